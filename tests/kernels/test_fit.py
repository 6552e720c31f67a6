"""A kernel that asks for more shared memory than the GPU has is refused before it is launched."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.codegen.compile import find_nvcc
from attention_engine.errors import TileDoesNotFit
from attention_engine.kernels.warps import registers

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")


def test_a_tile_that_does_not_fit_is_refused_with_the_way_out():
    small = replace(arch.H100(), name="a small GPU", shared_memory_per_block=16000)
    engine = AttentionEngine((meta_tensor(1, 2, 64, 64, dtype=torch.float16),) * 3, device=small)
    with pytest.raises(TileDoesNotFit) as caught:
        engine.source("postprocess", form="cuda")
    assert str(caught.value) == (
        "head dims 64 and 64 in float16 need 16384 bytes of shared memory a block with their default tile, "
        "and a small GPU has 16000.\n"
        '  Choose smaller head dims; backend="reference" runs any.'
    )


@pytest.mark.parametrize("threads", [256, 384, 512])
def test_computing_threads_ask_for_no_more_registers_than_copying_ones_give_back(threads):
    copying, computing = registers(threads)
    started_with = 65536 // (threads + 128) // 8 * 8
    assert copying * 128 + computing * threads <= started_with * (threads + 128)
    assert computing % 8 == 0 and started_with <= computing <= 240
