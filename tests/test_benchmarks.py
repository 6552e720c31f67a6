"""The benchmarks import and say what they need where there is no GPU; their counts are those of the README."""

import pytest
import torch

from benchmarks import linear, softmax


@pytest.mark.parametrize("mask, direction, want", [
    ("full", "forward", 4 * 2 * 16 * 8192**2 * 128),
    ("causal", "forward", 2 * 2 * 16 * 8192**2 * 128),
    ("causal", "backward", 5 * 2 * 16 * 8192**2 * 128),
])
def test_flops_are_counted_as_the_readme_says(mask, direction, want):
    assert softmax.Problem(2, 8192, 16, 128, mask).flops(direction) == want


def test_numbers_that_differ_stop_the_run():
    x = torch.randn(4, 8)
    softmax.check("ours", [x] * 4, [x * 1.004] * 4)
    with pytest.raises(SystemExit, match=r"ours: dk differs from SDPA.s by 1\.0e-02 of its size; nothing was timed"):
        softmax.check("ours", [x, x, x * 1.01, x], [x] * 4)
    with pytest.raises(SystemExit, match="o differs"):
        softmax.check("ours", [x * torch.nan, x, x, x], [x] * 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        softmax.main([])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        linear.main([])
