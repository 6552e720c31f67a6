"""Gradients as autograd asks for them: through rows, twice, again, of some inputs only, by the user's own formula."""

import pytest
import torch

from attention_engine import SymbolScalar, Var
from attention_engine.errors import BackwardNotDerived, RowNotDifferentiable
from attention_engine.library import (
    OnlineIdentity,
    OnlineRelu,
    OnlineRetention,
    OnlineSigmoid,
    OnlineSoftmax,
    OnlineSoftmaxOne,
)
from tests import plain
from tests.cases import OnlineRelu2RowSum
from tests.runtime.engines import (
    BACKENDS,
    HEADS,
    agrees,
    build,
    close,
    exactly,
    late,
    qkv,
    results,
    same,
    scaled,
    weighted_sum,
)


def row_sum(o, rows):
    """A loss of the rows alone; a row that kept nothing (-inf) stays out."""
    finite = [r.double().masked_fill(r.isinf(), 0.0) for r in rows.values()]
    return sum((r * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() for r in finite)


LOSSES = {
    "the output alone": weighted_sum,
    "lse alone": row_sum,
    "lse and the output": lambda o, rows: weighted_sum(o, rows) + row_sum(o, rows),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("online_func", [OnlineSoftmax, OnlineSoftmaxOne])
def test_gradients_arrive_through_rows(loss, online_func, deterministic):
    _, _, dq, dk, dv = agrees(
        {},
        *qkv(35, 70),
        loss=LOSSES[loss],
        online_func=online_func(),
        deterministic=deterministic,
        mask_mod=late,
    )
    assert dq.any() and dk.any() and bool(dv.any()) is (loss != "lse alone")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
def test_the_first_call_equals_the_second(backend, deterministic):
    inputs = qkv(70, 140)
    engine = build(backend=backend, deterministic=deterministic)
    same(results(engine, *inputs), results(engine, *inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_twice_gives_the_same(backend):
    inputs = qkv(40)
    o = build(backend=backend)(*inputs)
    loss = weighted_sum(o, {})
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    same(list(first), list(torch.autograd.grad(loss, inputs, retain_graph=True)))
    loss.backward()
    loss = weighted_sum(build(backend=backend)(*inputs), {})
    loss.backward()
    same([t.grad for t in inputs], [2 * g for g in first])  # added up, by autograd alone
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_deterministic_gradients_are_those_of_the_atomics_but_for_rounding():
    inputs = qkv(70, 140)
    close(results(build(deterministic=True), *inputs), results(build(), *inputs), 1e-5)


def test_deterministic_kernels_have_no_atomics():
    kernels = ("backward", "queries", "preprocess")
    for kernel in kernels:
        assert "atomic" not in build(deterministic=True).source(kernel)
    assert "atomic" in build().source("backward")


KINDS = {
    "softmax": OnlineSoftmax, "softmax_one": OnlineSoftmaxOne, "sigmoid": OnlineSigmoid, "relu": OnlineRelu,
    "retention": OnlineRetention, "relu2_row_sum": OnlineRelu2RowSum,
}  # fmt: skip


def plainly(kind, **options):
    """The attention of `build` in plain torch and float64, of which nothing is the product's."""
    return lambda q, k, v: plain.attention(q, k, v, kind, score=plain.scaled(0.25), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_gradients_agree_with_plain_torch_in_float64(backend, kind):
    inputs = qkv(9, 12)

    def second(engine, inputs):
        o = engine(*inputs)
        first = torch.autograd.grad(weighted_sum(o * o, {}), inputs, create_graph=True)
        penalty = sum((g.double() ** 2).sum() for g in first)
        return [*(g.detach() for g in first), *torch.autograd.grad(penalty, inputs)]

    engine = build(backend=backend, online_func=KINDS[kind](), mask_mod=None)  # in full rows no sum comes near 0
    found = second(engine, inputs)
    exact = second(plainly(kind), exactly(inputs))
    for a, b in zip(found, exact):
        close([a / b.abs().max()], [b / b.abs().max()], 1e-4)
    assert all(g.any() for g in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_gradients_through_lse_agree_with_plain_torch_in_float64(backend):
    def second(o, lse, inputs):
        first = torch.autograd.grad(weighted_sum(o, {}) + (lse**2).sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum((g.double() ** 2).sum() for g in first), inputs))

    inputs = qkv(9, 12)
    o, rows = build(backend=backend)(*inputs, return_rowscales=True)
    precise = exactly(inputs)
    exact = second(*plainly("softmax", causal=True, return_lse=True)(*precise), precise)
    close(second(o, rows["lse"], inputs), exact, 1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", range(3), ids=["q", "k", "v"])
def test_one_input_alone_may_ask_for_a_gradient(backend, wanted):
    inputs = qkv(20)
    engine = build(backend=backend)
    every = results(engine, *inputs)[2:]
    some = [t.detach().requires_grad_(n == wanted) for n, t in enumerate(inputs)]
    engine(*some).backward(torch.linspace(-1, 1, inputs[0].shape[0] * 20 * HEADS * 24).view(2, 20, HEADS, 24))
    close([some[wanted].grad], [every[wanted]], 1e-5)
    assert [t.grad is None for t in some] == [n != wanted for n in range(3)]


def test_no_gradient_is_made_where_none_is_asked_for():
    inputs = [t.detach() for t in qkv()]
    assert not build()(*inputs).requires_grad
    with torch.no_grad():
        assert not build()(*qkv()).requires_grad
    with torch.inference_mode():
        assert not build()(*qkv()).requires_grad


def test_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    inputs = qkv(20)
    engine = build(deterministic=True)
    o = checkpoint(engine, *inputs, use_reentrant=False)
    same(list(torch.autograd.grad(weighted_sum(o, {}), inputs)), results(engine, *inputs)[2:])


# ---- the user's own formulas


class StraightThrough(OnlineSoftmax):
    """Softmax whose gradient takes the weights for the scores, as straight-through estimators do."""

    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"]).exp()

    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
        return dp * 0.5 + scores * doosum_rowscales


class ByHand(StraightThrough):
    """Softmax with its own gradient."""

    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
        return (dp - doosum_rowscales) * scores


@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
def test_a_users_backward_is_what_runs_on_every_backend(deterministic):
    inputs = qkv(35, 70)
    o, lse, dq, dk, dv = agrees({}, *inputs, online_func=StraightThrough(), deterministic=deterministic)
    derived = results(build(deterministic=deterministic), *inputs)
    close([o, lse, dv], [derived[0], derived[1], derived[4]], 1e-5)
    for own, other in ((dq, derived[2]), (dk, derived[3])):
        assert (own - other).abs().max() > 0.1


def test_a_users_backward_that_is_the_derived_one_changes_nothing():
    inputs = qkv(35, 70)
    close(agrees({}, *inputs, online_func=ByHand()), results(build(), *inputs), 1e-5)


class BentByHand(ByHand):
    """Softmax with its own gradient, whose epilogue does more than to scale the output."""

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return torch.tanh(o), rows


def test_a_backward_pass_that_cannot_be_derived_is_refused_when_it_is_asked_for():
    inputs = qkv()
    engine = build(online_func=BentByHand())
    exact = exactly(inputs)
    reference = build(online_func=BentByHand(), backend="reference")
    o = engine(*inputs)
    close([o], [reference(*exact)], 2e-5)
    for _ in range(2):
        with pytest.raises(BackwardNotDerived, match="epilogue"):
            o.sum().backward(retain_graph=True)
    with pytest.raises(BackwardNotDerived):
        torch.autograd.grad(o.sum(), inputs, create_graph=True)
    assert "# no backward pass: " in engine.program()
    assert all(g.any() for g in torch.autograd.grad(reference(*exact).sum(), exact))  # torch can


class Topped(OnlineSoftmax):
    """Softmax that returns its maximum too."""

    def __init__(self):
        super().__init__()
        self.final_rowscales = {**self.final_rowscales, "top": SymbolScalar("top", Var("0.0"))}

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o, {**rows, "top": online_rowscales["m"]}


@pytest.mark.parametrize("again", [False, True], ids=["once", "create_graph"])
def test_a_returned_maximum_joins_the_loss(again):
    """As a QK-clip loss has it: relu(maximum - bound)."""
    inputs = qkv(21, 35)
    exact = [t.detach().double().requires_grad_() for t in inputs]

    def loss_of(o, rows):
        kept = rows["top"] > -1e9
        clipped = torch.where(kept, torch.relu(rows["top"] - 0.5), 0.0).square().sum()
        return weighted_sum(o, {}) + clipped + torch.where(kept, rows["lse"], 0.0).sum()

    found = []
    for backend, given in (("interpret", inputs), ("reference", exact)):
        o, rows = build(online_func=Topped(), mask_mod=late, backend=backend)(*given, return_rowscales=True)
        found.append(list(torch.autograd.grad(loss_of(o, rows), given, create_graph=again)))
    close([g.detach() for g in found[0]], found[1], 2e-5)


def test_a_detached_row_joins_the_loss():
    inputs = qkv()
    o, rows = build()(*inputs, return_rowscales=True)
    found = torch.autograd.grad(weighted_sum(o, {}) + rows["lse"].detach().sum(), inputs)
    same(list(found), results(build(), *inputs)[2:])


@pytest.mark.parametrize("again", [False, True], ids=["once", "create_graph"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_users_backward_says_nothing_of_rows(backend, again):
    inputs = qkv()
    o, rows = build(online_func=ByHand(), backend=backend)(*inputs, return_rowscales=True)
    with pytest.raises(RowNotDifferentiable) as caught:
        torch.autograd.grad(o.sum() + rows["lse"].sum(), inputs, create_graph=again)
    assert str(caught.value) == (
        "a gradient arrived at the returned row 'lse', which has none: a `backward` written by hand doesn't say it.\n"
        "  Detach the row before it joins the loss."
    )


def test_scores_may_be_read_twice_and_negated():
    def twice(score, custom, b, h, q_idx, kv_idx):
        s = score * 0.25
        return -((s + 1) ** 2) + s * torch.tanh(s) - (3 - s) / (2 + q_idx) + s.exp() / (1 + kv_idx)

    agrees({}, *qkv(20), score_mod=twice)


def test_a_score_mod_is_not_needed():
    agrees({}, *qkv(20), score_mod=None, mask_mod=None, online_func=OnlineIdentity())
    assert scaled(2.0, None, 0, 0, 0, 0) == 0.5
