"""The drawings for maintainers: what the code draws stands in the files, can be read, and says what kernels do."""

import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
DRAWINGS = ("backward_block", "forward_block", "unit_calendar", "unit_life")


@pytest.fixture
def draws(monkeypatch):
    """A module of that folder, which are programs' own."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_a_file_each_and_every_one_is_on_a_page():
    assert sorted(p.stem for p in FOLDER.glob("*.svg")) == list(DRAWINGS)
    pages = "".join(p.read_text() for p in (FOLDER.parent / "maintainers").glob("*.md"))
    for name in DRAWINGS:
        root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
        assert float(root.get("width")) <= 840, "the width of a page"
        sizes = [float(t.get("font-size")) for t in root.iter("{http://www.w3.org/2000/svg}text")]
        assert min(sizes) >= 10, "smaller letters can't be read"
        assert f"(../drawings/{name}.svg)" in pages


def test_what_cannot_be_read_is_found(draws):
    svg = draws("svg")
    beside = svg.Text(50, 20, "one"), svg.Text(50, 40, "two")
    assert svg.crossings(svg.Picture(100, 50, "", beside)) == []
    shapes = svg.Text(50, 20, "one"), svg.Text(55, 22, "two"), svg.Text(98, 45, "three")
    boxed = svg.Box(40, 60, 20, 20), svg.Text(50, 70, "too long")
    found = svg.crossings(svg.Picture(100, 80, "", (*shapes, *boxed)))
    arrow = svg.Text(50, 20, "one"), svg.Line([(0, 18), (100, 18)], tip=True)
    assert svg.crossings(svg.Picture(100, 50, "", arrow)) == ["an arrow crosses 'one'"]
    assert found == ["'three' leaves the picture", "'too long' leaves its box", "'one' meets 'two'"]


def test_the_life_of_a_unit_is_what_the_code_draws(draws):
    picture = draws("units").life()
    assert draws("svg").crossings(picture) == []
    assert picture.svg() == (FOLDER / "unit_life.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWINGS)
def test_the_drawings_are_what_the_code_draws(name, draws):
    picture = draws("draw").DRAWINGS[name]()
    assert draws("svg").crossings(picture) == []
    assert picture.svg() == (FOLDER / f"{name}.svg").read_text()


@pytest.mark.slow
def test_no_product_reads_a_tile_before_it_has_come_or_after_it_was_given_back(draws):
    blocks, replay = draws("blocks"), draws("replay")
    for events, first, lengths, tiles in (
        (blocks.record().forward, "q", blocks.forward_length, "kv"),
        (blocks.record().backward, "k", blocks.backward_length, ("q", "do")),
    ):
        made = replay.replay(blocks.one_block(events, first), lengths, blocks.SYMBOLS)
        for product in made.products:
            step = int(product.of[0].split()[1])
            for tile in set(product.event.names[:2]) & set(tiles):
                (copy,) = (c for c in made.copies if c.of == (f"{tile} {step}",) and c.lane == "warp 0")
                assert copy.end <= product.start
                after = [c.start for c in made.copies if c.of == (f"{tile} {step + 2}",) and c.lane == "warp 0"]
                assert all(product.end <= start for start in after)


@pytest.mark.slow
def test_a_unit_is_prepared_then_computed_then_stored_each_by_whom_the_page_says(draws):
    units = draws("units")
    order = [units.BEFORE, *(f"unit {n}" for n in range(units.HEADS)), units.AFTER]
    found = sorted(set(units.found(units.events())))
    assert len(found) == 3 * units.HEADS, "each once"
    when = {(what, unit): order.index(at) for what, unit, at in found}
    ahead = 3  # of two blocks a unit, on a GPU that runs three at once
    for unit in range(units.HEADS):
        assert when["computed", unit] == 1 + unit
        assert when["prepared", unit] == max(0, 1 + unit - ahead)
        assert when["stored", unit] == min(1 + unit + ahead, len(order) - 1)


def test_the_page_says_how_long_an_act_is_drawn(draws):
    """Of what is set, not recorded."""
    page = (FOLDER.parent / "maintainers" / "blocks.md").read_text()
    replay = draws("replay")
    assert re.search(rf"lands {replay.LANDING} steps", page) and re.search(rf"takes {replay.PRODUCT} steps", page)
