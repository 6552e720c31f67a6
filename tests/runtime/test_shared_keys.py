"""Keys and values with a batch of 1 serve every batch of the queries."""

import pytest
import torch

from attention_engine.library import alibi
from tests import plain
from tests.runtime.engines import BACKENDS, HEADS, build, close, qkv

both = pytest.mark.parametrize("backend", BACKENDS)


def tensors(shared, layout):
    made = [t.detach()[: 1 if name in shared else 3] for name, t in zip("qkv", qkv(9, 12, batch=3), strict=True)]
    made = made if layout == "bshd" else [t.transpose(1, 2).contiguous() for t in made]
    return [*(t.clone().requires_grad_() for t in made), torch.rand(HEADS, requires_grad=True)]


@both
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("shared", ["kv", "k", "v"])
def test_their_gradients_are_sums(shared, layout, backend):
    inputs = tensors(shared, layout)
    engine = build({"slopes": ("heads",)}, score_mod=alibi(0.25), backend=backend, layout=layout)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    heads = [t if layout == "bshd" else t.transpose(1, 2) for t in exact[:3]]
    score = lambda s, b, h, i, j: s * 0.25 - exact[3][h] * (i - j).abs()  # noqa: E731
    want = plain.attention(*(t.expand(3, *t.shape[1:]) for t in heads), "softmax", causal=True, score=score)
    want = want if layout == "bshd" else want.transpose(1, 2)
    d_o = torch.randn_like(want)
    for _ in range(3):  # a call that was seen is what it was
        o, rows = engine(*inputs, return_rowscales=True)
        assert o.shape == want.shape and rows["lse"].shape == (3, HEADS, 9)
        found = torch.autograd.grad(o, inputs, d_o.float())
        close([o.detach(), *found], [want, *torch.autograd.grad(want, exact, d_o, retain_graph=True)], 3e-5)
    with torch.no_grad():
        close([engine(*inputs)], [want], 3e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_calls_of_16_bit_are_seen_and_stay_right(dtype):
    q, k, v = (t.detach() for t in qkv(9, 12, batch=3, dtype=dtype))
    engine = build(dtype=dtype)
    want = engine(q, k[:1].expand_as(k).contiguous(), v[:1].expand_as(v).contiguous())
    for _ in range(3):
        assert torch.equal(engine(q, k[:1], v[:1]), want)
        engine(q, k, v)


@both
def test_check_takes_them(backend):
    q, k, v = (t.detach() for t in qkv(9, 12, batch=3))
    assert build(backend=backend).check(q, k[:1], v[:1]).ok


@both
def test_a_compiled_engine_takes_them(backend):
    q, k, v = qkv(9, 12, batch=3)
    engine = build(backend=backend)
    torch._dynamo.reset()
    compiled = torch.compile(engine, fullgraph=True, backend="aot_eager")
    close([compiled(q, k[:1], v[:1])], [engine(q, k[:1], v[:1])], 1e-6)
