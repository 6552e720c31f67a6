"""The package's shape: imports go one way, files and functions stay short, every operation stands in every table."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from attention_engine.ir.evaluate import PYTHON
from attention_engine.ir.expr import LEAVES, Op
from attention_engine.ir.verify import OPERANDS
from attention_engine.passes.differentiate import GRADIENTS
from attention_engine.passes.simplify import CONSTRUCTORS
from attention_engine.passes.symbolic import SYMPY
from attention_engine.reference.evaluate import TORCH

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "attention_engine"
FILES = sorted(PACKAGE.rglob("*.py"))
CODE = sorted([*FILES, *(ROOT / "attn_script").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

# What each part may import of the package, besides itself. A level may use all levels below it.
LEVELS = [
    {"errors", "settings", "files", "folders", "collector"}, {"ir"}, {"frontend", "passes"},
    {"library", "reference", "arch"}, {"plan"}, {"kernels"}, {"codegen"}, {"compiler"}, {"tuner"}, {"runtime"},
    {"flex", "serving"}, {"integrations", "distributed", "shipping"}, {"__init__"}, {"cli"}, {"__main__"},
]  # fmt: skip
BELOW = {part: set().union(*LEVELS[:i]) for i, level in enumerate(LEVELS) for part in level}
BELOW["settings"] = {"errors"}
BELOW["files"], BELOW["folders"], BELOW["collector"] = set(), {"files", "settings"}, set()
BELOW["frontend"] |= {"passes"}  # tracing leaves normal forms
BELOW["reference"] = {"errors", "ir"}
BELOW["arch"] = {"errors", "settings", "ir"}
# The same within codegen/: what runs kernels on a CPU knows nothing of what compiles them.
BELOW_IN_CODEGEN: dict[str, set[str]] = {
    "tir_types": set(), "tiles": {"tir_types"}, "simulator": {"tir_types", "tiles"},
    "interpreter": {"tir_types", "tiles", "simulator"}, "patches": {"tir_types"}, "compile": {"tir_types", "patches"},
    "cache": {"compile"}, "dialects": {"tir_types", "patches", "compile"}, "__init__": set(),
}  # fmt: skip
# The folders of kernels/: each knows what lies in kernels/ itself, and no other. Keys of kernels on disk rely on it.
KERNEL_FOLDERS = {"straight", "hopper", "linear", "cached", "parts"}
TORCH_PARTS = {
    "reference",
    "codegen",
    "tuner",
    "runtime",
    "flex",
    "serving",
    "integrations",
    "distributed",
    "shipping",
    "cli",
}  # and inside functions of arch
TILELANG_PARTS = {"kernels", "codegen"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[tuple[str, int, bool]]:
    """The modules that a file imports: name, line, and whether at the top (not in a function, nor for types alone)."""
    found: list[tuple[str, int, bool]] = []

    def visit(node: ast.AST, at_top: bool) -> None:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            found.extend((f"{node.module}.{a.name}", node.lineno, at_top) for a in node.names)
        elif isinstance(node, ast.Import):
            found.extend((a.name, node.lineno, at_top) for a in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            at_top = False
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, (ast.stmt, ast.excepthandler, ast.match_case)):  # no expression imports
                visit(inner, at_top)

    visit(parsed(path), True)
    return found


def imports_of(files: Iterable[Path]) -> Iterator[tuple[Path, str, list[str], bool, str]]:
    """Each import of each file: the file, the module, its words, whether at the top, and a complaint's beginning."""
    for path in files:
        for name, line, at_top in imports(path):
            yield path, name, name.split("."), at_top, f"{name_of(path)}:{line}: "


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def assert_none(complaints: Iterable[str]) -> None:
    """One test reads every file, and says all that is wrong: a line each."""
    if lines := "\n".join(complaints):
        pytest.fail(lines, pytrace=False)


def test_imports_go_one_way():
    assert {part_of(path) for path in FILES} <= set(BELOW), "a part stands in no level"

    def wrong(path: Path, words: list[str]) -> bool:
        part, other = part_of(path), words[1] if len(words) > 1 and words[1] in BELOW else "__init__"
        return words[0] == "attention_engine" and other != part and other not in BELOW[part]

    assert_none(f"{where}{part_of(path)} imports {name}" for path, name, words, _, where in imports_of(FILES)
        if wrong(path, words))  # fmt: skip


def test_imports_go_one_way_in_codegen():
    files = sorted((PACKAGE / "codegen").rglob("*.py"))
    assert files
    for path in files:
        part = path.relative_to(PACKAGE / "codegen").parts[0].removesuffix(".py")
        known = BELOW_IN_CODEGEN.get(part, set()) | {part}
        assert_none(f"{where}{part} imports {name}" for _, name, words, _, where in imports_of([path])
            if words[:2] == ["attention_engine", "codegen"] and words[2] not in known)  # fmt: skip


def test_folders_of_kernels_know_shared_parts_alone():
    files = sorted((PACKAGE / "kernels").rglob("*.py"))
    assert files
    for path in files:
        folder, *_ = path.relative_to(PACKAGE / "kernels").parts
        assert folder in KERNEL_FOLDERS or path.parent == PACKAGE / "kernels"
        assert_none(f"{where}{folder} imports {name}" for _, name, words, _, where in imports_of([path])
            if words[:2] == ["attention_engine", "kernels"] and words[2] in KERNEL_FOLDERS - {folder})  # fmt: skip


