"""A program whose result depends on how a row is cut is refused; every right one is let through, quickly."""

from __future__ import annotations

import time

import pytest

from attention_engine.errors import NotOnline
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.tracing import trace
from attention_engine.library import OnlineSoftmax
from attention_engine.passes import check_cuts
from attention_engine.passes.check_cuts import CUTS, KEYS, check_online
from tests.programs import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_right_program_passes(name):
    check_online(EXAMPLES[name].trace())


def test_the_test_is_quick():
    program = EXAMPLES["softmax"].trace()
    times = []
    for _ in range(5):
        check_cuts._check.cache_clear()
        start = time.perf_counter()
        check_online(program)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.04, f"{min(times) * 1e3:.1f} ms"  # 8 ms where nothing else runs


def test_every_cut_holds_each_key_once():
    assert len(CUTS) == len({c.tiles for c in CUTS}) == 9
    for cut in CUTS:
        assert sorted(j for tile in cut.tiles for j in tile) == list(range(KEYS)), cut.name
    assert sum(not cut.tiles[0] for cut in CUTS) == 2  # a first tile that is masked whole


class NoRescale(OnlineSoftmax):
    """Forgets to rescale the output."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        weights, rows, _ = OnlineSoftmax.online_fwd(scores, online_rowscales, b, h, q_idx)
        return weights, rows, 1


class Inverted(OnlineSoftmax):
    """Rescales by exp(new maximum - old maximum)."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        weights, rows, rescale = OnlineSoftmax.online_fwd(scores, online_rowscales, b, h, q_idx)
        return weights, {**rows, "r": online_rowscales["r"] / rescale + weights.get_reduce("sum")}, 1 / rescale


def test_a_rescale_the_other_way_round_is_refused_although_every_cut_gives_nan():
    with pytest.raises(NotOnline) as caught:
        check_online(trace(EXAMPLES["softmax"].score_mod, None, Inverted(), CustomIO()), where="Inverted: ")
    assert str(caught.value) == (
        "Inverted: rescale is inf where nothing was added yet, and 0 times it is NaN in each row.\n"
        "  It is what the output so far is multiplied with: exp(old maximum - new maximum), which is 0 at first."
    )


class StaleSum(OnlineSoftmax):
    """Forgets to rescale the sum."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        weights, rows, rescale = OnlineSoftmax.online_fwd(scores, online_rowscales, b, h, q_idx)
        return weights, {**rows, "r": online_rowscales["r"] + weights.get_reduce("sum")}, rescale


class StaleRow(OnlineFunc):
    """The output is right and a returned row isn't: it holds the last tile's sum alone."""

    def __init__(self):
        super().__init__({"last": 0.0}, {"last": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"last": scores.get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"last": online_rowscales["last"]}


class CountsTiles(OnlineFunc):
    """Only a tile that keeps nothing shows it."""

    def __init__(self):
        super().__init__({"sum": 0.0, "started": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        total = online_rowscales["sum"] + scores.exp().get_reduce("sum")
        return scores.exp(), {"sum": total, "started": online_rowscales["started"].max((1e-9 - total).relu() * 1e9)}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["sum"] + online_rowscales["started"], {}


class PerTile(OnlineFunc):
    """Normalises each tile by itself."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores / scores.get_reduce("abssum").max(1.0), {}, 1


@pytest.mark.parametrize("func", [NoRescale, StaleSum, StaleRow, CountsTiles, PerTile], ids=lambda f: f.__name__)
def test_a_wrong_program_is_refused(func):
    with pytest.raises(NotOnline, match="depends on how a row is cut into tiles"):
        check_online(trace(None, None, func(), CustomIO()))


def test_a_masked_first_tile_is_what_finds_some_mistakes():
    with pytest.raises(NotOnline, match="a masked tile, then one of all keys"):
        check_online(trace(None, None, CountsTiles(), CustomIO()))


def test_the_message_names_both_cuts_their_results_and_the_cause():
    with pytest.raises(NotOnline) as error:
        check_online(trace(None, None, StaleRow(), CustomIO()))
    assert str(error.value) == (
        "the returned row 'last' depends on how a row is cut into tiles. Is a rescale forgotten?\n"
        "  Of the same 10 keys:\n"
        "    one tile: -3.61959\n"
        "    tiles of 4 and 6 keys: -2.85552\n"
        "  The third result of online_fwd multiplies the output of earlier tiles; a state that sums weights needs\n"
        "  it too: r * rescale + weights.get_reduce('sum'). Weights that need all scores of their row (sparsemax, "
        "entmax)\n  or those of later keys (stick breaking) can't be made tile by tile."
    )


def test_weights_that_no_key_changes_are_summed_over_the_keys():
    class Mean(OnlineFunc):
        """The mean of v."""

        def __init__(self):
            super().__init__({"n": 0.0})

        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            ones = scores * 0.0 + 1.0
            return 1.0, {"n": online_rowscales["n"] + ones.get_reduce("sum")}, 1

        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
            return o / online_rowscales["n"], {}

    check_online(trace(None, None, Mean(), CustomIO()))


def test_a_program_that_passed_is_not_run_again_and_one_that_fell_is(monkeypatch):
    run, runs = check_cuts._run, []
    monkeypatch.setattr(check_cuts, "_run", lambda *given: runs.append(given) or run(*given))
    check_cuts._check.cache_clear()
    for _ in range(2):
        check_online(EXAMPLES["softmax"].trace())
    assert len(runs) == len(check_cuts.ROWS) * (1 + len(check_cuts.CUTS))
    for cuts in (check_cuts.CUTS[:3], check_cuts.CUTS):  # others are tried all the same
        del runs[:]
        check_online(EXAMPLES["softmax"].trace(), cuts)
        assert len(runs) == (len(check_cuts.ROWS) * (1 + len(cuts)) if len(cuts) == 3 else 0)
    wrong, said = trace(None, None, NoRescale(), CustomIO()), []
    for where in ("", "here: "):
        with pytest.raises(NotOnline) as told:
            check_online(wrong, where=where)
        said.append(str(told.value))
    assert said[1] == f"here: {said[0]}"
