"""Comparisons that no index can change."""

import sys

import pytest
import torch

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.ir.expr import Op, const, make
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.library import and_masks, causal, sliding_window
from attention_engine.passes.index_ranges import settle_comparisons
from attention_engine.passes.simplify import add, mul


@pytest.mark.parametrize(("op", "a", "b", "truth"), [
    (Op.LESS_EQUAL, add(Q_IDX, mul(const(-1), KV_IDX)), const(2**40), True),
    (Op.LESS_EQUAL, add(Q_IDX, mul(const(-1), KV_IDX)), const(2**31 - 1), True),
    (Op.LESS_EQUAL, add(Q_IDX, mul(const(-1), KV_IDX)), const(2**31 - 2), None),
    (Op.LESS, const(2**31), Q_IDX, False),
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
