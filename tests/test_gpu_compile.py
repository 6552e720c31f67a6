"""Compiling the GPU tests' kernels where there is no GPU: what stands for one."""

import torch

from tests.gpu.compile import Compiled, OnCpu


def test_what_is_asked_of_a_gpu_comes_from_the_cpu():
    with OnCpu():
        made = [torch.randn(2, device="cuda"), torch.ones(2).to("cuda:0", torch.float16), torch.ones(2).cuda()]
    assert [t.device.type for t in made] == ["cpu"] * 3 and made[1].dtype is torch.float16


def test_a_compiled_kernel_does_nothing_and_shows_its_text():
    class Kernel:
        lowered = "text"

    silent = Compiled(Kernel())
    assert silent.lowered == "text" and silent(torch.ones(1), 2) is None
