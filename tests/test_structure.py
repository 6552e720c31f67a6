"""The package's shape: imports go one way, files and functions stay short, every operation stands in every table."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
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
    {"errors", "settings", "files", "folders"}, {"ir"}, {"frontend", "passes"}, {"library", "reference", "arch"},
    {"plan"}, {"kernels"}, {"codegen"}, {"compiler"}, {"tuner"}, {"runtime"}, {"flex", "serving"},
    {"integrations", "distributed", "shipping"}, {"__init__"}, {"cli"}, {"__main__"},
]  # fmt: skip
BELOW = {part: set().union(*LEVELS[:i]) for i, level in enumerate(LEVELS) for part in level}
BELOW["settings"] = {"errors"}
BELOW["files"], BELOW["folders"] = set(), {"files", "settings"}
BELOW["frontend"] |= {"passes"}  # tracing leaves normal forms
BELOW["reference"] = {"errors", "ir"}
BELOW["arch"] = {"errors", "settings", "ir"}
# The same within codegen/: what runs kernels on a CPU knows nothing of what compiles them.
BELOW_IN_CODEGEN: dict[str, set[str]] = {
    "tir_types": set(), "tiles": {"tir_types"}, "simulator": {"tir_types", "tiles"},
    "interpreter": {"tir_types", "tiles", "simulator"}, "patches": {"tir_types"}, "compile": {"tir_types", "patches"},
    "cache": {"compile"}, "__init__": set(),
}  # fmt: skip
# The folders of kernels/: each knows what lies in kernels/ itself, and no other. Keys of kernels on disk rely on it.
KERNEL_FOLDERS = {"straight", "hopper", "linear", "cached"}
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


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """The modules that a file imports: name, line, and whether at the top (not in a function, nor for types alone)."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner) for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) not in late


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path):
    part = part_of(path)
    assert part in BELOW, f"{part} stands in no level"
    for name, line, _ in imports(path):
        words = name.split(".")
        if words[0] != "attention_engine":
            continue
        other = words[1] if len(words) > 1 and words[1] in BELOW else "__init__"
        assert other == part or other in BELOW[part], f"{name_of(path)}:{line}: {part} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "codegen").rglob("*.py")), ids=name_of)
def test_imports_go_one_way_in_codegen(path):
    part = path.relative_to(PACKAGE / "codegen").parts[0].removesuffix(".py")
    for name, line, _ in imports(path):
        words = name.split(".")
        if words[:2] == ["attention_engine", "codegen"]:
            assert words[2] in BELOW_IN_CODEGEN[part] | {part}, f"{name_of(path)}:{line}: {part} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=name_of)
def test_folders_of_kernels_know_shared_parts_alone(path):
    folder, *_ = path.relative_to(PACKAGE / "kernels").parts
    assert folder in KERNEL_FOLDERS or path.parent == PACKAGE / "kernels"
    for name, line, _ in imports(path):
        words = name.split(".")
        if words[:2] == ["attention_engine", "kernels"]:
            assert words[2] not in KERNEL_FOLDERS - {folder}, f"{name_of(path)}:{line}: {folder} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_torch_and_tilelang_are_imported_where_they_belong(path):
    part = part_of(path)
    for name, line, at_top in imports(path):
        words = name.split(".")
        if words[0] == "torch" and (at_top or part != "arch"):
            assert part in TORCH_PARTS, f"{name_of(path)}:{line}: {part} imports torch"
        if words[0] in ("tilelang", "tvm"):
            assert part in TILELANG_PARTS, f"{name_of(path)}:{line}: {part} imports {words[0]}"


def test_importing_the_package_does_not_import_tilelang():
    code = "import sys, attention_engine\nprint(*{m.split('.')[0] for m in sys.modules} & {'tilelang', 'tvm', 'sympy'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_a_module_opens_with_a_sentence(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{name_of(path)} has no docstring"
    first = docstring.split("\n\n")[0]
    assert first.rstrip()[-1] in ".:", f"{name_of(path)} opens with no sentence: {first!r}"


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE, f"{name_of(path)} has {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_public_classes_and_functions_say_what_they_are(path):
    for node in ast.parse(path.read_text()).body:
        if any(ast.unparse(decorator) == "overload" for decorator in getattr(node, "decorator_list", ())):
            continue  # a type; the function that follows says what it is
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name_of(path)}:{node.lineno}: {node.name} has no docstring"


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
