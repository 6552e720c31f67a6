"""The reference against plain torch in float64, its gradients against finite differences, and every empty case."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Type
from attention_engine.ir.program import Program
from attention_engine.library import OnlineRelu, OnlineRetention, OnlineSigmoid, OnlineSoftmax, OnlineSoftmaxOne
from attention_engine.passes.derive_backward import derive_backward
from attention_engine.reference.dense import attend, attend_backward, compute_dtype, saved_rows
from tests import plain
from tests.programs import EXAMPLES, HEADS, MASKS, causal, decayed, late, scaled, softcapped, with_alibi

BATCH, QUERIES, KEYS = 2, 7, 9


def tensors(
    dtype: torch.dtype = torch.float64, kv_heads: int = 2, queries: int = QUERIES, keys: int = KEYS, batch: int = BATCH
):
    """q, k, v: (batch, heads, length, dim)."""
    generator = torch.Generator().manual_seed(2)
    sizes = (HEADS, queries, 5), (kv_heads, keys, 5), (kv_heads, keys, 3)
    return [torch.randn(batch, *s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


def by_plain(given: list[Tensor], kind: str, **options) -> Tensor | tuple[Tensor, Tensor]:
    """plain.py on the same tensors; its own layout is (batch, length, heads, dim)."""
    result = plain.attention(*(t.transpose(1, 2) for t in given), kind, **options)
    if isinstance(result, tuple):
        return result[0].transpose(1, 2), result[1]
    return result.transpose(1, 2)


SLOPES = EXAMPLES["alibi"].custom()["slopes"]
BIAS = EXAMPLES["sigmoid bias"].custom()["bias"]
AGAINST_PLAIN = {
    "softmax": ("softmax", plain.scaled(0.4)),
    "softmax one": ("softmax_one", plain.scaled(0.4)),
    "softcap": ("softmax", plain.softcapped(0.4, 2.0)),
    "alibi": ("softmax", lambda s, b, h, i, j: s * 0.4 - SLOPES[h] * (i - j)),
    "sigmoid bias": ("sigmoid", plain.biased(0.4, BIAS)),
    "relu": ("relu", plain.scaled(0.4)),
    "relu2": ("relu2", plain.scaled(0.4)),
    "relu2 row sum": ("relu2_row_sum", plain.scaled(0.4)),
    "retention": ("retention", plain.decayed(0.4)),
}
PLAIN_MASKS = {
    "full": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j <= 2) & (j - i <= 1),
    "late": lambda b, h, i, j: i >= j + 2,
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", AGAINST_PLAIN)
def test_outputs_and_gradients_are_those_of_plain_torch(name, mask, kv_heads):
    kind, score = AGAINST_PLAIN[name]
    given = tensors(kv_heads=kv_heads)
    o, _ = attend(EXAMPLES[name].trace(MASKS[mask]), *given, EXAMPLES[name].custom())
    expected = by_plain(given, kind, score=score, mask=PLAIN_MASKS[mask])
    seed = torch.randn(o.shape, dtype=torch.float64)
    assert torch.allclose(o, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad(o, given, seed), torch.autograd.grad(expected, given, seed), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["softmax", "softmax_one"])
def test_the_returned_row_is_the_log_of_the_sum_of_exponentials(kind, mask):
    func = {"softmax": OnlineSoftmax, "softmax_one": OnlineSoftmaxOne}[kind]
    given = tensors()
    _, (lse,) = attend(trace(scaled, MASKS[mask], func(), CustomIO()), *given)
    _, expected = by_plain(given, kind, score=plain.scaled(0.4), mask=PLAIN_MASKS[mask], return_lse=True)
    assert torch.allclose(lse, expected, rtol=1e-12)


SHIPPED = {
    "softmax": (OnlineSoftmax, scaled),
    "softmax one": (OnlineSoftmaxOne, softcapped),
    "sigmoid": (OnlineSigmoid, scaled),
    "relu": (OnlineRelu, scaled),
}


@pytest.mark.parametrize("mask", [None, late])
@pytest.mark.parametrize("name", SHIPPED)
def test_gradients_of_the_first_and_second_order_are_those_of_finite_differences(name, mask):
    func, score_mod = SHIPPED[name]
    program = trace(score_mod, mask, func(), CustomIO())
    given = tensors(queries=3, keys=4, batch=1)

    def run(*qkv: Tensor) -> tuple[Tensor, ...]:
        o, rows = attend(program, *qkv)
        return o, *(torch.where(row.isfinite(), row, 0.0) for row in rows)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_gradients_of_retention_hold_its_normaliser_constant():
    """Finite differences don't: so the normaliser of the point is put in by hand."""
    given = tensors(queries=3, keys=4, batch=1)
    program = trace(decayed, causal, OnlineRetention(), CustomIO())
    _, (normaliser,) = attend(program, *given)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(3)[:, None], torch.arange(4)
        gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))[:, None, None]
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        x = q @ k.transpose(-1, -2) * 0.4 * gamma ** (i - j).abs()
        return (torch.where(i >= j, x, 0.0) / normaliser.detach()[..., None]) @ v

    assert torch.autograd.gradcheck(run, given) and torch.autograd.gradgradcheck(run, given)
    o = attend(program, *given)[0]
    assert torch.allclose(o, run(*given), rtol=1e-12)
    seed = torch.randn_like(o)
    pairs = zip(torch.autograd.grad(o, given, seed), torch.autograd.grad(run(*given), given, seed), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-11) for a, b in pairs)


