"""Kernels of linear attention, compiled without a GPU: each architecture's instructions, no spills, memory fits.

Most of nvcc's time goes to headers, so what is tested together is compiled together.
"""

import functools
import re
from dataclasses import replace

import pytest
import torch

from attention_engine import CustomIO, LinearAttentionEngine, arch, meta_tensor
from attention_engine.compiler import LinearKernels, pass_configs
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import LinearProblem, LinearTile
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles

pytest.importorskip("tilelang")
from attention_engine.codegen import compile as codegen_compile
from attention_engine.kernels.linear.channels.common import APART_BY_COLUMNS, APART_BY_PAIRS
from attention_engine.kernels.linear.common import COPYING, consumer_registers
from tests.kernels.together import assert_fits, compile_together

pytestmark = [pytest.mark.slow, pytest.mark.skipif(codegen_compile.find_nvcc() is None, reason="needs nvcc")]

PROGRAM = trace_mods({"v": lambda x, c: x * c["dt"]}, CustomIO({"dt": ("batch", "heads", "seq_len")}))
SCALED = trace_mods({"q": lambda x, c: x * 0.0625}, CustomIO({}))
NARROW = LinearProblem(8, 1, 1, 128, 64, "bfloat16", custom=(("dt", "float32", ("batch", "heads", "seq_len")),))
WIDE = LinearProblem(4, 4, 4, 256, 512, "bfloat16")


def narrow(gpu):
    kernels = LinearKernels(PROGRAM, NARROW, default_linear_tiles(PROGRAM, NARROW, gpu), gpu)
    return {
        "forward": lambda: kernels.kernel(kernels.plan.walk("output", starts=True, ends=True)),
        "states_backward": lambda: kernels.kernel(kernels.plan.states(reverse=True, starts=True, overlaps=True)),
        "chunk_dq": lambda: kernels.kernel(kernels.plan.rows("dq", True, ())),
        "chunk_dk": lambda: kernels.kernel(kernels.plan.rows("dk", True, ())),
        "chunk_dv": lambda: kernels.kernel(kernels.plan.rows("dv", False, PROGRAM.loads("v"))),
        "step": lambda: kernels.kernel(kernels.plan.step(starts=True)),
    }


def ampere(gpu):
    return {"states_backward": narrow(gpu)["states_backward"]}


def wide(gpu):
    kernels = LinearKernels(SCALED, WIDE, default_linear_tiles(SCALED, WIDE, gpu), gpu)
    return {"walk_dq": lambda: kernels.kernel(kernels.plan.walk("dq", False, False))}


def channels(gpu):
    problem = replace(NARROW, per_channel=True)
    kernels = LinearKernels(PROGRAM, problem, default_channel_tiles(problem, gpu), gpu)
    return {
        "channel_scores": lambda: kernels.kernel(kernels.plan.scores),
        "channel_states_backward": lambda: kernels.kernel(kernels.plan.states(True, True, True, initial=True)),
        "channel_dv": lambda: kernels.kernel(kernels.plan.channel_rows("dv", PROGRAM.loads("v"))),
        "channel_gradients": lambda: kernels.kernel(kernels.plan.gradients(True, 1, ((), (), ()))),
    }


def halves(gpu):
    problem = replace(NARROW, dtype="float16")
    kernels = LinearKernels(PROGRAM, problem, default_linear_tiles(PROGRAM, problem, gpu), gpu)
    problem = replace(problem, per_channel=True)
    channels = LinearKernels(PROGRAM, problem, default_channel_tiles(problem, gpu), gpu)
    return {
        "forward": lambda: kernels.kernel(kernels.plan.walk("output", starts=True, ends=True)),
        "chunk_dq": lambda: kernels.kernel(kernels.plan.rows("dq", True, ())),
        "channel_gradients": lambda: channels.kernel(channels.plan.gradients(True, 1, ((), (), ()))),
    }


def lower(kernel):
    configs = {**pass_configs(kernel.problem), **kernel.configs}
    return codegen_compile.lower_kernel(kernel.prim_func, kernel.target, pass_configs=configs)


@functools.cache
def compiled(kernels, gpu):
    """Kernels by their names, of one source file."""
    return compile_together({name: lower(made()) for name, made in kernels(gpu).items()}, gpu)


def assert_numbers_of_rows_go_by_registers(cuda):
    """A copying warp that wrote them would overtake their readers: it waits for the tiles loaded beside them alone."""
    assert "cp_async" not in cuda and "tma_load" in cuda and "tma_store" in cuda


def assert_asks_for_registers(cuda, tile):
    (handed,), (kept,) = (map(int, re.findall(rf"reg_{n}<(\d+)>", cuda)) for n in ("alloc", "dealloc"))
    assert (handed, kept) == (consumer_registers(tile), 24)


