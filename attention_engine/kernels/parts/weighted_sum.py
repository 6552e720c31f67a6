"""Adds up parts of rows, each times a factor of its row, in one pass over all of them."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import FLOAT, Buffers, build

ENTRIES = 2048  # of a block
THREADS = 128


def weighted_sum(problem: Problem, count: int, dim: int, dtype: str) -> Any:
    """The PrimFunc: (part0, ..., factor0, ..., the sum): parts fp32 (rows, dim), their factors fp32 (rows,)."""
    rows = T.dynamic("rows")
    parameters = {f"part{n}": T.Tensor([rows, dim], FLOAT) for n in range(count)}
    parameters |= {f"factor{n}": T.Tensor([rows], FLOAT) for n in range(count)}
    parameters["sum"] = T.Tensor([rows, dim], dtype)
    together = max(ENTRIES // dim, 1)

    def total(buffers: Buffers, row: Any, d: Any) -> Any:
        terms = [buffers[f"factor{n}"][row] * buffers[f"part{n}"][row, d] for n in range(count)]
        found = terms[0]
        for term in terms[1:]:
            found = found + term
        return found

    @T.macro
    def body(buffers: Buffers) -> None:
        with T.Kernel(T.ceildiv(rows, together), threads=THREADS) as block:
            for i, d in T.Parallel(together, dim):
                if block * together + i < rows:
                    row = block * together + i
                    buffers["sum"][row, d] = T.cast(total(buffers, row, d), dtype)

    return build("weighted_sum", parameters, body)
