"""Layouts: every token is held once, at any number of ranks, and work is shared evenly."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, create_mask, document_ids
from attention_engine import library as lib
from attention_engine.distributed import Layout
from attention_engine.distributed.deal import PARTIAL, SENT, WHOLE, deal, work_of_pieces
from attention_engine.distributed.exchange import Ranks
from attention_engine.distributed.layout import order_of_gathered, order_of_sent
from attention_engine.distributed.methods import ALIGNED, Call
from attention_engine.distributed.placements import placements
from attention_engine.distributed.split import Split
from attention_engine.errors import LengthNotInLayout
from attention_engine.passes.tile_plan import plan_tiles

CPU = torch.device("cpu")
PREFIX = lib.prefix_lm(9)


def layouts(length, ranks):
    yield Layout.contiguous(length, ranks)
    yield Layout.zigzag(length, ranks)
    yield Layout.dealt([n % 7 for n in range(4 * ranks)], length, ranks)


@pytest.mark.parametrize(("length", "ranks"), [(53, 2), (64, 4), (8191, 8), (1 << 20, 1024)])
def test_every_token_is_held_once(length, ranks):
    for layout in layouts(length, ranks):
        places = torch.cat([layout.places(rank) for rank in range(ranks)])
        assert torch.equal(places.sort().values, torch.arange(length)), layout.name
        assert layout.length == length and layout.ranks == ranks
        for rank in (0, ranks - 1):
            mine = layout.places(rank)
            for run in layout.runs[rank]:
                assert torch.equal(mine[run.here], torch.arange(run.start, run.start + run.count))


@pytest.mark.parametrize(("length", "ranks"), [(53, 2), (61, 3), (1000, 8)])
def test_what_is_gathered_comes_in_order_and_goes_back(length, ranks):
    for layout in layouts(length, ranks):
        sent = torch.arange(length).index_select(0, order_of_sent(layout, CPU)).view(ranks, layout.most)
        for rank in range(ranks):
            assert torch.equal(sent[rank, : layout.count(rank)], layout.places(rank))
        assert torch.equal(sent.flatten().index_select(0, order_of_gathered(layout, CPU)), torch.arange(length))


def share_of_the_slowest(layout, kept):
    """kept: pairs, or what rows take."""
    work = [kept[layout.places(rank)].sum().item() for rank in range(layout.ranks)]
    return sum(work) / len(work) / max(work)


def tiles_of_pieces(kept, side, pieces):
    """WHOLE for each whole tile and PARTIAL for each other that keeps something, of each row, by piece."""
    tiles = kept.unfold(0, side, side).unfold(1, side, side)
    some, whole = tiles.any(-1).any(-1), tiles.all(-1).all(-1)
    rows = (PARTIAL * some.sum(1) - (PARTIAL - WHOLE) * whole.sum(1)).repeat_interleave(side)
    return rows.view(pieces, -1).sum(1)


def test_zigzag_balances_causal_masks_and_dealing_balances_documents():
    at = torch.arange(1024)
    causal = at[:, None] >= at
    assert share_of_the_slowest(Layout.contiguous(1024, 8), causal) < 0.55
    assert share_of_the_slowest(Layout.zigzag(1024, 8), causal) > 0.999
    ids = document_ids([496, 32, 64, 16, 80, 16, 192, 128])
    engine = AttentionEngine(
        None, CustomIO({"documents": ("batch", "seq_len")}), mask_mod=lib.and_masks(lib.causal, lib.document())
    )
    counts = work_of_pieces(engine, 1024, 64, {"documents": ids})
    kept = causal & (ids[0][:, None] == ids[0])
    rows = tiles_of_pieces(kept, 16, 1024)
    dealt = share_of_the_slowest(Layout.dealt(counts, 1024, 8), rows)
    assert dealt > 0.98 > 0.9 > share_of_the_slowest(Layout.zigzag(1024, 8), rows)


@pytest.mark.parametrize(
    ("length", "pieces", "side", "step"), [(1024, 4, 128, 1), (1024, 64, 16, 1), (8192, 8, 128, 2)]
)
def test_work_is_counted_by_tiles(length, pieces, side, step):
    """A masked tile takes several times as long as a whole one: documents that begin within tiles cost more."""
    lengths = [length // 2 - 20, 60, 120, length // 2 - 160]
    ids, at = document_ids(lengths), torch.arange(length)
    engine = AttentionEngine(
        None, CustomIO({"documents": ("batch", "seq_len")}), mask_mod=lib.and_masks(lib.causal, lib.document())
    )
    found = work_of_pieces(engine, length, pieces, {"documents": ids})
    kept = (at[:, None] >= at) & (ids[0][:, None] == ids[0])
    assert found == tiles_of_pieces(kept, side, pieces).tolist()
    assert work_of_pieces(AttentionEngine(), length, pieces, {}) == [1] * pieces


@pytest.mark.parametrize("ranks", [2, 4])
def test_neighbours_stay_together_where_that_saves_sends(ranks):
    length = 8192
    ids = document_ids([3600, 300, 700, 90, 1202, 500, 1400, 400])
    engine = AttentionEngine(
        None, CustomIO({"documents": ("batch", "seq_len")}), mask_mod=lib.and_masks(lib.causal, lib.document())
    )
    work = work_of_pieces(engine, length, 8 * ranks, {"documents": ids})
    layout = deal(engine, length, ranks, {"documents": ids})
    kept = layout.kept
    assert kept is not None and {layout.count(rank) for rank in range(ranks)} == {length // ranks}

    def sent(layout):
        each = [(kept.needed(layout.runs[rank]), layout.places(rank)) for rank in range(ranks)]
        return [sum(stop - first for first, stop in needed) - len(own) for needed, own in each]

    def slowest(layout):
        """In whole tiles: the work of a rank's queries, and the keys that it is sent."""
        piece = length // len(work)
        rows = torch.tensor(work).repeat_interleave(piece) / (piece * WHOLE * 128)
        loads = [rows[layout.places(rank)].sum().item() for rank in range(ranks)]
        return max(load + SENT * keys for load, keys in zip(loads, sent(layout), strict=True))

    by_work_alone = Layout.dealt(work, length, ranks)
    assert max(sent(layout)) < 0.75 * max(sent(by_work_alone))
    assert slowest(layout) < 0.95 * min(slowest(by_work_alone), slowest(Layout.contiguous(length, ranks)))


