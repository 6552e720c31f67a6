"""Parts of rows added up by a kernel of its own: one pass over them, where torch takes one for each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from attention_engine.compiler import Kernel, pass_configs
from attention_engine.ir.problem import Problem
from attention_engine.plan.targets import Target
from attention_engine.reference.merge import add_weighted
from attention_engine.runtime.program_kernels import NAMES

ANY = Problem(1, 1, 64, 64, "float16")  # a sum is of no problem


@functools.lru_cache(maxsize=64)
def sum_kernel(count: int, dim: int, dtype: str, target: Target) -> Kernel:
    """The kernel that adds up so many parts of rows of so many entries."""
    kernel = Kernel("parts.weighted_sum.weighted_sum", (ANY, count, dim, dtype), target, ANY, pass_configs(ANY))
    kernel.begin()
    return kernel


def add_by_kernel(target: Target, parts: Sequence[Tensor], factors: Sequence[Tensor], out: Tensor) -> None:
    """The sum of parts times their factors, in the dtype of `out`; by torch while the kernel is being compiled, and
    where heads don't lie inside queries in memory.

    parts: fp32 (batch, heads, queries, DV); factors: fp32 (batch, heads, queries, 1).
    """
    rows = [t.transpose(1, 2) for t in (*parts, out)]
    one_by_one = out.numel() > 0 and all(t.is_contiguous() for t in rows)
    kernel = sum_kernel(len(parts), out.shape[3], NAMES[out.dtype], target) if one_by_one else None
    if kernel is None or not kernel.ready:
        add_weighted(parts, factors, out)
        return
    *of_parts, whole = [t.view(-1, out.shape[3]) for t in rows]
    of_rows = [t.transpose(1, 2).reshape(-1).contiguous() for t in factors]  # one number for all rows has no strides
    kernel.run(*of_parts, *of_rows, whole)
