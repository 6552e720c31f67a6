"""Bounds of masks, by brute force over small grids: no kept pair lies outside, and exact bounds keep nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Expr, Op, Type, const, make, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.library import and_masks, causal, dilated, or_masks, prefix_lm, sliding_window
from attention_engine.passes.analyse_mask import Bound, MaskPlan, analyse_mask
from attention_engine.passes.simplify import simplify

QUERIES, KEYS = 13, 11


def mask_of(mask_mod, axes=None) -> Expr | None:
    return trace(None, mask_mod, None, CustomIO(axes or {})).mask


def meets(plan: MaskPlan, q: int, kv: int) -> bool:
    return all(bound.q * q + bound.kv * kv + bound.offset >= 0 for bound in plan.bounds)


def check(mask: Expr | None, plan: MaskPlan) -> None:
    for q in range(QUERIES):
        for kv in range(KEYS):
            values = {Q_IDX: q, KV_IDX: kv, B: 1, H: 2}
            if mask is not None:
                values |= {n: 1.0 if n.dtype is Type.FLOAT else 3 for n in topological(mask) if n.op is Op.LOAD}
            kept = mask is None or evaluate(mask, values)
            if kept:
                assert meets(plan, q, kv), f"{(q, kv)} is kept by {mask} and lies outside {plan}"
            elif plan.exact:
                assert not meets(plan, q, kv), f"{(q, kv)} is masked by {mask} and lies inside {plan}"


def whole_and_empty(plan: MaskPlan, q: range, kv: range) -> tuple[bool, bool]:
    """By interval arithmetic on the bounds, as kernels do it: is the tile whole; does it hold nothing?"""
    corners = [[b.q * i + b.kv * j + b.offset for i in (q[0], q[-1]) for j in (kv[0], kv[-1])] for b in plan.bounds]
    return plan.exact and all(min(c) >= 0 for c in corners), any(max(c) < 0 for c in corners)


def causal_with_offset(b, h, q_idx, kv_idx):
    return q_idx + 3 >= kv_idx


def diagonal(b, h, q_idx, kv_idx):
    return q_idx == kv_idx + 2


def blocks(b, h, q_idx, kv_idx):
    return q_idx // 4 == kv_idx // 4


def not_far(b, h, q_idx, kv_idx):
    return ~(q_idx > 2 * kv_idx + 1) & ~(kv_idx >= q_idx + 3)


def of_the_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx + h > 3)


def of_lengths(b, h, q_idx, kv_idx, custom):
    return (kv_idx < custom["lengths"]) & (q_idx >= kv_idx)


def of_floats(b, h, q_idx, kv_idx):
    return q_idx * 0.5 >= kv_idx


def even(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


def apart(b, h, q_idx, kv_idx):
    return q_idx != kv_idx


def all_pairs(b, h, q_idx, kv_idx):
    return q_idx == q_idx


EXACT = {
    "none": None, "causal": causal, "causal with offset": causal_with_offset, "window": sliding_window(3, 1),
    "diagonal": diagonal, "not far": not_far, "causal window": and_masks(causal, sliding_window(4)), "all": all_pairs,
}  # fmt: skip
INEXACT = {
    "prefix": prefix_lm(4), "blocks": blocks, "causal blocks": and_masks(causal, blocks), "dilated": dilated(3),
    "of the head": of_the_head, "floats": of_floats, "even": even, "apart": apart,
    "either": or_masks(causal, sliding_window(0, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*EXACT, *INEXACT])
def test_no_kept_pair_lies_outside_and_exact_bounds_are_the_mask(name):
    mask = mask_of({**EXACT, **INEXACT}[name])
    plan = analyse_mask(mask)
    assert plan.exact == (name in EXACT)
    check(mask, plan)


@pytest.mark.parametrize("name", [*EXACT, *INEXACT])
def test_a_whole_tile_is_whole_and_an_empty_one_empty(name):
    mask = mask_of({**EXACT, **INEXACT}[name])
    plan = analyse_mask(mask)
    seen = 0
    for q in (range(i, i + 4) for i in range(0, 16, 4)):
        for kv in (range(j, j + 3) for j in range(0, 15, 3)):
            kept = [mask is None or evaluate(mask, {Q_IDX: i, KV_IDX: j, H: 2, B: 0}) for i in q for j in kv]
            whole, empty = whole_and_empty(plan, q, kv)
            assert not whole or all(kept)
            assert not empty or not any(kept)
            seen += whole or empty
    assert seen or name in ("blocks", "even", "apart", "prefix", "either", "floats")  # nothing is known of these


def test_the_bounds_of_a_causal_mask():
    assert analyse_mask(mask_of(causal)) == MaskPlan((Bound(1, -1, 0),), True)
    assert analyse_mask(mask_of(causal_with_offset)) == MaskPlan((Bound(1, -1, 3),), True)


def test_the_bounds_of_a_window():
    plan = analyse_mask(mask_of(sliding_window(3, 1)))
    assert set(plan.bounds) == {Bound(-1, 1, 3), Bound(1, -1, 1)}
    assert plan.exact


def test_what_is_known_of_part_of_a_mask_is_used():
    plan = analyse_mask(mask_of(of_lengths, {"lengths": ("batch",)}))
    assert plan == MaskPlan((Bound(1, -1, 0),), False)
    check(mask_of(of_lengths, {"lengths": ("batch",)}), plan)


@st.composite
def comparisons(draw: st.DrawFn) -> Expr:
    def affine() -> Expr:
        q, kv, offset = (draw(st.integers(-3, 3)) for _ in range(3))
        return Q_IDX * q + KV_IDX * kv + const(offset)

    op = draw(st.sampled_from([Op.LESS, Op.LESS_EQUAL, Op.EQUAL]))
    truth = make(op, affine(), affine())
    return make(Op.NOT, truth) if draw(st.booleans()) else truth


@settings(max_examples=200)
@given(st.lists(st.tuples(comparisons(), st.sampled_from([Op.AND, Op.AND, Op.OR])), min_size=1, max_size=3))
def test_random_masks(parts):
    mask = parts[0][0]
    for part, op in parts[1:]:
        mask = make(op, mask, part)
    (mask,) = simplify(mask)
    check(mask, analyse_mask(mask))
