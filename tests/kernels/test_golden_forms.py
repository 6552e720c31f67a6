"""Kernels and forms that no problem of test_golden.py meets, kept as text: a change of one is read as a diff."""

import difflib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.compiler import Kernels, LinearKernels
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.block_lists import ListedBlocks
from attention_engine.ir.linear import LinearProblem
from attention_engine.library import OnlineSoftmax, causal, document, relative_bias, scale
from attention_engine.runtime.block_rows import _looking, kernel_for
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles
from tests.runtime.test_extremes import Over
from tests.sweep import Job

GPU = arch.H100()
DOCUMENTS = {"documents": ("batch", "seq_len")}


def kernels(dim=128, score=None, mask=causal, wanting=(), forward=None, backward=None, queries=0, long=256, **custom):
    """The kernels of a problem whose tiles have these forms, and over keys so many queries."""
    metas = [meta_tensor(1, heads, long, dim, dtype=torch.float16) for heads in (4, 2, 2)]
    engine = AttentionEngine(metas, CustomIO(custom), score or scale(0.1), mask, OnlineSoftmax(), device=GPU)
    made = engine._kernels("cuda")
    tiles = replace(
        made.tiles, forward=made.tiles.forward.in_form(**(forward or {})),
        backward=replace(made.tiles.backward, q=queries or made.tiles.backward.q).in_form(**(backward or {})),
    )  # fmt: skip
    return Kernels(made.maths.wanting(wanting), made.problem, tiles, GPU, deterministic=False)


def text(kernel):
    return kernel.prim_func.script()


def test_items_over_queries_that_come_ahead(golden):
    made = kernels(mask=document(), forward={"persistent": True, "queries_ahead": True}, **DOCUMENTS)
    assert text(made.forward) == golden


def test_sums_and_multiplications_among_exponentials(golden):
    made = kernels(dim=64, mask=None, long=None)
    assert made.tiles.forward.woven and text(made.forward) == golden


def test_items_over_keys(golden):
    assert text(kernels(mask=document(), backward={"persistent": True}, **DOCUMENTS).backward) == golden


def test_what_differs_where_packed_sequences_are_long(golden):
    """Blocks of keys of such sequences walk over one head after another."""
    metas = [meta_tensor(1, heads, 256, 128, dtype=torch.float16) for heads in (8, 2, 2)]
    made = AttentionEngine(metas, None, scale(0.1), causal, OnlineSoftmax())._all_kernels(GPU, packed="alike")
    both = [text(made[name]).splitlines() for name in ("backward", "backward of long sequences")]
    assert "\n".join(difflib.unified_diff(*both, lineterm="", n=0)) == golden


def test_sums_of_diagonals(golden):
    given = {"wanting": ("table",), "table": ("heads", 65)}
    made = kernels(score=relative_bias("table", 32, 0.1), queries=64, backward={"skewed_sums": True}, **given)
    assert text(made.backward) == golden


@pytest.mark.parametrize("over_keys", [False, True], ids=["forward", "over keys"])
def test_tile_map(over_keys, golden):
    made = kernels(mask=document(), **DOCUMENTS)
    launched = made.of_backward if over_keys else made.of_forward
    (tile_map,) = (kernel for kernel in launched.values() if kernel.builder == "tile_map.tile_map")
    assert text(tile_map) == golden


def with_bias(score, custom, b, h, q_idx, kv_idx):
    return score * 0.1 + custom["bias"][h, q_idx, kv_idx]


def test_gradient_of_a_bias_of_pairs(golden):
    made = kernels(dim=32, score=with_bias, wanting=("bias",), bias=("heads", "seq_len", "seq_len_kv"))
    (launch,) = made.plan.pair_launches
    assert text(made.kernel(launch)) == golden


def read_everywhere(score, custom, b, h, q_idx, kv_idx):
    """Reads whose gradients are summed along diagonals, by keys, and by an atomic a pair."""
    near = (q_idx - kv_idx).clamp(-32, 32) + 32
    return score * 0.1 + custom["table"][h, near] + custom["keys"][h, kv_idx] + custom["pairs"][h, (q_idx + kv_idx) % 7]


def test_gradients_of_custom_inputs_in_straight_lines(golden):
    inputs = {"table": ("heads", 65), "keys": ("heads", "seq_len_kv"), "pairs": ("heads", 7)}
    made = kernels(dim=32, score=read_everywhere, wanting=tuple(inputs), **inputs)
    assert text(made.backward) == golden


@pytest.mark.parametrize("over_keys", [True, False], ids=["over keys", "over queries"])
def test_extremes_of_rows(over_keys, golden):
    metas = [meta_tensor(1, heads, 256, 64, dtype=torch.float16) for heads in (4, 2, 2)]
    made = AttentionEngine(metas, None, scale(0.1), causal, Over("absmax"), device=GPU)._kernels("cuda")
    assert text(made.kernel(made.plan.extremes(over_keys))) == golden


def test_rows_of_blocks(golden):
    looking = _looking(AttentionEngine(mask_mod=causal, device=GPU))
    q, k = (torch.empty(1, 256, heads, 64, dtype=torch.float16) for heads in (4, 2))
    made = kernel_for(looking._kernels_of("tilelang", q, k, []), q, k, [], ListedBlocks(128, 128, True, 2))
    assert text(made) == golden


@pytest.mark.parametrize("kernel", ["preprocess", "exact_delta", "preprocess_again"])
def test_rows_of_an_exact_delta(kernel, golden):
    made = Job("case: relu2_row_sum", "causal", 64, "fp16").engine(GPU)._kernels("cuda")
    assert text(made.of_backward[kernel]) == golden


def test_dq_of_the_last_units_of_persistent_blocks(golden):
    made = kernels(mask=document(), backward={"persistent": True}, **DOCUMENTS)
    assert text(made.of_backward["postprocess"]) == golden


PROGRAM = trace_mods({"v": lambda x, c: x * c["dt"]}, CustomIO({"dt": ("batch", "heads", "seq_len")}))
PROBLEM = LinearProblem(4, 2, 2, 64, 64, "bfloat16", custom=(("dt", "float32", ("batch", "heads", "seq_len")),))
CHANNELS = replace(PROBLEM, per_channel=True)
LINEAR = {
    "walk": lambda plan: plan.walk("output", starts=True, ends=True),
    "states": lambda plan: plan.states(reverse=True, starts=True, overlaps=True),
    "chunk": lambda plan: plan.rows("dq", True, ()),
    "step": lambda plan: plan.step(starts=True),
    "sums of decays": lambda plan: plan.sum_decays(64),
    "decay gradients": lambda plan: plan.decay_gradients(()),
}
BY_CHANNEL = {
    "scores": lambda plan: plan.scores,
    "states": lambda plan: plan.states(True, True, True, initial=True),
    "rows": lambda plan: plan.channel_rows("dv", PROGRAM.loads("v")),
    "gradients": lambda plan: plan.gradients(True, 1, ((), (), ())),
    "sums of decays": lambda plan: plan.channel_sums,
}


@pytest.mark.parametrize("kernel", LINEAR)
def test_linear(kernel, golden):
    made = LinearKernels(PROGRAM, PROBLEM, default_linear_tiles(PROGRAM, PROBLEM, GPU), GPU)
    assert text(made.kernel(LINEAR[kernel](made.plan))) == golden


@pytest.mark.parametrize("kernel", BY_CHANNEL)
def test_linear_by_channel(kernel, golden):
    made = LinearKernels(PROGRAM, CHANNELS, default_channel_tiles(CHANNELS, GPU), GPU)
    assert text(made.kernel(BY_CHANNEL[kernel](made.plan))) == golden