def test_a_last_tile_that_is_not_full():
    engine = AttentionEngine(mask_mod=lib.causal)
    found = work_of_pieces(engine, 300, 3, {})  # of 100 queries, in tiles of as many
    assert found == [100 * (PARTIAL + WHOLE * n) for n in range(3)]
    assert sum(work_of_pieces(engine, 299, 3, {})) == 299 * PARTIAL + 100 * WHOLE + 99 * 2 * WHOLE


def test_pieces_are_dealt_evenly_or_not_at_all():
    with pytest.raises(LengthNotInLayout, match="7 pieces can't be dealt evenly to 2 ranks"):
        Layout.dealt([1] * 7, 70, 2)
    counts = [3, 3, 2, 2, 2, 0]  # the largest first, each to who has the least, would come to 7 and 5
    runs = Layout.dealt(counts, 6, 2).runs
    assert [sum(sum(counts[run.start : run.start + run.count]) for run in each) for each in runs] == [6, 6]


def test_which_custom_inputs_come_whole():
    axes = {
        "rows": ("batch", "seq_len"), "documents": ("batch", "seq_len"), "keys": ("heads", "seq_len_kv"),
        "pairs": (1, "heads", "seq_len", "seq_len_kv"), "slopes": ("heads",),
    }  # fmt: skip

    def score(s, c, b, h, q, k):
        same = c["documents"][b, q] == c["documents"][b, k]
        return torch.where(same, s * c["rows"], 0.0) + c["keys"] + c["pairs"] + c["slopes"]

    engine = AttentionEngine(None, CustomIO(axes), score)
    found = {p.spec.name: (p.queries, p.keys) for p in placements(engine._program, engine.custom_io.in_order)}
    assert found == {
        "rows": (1, None), "documents": (None, None), "keys": (None, 1), "pairs": (2, None), "slopes": (None, None),
    }  # fmt: skip


@pytest.mark.parametrize("mask", [lib.causal, lib.sliding_window(200, 30), lib.causal_from(-300), PREFIX])
def test_a_run_gets_the_keys_that_it_may_see(mask):
    """No kept pair lies outside of them, and for masks of plain bounds few masked keys lie inside."""
    at = torch.arange(1024)
    keep = create_mask(mask, 1, 1, 1024, 1024)[0, 0]
    for layout in layouts(1024, 4):
        bounds = plan_tiles(AttentionEngine(mask_mod=mask)._program.mask).bounds.bounds
        call = Call(None, None, layout, layout, {}, {}, {}, False, None, bounds, (), lists=True)
        for run in (run for runs in layout.runs for run in runs):
            first, stop = call.seen(run)
            of_run = keep[run.start : run.start + run.count].any(0)
            assert not of_run[:first].any() and not of_run[stop:].any() and 0 <= first < stop <= 1024
            if mask is not PREFIX and of_run.any():
                assert first > at[of_run][0] - ALIGNED and stop == at[of_run][-1] + 1


def test_keys_go_round_where_a_ring_holds_fewer_than_all():
    """It holds those of two ranks at once."""
    for ranks in (1, 2, 3, 64):
        assert Split(None, Ranks(None, ranks, 0), ring=True).goes_round is (ranks > 2)
    assert not Split(None, Ranks(None, 3, 0)).goes_round


def test_a_thousand_ranks_hold_all_of_it_between_them():
    """Layouts, shapes of custom inputs, and keys that runs see, of ranks that are not there."""
    ranks, length = 1024, 1 << 17
    engine = AttentionEngine(
        None, CustomIO({"gate": ("batch", "seq_len"), "slopes": ("heads",)}),
        lambda s, c, b, h, q, k: s * c["gate"] - c["slopes"] * (q - k), lib.causal,
    )  # fmt: skip
    gate, slopes = placements(engine._program, engine.custom_io.in_order)
    bounds, sizes = plan_tiles(engine._program.mask).bounds.bounds, {"batch": 1, "heads": 8}
    sizes |= dict.fromkeys(("seq_len", "seq_len_kv"), length)
    for layout in layouts(length, ranks):
        call = Call(engine, None, layout, layout, sizes, {}, {}, False, None, bounds, (), lists=True)
        tokens, pairs = 0, []
        for rank in range(ranks):
            own = {"seq_len": layout.count(rank), "seq_len_kv": layout.count(rank)}
            assert slopes.shape(sizes, own) == (8,)
            tokens += gate.shape(sizes, own)[1]
            assert all(call.seen(run) == (0, run.start + run.count) for run in layout.runs[rank])
            pairs.append(sum(run.count * call.seen(run)[1] for run in layout.runs[rank]))
        assert tokens == length
        if layout.name == "zigzag":
            assert max(pairs) < 1.001 * min(pairs)  # two runs that meet in the middle are one
