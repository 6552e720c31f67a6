"""Parts of rows that a kernel adds up, each times a factor of its row."""

import pytest
import torch

from attention_engine.reference.merge import add_weighted
from attention_engine.runtime.weighted_sum import add_by_kernel, sum_kernel


@pytest.mark.parametrize(("count", "dim", "dtype"), [(1, 40, torch.bfloat16), (3, 128, torch.float16)])
def test_parts_are_added_in_one_pass(count, dim, dtype):
    """As torch adds them, to a rounding; what lies behind the last row is left alone."""
    torch.manual_seed(0)
    parts = [torch.randn(1, 53, 3, dim).transpose(1, 2) for _ in range(count)]
    factors = [torch.rand(1, 3, 53, 1) for _ in range(count)]
    memory = torch.full((1, 60, 3, dim), 7.0, dtype=dtype)
    wanted = torch.empty(1, 53, 3, dim, dtype=torch.float64).transpose(1, 2)
    add_weighted([p.double() for p in parts], [f.double() for f in factors], wanted)
    add_by_kernel("interpret", parts, factors, memory[:, :53].transpose(1, 2))
    assert sum_kernel.cache_info().currsize and (memory[:, 53:] == 7).all()
    found = memory[:, :53].transpose(1, 2).double()
    assert (found - wanted).abs().max() <= 2 * torch.finfo(dtype).eps * wanted.abs().max()


def test_a_factor_may_be_one_number_for_all_rows():
    parts, factors = [torch.randn(2, 9, 3, 40).transpose(1, 2)], [torch.tensor(0.5).expand(2, 3, 9, 1)]
    out = torch.empty(2, 9, 3, 40, dtype=torch.float16).transpose(1, 2)
    add_by_kernel("interpret", parts, factors, out)
    torch.testing.assert_close(out, (parts[0] * 0.5).half())


def test_other_places_in_memory_are_left_to_torch():
    parts, factors = [torch.randn(2, 3, 5, 8)], [torch.rand(2, 3, 5, 1)]
    out = torch.empty(2, 3, 5, 8)
    add_by_kernel("interpret", parts, factors, out)
    assert torch.equal(out, parts[0] * factors[0])
