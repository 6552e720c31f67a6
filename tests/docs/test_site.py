"""The site: it builds strictly, reads from files without the network, and lists every public name."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attention_engine
from attention_engine import library, settings
from attention_engine.cli import main as command_line
from attention_engine.ir.linear import LinearTile
from attention_engine.tuner import entries

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WIDEST = 120  # columns of code beside the menu, in a window of 1280 pixels


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site's folder, as `make docs` makes it. strict makes a link, an anchor or an object of the API that isn't
    there an error, and any other warning; with --quiet it would count none."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                          cwd=ROOT, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def words(path):
    """A page's text, without its markup."""
    return re.sub("<[^>]+>", "", path.read_text())


def test_every_page_is_there_with_what_it_includes(site):
    for page in PAGES:
        html = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
        assert "--8&lt;--" not in html and "--8<--" not in html, page.name
    assert "T.Pipelined" in words(site / "naive-to-flash.html")
    assert "check_cuts.py" in words(site / "compiler.html")
    assert (site / "drawings" / "forward_block.svg").is_file() and not list((site / "drawings").glob("*.py"))


def test_the_api_lists_every_public_name(site):
    html = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    anchors = set(re.findall(r'id="attention_engine\.([\w.]+)"', html))
    assert {f"flex.{name}" for name in attention_engine.flex.__all__} - anchors == set()
    assert {f"integrations.transformers.{name}" for name in ("register", "Layer", "softmax_engine")} <= anchors
    modules = {"arch", "library"}  # whose own names are listed
    public = set(attention_engine.__all__) - modules - {"flex"}
    for module in modules:
        held = vars(getattr(attention_engine, module))
        named = {n for n, v in held.items() if not n.startswith("_") and getattr(v, "__module__", "").endswith(module)}
        public |= {f"{module}.{name}" for name in named if not getattr(held[name], "_is_protocol", False)}
    assert public - anchors == set() and len(public) > 45
    for engine in ("AttentionEngine", "LinearAttentionEngine"):
        held = inspect.getmembers(getattr(attention_engine, engine), inspect.isfunction)
        own = {n for n, f in held if not n.startswith("_") and f.__module__.startswith("attention_engine")}
        assert {f"{engine}.{name}" for name in own - {"extra_repr"}} - anchors == set()


def test_what_the_api_lists_has_a_text():
    for name in attention_engine.__all__:
        assert (inspect.getdoc(getattr(attention_engine, name)) or "").strip(), name
    for name, held in vars(library).items():
        if not name.startswith("_") and getattr(held, "__module__", None) == library.__name__:
            assert (inspect.getdoc(held) or "").strip(), name


def test_commands_and_environment_variables_are_told(site):
    page = words(site / "cli.html")
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', Path(settings.__file__).read_text()))
    (commands,) = (a.choices for a in command_line.parser()._actions if a.choices)
    assert len(read) >= 7 and len(commands) >= 7
    for name in (*read, *commands):
        assert re.search(rf"\b{name}\b", page), name


def test_the_schema_of_tune_files_is_told(site):
    page = words(site / "tuning.html")
    names = {*entries.NUMBERS[entries.Tile], *entries.FLAGS, *(f.name for f in dataclasses.fields(LinearTile))}
    for name in (*names, "schema", "entries", *(f.name for f in dataclasses.fields(entries.Entry))):
        assert re.search(rf"\b{name}\b", page), name
    (shown,) = re.findall(r"```json\n(.*?)```", (DOCS / "tuning.md").read_text(), re.DOTALL)
    (entry,) = entries.parse(shown, "tuning.md")
    assert json.loads(shown)["schema"] == entries.SCHEMA and entry.tile.persistent


def test_examples_of_docstrings_are_shown_as_code(site):
    for name in ("library", "engines", "parts"):
        html = (site / "api" / f"{name}.html").read_text()
        assert "<blockquote>" not in html and 'class="language-pycon' in html, name
        assert html.count("language-pycon") >= {"library": 24, "engines": 2, "parts": 3}[name]


def test_nothing_is_fetched_from_elsewhere(site):
    """Neither by a page nor by a style: search and formulas work from files."""
    for page in site.rglob("*.html"):
        html = page.read_text()
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]+src="(?:https?:)?//[^"]+', html)
        fetched += re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]+href="(?:https?:)?//[^"]+', html)
        fetched += re.findall(r'<link[^>]+href="(?:https?:)?//[^"]+"[^>]+rel="(?:stylesheet|preconnect|icon)"', html)
        assert not fetched, (page.name, fetched)
        assert "assets/iframe-worker.js" in html
    assert (site / "search" / "search_index.js").read_text().startswith("var __index")


def test_formulas_are_drawn(site):
    html = {page.name: page.read_text() for page in site.rglob("*.html")}
    assert not [name for name, text in html.items() if 'class="arithmatex"' in text]
    assert html["backward.html"].count("<math") > 5 and html["linear.html"].count("<math") > 1


def test_no_line_of_code_is_cut():
    for path in (*PAGES, *(DOCS / "tutorial").glob("*.py")):
        text = path.read_text()
        blocks = [text] if path.suffix == ".py" else re.findall(r"```(?:python|py|sh)\n(.*?)```", text, re.DOTALL)
        long = [line for block in blocks for line in block.splitlines() if len(line) > WIDEST]
        assert not long, (path.name, long)


def test_pictures_of_speed_are_shown_for_light_and_dark_pages():
    shown = [
        m for page in PAGES for m in re.findall(r"\((?:\.\./)?(speed/\w+\.svg)#only-(light|dark)\)", page.read_text())
    ]
    assert {name for name, kind in shown if kind == "light"} == {
        f"speed/{path.name}" for path in (DOCS / "speed").glob("*.svg") if not path.stem.endswith("_dark")
    }
    for name, kind in shown:
        assert (DOCS / name).exists() and (kind == "dark") == name.endswith("_dark.svg"), name
    assert len([1 for _, kind in shown if kind == "dark"]) * 2 == len(shown)
