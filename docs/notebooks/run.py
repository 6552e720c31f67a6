"""Runs the notebooks cell by cell, as Jupyter does, and holds what they show to the outputs that are stored in them.

    python docs/notebooks/run.py           says which notebooks show something else
    python docs/notebooks/run.py --write   stores what they show

Neither Jupyter nor a kernel is needed: a cell is Python, and its last expression is shown by its repr, and by
`_repr_html_` or `_repr_latex_` where it has them. Of a cell that is tagged "varies", whose numbers are rounded
otherwise on another processor, the kinds of outputs are compared, their first lines, and whether a check is ok.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RICH = {"text/html": "_repr_html_", "text/latex": "_repr_latex_"}
Cell = dict[str, Any]


def run(path: Path) -> list[list[Cell]]:
    """The outputs of each code cell, run in their order with one set of names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    return [outputs_of("".join(cell["source"]), f"{path.stem}[{n}]", names, n) for n, cell in enumerate(cells, 1)]


def outputs_of(source: str, file: str, names: dict[str, Any], count: int) -> list[Cell]:
    """What a cell prints, and the value of its last expression."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    said, value = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        exec(compile(ast.Module(body, []), file, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)  # type: ignore[attr-defined]
    found: list[Cell] = []
    if said.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": said.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        data |= {kind: getattr(value, way)().splitlines(True) for kind, way in RICH.items() if hasattr(value, way)}
        found.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return found


def shown(outputs: list[Cell], varies: bool) -> str:
    """Outputs as text to compare: lines of the package's own files may move."""
    if varies:
        plain = ["".join(o.get("data", {}).get("text/plain", [])) for o in outputs]
        found: Any = [[sorted(o.get("data", {})), p.split("\n", 1)[0], "NOT ok" in p] for o, p in zip(outputs, plain)]
    else:
        found = [o.get("data", o.get("text")) for o in outputs]
    return re.sub(r"\.py:\d+", ".py:#", json.dumps(found, ensure_ascii=False, indent=1))


def differences(path: Path, found: list[list[Cell]]) -> list[str]:
    """The cells that show something else than what is stored, with both."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    told = []
    for n, (cell, outputs) in enumerate(zip(cells, found, strict=True), 1):
        varies = "varies" in cell["metadata"].get("tags", [])
        stored, now = (shown(each, varies) for each in (cell["outputs"], outputs))
        if stored != now:
            told.append(f"{path.name}, code cell {n}: stored\n{stored}\nand now\n{now}")
    return told


def store(path: Path, found: list[list[Cell]]) -> None:
    """Writes the outputs into the notebook."""
    notebook = json.loads(path.read_text())
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for n, (cell, outputs) in enumerate(zip(cells, found, strict=True), 1):
        cell["outputs"], cell["execution_count"] = outputs, n
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Of all notebooks; 1 where one shows something else."""
    changed = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        found = run(path)
        if told := differences(path, found):
            changed += 1
            print(*told, sep="\n")
            if "--write" in arguments:
                store(path, found)
    return int(changed > 0 and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
