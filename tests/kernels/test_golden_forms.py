"""Kernels and forms that no problem of test_golden.py meets, kept as text: a change of one is read as a diff."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.compiler import Kernels, LinearKernels
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import LinearProblem
from attention_engine.library import OnlineSoftmax, causal, document, relative_bias, scale
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles

GPU = arch.H100()
DOCUMENTS = {"documents": ("batch", "seq_len")}


def kernels(dim=128, score=None, mask=causal, wanting=(), forward=None, backward=None, queries=0, **custom):
    """The kernels of a problem whose tiles have these forms, and over keys so many queries."""
    metas = [meta_tensor(1, heads, 256, dim, dtype=torch.float16) for heads in (4, 2, 2)]
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


def test_items_over_keys(golden):
    assert text(kernels(mask=document(), backward={"persistent": True}, **DOCUMENTS).backward) == golden


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


PROGRAM = trace_mods({"v": lambda x, c: x * c["dt"]}, CustomIO({"dt": ("batch", "heads", "seq_len")}))
PROBLEM = LinearProblem(4, 2, 2, 64, 64, "bfloat16", custom=(("dt", "float32", ("batch", "heads", "seq_len")),))
CHANNELS = replace(PROBLEM, per_channel=True)
LINEAR = {
    "walk": lambda plan: plan.walk("output", starts=True, ends=True),
    "states": lambda plan: plan.states(reverse=True, starts=True, overlaps=True),
    "chunk": lambda plan: plan.rows("dq", True, ()),
    "step": lambda plan: plan.step(starts=True),
}
BY_CHANNEL = {
    "scores": lambda plan: plan.scores,
    "states": lambda plan: plan.states(True, True, True, initial=True),
    "rows": lambda plan: plan.channel_rows("dv", PROGRAM.loads("v")),
    "gradients": lambda plan: plan.gradients(True, 1, ((), (), ())),
}


@pytest.mark.parametrize("kernel", LINEAR)
def test_linear(kernel, golden):
    made = LinearKernels(PROGRAM, PROBLEM, default_linear_tiles(PROGRAM, PROBLEM, GPU), GPU)
    assert text(made.kernel(LINEAR[kernel](made.plan))) == golden


@pytest.mark.parametrize("kernel", BY_CHANNEL)
def test_linear_by_channel(kernel, golden):
    made = LinearKernels(PROGRAM, CHANNELS, default_channel_tiles(CHANNELS, GPU), GPU)
    assert text(made.kernel(BY_CHANNEL[kernel](made.plan))) == golden
