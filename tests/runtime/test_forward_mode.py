"""Forward-mode autograd: kernels have no derivative of that kind, so the reference stands in; never a silent zero."""

import pytest
import torch
from torch.autograd import forward_ad

from attention_engine import LinearAttentionEngine, meta_tensor
from tests.runtime.engines import build, close, qkv


def scaled(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25 * custom["bias"]


def dense(backend, dtype):
    engine = build({"bias": ("heads",)}, backend=backend, dtype=torch.float32, score_mod=scaled)
    q, k, v = (t.detach() for t in qkv(dtype=dtype))
    return engine, [q, k, v, torch.rand(q.shape[2], dtype=dtype) + 1]


def linear(backend, dtype):
    engine = LinearAttentionEngine((meta_tensor(2, 2, 12, 16, dtype=torch.float32),) * 3, backend=backend)
    q, k, v = (torch.randn(2, 12, 2, 16, dtype=dtype) for _ in range(3))
    return engine, [q, k, v, -torch.rand(2, 12, 2, dtype=dtype)]


def by_differences(engine, given, tangents, step=1e-6):
    ahead, behind = ([t + sign * step * d for t, d in zip(given, tangents, strict=True)] for sign in (1, -1))
    return (engine(*ahead) - engine(*behind)) / (2 * step)


@pytest.mark.parametrize("make", [dense, linear])
def test_a_derivative_along_a_direction_is_that_of_differences(make):
    engine, given = make("reference", torch.float64)
    tangents = [torch.randn_like(t) for t in given]
    o, found = torch.func.jvp(engine, tuple(given), tuple(tangents))
    close([o, found], [engine(*given), by_differences(engine, given, tangents)], 1e-6)


@pytest.mark.parametrize("make", [dense, linear])
@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_every_way_to_ask_gives_it(make, backend, with_gradients):
    engine, given = make(backend, torch.float32)
    exact, _ = make("reference", torch.float64)
    tangents = [torch.randn_like(t) for t in given]
    expected = by_differences(exact, [t.double() for t in given], [t.double() for t in tangents]).float()
    for _ in range(3):  # also where the call was seen before
        engine(*given)
        with forward_ad.dual_level():
            leaves = [t.clone().requires_grad_(with_gradients) for t in given]
            o = engine(*(forward_ad.make_dual(t, d) for t, d in zip(leaves, tangents, strict=True)))
            close([forward_ad.unpack_dual(o).tangent.detach()], [expected], 1e-4)
            plain = engine(*given)
            assert forward_ad.unpack_dual(plain).tangent is None
        close([torch.func.jvp(engine, tuple(given), tuple(tangents))[1]], [expected], 1e-4)


def test_a_call_like_the_last_gives_it_too():
    """float16, whose launches are known after a first call."""
    engine, given = build(dtype=torch.float16), [t.detach() for t in qkv(dtype=torch.float16)]
    tangents = [torch.randn_like(t) for t in given]
    for _ in range(3):
        engine(*given)
    assert engine._again is not None
    with forward_ad.dual_level():
        o = engine(*(forward_ad.make_dual(t, d) for t, d in zip(given, tangents, strict=True)))
        found = forward_ad.unpack_dual(o).tangent
    exact = build(backend="reference", dtype=torch.float32)
    expected = by_differences(exact, [t.double() for t in given], [t.double() for t in tangents])
    close([found.double()], [expected], 1e-2)


@pytest.mark.parametrize("make", [dense, linear])
def test_forward_over_reverse_is_the_second_derivative(make):
    engine, (q, *others) = make("reference", torch.float64)
    direction = torch.randn_like(q)

    def loss(q):
        return (engine(q, *others) ** 2).sum()

    def by_autograd(q):
        q = q.clone().requires_grad_()
        return torch.autograd.grad(loss(q), q)[0]

    _, found = torch.func.jvp(torch.func.grad(loss), (q,), (direction,))
    step = 1e-6
    close([found], [(by_autograd(q + step * direction) - by_autograd(q - step * direction)) / (2 * step)], 1e-5)


def test_a_step_of_decoding_has_it_too():
    engine, (q, k, v, decay) = linear("reference", torch.float64)
    one = [t[:, :1] for t in (q, k, v, decay)]
    direction = torch.randn_like(one[0])
    _, found = torch.func.jvp(lambda q: engine.step(q, *one[1:])[0], (one[0],), (direction,))
    close([found], [by_differences(lambda *t: engine.step(*t)[0], one, [direction, *(0 * t for t in one[1:])])], 1e-6)


@pytest.mark.parametrize("make", [dense, pytest.param(linear, marks=pytest.mark.slow)])
def test_compiled_code_has_it_too(make):
    engine, given = make("reference", torch.float32)
    tangents = [torch.randn_like(t) for t in given]

    def derivative(given, tangents):
        return torch.func.jvp(engine, given, tangents)[1]

    found = torch.compile(derivative, backend="aot_eager")(tuple(given), tuple(tangents))
    close([found], [derivative(tuple(given), tuple(tangents))], 1e-5)
