"""Which weights leave fp16's range, and that they are right there all the same: powers, exp less a constant."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, meta_tensor
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.program import SCORE
from attention_engine.library import OnlineSigmoid, OnlineSoftmax, causal
from attention_engine.passes.check_cuts import check_online
from attention_engine.passes.half_range import bound_weights, final_weights_fit, weights_fit
from tests import programs


class Normalised(OnlineFunc):
    """A function of the score over its row sum."""

    def __init__(self):
        super().__init__({"r": 0.0}, {})

    @classmethod
    def online_fwd(cls, scores, online_rowscales, b, h, q_idx):
        weights = cls.weigh(scores)
        return weights, {"r": online_rowscales["r"] + weights.get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["r"], {}


class Power(Normalised):
    @staticmethod
    def weigh(scores):
        return scores**4


class ConstantMaximum(Normalised):
    @staticmethod
    def weigh(scores):
        return (scores - 3.0).exp()


class Bumps(Normalised):
    """Neither grows with the score nor with its absolute value."""

    @staticmethod
    def weigh(scores):
        return scores**4 + 300 * (scores - 2).abs() + 1


@pytest.mark.parametrize(("name", "fits", "final_fits"), [
    ("softmax", True, True), ("softmax one", True, True), ("sigmoid bias", True, True), ("relu", True, True),
    ("retention", True, True), ("tempered", True, True), ("sink", True, True),
    ("relu2 row sum", False, True), ("relu2", False, False),
])  # fmt: skip
def test_weights_that_no_maximum_bounds_are_told_apart(name, fits, final_fits):
    program = programs.EXAMPLES[name].trace()
    assert (weights_fit(program), final_weights_fit(program)) == (fits, final_fits)


@pytest.mark.parametrize("func", [Power, ConstantMaximum, Bumps])
def test_bounded_weights_are_the_same_attention(func):
    program = bound_weights(trace(None, None, func(), CustomIO({})))
    check_online(program)
    assert weights_fit(program)
    start = {s.variable: s.initial for s in program.states}
    weights = evaluate(program.weights, {**start, SCORE: [0.01, -0.02, 0.005]}, 3)
    assert 2.0**13 <= max(weights) <= 2.0**15


class NamesABound(OnlineFunc):
    """x^4 over its row sum, which stands in a state called as the bound would be."""

    weigh = staticmethod(Power.weigh)

    def __init__(self):
        super().__init__({"_bound": 0.0}, {})

    @classmethod
    def online_fwd(cls, scores, online_rowscales, b, h, q_idx):
        weights = cls.weigh(scores)
        return weights, {"_bound": online_rowscales["_bound"] + weights.get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["_bound"], {}


def plain(weigh, q, k, v, normalised):
    x = torch.einsum("bqhd,bkhd->bhqk", q, k)
    keep = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    w = torch.where(keep, weigh(x), 0.0)
    w = w / w.sum(-1, keepdim=True) if normalised else w
    return torch.einsum("bhqk,bkhd->bqhd", w, v)


@pytest.mark.parametrize("size", [0.02, 1.0, 8.0, 20.0, 300.0])
@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("func", [Power, ConstantMaximum, Bumps, programs.Relu2, NamesABound])
def test_fp16_is_right_where_weights_leave_its_range(func, backend, size):
    """Scores of about `size`; within a few roundings of fp16 of the formula in float64, gradients too."""
    if func is ConstantMaximum and size > 8:
        pytest.skip("exp of its scores leaves fp32")
    length, dim = 70, 32
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(1, length, 2, dim, generator=generator) for _ in range(4))
    q, k = q * (size / dim**0.5) ** 0.5, k * (size / dim**0.5) ** 0.5
    grown = max(size, 1.0) if func is programs.Relu2 else 1.0  # its weights are as large as they are
    given = [x.half() for x in (q, k, v / grown**2, do / grown)]
    weigh = func.weigh if hasattr(func, "weigh") else lambda x: x.relu() ** 2
    engine = AttentionEngine((meta_tensor(1, 2, length, dim, dtype=torch.float16),) * 3, None, None, causal, func(),
                             scale=1.0, backend=backend)  # fmt: skip

    def results(run, dtype):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in given[:3]]
        o = run(*leaves)
        return [o, *torch.autograd.grad(o, leaves, given[3].to(dtype))]

    ours = results(engine, torch.float16)
    exact = results(lambda *x: plain(weigh, *x, func is not programs.Relu2), torch.float64)
    for name, found, right in zip(("o", "dq", "dk", "dv"), ours, exact, strict=True):
        error = (found.double() - right).abs().mean()
        assert error <= 2e-3 * right.abs().mean(), (name, float(error / right.abs().mean()))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("func", [Power, ConstantMaximum, Bumps])
def test_fp16_rows_that_keep_no_key_of_their_first_tile_are_right(func, backend):
    """A tile of which a row keeps nothing has no largest score; the last queries see keys of the second tile alone."""
    length, dim = 300, 32
    q, k, v = (0.3 * torch.randn(1, length, 2, dim) for _ in range(3))
    engine = AttentionEngine((meta_tensor(1, 2, length, dim, dtype=torch.float16),) * 3, None, None,
                             lambda b, h, i, j: (i >= j + 5) & ((i < 250) | (j > 200)), func(), scale=1.0,
                             backend=backend)  # fmt: skip
    o = engine(q.half(), k.half(), v.half())
    i, j = torch.arange(length)[:, None], torch.arange(length)
    keep = (i >= j + 5) & ((i < 250) | (j > 200))
    wide = [x.half().double() for x in (q, k, v)]
    w = torch.where(keep, func.weigh(torch.einsum("bqhd,bkhd->bhqk", *wide[:2])), 0.0)
    right = torch.einsum("bhqk,bkhd->bqhd", (w / w.sum(-1, keepdim=True)).nan_to_num(0.0), wide[2])
    assert not o[:, :5].any()
    assert (o.double() - right).abs().mean() <= 2e-3 * right.abs().mean()


@pytest.mark.parametrize("func", [OnlineSoftmax, OnlineSigmoid])
def test_kernels_of_bounded_weights_are_as_they_were(func):
    engine = AttentionEngine((meta_tensor(1, 2, 64, 64, dtype=torch.float16),) * 3, None, None, causal, func())
    assert "_bound" not in engine.source("forward")
