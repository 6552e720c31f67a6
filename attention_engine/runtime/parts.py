"""Values wider than a kernel has room for: an attention over some of their columns at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_engine.runtime import op

WIDEST = 256  # value dims that a kernel has room for


def width(dim_v: int) -> int:
    """The value dim of a kernel, of values that are cut in as few equal parts as have room."""
    return -(-dim_v // -(-dim_v // WIDEST))


def run(key: str, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], return_rows: bool) -> tuple[Tensor, ...]:
    """An attention over wide values, some columns at a time: a column of the output asks for no other's, and gradients
    are sums over columns. Rows are alike in all parts; those of the first are returned."""
    first, *others = v.split(width(v.shape[3]), -1)
    output, *rows = op.run(key, return_rows, (q, k, first, *custom))
    return (torch.cat([output, *(op.run(key, False, (q, k, part, *custom))[0] for part in others)], -1), *rows)
