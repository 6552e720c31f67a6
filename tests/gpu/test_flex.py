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


def documents_of(length, size=4096):
    return (torch.arange(size, device="cuda") // length).int()


@pytest.mark.parametrize("dim", [64, 128])
def test_a_mask_keeps_its_lists_until_a_tensor_is_written(dim):
    """Calls of a kept mask are those of a new one bit for bit: after a write, on another stream, in a graph that is
    replayed after a write, compiled. Blocks have several items each, which a counter deals."""
    ids = documents_of(700)
    q, k, v = (torch.randn(2, 8, 4096, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def made():
        return flex.create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, 4096, 4096)

    mask, held = made(), torch.zeros_like(q)

    def same(found=None):
        found = flex.flex_attention(q, k, v, None, mask) if found is None else found
        return torch.equal(found, flex.flex_attention(q, k, v, None, made()))

    assert all([same() for _ in range(3)]) and mask._lists is not None and len(mask._lists.made) == 1
    for length in (900, 300, 5000):
        ids.copy_(documents_of(length))
        assert all([same() for _ in range(3)])
    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        ids.copy_(documents_of(650))
        assert same() and same()
    aside.synchronize()
    with torch.cuda.graph(graph):
        replayed = flex.flex_attention(held, k, v, None, mask)
    held.copy_(q)
    for length in (1000, 450):
        ids.copy_(documents_of(length))
        graph.replay()
        assert same(replayed) and same()
    compiled = torch.compile(lambda *given: flex.flex_attention(*given, None, mask), fullgraph=True)
    for length in (1000, 600):
        ids.copy_(documents_of(length))
        assert same(compiled(q, k, v)) and same()


def test_gradients_of_a_mask_that_keeps_its_lists():
    ids = documents_of(700, 2048)
    q, k, v = (torch.randn(1, 8, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask, arriving = (
        flex.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 2048, 2048),
        torch.randn_like(q),
    )
    for length in (700, 200):
        ids.copy_(documents_of(length, 2048))
        new = flex.create_block_mask(mask.mask_mod, None, None, 2048, 2048)
        found = [
            torch.autograd.grad(flex.flex_attention(q, k, v, None, m), (q, k, v), arriving) for m in (new, mask, mask)
        ]
        for others in found[1:]:
            for a, b in zip(others, found[0], strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)  # sums in another order
    assert mask._lists is not None and len(mask._lists.made) == 2
