"""Kernels of linear attention, compiled without a GPU: each architecture's instructions, no spills, memory fits."""

import functools
import re
from dataclasses import replace

import pytest

from attention_engine import CustomIO, arch
from attention_engine.compiler import pass_configs
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import LinearProblem, LinearTile
from attention_engine.runtime.linear_channels import ChannelKernels
from attention_engine.runtime.linear_plan import LinearKernels
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles

pytest.importorskip("tilelang")
from attention_engine.target import compile as target_compile

pytestmark = pytest.mark.skipif(target_compile.find_nvcc() is None, reason="needs nvcc")

PROGRAM = trace_mods({"v": lambda x, c: x * c["dt"]}, CustomIO({"dt": ("batch", "heads", "seq_len")}))
KERNELS = {
    "forward": lambda kernels: kernels.walk("output", starts=True, ends=True),
    "states": lambda kernels: kernels.states(reverse=True, starts=True, overlaps=True),
    "dq": lambda kernels: kernels.rows("dq", True, ()),
    "dv": lambda kernels: kernels.rows("dv", False, PROGRAM.loads("v")),
    "step": lambda kernels: kernels.step(starts=True),
}
CHANNEL_KERNELS = {
    "channel_scores": lambda kernels: kernels.scores(),
    "channel_states": lambda kernels: kernels.states(reverse=True, starts=True, overlaps=True, initial=True),
    "channel_dv": lambda kernels: kernels.channel_rows("dv", PROGRAM.loads("v")),
    "channel_gradients": lambda kernels: kernels.gradients(True, 1, ((), (), ())),
}


@functools.cache
def lowered(gpu, kernel, dtype="bfloat16", dims=(128, 64), forward=None, states=None):
    problem = LinearProblem(8, 1, 1, *dims, dtype, custom=(("dt", "float32", ("batch", "heads", "seq_len")),))
    if kernel in CHANNEL_KERNELS:
        problem = replace(problem, per_channel=True)
        made = CHANNEL_KERNELS[kernel](ChannelKernels(PROGRAM, problem, default_channel_tiles(problem, gpu), gpu))
    else:
        tiles = default_linear_tiles(problem, gpu)
        tiles = replace(tiles, forward=forward or tiles.forward, states=states or tiles.states)
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
    made, used = lowered(arch.H100(), "forward", forward=LinearTile(64, 128, 64, 128, 1))
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    assert "cp_async" not in made.cuda and "tma_load" in made.cuda


@pytest.mark.parametrize("kernel", ["forward", "channel_gradients"])
def test_ampere_kernels_fit_without_spills(kernel):
    made, used = lowered(arch.A100(), kernel)
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    assert "mma_sync" in made.cuda and "wgmma" not in made.cuda
    assert used.shared_bytes <= 99 * 1024


@pytest.mark.parametrize(("blocks", "threads"), [(2, 128), (3, 128), (2, 256)])
def test_blocks_that_share_an_sm_ask_for_no_more_registers_than_there_are(blocks, threads):
    """Else a block waits for registers forever: it did, on an H100."""
    made, _ = lowered(arch.H100(), "states", states=LinearTile(64, 128, 64, threads, 2, blocks=blocks))
    (handed,) = map(int, re.findall(r"reg_alloc<(\d+)>", made.cuda))
    (kept,) = map(int, re.findall(r"reg_dealloc<(\d+)>", made.cuda))
    at_launch = 65536 // blocks // (threads + 128) // 8 * 8
    assert handed * threads + kept * 128 <= at_launch * (threads + 128)


WIDE = LinearProblem(4, 4, 4, 256, 512, "bfloat16")


@pytest.mark.parametrize("role", ["output", "dq", "dk", "dv"])
def test_walks_of_wide_heads_fit_without_spills(role):
    program, gpu = trace_mods({"q": lambda x, c: x * 0.0625}, CustomIO({})), arch.H100()
    made = LinearKernels(program, WIDE, default_linear_tiles(WIDE, gpu), gpu).walk(role, False, False)
    found = target_compile.lower_kernel(made.prim_func, gpu, pass_configs=made.configs)
    used = found.resources()
    assert (used.spill_stores, used.spill_loads) == (0, 0) and used.notes == ()
    assert found.launch_shared_bytes <= gpu.shared_memory_per_block
    assert "tma_load" in found.cuda and "tma_store" in found.cuda
