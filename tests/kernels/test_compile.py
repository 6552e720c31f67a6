"""Kernels of softmax, compiled without a GPU: the instructions of each architecture, no spills, memory that fits."""

import functools
import re

import pytest
import torch

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.library import OnlineSoftmax, causal, scale

pytest.importorskip("tilelang")
from attention_engine.target import compile as target_compile

pytestmark = pytest.mark.skipif(target_compile.find_nvcc() is None, reason="needs nvcc")


@functools.cache
def lowered(gpu, kernel, dtype=torch.float16, dim=64):
    metas = [meta_tensor(1, heads, 256, dim, dtype=dtype) for heads in (4, 2, 2)]
    engine = AttentionEngine(metas, None, scale(dim**-0.5), causal, OnlineSoftmax(), device=gpu)
    source = engine._source_kernel(kernel, "cuda")
    made = target_compile.lower_kernel(source.prim_func, gpu, pass_configs=source.configs)
    return made, made.resources()


def fits(gpu, kernel, **problem):
    made, used = lowered(gpu, kernel, **problem)
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    assert 0 < used.registers <= gpu.max_registers_per_thread
    assert used.shared_bytes <= gpu.shared_memory_per_block
    return made.cuda, used


@pytest.mark.parametrize("kernel", ["forward", "backward", "backward_queries"])
def test_hopper_kernels_use_its_instructions(kernel):
    cuda, used = fits(arch.H100(), kernel)
    assert "wgmma" in cuda and "tma_load" in cuda
    assert used.notes == ()  # no wgmma is serialised
    assert ("AtomicAddx4" in cuda) is (kernel == "backward")


@pytest.mark.parametrize(("kernel", "dtype"), [("forward", torch.bfloat16), ("backward", torch.float16)])
def test_hand_placed_kernels_run_products_while_they_compute(kernel, dtype):
    cuda, used = fits(arch.H100(), kernel, dtype=dtype, dim=128)
    assert used.notes == ()  # C7510 to C7519: wgmma serialised
    assert "warpgroup_reg_dealloc<24>" in cuda
    assert "tl::wait_wgmma<1>()" in cuda
    assert ("const int warpgroup = __shfl_sync" in cuda) is (kernel == "forward")


@pytest.mark.parametrize(("dim", "groups"), [(64, 3), (128, 2)])
def test_three_warpgroups_take_turns_and_two_do_not(dim, groups):
    cuda = lowered(arch.H100(), "forward", dim=dim)[0].cuda
    assert f"__launch_bounds__({128 * (groups + 1)}" in cuda
    assert ("__named_barrier_arrive" in cuda) is (groups == 3)


def test_weights_are_made_before_the_wait_for_their_gradients():
    """What keeps compilers from moving that wait up: a fence on the weights, and a wait that is over."""
    cuda = lowered(arch.H100(), "backward", dim=128)[0].cuda
    loop = cuda[cuda.index("tl::wait_wgmma<1>()") :]
    between = loop[loop.index("exp2f") : loop.index("tl::wait_wgmma<0>()")]
    assert "warpgroup_fence_operand(reinterpret_cast<float*>(weights + 0), 40)" in between and ".wait(" in between


def test_fences_name_the_registers_that_a_thread_has():
    for kernel in ("forward", "backward"):
        cuda = lowered(arch.H100(), kernel)[0].cuda
        held = {name: int(count) for name, count in re.findall(r"\bfloat (\w+)\[(\d+)\];", cuda)}
        fenced = re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\((\w+) \+ 0\), (\d+)\)", cuda)
        assert len(fenced) > 4 and all(int(count) == held[name] for name, count in fenced)


@pytest.mark.parametrize("kernel", ["backward_preprocess", "backward_postprocess"])
def test_row_kernels_do_not_spill(kernel):
    _, used = fits(arch.H100(), kernel)
    assert used.notes == ()


@pytest.mark.parametrize("gpu", [arch.A100(), arch.RTX4090()], ids=lambda gpu: gpu.target)
def test_older_gpus_copy_by_cp_async(gpu):
    cuda, used = fits(gpu, "forward")
    assert "cp_async" in cuda and "mma_sync" in cuda
    assert "wgmma" not in cuda and "tma_load" not in cuda
    assert used.shared_bytes <= 99 * 1024