def test_gradients_of_custom_inputs_are_those_of_finite_differences():
    program = trace(with_alibi, causal, OnlineSoftmax(), CustomIO({"slopes": ("heads",)}))
    given = tensors(queries=3, keys=4, batch=1)
    slopes = SLOPES.clone().requires_grad_()

    def run(slopes: Tensor, *qkv: Tensor) -> Tensor:
        return attend(program, *qkv, {"slopes": slopes})[0]

    assert torch.autograd.gradcheck(run, (slopes, *given))
    assert torch.autograd.gradgradcheck(run, (slopes, *given))


# ---- score mods that use a value twice, and the other classic traps


SCORE_MODS = {
    "(s + 1) ** 2": (lambda s, c, b, h, i, j: (s + 1) ** 2, lambda s, i, j: (s + 1) ** 2),
    "(s + 1) * (s + 1)": (lambda s, c, b, h, i, j: (s + 1) * (s + 1), lambda s, i, j: (s + 1) ** 2),
    "s * tanh(s)": (lambda s, c, b, h, i, j: s * s.tanh(), lambda s, i, j: s * s.tanh()),
    "-s": (lambda s, c, b, h, i, j: -s, lambda s, i, j: -s),
    "exp(0.1 s)": (lambda s, c, b, h, i, j: (0.1 * s).exp(), lambda s, i, j: (0.1 * s).exp()),
    "1 - s": (lambda s, c, b, h, i, j: 1 - s, lambda s, i, j: 1 - s),
    "s / (1 + |i - j|)": (lambda s, c, b, h, i, j: s / (1 + abs(i - j)), lambda s, i, j: s / (1 + (i - j).abs())),
    "s / (s * s + 1)": (lambda s, c, b, h, i, j: s / (s * s + 1), lambda s, i, j: s / (s * s + 1)),
    "i / (2 + s * s)": (lambda s, c, b, h, i, j: i / (2 + s * s), lambda s, i, j: i / (2 + s * s)),
    "where": (lambda s, c, b, h, i, j: torch.where(s > 0, s, 0.1 * s), lambda s, i, j: torch.where(s > 0, s, 0.1 * s)),
    "max of s and -s": (lambda s, c, b, h, i, j: s.max(-s), lambda s, i, j: s.abs()),
    "min of s and 2 s": (lambda s, c, b, h, i, j: s.min(2 * s), lambda s, i, j: torch.minimum(s, 2 * s)),
}


