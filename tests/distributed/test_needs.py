"""Which keys ranks need: no kept pair lies outside of them, and of masks of documents and windows few others inside."""

import pickle
from unittest.mock import patch

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, create_mask, document_ids
from attention_engine import library as lib
from attention_engine.distributed import Layout, needs
from attention_engine.distributed.deal import deal
from attention_engine.distributed.needs import Told, first_by, joined, needed_by, without
from attention_engine.passes.tile_plan import plan_tiles

LENGTH, RANKS = 1000, 4
IDS = document_ids([260, 31, 300, 9, 200, 200])
OTHERS = torch.randint(0, 5, (2, LENGTH), generator=torch.Generator().manual_seed(0))
DOCUMENTS = CustomIO({"documents": ("batch", "seq_len")})
LIMITS = CustomIO({"limits": ("heads", "seq_len"), "floats": ("seq_len",)})


def far(b, h, q_idx, kv_idx):
    """Two sums of both sides, a distance, a choice of the two, and none of what bounds know of."""
    near, both = (q_idx - 2 * kv_idx).abs() < 90, (q_idx + kv_idx).min(400 + q_idx)
    return near | (both < 300) | (q_idx.max(kv_idx + 500) == kv_idx + q_idx)


def limits(b, h, q_idx, kv_idx, custom):
    return (kv_idx <= custom["limits"][h, q_idx]) & ~(custom["floats"][q_idx] > custom["floats"][kv_idx] + 1.0)


def wrapping(b, h, q_idx, kv_idx):
    return q_idx * kv_idx * (2**40) * (2**20) >= 0


def kept(mask, custom):
    """The pairs that the mask keeps in any batch and head."""
    return create_mask(mask, 2 if custom.get("documents") is OTHERS else 1, 3, LENGTH, LENGTH, **custom).any(1).any(0)


CASES = {
    "documents, causal": (lib.and_masks(lib.causal, lib.document()), DOCUMENTS, {"documents": IDS}),
    "documents": (lib.document(), DOCUMENTS, {"documents": IDS.long()}),
    "documents without an order": (lib.document(), DOCUMENTS, {"documents": OTHERS}),
    "far": (far, CustomIO({}), {}),
    "limits": (
        limits, LIMITS, {"limits": torch.arange(LENGTH).repeat(3, 1) // 2, "floats": torch.linspace(0, 9, LENGTH)}
    ),
    "dilated": (lib.and_masks(lib.dilated(3), lib.sliding_window(50)), CustomIO({}), {}),
    "wrapping": (wrapping, CustomIO({}), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pieces", [7, 125])
def test_no_kept_pair_lies_outside_of_what_ranks_need(name, pieces):
    mask, io, custom = CASES[name]
    engine = AttentionEngine(None, io, mask_mod=mask)
    keep = kept(mask, custom)
    with patch.object(needs, "PIECES", pieces), patch.object(needs, "CLOSE", 0):
        layout = deal(engine, LENGTH, RANKS, custom)
        assert layout.kept.holds(engine._program.mask, custom)
        assert not layout.kept.holds(AttentionEngine(mask_mod=lib.causal)._program.mask, custom)
        found = needed_by((), layout, layout, layout.kept) or [((0, LENGTH),)] * RANKS
    for rank, ranges in enumerate(found):
        inside = torch.zeros(LENGTH, dtype=torch.bool)
        for first, stop in ranges:
            inside[first:stop] = True
        wanted = keep[layout.places(rank)].any(0)
        assert not (wanted & ~inside).any()
        if name in ("documents, causal", "documents", "dilated") and pieces == 125:
            assert inside.sum() <= wanted.sum() + 8 * 8 * len(layout.runs[rank])  # pieces of 8 tokens


@pytest.mark.parametrize("mask", [lib.causal, lib.sliding_window(200, 30), lib.causal_from(-300)])
def test_bounds_say_what_ranks_need_before_any_tensor_does(mask):
    bounds = plan_tiles(AttentionEngine(mask_mod=mask)._program.mask).bounds.bounds
    keep = create_mask(mask, 1, 1, LENGTH, LENGTH)[0, 0]
    for layout in (Layout.contiguous(LENGTH, RANKS), Layout.zigzag(LENGTH, RANKS)):
        for rank, ranges in enumerate(needed_by(bounds, layout, layout, None)):
            inside = torch.zeros(LENGTH, dtype=torch.bool)
            for first, stop in ranges:
                inside[first:stop] = True
            assert torch.equal(inside, keep[layout.places(rank)].any(0))
    assert needed_by((), layout, layout, None) is None


@pytest.mark.parametrize("mask", [lib.causal, lib.sliding_window(200, 30)])
@pytest.mark.parametrize("most", [1, 2])
def test_what_a_first_launch_sees_is_needed_first(mask, most):
    """A rank's first run, or all that it has, where one launch lists them."""
    bounds = plan_tiles(AttentionEngine(mask_mod=mask)._program.mask).bounds.bounds
    keep = create_mask(mask, 1, 1, LENGTH, LENGTH)[0, 0]
    layout = Layout.zigzag(LENGTH, RANKS)
    for runs, ranges in zip(layout.runs, first_by(bounds, layout, layout, most), strict=True):
        inside = torch.zeros(LENGTH, dtype=torch.bool)
        for first, stop in ranges:
            inside[first:stop] = True
        seen = [keep[run.start : run.start + run.count].any(0) for run in (runs if len(runs) > most else runs[:1])]
        assert torch.equal(inside, torch.stack(seen).any(0))


def test_ranges_without_others():
    assert without([(0, 10), (12, 20)], [(3, 5), (9, 13), (19, 30)]) == ((0, 3), (5, 9), (13, 19))
    assert without([(0, 4)], []) == ((0, 4),) and without([(2, 4)], [(0, 9)]) == ()


def test_what_a_tensor_said_holds_while_it_is_unwritten():
    ids = torch.arange(12)
    told = Told.of(ids)
    assert told.holds(ids) and told.holds(ids.detach()) and told.holds(ids.view(12))
    assert not told.holds(ids.clone()) and not told.holds(ids[:6]) and not told.holds(ids.view(3, 4))
    ids[3] = 0
    assert not told.holds(ids)
    assert not Told.of(torch.arange(3)).holds(torch.arange(3))


def test_ranges_that_meet_are_one():
    assert joined([(5, 9), (0, 3), (3, 4)]) == ((0, 4), (5, 9))
    assert joined([(0, 3), (5, 9), (12, 13), (1, 2)], close=2) == ((0, 9), (12, 13))


def test_a_layout_that_is_sent_forgets_what_it_was_dealt_by():
    layout = deal(AttentionEngine(None, DOCUMENTS, mask_mod=lib.document()), LENGTH, RANKS, {"documents": IDS})
    sent = pickle.loads(pickle.dumps(layout))
    assert layout.kept is not None and sent.kept is None and sent == layout
