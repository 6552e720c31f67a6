"""The notebooks: each cell runs and shows what is stored, and the page lists them all."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

pytest.importorskip("tilelang")  # check() runs the kernels on the interpreter

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_SECONDS = 20.0  # of a processor


def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_shows_what_it_stores(path):
    run, start = runner(), time.process_time()
    told = run.differences(path, run.run(path))
    assert not told, "\n".join([*told, "python docs/notebooks/run.py --write stores what notebooks show now"])
    assert time.process_time() - start < MOST_SECONDS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_whole(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["cells"][0]["cell_type"]) == (4, "markdown")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert f"]({path.name})" in (FOLDER / "index.md").read_text()
    text = path.read_text()
    assert "text/html" in text and "Traceback" not in text
    for cell in notebook["cells"]:
        assert max(map(len, cell["source"])) <= 130 and cell.keys() >= {"cell_type", "id", "metadata", "source"}


def test_a_cell_that_shows_something_else_is_told(tmp_path):
    run = runner()
    cells = [{"cell_type": "code", "id": "a", "metadata": {}, "source": ["print(1)\n", "2 + 2"], "outputs": []}]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    found = run.run(path)
    assert [o.get("text") or o["data"]["text/plain"] for o in found[0]] == [["1\n"], ["4"]]
    assert len(run.differences(path, found)) == 1
    run.store(path, found)
    assert run.differences(path, found) == []
    found[0][1]["data"]["text/plain"] = ["5"]
    (told,) = run.differences(path, found)
    assert told.startswith("small.ipynb, code cell 1: stored\n")
