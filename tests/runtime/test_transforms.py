"""torch.func's transforms and batched gradients through both engines, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import functional
from torch.func import grad, jacrev, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from attention_engine import CustomIO, LinearAttentionEngine, meta_tensor
from attention_engine.library import OnlineSoftmax, alibi
from attention_engine.runtime import linear_op
from tests import plain, plain_linear
from tests.runtime.engines import BACKENDS, DIM, DIM_V, HEADS, KV_HEADS, build, close

LENGTH = 5
both = pytest.mark.parametrize("backend", BACKENDS)


def with_slopes(q, k, v, slopes):
    score = lambda s, b, h, i, j: s * 0.25 - slopes[h] * (i - j).abs()  # noqa: E731
    return plain.attention(q, k, v, "softmax", causal=True, score=score)


class Bent(OnlineSoftmax):
    """An epilogue that kernels leave to torch."""

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        return torch.tanh(o / r), {"lse": m + r.log()}


def linear(**options):
    metas = [meta_tensor(None, h, None, d, dtype=torch.float32) for h, d in
             ((KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM_V))]  # fmt: skip
    return LinearAttentionEngine(metas, **options)


def with_a_gain(backend):
    """(q, k, v, decay, initial state, gain) -> o, with the last state folded in."""
    engine = linear(v_mod=lambda x, c: x * c["gain"], custom_io=CustomIO({"gain": ("heads",)}), backend=backend)

    def call(q, k, v, decay, initial, gain):
        o, last = engine(q, k, v, decay, gain, initial_state=initial, output_final_state=True)
        return o + last.sum(2)[:, None]

    return call


def plainly_with_a_gain(q, k, v, decay, initial, gain):
    o, last = plain_linear.recurrence(q, k, v * gain[:, None], decay, initial)
    return o + last.sum(2)[:, None]


def softmax_inputs(batch):
    sizes = ((LENGTH, HEADS, DIM), (LENGTH, KV_HEADS, DIM), (LENGTH, KV_HEADS, DIM_V))
    return [*(torch.randn(batch, *size) for size in sizes), torch.rand(HEADS)]


def linear_inputs(batch, channels=False):
    sizes = ((KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM_V))
    decay = (batch, LENGTH, HEADS, DIM) if channels else (batch, LENGTH, HEADS)
    return [
        *(torch.randn(batch, LENGTH, *size) for size in sizes), -torch.rand(decay),
        torch.randn(batch, HEADS, DIM, DIM_V), torch.rand(HEADS) + 0.5,
    ]  # fmt: skip


def pairs_of(backend):
    """Name: (an engine as a function of its tensors, the same in plain torch, the tensors for a batch)."""
    return {
        "softmax": (build({"slopes": ("heads",)}, score_mod=alibi(0.25), backend=backend), with_slopes, softmax_inputs),
        "bent": (
            build({"slopes": ("heads",)}, score_mod=alibi(0.25), online_func=Bent(), backend=backend),
            lambda *tensors: with_slopes(*tensors).tanh(), softmax_inputs,
        ),
        "linear": (with_a_gain(backend), plainly_with_a_gain, linear_inputs),
        "channels": (with_a_gain(backend), plainly_with_a_gain, lambda batch: linear_inputs(batch, True)),
    }  # fmt: skip


def numbers(o):
    """A few numbers that an output is squeezed into, no two of them alike."""
    return torch.stack([(o * torch.linspace(-1, n, o.shape[-1], dtype=o.dtype)).square().sum() for n in (1.0, 2.0, 3)])


def leaves_of(inputs):
    return [t.detach().clone().requires_grad_() for t in inputs]


def many(function, inputs):
    """Gradients for three gradients of the output at once."""
    inputs = leaves_of(inputs)
    o = function(*inputs)
    d_o = torch.linspace(-1, 2, 3 * o.numel(), dtype=o.dtype).view(3, *o.shape)
    return torch.autograd.grad(o, inputs, d_o, is_grads_batched=True)


def many_once_more(function, inputs):
    """The gradients of those: a graph through batched gradients."""
    inputs = leaves_of(inputs)
    found = torch.autograd.grad(
        numbers(function(*inputs)), inputs, torch.eye(3, dtype=inputs[0].dtype), is_grads_batched=True,
        create_graph=True,
    )  # fmt: skip
    return torch.autograd.grad(sum(g.square().mean() for g in found), inputs)


def jacobian(function, inputs):
    return functional.jacobian(lambda *t: numbers(function(*t)), tuple(inputs), vectorize=True)


def hessian(function, inputs):
    *rest, last = inputs
    return (functional.hessian(lambda x: numbers(function(*rest, x)).prod().abs().log(), last, vectorize=True),)


def rows_of_jacobian(function, inputs):
    return jacrev(lambda *t: numbers(function(*t)), tuple(range(len(inputs))))(*inputs)


def pulled_back(function, inputs):
    o, pull = vjp(function, *inputs)
    return (o, *pull(o.square()))


def of_a_loss(function, inputs):
    return grad(lambda *t: numbers(function(*t)).sum(), tuple(range(len(inputs))))(*inputs)


def twice(function, inputs):
    first = lambda *t: sum(g.square().mean() for g in of_a_loss(function, t))  # noqa: E731
    return grad(first, tuple(range(len(inputs))))(*inputs)


def of_each_sample(function, inputs):
    """vmap of grad, over all but the last tensor; then over the last alone."""
    count = len(inputs)
    samples = [torch.stack([t, 2 * t, -0.5 * t.abs()]) for t in inputs]
    of_one = grad(lambda *t: numbers(function(*t)).sum(), tuple(range(count)))
    some = vmap(of_one, (*(0,) * (count - 1), None))(*samples[:-1], inputs[-1])
    return (*some, *vmap(of_one, (*(None,) * (count - 1), 0))(*inputs[:-1], samples[-1]))


def twice_around_vmap(function, inputs):
    """Autograd follows tensors that a vmap has wrapped."""
    samples = [torch.stack([t, -0.5 * t.abs()]).requires_grad_() for t in inputs]
    first = torch.autograd.grad(numbers(vmap(function)(*samples)).sum(), samples, create_graph=True)
    return torch.autograd.grad(sum(g.square().mean() for g in first), samples)


def of_what_arrives(function, inputs):
    """The gradient of a gradient by what arrived at it alone."""
    o, pull = vjp(function, *inputs)
    return (grad(lambda d: sum(g.square().mean() for g in pull(d)))(o),)


def over_other_dims(function, inputs):
    """vmap twice, the entries of the second not first."""
    samples = [torch.stack([torch.stack([t, -0.5 * t.abs()], 1), torch.stack([0.1 * t, t], 1)]) for t in inputs[:-1]]
    count = len(samples)
    call = lambda *t: function(*t, inputs[-1])  # noqa: E731
    return (vmap(vmap(call, (1,) * count, 2))(*samples),)


TRANSFORMS = {
    f.__name__: f
    for f in (many, many_once_more, jacobian, hessian, rows_of_jacobian, pulled_back, of_a_loss, twice, of_each_sample,
              twice_around_vmap, of_what_arrives, over_other_dims)
}  # fmt: skip


@both
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("engine", ["softmax", "bent", "linear", "channels"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_makes_of_an_engine_what_it_makes_of_plain_torch(name, engine, batch, backend):
    torch.manual_seed(0)
    function, plainly, make = pairs_of(backend)[engine]
    inputs, transform = make(batch), TRANSFORMS[name]
    found = transform(function, inputs)
    exact = transform(plainly, [t.double() for t in inputs])
    assert len(found) == len(exact)
    for a, b in zip(found, exact, strict=True):
        assert a.shape == b.shape
        scale = b.abs().max()
        close([a / scale], [b / scale], 1e-4)


@both
def test_an_entry_whose_batch_is_read_runs_alone(backend):
    engine = linear(v_mod=lambda x, c: x * c["gain"], custom_io=CustomIO({"gain": ("batch",)}), backend=backend)
    q, k, v, decay, _, _ = linear_inputs(2)
    gain, entries = torch.tensor([1.0, -2.0]), torch.stack([q, 2 * q, -q])
    want = torch.stack([engine(entry, k, v, decay, gain) for entry in entries])
    close([vmap(lambda q: engine(q, k, v, decay, gain))(entries)], [want], 1e-6)


@both
@pytest.mark.parametrize("single", [False, True], ids=["length 1", "no length"])
def test_steps_of_many_states_at_once(backend, single):
    torch.manual_seed(1)
    engine = linear(backend=backend)
    tokens = [t[:, 0] if single else t[:, :1] for t in linear_inputs(2)[:4]]
    states = torch.randn(3, 2, HEADS, DIM, DIM_V)
    found = vmap(lambda s: engine.step(*tokens, state=s))(states)
    for n, state in enumerate(states):
        close([f[n] for f in found], list(engine.step(*tokens, state=state)), 1e-6)


def test_create_graph_of_a_linear_attention_runs_no_token_by_token_loop(monkeypatch):
    """The gradient itself comes from where it comes from without a graph."""
    function, _, make = pairs_of("interpret")["linear"]
    inputs = leaves_of(make(2))
    loss = numbers(function(*inputs)).sum()
    want = torch.autograd.grad(loss, inputs, retain_graph=True)
    with monkeypatch.context() as patched:
        patched.setattr(linear_op, "differentiable_gradients", None)
        found = torch.autograd.grad(loss, inputs, create_graph=True)
    close([g.detach() for g in found], list(want), 1e-6)


def test_flops_of_a_linear_attention_are_its_products_with_the_state():
    q, k, v, decay, _, _ = linear_inputs(2)
    engine = linear(backend="interpret")
    of_one = 2 * 2 * LENGTH * HEADS * DIM * DIM_V
    with FlopCounterMode(display=False) as counter:
        engine(q.requires_grad_(), k, v, decay).sum().backward()
        engine.step(q[:, :1].detach(), k[:, :1], v[:, :1], decay[:, :1])
    found = {str(k).rpartition(".")[2]: n for k, n in counter.get_flop_counts()["Global"].items()}
    assert found == {
        "linear_forward": 2 * of_one, "linear_backward": 5 * of_one, "linear_step": 2 * of_one // LENGTH,
    }  # fmt: skip