def test_torch_and_tilelang_are_imported_where_they_belong():
    def wrong(part: str, root: str, at_top: bool) -> bool:
        if root == "torch" and (at_top or part != "arch"):
            return part not in TORCH_PARTS
        return root in ("tilelang", "tvm") and part not in TILELANG_PARTS

    assert_none(f"{where}{part_of(path)} imports {name}" for path, name, words, at_top, where in imports_of(FILES)
        if wrong(part_of(path), words[0], at_top))  # fmt: skip


def test_importing_the_package_does_not_import_tilelang():
    code = "import sys, attention_engine\nprint(*{m.split('.')[0] for m in sys.modules} & {'tilelang', 'tvm', 'sympy'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_a_module_opens_with_a_sentence():
    def complaint(path: Path) -> str | None:
        first = (ast.get_docstring(parsed(path)) or "").split("\n\n")[0].rstrip()
        return None if first and first[-1] in ".:" else f"{name_of(path)} opens with no sentence: {first!r}"

    assert_none(filter(None, map(complaint, CODE)))


def test_files_and_functions_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in CODE}
    assert_none(f"{name} has {length} lines" for name, length in lengths.items() if length > LONGEST_FILE)
    for path in CODE:
        functions = (n for n in ast.walk(parsed(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        lengths = {f"{name_of(path)}:{f.lineno}: {f.name}": (f.end_lineno or 0) - f.lineno + 1 for f in functions}
        assert_none(f"{name} has {length} lines" for name, length in lengths.items() if length > LONGEST_FUNCTION)


def test_public_classes_and_functions_say_what_they_are():
    def silent(node: ast.stmt) -> bool:
        if any(ast.unparse(decorator) == "overload" for decorator in getattr(node, "decorator_list", ())):
            return False  # a type; the function that follows says what it is
        public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        return public and not ast.get_docstring(node)

    nodes = ((path, node) for path in FILES for node in parsed(path).body if silent(node))
    assert_none(f"{name_of(path)}:{node.lineno}: {node.name} has no docstring" for path, node in nodes)


OPERATIONS = set(Op) - LEAVES
TABLES = {
    "ir/evaluate.py, PYTHON": (PYTHON, OPERATIONS - {Op.LOAD, Op.REDUCE, Op.CAST}),
    "reference/evaluate.py, TORCH": (TORCH, OPERATIONS - {Op.LOAD, Op.REDUCE, Op.CAST}),
    "passes/symbolic.py, SYMPY": (SYMPY, OPERATIONS - {Op.LOAD, Op.REDUCE}),
    "passes/differentiate.py, GRADIENTS": (GRADIENTS, OPERATIONS),
    "passes/simplify.py, CONSTRUCTORS": (CONSTRUCTORS, OPERATIONS),
    "ir/verify.py, OPERANDS": (OPERANDS, set(Op) - {Op.LOAD}),
}


def assert_whole(name: str, found: set[Op], expected: set[Op]) -> None:
    lacking, odd = ([op.name for op in Op if op in some] for some in (expected - found, found - expected))
    assert not lacking, f"{name} has no row for {lacking} (docs/maintainers/extend.md lists the tables)"
    assert not odd, f"{name} has a row for {odd}, which want none"


@pytest.mark.parametrize("name", TABLES)
def test_every_operation_stands_in_every_table(name):
    table, expected = TABLES[name]
    assert_whole(name, set(table), expected)


def test_every_operation_stands_in_the_table_of_kernels():
    splice = pytest.importorskip("attention_engine.kernels.splice")
    assert_whole("kernels/splice.py, TILELANG", set(splice.TILELANG), OPERATIONS - {Op.LOAD, Op.REDUCE, Op.CAST})


def mapped() -> set[str]:
    """The files that the map names: in a table's first column, behind the folder that was last in bold."""
    found, folder = set(), ""
    for line in (PACKAGE / "README.md").read_text().splitlines():
        if line.startswith("| "):
            first = line.split("|")[1]
            folder = next(iter(re.findall(r"\*\*([\w/]+/)\*\*", first)), folder)
            found |= {folder + name for name in re.findall(r"`(\w+\.py)`", first)}
            found |= set(re.findall(r"\*\*(\w+\.py)\*\*", first))
    return {"__main__.py" if name == "cli/__main__.py" else name for name in found}


def test_the_map_names_every_file():
    held = {str(path.relative_to(PACKAGE)) for path in FILES if path.name != "__init__.py" or path.parent == PACKAGE}
    lacking, gone = sorted(held - mapped()), sorted(mapped() - held)
    assert not lacking, f"attention_engine/README.md has no line for {lacking}"
    assert not gone, f"attention_engine/README.md names {gone}, which are not there"


def test_every_error_derives_from_one():
    from attention_engine import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
    assert len(classes) > 10
    assert all(issubclass(c, errors.AttentionEngineError) and c.__doc__ for c in classes)
