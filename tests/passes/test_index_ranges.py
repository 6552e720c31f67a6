"""Comparisons that no index can change."""

import sys

import pytest
import torch

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.ir.expr import Op, Type, const, make, var
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.library import and_masks, causal, sliding_window
from attention_engine.passes.index_ranges import LONGEST, NARROW, WIDE, Ranges, fits, settle_comparisons
from attention_engine.passes.simplify import add, mul


@pytest.mark.parametrize(("op", "a", "b", "truth"), [
    (Op.LESS_EQUAL, add(Q_IDX, mul(const(-1), KV_IDX)), const(2**40), True),
    (Op.LESS_EQUAL, add(Q_IDX, mul(const(-1), KV_IDX)), const(2**31 - 1), True),
    (Op.LESS_EQUAL, add(Q_IDX, mul(const(-1), KV_IDX)), const(LONGEST - 1), True),
    (Op.LESS_EQUAL, add(Q_IDX, mul(const(-1), KV_IDX)), const(LONGEST - 2), None),
    (Op.LESS, KV_IDX, add(Q_IDX, const(2**63 - LONGEST)), True),
    (Op.LESS, KV_IDX, add(Q_IDX, const(2**63 - 1)), None),  # which wraps
    (Op.LESS, const(LONGEST), Q_IDX, False),
    (Op.LESS, Q_IDX, const(0), False),
    (Op.LESS, const(-1), KV_IDX, True),
    (Op.EQUAL, make(Op.ABS, add(Q_IDX, const(5))), const(4), False),
    (Op.EQUAL, Q_IDX, KV_IDX, None),
])  # fmt: skip
def test_ranges_decide_what_they_can(op, a, b, truth):
    condition = make(op, a, b)
    assert settle_comparisons(condition) is (condition if truth is None else const(truth))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("window", [sys.maxsize, 2**40, 2**31 - 1])
def test_a_window_of_any_size_works(window, backend):
    q, k, v = (torch.randn(1, 5, 1, 16) for _ in range(3))
    metas = (meta_tensor(1, 1, 5, 16, dtype=torch.float32),) * 3
    masks = causal, and_masks(causal, sliding_window(window, window)), sliding_window(window)
    plain, wide, one_sided = (AttentionEngine(metas, None, None, m, backend=backend)(q, k, v) for m in masks)
    assert torch.equal(plain, wide) and torch.equal(plain, one_sided)


READ, WIDE_READ = (make(Op.LOAD, KV_IDX, arg=name, dtype=Type.INT) for name in ("x", "wide"))


@pytest.mark.parametrize(("expr", "least", "most"), [
    (READ, *NARROW), (WIDE_READ, *WIDE),
    (add(READ, Q_IDX), NARROW[0], NARROW[1] + LONGEST - 1),
    (make(Op.MUL, WIDE_READ, const(3)), *WIDE), (make(Op.ABS, WIDE_READ), *WIDE),  # which wrap
    (make(Op.MUL, READ, READ), -(2**31) * (2**31 - 1), 2**62),
    (make(Op.MOD, WIDE_READ, const(7)), 0, 6), (make(Op.MOD, WIDE_READ, const(-7)), -6, 0),
    (make(Op.FLOORDIV, READ, const(-2)), -(2**30), 2**30),
    (make(Op.BIT_AND, WIDE_READ, const(255)), 0, 255), (make(Op.BIT_XOR, Q_IDX, const(-1)), -LONGEST, LONGEST - 1),
    (make(Op.SHIFT_LEFT, const(1), Q_IDX), *WIDE), (make(Op.SHIFT_RIGHT, WIDE_READ, const(40)), -(2**23), 2**23 - 1),
    (make(Op.MINIMUM, make(Op.MAXIMUM, WIDE_READ, const(0)), const(9)), 0, 9),
    (make(Op.CAST, make(Op.TANH, var("x", [])) * 5.0, arg=Type.INT), -7, 7),
    (make(Op.CAST, var("x", []), arg=Type.INT), *WIDE),
])  # fmt: skip
def test_ranges_of_integers(expr, least, most):
    assert Ranges({"wide"})(expr) == (least, most)


def test_ranges_know_what_wraps():
    ranges, twice = Ranges({"wide"}), make(Op.MUL, WIDE_READ, const(2))
    assert ranges.wraps(twice) and not ranges.wraps(make(Op.MOD, twice, const(3))) and not ranges.wraps(READ)
    assert not ranges.never_wrap(make(Op.MOD, twice, const(3))) and ranges.never_wrap(make(Op.MUL, READ, READ))
    assert fits((-5, 5), NARROW) and not fits((-5, 2**31), NARROW) and not fits(None, WIDE)
