"""Kernels of linear attention, compiled without a GPU: each architecture's instructions, no spills, memory fits."""

import functools
from dataclasses import replace

import pytest

from attention_engine import CustomIO, arch
from attention_engine.compiler import pass_configs
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import LinearProblem
from attention_engine.runtime.linear_channels import ChannelKernels
from attention_engine.runtime.linear_launch import LinearKernels
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles

pytest.importorskip("tilelang")
from attention_engine.target import compile as target_compile

pytestmark = pytest.mark.skipif(target_compile.find_nvcc() is None, reason="needs nvcc")

PROGRAM = trace_mods({"v": lambda x, c: x * c["dt"]}, CustomIO({"dt": ("batch", "heads", "seq_len")}))
KERNELS = {
    "forward": lambda kernels: kernels.forward(starts=True, ends=True),
    "states": lambda kernels: kernels.states(reverse=True, starts=True, overlaps=True),
    "dq": lambda kernels: kernels.rows("dq", True, ()),
    "step": lambda kernels: kernels.step(starts=True),
}
CHANNEL_KERNELS = {
    "channel_scores": lambda kernels: kernels.scores(),
    "channel_states": lambda kernels: kernels.states(reverse=True, starts=True, overlaps=True, initial=True),
    "channel_dv": lambda kernels: kernels.channel_rows("dv", PROGRAM.loads("v")),
    "channel_gradients": lambda kernels: kernels.gradients(True, 1, ((), (), ())),
}


@functools.cache
def lowered(gpu, kernel, dtype="bfloat16", dims=(128, 64), pipelined=False):
    problem = LinearProblem(8, 1, 1, *dims, dtype, custom=(("dt", "float32", ("batch", "heads", "seq_len")),))
    if kernel in CHANNEL_KERNELS:
        problem = replace(problem, per_channel=True)
        made = CHANNEL_KERNELS[kernel](ChannelKernels(PROGRAM, problem, default_channel_tiles(problem, gpu), gpu))
    else:
        tiles = default_linear_tiles(problem, gpu)
        if pipelined:
            tiles = replace(tiles, forward=replace(tiles.forward, stages=1, specialize=True))
        made = KERNELS[kernel](LinearKernels(PROGRAM, problem, tiles, gpu))
    found = target_compile.lower_kernel(made.prim_func, gpu, pass_configs={**pass_configs(problem), **made.configs})
    return found, found.resources()


@pytest.mark.parametrize("kernel", [*KERNELS, *CHANNEL_KERNELS])
def test_hopper_kernels_fit_without_spills(kernel):
    made, used = lowered(arch.H100(), kernel)
    assert (used.spill_stores, used.spill_loads) == (0, 0) and used.notes == ()
    assert 0 < used.registers <= 255 and used.shared_bytes <= arch.H100().shared_memory_per_block
    assert ("wgmma" in made.cuda) is (kernel != "step")


def test_numbers_of_rows_go_by_registers():
    """A copying warp that wrote them would overtake their readers: it waits for the tiles loaded beside them alone."""
    made, used = lowered(arch.H100(), "forward", pipelined=True)
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    assert "cp_async" not in made.cuda and "tma_load" in made.cuda


@pytest.mark.parametrize("kernel", ["forward", "channel_gradients"])
def test_ampere_kernels_fit_without_spills(kernel):
    made, used = lowered(arch.A100(), kernel)
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    assert "mma_sync" in made.cuda and "wgmma" not in made.cuda
    assert used.shared_bytes <= 99 * 1024
