"""The kernels of one problem as TileLang, kept as text: a change of a kernel is read as a diff."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.library import OnlineSoftmax, causal, scale

pytest.importorskip("tilelang")

ROOT = Path(__file__).parents[2]
KERNELS = ("forward", "backward", "preprocess", "postprocess")


def engine(dim=64, dim_v=None, **options):
    dims = (dim, dim, dim_v or dim)
    metas = [meta_tensor(1, heads, 256, d, dtype=torch.float16) for heads, d in zip((4, 2, 2), dims, strict=True)]
    return AttentionEngine(metas, None, scale(0.125), causal, OnlineSoftmax(), device=arch.H100(), **options)


def text(made, kernel):
    """The kernel as TileLang prints it; `source` puts a title over it and folds its lines."""
    return made._source_kernel(kernel, "tilelang").source("tilelang")


@pytest.mark.parametrize("kernel", KERNELS)
def test_softmax_causal(kernel, golden):
    assert text(engine(), kernel) == golden


def test_softmax_causal_over_queries(golden):
    assert text(engine(dim=32, dim_v=64, deterministic=True), "queries") == golden


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_softmax_causal_in_straight_lines(kernel, golden):
    """At head dims for which nothing is placed by hand."""
    assert text(engine(dim=32, dim_v=64), kernel) == golden


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=["own keys", "shared keys"])
def test_backward_of_wide_heads(dims, golden):
    assert text(engine(*dims), "backward") == golden


TEXTS = f"""
from attention_engine.codegen.compile import lower_kernel
from tests.kernels.test_golden import engine

junk = [bytearray(size) for size in range(COUNT)]  # other addresses
for name in {KERNELS}:
    kernel = engine()._source_kernel(name, "tilelang")
    print(lower_kernel(kernel.prim_func, kernel.target, pass_configs=kernel.configs).cuda)
"""


@pytest.mark.slow  # golden files hold the tile programs of any process; this is the CUDA made of them, with no cache
def test_two_processes_write_the_same_text():
    runs = [
        subprocess.run(
            [sys.executable, "-c", TEXTS.replace("COUNT", count)], cwd=ROOT, capture_output=True, text=True, check=True,
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "HOME": str(Path.home())},
        ).stdout
        for seed, count in (("1", "0"), ("2", "3000"))
    ]  # fmt: skip
    assert runs[0] == runs[1] and runs[0].count("__global__ void __launch_bounds__") == len(KERNELS)
