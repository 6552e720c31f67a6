"""The fifty score functions and masks of FlexAttention's kind on a GPU, and the tiny transformer beside torch's."""

from __future__ import annotations

import pytest
import torch

from attention_engine import flex
from attention_engine.flex import again
from tests.flex.cases import CASES, Sizes
from tests.flex.check import errors_of
from tests.flex.transformer import PLAIN, losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, dtype):
    errors_of(CASES[name], Sizes(queries=256, keys=256, dim=64), dtype, "auto", "cuda")


@pytest.mark.parametrize("compiled", [None, {"fullgraph": True}], ids=["eager", "compiled"])
def test_a_transformer_trains_with_one_changed_import(compiled):
    found = losses(flex, 8, torch.float32, "cuda", compiled)
    assert found == pytest.approx(losses(PLAIN, 8, torch.float32, "cuda"), rel=1e-4)


def programs():
    """A score and a mask each, of tensors of eight heads and 384 keys."""
    slopes, documents = torch.rand(8, device="cuda"), (torch.arange(384, device="cuda") // 100).int()
    return {
        "nothing": (None, None),
        "causal": (None, lambda b, h, i, j: i >= j),
        "slopes": (lambda s, b, h, i, j: s - slopes[h] * (i - j), lambda b, h, i, j: i >= j),
        "documents": (None, lambda b, h, i, j: documents[i] == documents[j]),
    }


@pytest.mark.parametrize("name", ["nothing", "causal", "slopes", "documents"])
def test_calls_like_one_before_launch_tensors_as_they_come(name):
    """By addresses, without views: the same numbers, on another stream and in a graph that is replayed too."""
    again.KNOWN.clear()
    score, mask_mod = programs()[name]
    mask = None if mask_mod is None else flex.create_block_mask(mask_mod, None, None, 384, 384)
    q, k, v = (torch.randn(2, n, 384, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))

    def call(*given):
        return flex.flex_attention(*given, score, mask, enable_gqa=True, return_lse=True)

    first = call(q, k, v)
    assert [known.pointed is None for alike in again.KNOWN.values() for known in alike] == [False]
    torch.cuda.synchronize()
    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(aside):
        torch.cuda._sleep(20_000_000)
        late = q * 1  # what a launch on another stream would read too soon
        other = call(late, k, v)
    aside.synchronize()
    held = torch.zeros_like(q)
    with torch.cuda.graph(graph):
        replayed = call(held, k, v)
    held.copy_(q)
    graph.replay()
    for found in (call(q, k, v), other, replayed):
        for a, b in zip(found, first, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


def test_gradients_of_calls_like_one_before():
    q, k, v = (torch.randn(2, 8, 384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    score, mask_mod = programs()["slopes"]
    mask, arriving = flex.create_block_mask(mask_mod, None, None, 384, 384), torch.randn_like(q)
    found = [torch.autograd.grad(flex.flex_attention(q, k, v, score, mask), (q, k, v), arriving) for _ in range(3)]
    for others in found[1:]:
        for a, b in zip(others, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)  # sums in another order
            assert a.stride() == b.stride()
