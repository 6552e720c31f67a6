"""The pages for maintainers: what their blocks print stands below them, and what they name is there."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted((DOCS / "maintainers").glob("*.md")), DOCS / "glossary.md"]
RUN = [page for page in PAGES if "```python" in page.read_text()]
PACKAGE = ROOT / "attention_engine"
TEXTS = {path: path.read_text() for path in PACKAGE.rglob("*.py")}


@pytest.fixture(scope="module")
def outputs():
    spec = importlib.util.spec_from_file_location("outputs", DOCS / "outputs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", RUN, ids=lambda p: p.stem)
def test_blocks_print_what_stands_below_them(page, outputs):
    assert outputs.run(page, slow=False) == page.read_text()


@pytest.mark.slow
def test_the_line_of_cuda_is_what_the_package_makes(outputs):
    page = DOCS / "maintainers" / "one-score.md"
    assert outputs.run(page) == page.read_text()


def test_what_is_printed_otherwise_is_seen(outputs, tmp_path):
    page = tmp_path / "page.md"
    wrong = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n<!-- slow -->\n```python\n1 / 0\n```\n"
    page.write_text(wrong)
    assert outputs.run(page, slow=False) == wrong.replace("3", "2")
    with pytest.raises(ZeroDivisionError):
        outputs.run(page)


def files_named(text):
    """The paths in backquotes: of files, and folders that end with a slash."""
    quoted = re.findall(r"`([\w*./-]+(?:\.(?:py|md|json)|/))`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [path for path in quoted if not path.startswith("*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_that_a_page_names_are_there(page):
    for name in files_named(page.read_text()):
        there = any(list(folder.glob(name.rstrip("/"))) for folder in (PACKAGE, ROOT, DOCS))
        assert there, f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_functions_that_a_page_names_with_their_file_are_in_it(page):
    text = page.read_text()
    told = [(m[1], m[2]) for m in re.finditer(r"`(\w+)`(?:, `\w+`)* (?:in|of) `([\w./]+\.py)`", text)]
    told += [(m[2], m[1]) for m in re.finditer(r"`([\w./]+\.py)`, `(\w+)`", text)]
    for name, file in told:
        path = PACKAGE / file if (PACKAGE / file).is_file() else ROOT / file
        assert re.search(rf"\b{name}\b", path.read_text()), f"{page.name}: {name} is not in {file}"
    if page.stem in ("dq", "extend", "glossary"):
        assert len(told) > 8


def test_words_of_the_page_of_units_are_the_code_s():
    text = "".join(TEXTS.values())
    page = (DOCS / "maintainers" / "dq.md").read_text()
    for name in re.findall(r"`([a-z]\w+(?:_\w+)+)`", page):
        assert re.search(rf"\b{name}\b", text), name
