"""The cost model: beside what two and four H100s took, where "auto" goes, and the table of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attention_engine.distributed import cost
from attention_engine.distributed.cost import NODE, Sizes

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
MEASURED = {  # ms, two and four H100s, forward and backward; bf16, causal, heads 32 and 8 of 128; two ranks gather
    (2, 32768, "gather"): (6.55, 17.38), (2, 32768, "heads"): (6.81, 17.86),
    (2, 65536, "gather"): (25.14, 70.05), (2, 65536, "heads"): (25.71, 69.93),
    (2, 131072, "gather"): (107.22, 287.59), (2, 131072, "heads"): (106.65, 284.75),
    (4, 32768, "gather"): (3.66, 9.68), (4, 32768, "ring"): (4.53, 12.05), (4, 32768, "heads"): (3.82, 9.20),
    (4, 65536, "gather"): (12.96, 35.26), (4, 65536, "ring"): (14.59, 40.07), (4, 65536, "heads"): (13.26, 34.43),
    (4, 131072, "gather"): (52.56, 146.57), (4, 131072, "ring"): (53.51, 156.44), (4, 131072, "heads"): (51.98, 144.83),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "length", "method"), MEASURED)
def test_the_model_is_near_what_was_measured(ranks, length, method):
    found = getattr(cost, method)(Sizes(ranks, length))
    for seconds, took in zip(found, MEASURED[ranks, length, method], strict=True):
        assert 0.94 * took < 1e3 * seconds < 1.04 * took


def sizes(ranks: int, length: int, **rest) -> Sizes:
    return Sizes(ranks, length, spread=max(ranks // NODE, 1), **rest)


def test_auto_gathers_few_key_heads_among_few_ranks_and_else_exchanges_heads():
    assert cost.choose(sizes(2, 131072)) == "gather"
    assert cost.choose(sizes(8, 131072)) == "heads"
    assert cost.choose(sizes(2, 131072, kv_heads=32)) == "heads"
    assert cost.choose(sizes(2, 131072, kv_heads=1)) == "gather"
    assert cost.choose(sizes(8, 131072, heads=30)) == "gather"  # heads that the ranks don't divide


def in_percent(length: int, ranks: int) -> list[str]:
    """A row of the page's table."""
    given = sizes(ranks, length)
    found = [cost.gather(given), cost.heads(given) if given.heads % ranks == 0 else None, cost.ring(given)]
    found += [cost.pair(inner, given) if ranks > NODE else None for inner in (cost.gather, cost.ring)]
    shown = [None if each is None else cost.efficiency(each, given) for each in found]
    return ["" if each is None else f"{100 * each[0]:.0f} / {100 * each[1]:.0f}" for each in shown]


def test_the_page_has_the_models_table():
    text = PAGE.read_text()
    rows = re.findall(r"^\| (\d+)k \| (\d+) \|(.*)\|$", text, re.MULTILINE)
    assert len(rows) == 11 and {int(ranks) for _, ranks, _ in rows} == {2, 4, 8, 64, 1024}
    for length, ranks, cells in rows:
        assert [each.strip() for each in cells.split("|")] == in_percent(1024 * int(length), int(ranks)), (
            length,
            ranks,
        )


def test_a_thousand_ranks_cost_what_a_model_can_tell():
    """More ranks are never slower, nor faster than their share."""
    for method in (cost.gather, cost.heads, cost.ring):
        for ranks in (2, 4, 8):
            now, more = (method(sizes(n, 1 << 20)) for n in (ranks, 2 * ranks))
            assert sum(more) < sum(now)
            assert all(0 < each <= 1 for each in cost.efficiency(now, sizes(ranks, 1 << 20)))