def test_hopper_kernels_of_narrow_heads_fit_and_share_an_sm():
    made, tiles = compiled(narrow, arch.H100()), default_linear_tiles(PROGRAM, NARROW, arch.H100())
    for name, kernel in made.items():
        assert_fits(name, kernel, arch.H100())
        assert ("wgmma" in kernel.cuda) is (name != "step")
    assert_numbers_of_rows_go_by_registers(made["forward"].cuda)
    assert tiles.forward.blocks == tiles.rows["dq"].blocks == 2 and tiles.states.blocks == 3
    assert_asks_for_registers(made["forward"].cuda, tiles.forward)
    assert_asks_for_registers(made["states_backward"].cuda, tiles.states)
    for role in ("dq", "dk"):
        assert_asks_for_registers(made[f"chunk_{role}"].cuda, tiles.rows[role])
        assert made[f"chunk_{role}"].used.shared_bytes <= arch.H100().shared_memory_per_sm // 2 - 1024


def test_a_walk_holds_its_own_tensor_in_registers():
    """Shared memory would be copied over while it is still read: what no product reads, no barrier waits for."""
    tiles = default_linear_tiles(PROGRAM, NARROW, arch.H100())
    kernels = LinearKernels(PROGRAM, NARROW, replace(tiles, walks={"dv": tiles.forward}), arch.H100())
    text = kernels.kernel(kernels.plan.walk("dv", False, False, PROGRAM.loads("v"))).prim_func.script()
    assert "v_held" in text and "v_tile" not in text and "do_tile" in text


def test_a_hopper_walk_of_wide_heads_fits():
    (made,) = compiled(wide, arch.H100()).values()
    assert_fits("walk_dq", made, arch.H100())
    assert_numbers_of_rows_go_by_registers(made.cuda)


def test_hopper_kernels_with_a_decay_for_each_channel_fit():
    for name, made in compiled(channels, arch.H100()).items():
        assert_fits(name, made, arch.H100())
        assert "wgmma" in made.cuda


def test_an_ampere_kernel_fits():
    (made,) = compiled(ampere, arch.A100()).values()
    assert_fits("states_backward", made, arch.A100())
    assert "mma_sync" in made.cuda and "wgmma" not in made.cuda
    assert made.used.shared_bytes <= 99 * 1024


@pytest.mark.parametrize("threads", [128, 256])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_blocks_that_share_an_sm_ask_for_no_more_registers_than_there_are(blocks, threads):
    """Else a block waits for registers forever: it did, on an H100."""
    handed = consumer_registers(LinearTile(64, 128, 64, threads, 2, blocks=blocks))
    at_launch = arch.H100().registers_per_sm // blocks // (threads + COPYING) // 8 * 8
    assert handed * threads + 24 * COPYING <= at_launch * (threads + COPYING)
    assert handed <= 240 and handed % 8 == 0


def most_in_a_bank(places):
    """How many of these bytes' words, each counted once, share one of the 32 banks."""
    words = {place // 4 for place in places}
    return max(sum(word % 32 == bank for word in words) for bank in range(32))


@pytest.mark.parametrize(("size", "columns"), [(2, 64), (4, 64), (4, 32)])
def test_pairs_of_entries_as_fragments_lie_meet_in_no_bank(size, columns):
    """Lane 4 r + c of a warp reads entries 2 c and 2 c + 1 of row r; of 8 bytes a thread, half a warp at a time."""
    for apart, most in ((0, 8 if size == 2 else 4), (APART_BY_PAIRS, 1)):
        lanes = [(r * (columns + apart) + 2 * c) * size for r in range(8) for c in range(4)]
        together = lanes if size == 2 else lanes[:16]
        read = [lane + 4 * word for lane in together for word in range(2 * size // 4)]
        assert most_in_a_bank(read) == most, apart


def test_columns_that_are_summed_meet_in_few_banks():
    for apart, most in ((0, 32), (APART_BY_COLUMNS, 2)):
        assert most_in_a_bank([row * (64 + apart) * 4 for row in range(32)]) == most


def test_fp16_kernels_which_scale_states_fit():
    for name, made in compiled(halves, arch.H100()).items():
        assert_fits(name, made, arch.H100())


def test_an_engine_tells_the_resources_of_all_its_kernels():
    """tests/runtime/test_both_engines.py asks which they are, and compiles none."""
    metas = [meta_tensor(None, 2, None, dim, dtype=torch.float16) for dim in (16, 16, 24)]
    found = LinearAttentionEngine(metas, backend="interpret").resources(arch.H100())
    assert len(found) > 5 and all(0 < each.registers <= 255 for each in found.values())
