"""What a reader of the package meets, in numbers: files, functions, types, imports, what a call runs.

    python -m tests.measures [--at COMMIT] [--quick]

`--at` measures another commit beside the files as they are, from a copy that git makes. `--quick` leaves out what takes
more than a second: mypy, and the files that calls run. `make measures` shows the table.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import io
import itertools
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG, MANY, SAME = 60, 6, 8  # lines of a function, its arguments, equal lines of code in a row
IN_KERNELS = "kernels"

Function = ast.FunctionDef | ast.AsyncFunctionDef

CALLS = """
import collections, sys, torch
from attention_engine import AttentionEngine, meta_tensor
from attention_engine.library import OnlineSoftmax, causal

metas = [meta_tensor(1, 2, 64, 32, dtype="float16") for _ in range(3)]
engine = AttentionEngine(metas, None, None, causal, OnlineSoftmax(), backend="interpret")
q = torch.randn(1, 64, 2, 32).half()

def files_run():
    found = set()
    def note(frame, event, _):
        if "/attention_engine/" in frame.f_code.co_filename and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename.rsplit("/attention_engine/")[-1])
    sys.setprofile(note)
    try:
        engine(q, q, q)
    finally:
        sys.setprofile(None)
    of_gpus_stand_in = ("codegen/interpreter", "codegen/simulator", "codegen/tiles", "target/")
    return len([file for file in found if not file.startswith(of_gpus_stand_in)])

print(files_run())
engine(q, q, q)
print(files_run())
"""


def functions(tree: ast.Module) -> Iterator[Function]:
    """All functions of a module, methods and inner ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines_of(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def arguments_of(function: Function) -> int:
    """How many arguments a function has, but for self or cls."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def annotations_of(function: Function) -> list[ast.expr]:
    """The types of what a function takes and gives."""
    given = function.args
    taken = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return [note for note in (*(a.annotation for a in taken if a), function.returns) if note]


def any_share(given: Iterable[Function]) -> str:
    """How many types in a hundred hold an Any."""
    notes = [note for function in given for note in annotations_of(function)]
    held = sum(any(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(note)) for note in notes)
    return f"{100 * held / max(len(notes), 1):.1f} %"


def imports_at_top(tree: ast.Module) -> set[str]:
    """The modules that a file imports when it is imported, and what may be a module."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def cycles(graph: dict[str, set[str]]) -> int:
    """How many groups of nodes reach one another."""
    reached = {node: _reached(graph, node) for node in graph}
    groups = {frozenset(o for o in reached[node] if node in reached[o]) for node in graph if node in reached[node]}
    return len(groups)


def levels(graph: dict[str, set[str]]) -> int:
    """How many nodes the longest chain of imports has; of a graph without cycles."""
    depth: dict[str, int] = {}

    def of(node: str) -> int:
        if node not in depth:
            depth[node] = 1 + max((of(other) for other in graph[node]), default=0)
        return depth[node]

    return max(map(of, graph))


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead.extend(graph[node])
    return found


def repeated(texts: Iterable[str]) -> int:
    """How many runs of equal lines of code stand twice or more; imports, brackets and comments don't count."""
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    for text in texts:
        lines = [line.split("  #")[0].strip() for line in text.splitlines()]
        code = [line for line in lines if re.search(r"\w{3}", line) and not re.match(r"(#|from |import |\"\"\")", line)]
        seen.update(dict.fromkeys(zip(*[code[start:] for start in range(SAME)], strict=False), 1))
    return sum(count > 1 for count in seen.values())


def of_text(root: Path) -> dict[str, str]:
    """What the files of a tree show without being run."""
    package = root / "attention_engine"
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    all_of = [(name, f) for name, tree in trees.items() for f in functions(tree)]
    outside = [f for name, f in all_of if not name.startswith(IN_KERNELS)]
    inside = [f for name, f in all_of if name.startswith(IN_KERNELS)]

    def both(count: dict[bool, int]) -> str:
        return f"{count[False]} and {count[True]} in kernels"

    def counted(test: Iterable[bool], kernels: Iterable[bool]) -> str:
        return both({False: sum(test), True: sum(kernels)})

    lengths = sorted(len(text.splitlines()) for text in texts.values())
    modules = {"attention_engine." + name.removesuffix(".py").replace("/", "."): name for name in texts}
    graph = {m: {o for o in imports_at_top(trees[name]) if o in modules and o != m} for m, name in modules.items()}
    parts = {module: module.split(".")[1] for module in modules}
    of_parts: dict[str, set[str]] = {part: set() for part in parts.values()}
    for module, others in graph.items():
        of_parts[parts[module]] |= {parts[other] for other in others} - {parts[module]}
    circles = cycles(of_parts)
    return {
        "files": f"{len(texts)}, the longest of {lengths[-1]} lines",
        "lines": f"{sum(lengths):,}, a file {statistics.median(lengths):.0f} (median)",
        "functions": f"{len(all_of):,}",
        f"functions of more than {LONG} lines": counted(
            *([lines_of(f) > LONG for f in fs] for fs in (outside, inside))
        ),
        "the longest function, lines": both(
            {False: max(map(lines_of, outside), default=0), True: max(map(lines_of, inside), default=0)}
        ),
        f"functions of more than {MANY} arguments": counted(
            *([arguments_of(f) > MANY for f in fs] for fs in (outside, inside))
        ),
        "types of arguments and results that hold Any": f"{any_share(outside)} and {any_share(inside)} in kernels",
        "cycles of imports, among files and folders": f"{cycles(graph)} and {circles}",
        "levels of folders": "-" if circles else str(levels(of_parts)),
        f"runs of {SAME} equal lines": str(repeated(texts.values())),
    }


def of_types(root: Path) -> dict[str, str]:
    """What mypy, strict, finds in a tree."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    with tempfile.TemporaryDirectory() as cache:
        said = subprocess.run(
            [*command, "--cache-dir", cache, "-p", "attention_engine"], cwd=root, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": "", "MYPYPATH": str(root)},
        ).stdout  # fmt: skip
    files = re.findall(r"^(attention_engine/\S+?):\d+: error", said, re.MULTILINE)
    kernels = sum(file.startswith(f"attention_engine/{IN_KERNELS}") for file in files)
    return {"errors of mypy, strict": f"{len(files) - kernels} and {kernels} in kernels"}


def of_calls(root: Path) -> dict[str, str]:
    """How many files run in a first call of an engine, and in one that is like a call before."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    counts = done.stdout.split()
    return {"files that a first and a warm call run": " and ".join(counts) if counts else "-"}


def measured(root: Path, quick: bool) -> dict[str, str]:
    """All that is measured of a tree."""
    return of_text(root) | ({} if quick else of_types(root) | of_calls(root))


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The files of a commit."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder)


def table(columns: dict[str, dict[str, str]]) -> str:
    """The measures as a table of Markdown, a column a tree."""
    names = list(dict.fromkeys(itertools.chain(*columns.values())))
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(column.get(name, "-") for column in columns.values())] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="another commit, to compare with")
    parser.add_argument("--quick", action="store_true", help="without mypy and calls")
    args = parser.parse_args()
    columns = {}
    if args.at:
        with tree_of(args.at) as root:
            columns[f"at {args.at}"] = measured(root, args.quick)
    columns["now"] = measured(ROOT, args.quick)
    print(table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
