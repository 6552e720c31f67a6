"""The documents: every Python block runs, and every picture is what the package draws."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import attention_engine

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)
COUNTED = 74  # Python blocks that run; one that is lost, or fenced so that nobody runs it, is seen here


def blocks(page):
    """The page's Python blocks in order, each on its line of the page; without those that a later version runs."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        if match[1] is None or match[1] in attention_engine.__all__:
            line = text[: match.start(2)].count("\n")
            found.append("\n" * line + match[2])  # so that a traceback names the page's own line
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # it is eager on purpose
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_every_block_of_a_page_runs(page, capsys):
    if page.stem == "transformers":
        pytest.importorskip("transformers")
    module = type(sys)(f"docs_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module  # what a page defines can be pickled, as from any module
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), module.__dict__)


def test_the_kernels_of_the_gallery_agree_with_its_formulas():
    """On the interpreter, where the page itself would run the reference on a CPU."""
    engine = functools.partial(attention_engine.AttentionEngine, backend="interpret")
    names: dict = {"__name__": "docs_gallery"}
    for block in blocks(DOCS / "gallery.md"):
        exec(compile(block, "gallery.md", "exec"), names)
        names["AttentionEngine"] = engine


def test_no_block_is_lost():
    found = {page.stem: len(blocks(page)) for page in PAGES}
    needed = [match[1] for page in PAGES for match in BLOCK.finditer(page.read_text())]
    later = sum(name is not None and name not in attention_engine.__all__ for name in needed)
    assert sum(found.values()) + later == COUNTED, found
    for page in PAGES:  # other fences: shell, output, JSON, and code that is run in other ways
        fences = re.findall(r"^```(\S+)$", page.read_text(), re.MULTILINE)
        assert set(fences) <= {"python", "sh", "json", "text", "py"}, (page.name, set(fences))
        assert "py" not in fences or page.stem in ("errors", "naive-to-flash"), page.name  # mistakes, included files


def test_the_pictures_are_what_the_package_draws():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = {f"{name}.svg": draw() for name, draw in pictures.PICTURES.items()}
    assert drawn == {p.name: p.read_text() for p in pictures.FOLDER.iterdir()}
    kinds = pictures.kinds_of_tiles(torch.ones(4, 4).tril().bool(), 2, 2)
    assert kinds == [["part", "none"], ["whole", "part"]]


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f" {page.relative_to(DOCS)}\n" in menu, page.name
