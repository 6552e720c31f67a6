"""The search: outcomes keep their class, wrong numbers never win, a budget holds, a default stands unless beaten."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from attention_engine.errors import NothingRan
from attention_engine.plan.forms import Tile
from attention_engine.tuner.search import Budget, Outcome, Trial, search

DEFAULT, FAST, SLOW, *OTHERS = (Tile(q, 64, 128, 2) for q in range(64, 64 * 20, 64))


class FakeBench:
    """A bench whose outcomes are a table: a time, or an outcome (of compiling, or of measuring)."""

    COMPILING = (Outcome.COMPILE_ERROR, Outcome.REJECTED)

    def __init__(self, table: dict[Tile, float | Outcome], seconds: float = 0.0) -> None:
        self.table, self.seconds, self.measured = table, seconds, []

    def compile(self, tiles: Sequence[Tile], seconds: float) -> Iterator[Trial]:
        for tile in tiles:
            found = self.table[tile]
            yield Trial(tile, found if found in self.COMPILING else Outcome.OK, message="as told")

    def measure(self, tile: Tile, seconds: float) -> Trial:
        self.measured.append(tile)
        time.sleep(self.seconds)
        found = self.table[tile]
        return Trial(tile, found, message="as told") if isinstance(found, Outcome) else Trial(tile, Outcome.OK, found)


BAD = [o for o in Outcome if o is not Outcome.OK]


@pytest.mark.parametrize("outcome", BAD, ids=lambda outcome: outcome.value)
def test_a_tile_that_fails_keeps_its_class_and_the_search_goes_on(outcome):
    bench = FakeBench({DEFAULT: 10.0, SLOW: outcome, FAST: 5.0})
    result = search(bench, [DEFAULT, SLOW, FAST], Budget())
    assert {t.tile: t.outcome for t in result.trials} == {DEFAULT: Outcome.OK, SLOW: outcome, FAST: Outcome.OK}
    assert (result.best.tile, result.best.time_us, result.default_us) == (FAST, 5.0, 10.0)
    assert result.counts() == {"ok": 2, outcome.value: 1}
    assert (SLOW in bench.measured) is (outcome not in FakeBench.COMPILING)


@pytest.mark.parametrize("outcome", BAD, ids=lambda outcome: outcome.value)
def test_a_default_that_fails_is_replaced(outcome):
    result = search(FakeBench({DEFAULT: outcome, SLOW: 20.0}), [DEFAULT, SLOW], Budget())
    assert (result.best.tile, result.default_us) == (SLOW, None)


def test_where_nothing_runs_every_reason_is_told():
    table = dict(zip([DEFAULT, FAST, SLOW, *OTHERS], BAD))
    with pytest.raises(NothingRan) as caught:
        search(FakeBench(table), list(table), Budget(), "forward")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"none of {len(BAD)} tiles ran and gave right numbers for forward:"
    assert lines[1:-1] == [f"  {tile}: {outcome.value}: as told" for tile, outcome in table.items()]
    assert lines[-1] == "  Leave tune out: default tiles are used then."


def test_a_difference_within_noise_leaves_the_default():
    assert search(FakeBench({DEFAULT: 10.0, FAST: 9.95}), [DEFAULT, FAST], Budget()).best.tile == DEFAULT
    assert search(FakeBench({DEFAULT: 10.0, FAST: 9.8}), [DEFAULT, FAST], Budget()).best.tile == FAST


def test_the_best_few_are_measured_again_and_a_lucky_time_is_found_out():
    class Drifting(FakeBench):
        def measure(self, tile, seconds):
            trial = super().measure(tile, seconds)
            lucky = tile == SLOW and self.measured.count(SLOW) > 1
            return Trial(tile, Outcome.WRONG) if lucky else trial

    bench = Drifting({DEFAULT: 10.0, FAST: 8.0, SLOW: 1.0})
    result = search(bench, [DEFAULT, FAST, SLOW], Budget())
    assert result.best.tile == FAST  # SLOW was right once and wrong once
    assert bench.measured.count(FAST) == bench.measured.count(DEFAULT) == 4


def test_no_more_trials_than_the_budget_has():
    tiles = [DEFAULT, FAST, SLOW, *OTHERS]
    bench = FakeBench(dict.fromkeys(tiles, 10.0))
    assert len(search(bench, tiles, Budget(max_trials=4)).trials) == 4
    assert set(bench.measured) == set(tiles[:4])


def test_no_more_seconds_than_the_budget_has():
    tiles = [DEFAULT, FAST, SLOW, *OTHERS]
    started = time.monotonic()
    result = search(FakeBench(dict.fromkeys(tiles, 10.0), seconds=0.1), tiles, Budget(max_seconds=0.25))
    assert time.monotonic() - started < 2
    assert 1 <= len(result.trials) < len(tiles)