@pytest.mark.parametrize("mask", ["full", "late"])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_a_score_mod_has_the_right_output_and_gradients_derived_ones_too(name, mask):
    score_mod, by_hand = SCORE_MODS[name]
    program = trace(score_mod, MASKS[mask], OnlineSoftmax(), CustomIO())
    given = tensors()
    o, _ = attend(program, *given)
    expected = by_plain(given, "softmax", score=lambda s, b, h, i, j: by_hand(s, i, j), mask=PLAIN_MASKS[mask])
    assert torch.allclose(o, expected, rtol=1e-12, atol=1e-13)
    seed = torch.randn(o.shape, dtype=torch.float64)
    exact = torch.autograd.grad(expected, given, seed)
    derived = backward_of(program, given, o, seed)
    for ours, formulas, theirs in zip(torch.autograd.grad(o, given, seed), derived, exact, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        assert torch.allclose(formulas, theirs, rtol=1e-10, atol=1e-12)


def backward_of(program: Program, given: list[Tensor], o: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.detach() for t in given)
    backward = derive_backward(program)
    saved = saved_rows(program, backward, q, k, {})
    found = attend_backward(program, backward, q, k, v, {}, saved, (o.detach() * seed).sum(-1), seed, {})
    return found.q, found.k, found.v


def test_a_mask_after_a_softcap_stays_a_mask():
    """-inf before a tanh would come out as -cap: masked keys would have weight."""
    given = tensors()
    program = trace(softcapped, causal, OnlineSoftmax(), CustomIO())
    o, _ = attend(program, *given)
    q, k, v = (t.detach().clone() for t in given)
    k[:, :, 3:], v[:, :, 3:] = 1e3, -1e3
    changed, _ = attend(program, q, k, v)
    assert torch.equal(changed[:, :, :3], o[:, :, :3])
    assert not torch.equal(changed[:, :, 3:], o[:, :, 3:])


def test_a_masked_pair_has_no_part_whatever_its_score_says():
    given = tensors()
    q, k, v = (t.detach().clone() for t in given)
    k[:, :, -1] = math.nan
    v[:, :, -1] = 0.0
    last = trace(scaled, lambda b, h, i, j: j < KEYS - 1, OnlineSoftmax(), CustomIO())
    o, (lse,) = attend(last, q, k, v)
    expected = attend(trace(scaled, None, OnlineSoftmax(), CustomIO()), q, k[:, :, :-1], v[:, :, :-1])
    assert torch.allclose(o, expected[0], rtol=1e-12) and torch.allclose(lse, expected[1][0], rtol=1e-12)
    k[:, :, -1] = 1e6  # exp of it overflows
    for leaf in (q, k, v):
        leaf.requires_grad_()
    assert all(g.isfinite().all() for g in torch.autograd.grad(attend(last, q, k, v)[0].sum(), (q, k, v)))


# ---- what is empty


EMPTY_ROWS = {"softmax": -math.inf, "softmax one": 0.0, "retention": 1.0, "relu2 row sum": 0.0, "gated": -math.inf}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_that_keeps_nothing_gives_zeros(name):
    example = EXAMPLES[name]
    given = tensors()
    program = example.trace(late)
    o, rows = attend(program, *given, example.custom())
    assert torch.equal(o[:, :, :2], torch.zeros_like(o[:, :, :2]))
    assert o[:, :, 2:].abs().min() >= 0 and o.isfinite().all()
    seed = torch.zeros_like(o)
    seed[:, :, :2] = 1.0
    for gradient in torch.autograd.grad(o, given, seed):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    if name in EMPTY_ROWS:
        assert (rows[0][:, :, :2] == EMPTY_ROWS[name]).all()
        assert rows[0][:, :, 2:].isfinite().all()


def test_a_program_that_shifts_its_output_gives_0_for_a_row_that_keeps_nothing():
    class Shifted(OnlineFunc):
        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
            return o + 1.0, {}

    o, _ = attend(trace(scaled, late, Shifted(), CustomIO()), *tensors())
    assert (o[:, :, :2] == 0).all() and (o[:, :, 2:] != 0).all()


@pytest.mark.parametrize("keys", [0, KEYS])
def test_a_row_that_keeps_nothing_hands_on_the_gradient_of_its_returned_rows(keys):
    """Of no keys, log(exp(sink) + sum exp(x)) is the sink, and its gradient 1."""
    example = EXAMPLES["sink"]
    program, (name, sink) = example.trace(late), next(iter(example.custom().items()))
    given, sink = tensors(keys=keys), sink.double().requires_grad_()
    o, (row,) = attend(program, *given, {name: sink})
    assert torch.equal(row[:, :, :2], sink[:, None].expand(BATCH, HEADS, 2))
    seed = torch.randn_like(row)
    seed[:, :, 2:] = 0.0
    exact = seed.sum((0, 2))
    torch.testing.assert_close(torch.autograd.grad(row, sink, seed)[0], exact)
    if keys:
        backward, (q, k, v) = derive_backward(program), (t.detach() for t in given)
        custom = {name: sink.detach()}
        given = saved_rows(program, backward, q, k, custom), torch.zeros_like(seed), torch.zeros_like(o)
        found = attend_backward(program, backward, q, k, v, custom, *given, {"lse": seed})
        torch.testing.assert_close(found.custom[name], exact)


@pytest.mark.parametrize(
    ("queries", "keys", "batch"), [(0, KEYS, BATCH), (QUERIES, 0, BATCH), (QUERIES, KEYS, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("name", ["softmax", "retention", "alibi"])
def test_an_empty_batch_or_length_gives_an_empty_or_zero_result(name, queries, keys, batch):
    given = tensors(queries=queries, keys=keys, batch=batch)
    o, rows = attend(EXAMPLES[name].trace(causal), *given, EXAMPLES[name].custom())
    assert o.shape == (batch, HEADS, queries, 3) and (o == 0).all()
    assert all(row.shape == (batch, HEADS, queries) for row in rows)
    for tensor, gradient in zip(given, torch.autograd.grad(o, given, torch.ones_like(o)), strict=True):
        assert gradient.shape == tensor.shape and (gradient == 0).all()


# ---- blocks, types, indices out of range


def test_an_outside_block_mask_joins_the_mask():
    blocks = torch.rand(BATCH, 1, QUERIES, KEYS) < 0.5
    o, _ = attend(trace(scaled, causal, OnlineSoftmax(), CustomIO()), *tensors(), None, blocks)
    both = lambda b, h, i, j: (i >= j) & blocks[b, 0, i, j]  # noqa: E731
    assert torch.allclose(o, by_plain(tensors(), "softmax", score=plain.scaled(0.4), mask=both), rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float16, torch.float32),
     (torch.bfloat16, torch.float32)],
)  # fmt: skip
def test_results_have_the_dtype_of_q_and_rows_at_least_fp32(dtype, computed):
    given = tensors(dtype)
    o, (lse,) = attend(trace(scaled, None, OnlineSoftmax(), CustomIO()), *given)
    assert o.dtype is dtype and lse.dtype is computed is compute_dtype(*given)
    exact = by_plain([t.double() for t in given], "softmax", score=plain.scaled(0.4))
    assert (o.double() - exact).abs().max() < {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)


def test_an_index_out_of_range_reads_0_and_gets_no_gradient():
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return score * 0.4 + custom["table"][q_idx - kv_idx]  # negative above the diagonal, too large far below it

    program = trace(score_mod, None, OnlineSoftmax(), CustomIO({"table": (4,)}))
    given = tensors()
    table = torch.randn(4, dtype=torch.float64, requires_grad=True)
    o, _ = attend(program, *given, {"table": table})

    def by_hand(s, b, h, i, j):
        inside = (i - j >= 0) & (i - j < 4)
        return s * 0.4 + torch.where(inside, table[(i - j).clamp(0, 3)], 0.0)

    expected = by_plain(given, "softmax", score=by_hand)
    assert torch.allclose(o, expected, rtol=1e-12)
    seed = torch.randn(o.shape, dtype=torch.float64)
    (ours,), (theirs,) = torch.autograd.grad(o, [table], seed), torch.autograd.grad(expected, [table], seed)
    assert torch.allclose(ours, theirs, rtol=1e-11)


def test_integer_and_boolean_custom_inputs_are_read():
    def mask_mod(b, h, q_idx, kv_idx, custom):
        return (kv_idx < custom["lengths"]) & custom["heads_on"]

    io = CustomIO({"lengths": ("batch",), "heads_on": ("heads",)})
    program = trace(scaled, mask_mod, OnlineSoftmax(), io, {"lengths": Type.INT, "heads_on": Type.BOOL})
    lengths, on = torch.tensor([9, 4]), torch.tensor([True, True, False, True])
    o, _ = attend(program, *tensors(), {"lengths": lengths, "heads_on": on})
    mask = lambda b, h, i, j: (j < lengths[b]) & on[h]  # noqa: E731
    assert torch.allclose(o, by_plain(tensors(), "softmax", score=plain.scaled(0.4), mask=mask), rtol=1e-12, atol=1e-14)
    assert (o[:, 2] == 0).all()


def test_a_constant_score_and_constant_weights_are_spread_over_pairs():
    class Count(OnlineFunc):
        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            return 1.0, {}, 1

    q, k, v = tensors(kv_heads=4)
    o, _ = attend(trace(lambda *a: 0.5, None, Count(), CustomIO()), q, k, v)
    assert torch.allclose(o, v.sum(2, keepdim=True).expand(o.shape), rtol=1e-12)
