"""A kernel that asks for more shared memory than the GPU has is refused before it is launched."""

import re
from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, arch, library, meta_tensor
from attention_engine.errors import TileDoesNotFit
from attention_engine.target.compile import find_nvcc

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")


@needs_nvcc
def test_a_tile_that_does_not_fit_is_refused_with_the_way_out():
    small = replace(arch.H100(), name="a small GPU", shared_memory_per_block=16000)
    engine = AttentionEngine((meta_tensor(1, 2, 64, 64, dtype=torch.float16),) * 3, device=small)
    with pytest.raises(TileDoesNotFit) as caught:
        engine.source("backward_postprocess", form="cuda")
    assert str(caught.value) == (
        "head dims 64 and 64 in float16 need 32768 bytes of shared memory a block with their default tile, "
        "and a small GPU has 16000.\n"
        '  Choose smaller head dims; backend="reference" runs any.'
    )


@needs_nvcc
def test_wide_values_are_told_to_be_cut():
    engine = AttentionEngine((meta_tensor(1, 2, 64, 256, dtype=torch.float16),) * 2 +
                             (meta_tensor(1, 2, 64, 512, dtype=torch.float16),), device=arch.H100())  # fmt: skip
    with pytest.raises(TileDoesNotFit, match=re.escape("for part in v.split(256, -1)], -1)")):
        engine.source("forward", form="cuda")


def test_values_cut_in_two_give_the_same():
    """What the refusal advises: outputs, and gradients, which are linear in those of the output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 40, 2, dim, generator=generator) for dim in (16, 16, 32, 32))

    def results(attend):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attend(*leaves)
        return [o, *torch.autograd.grad(o, leaves, do)]

    def engine(dim_v):
        metas = [meta_tensor(1, 2, 40, dim, dtype=torch.float32) for dim in (16, 16, dim_v)]
        return AttentionEngine(tuple(metas), mask_mod=library.causal, online_func=library.OnlineSoftmax(),
                               backend="interpret")  # fmt: skip

    half = engine(16)
    cut = results(lambda q, k, v: torch.cat([half(q, k, part) for part in v.split(16, -1)], -1))
    for whole, parts in zip(results(engine(32)), cut, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5)
