"""What tests/measures.py counts, on a package of two files."""

from __future__ import annotations

import ast

from tests import measures

FIRST = """
from attention_engine.second import given

def many(a, b, c, d, e, f, g: Any) -> list[Any]:
    def within(self): return self
""" + "\n".join(f"    value_{n} = given" for n in range(60))
SECOND = """
class Small:
    def method(self, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
        return a
given = 1
"""


def tree(tmp_path, first=FIRST, second=SECOND):
    (package := tmp_path / "attention_engine" / "kernels").mkdir(parents=True)
    (package.parent / "second.py").write_text(second)
    (package / "first.py").write_text(first)
    return measures.of_text(tmp_path)


def test_functions_are_counted_inside_kernels_and_outside(tmp_path):
    found = tree(tmp_path)
    assert found["files"].startswith("2, the longest of 65 lines")
    assert found["functions"] == "3"
    assert found["functions of more than 60 lines"] == "0 and 1 in kernels"
    assert found["functions of more than 6 arguments"] == "0 and 1 in kernels"
    assert found["types of arguments and results that hold Any"] == "0.0 % and 100.0 % in kernels"
    assert found["levels of folders"] == "2"


def test_files_that_import_each_other_are_a_cycle(tmp_path):
    found = tree(tmp_path, second="import attention_engine.kernels.first")
    assert found["cycles of imports, among files and folders"] == "1 and 1" and found["levels of folders"] == "-"


def test_a_late_import_is_none_of_a_file():
    late = "import a\ndef f():\n    import b\n"
    assert measures.imports_at_top(ast.parse(late)) == {"a"}


def test_equal_lines_in_a_row_are_counted_once_a_run_of_eight():
    run = [f"value_{n} = compute({n})" for n in range(9)]
    assert measures.repeated(["\n".join(run), "\n".join(["# why", *run[:4], "", *run[4:]])]) == 2
    assert measures.repeated(["\n".join(run), "\n".join(run[:7])]) == 0


def test_the_table_has_a_column_a_tree():
    text = measures.table({"before": {"files": "1"}, "now": {"files": "2", "lines": "3"}})
    assert text.splitlines()[2:] == ["| files | 1 | 2 |", "| lines | - | 3 |"]
