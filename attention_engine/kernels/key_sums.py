"""Gradients of what pairs read by their key: sums of a tile's rows, which are keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis
from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import FLOAT, named
from attention_engine.kernels.pair_maths import PairMaths
from attention_engine.passes.read_places import CustomSums
from attention_engine.plan.forms import Tile


@dataclass(frozen=True)
class KeySum:
    """The sums of a key's read over a block's queries.

    by_head: do the heads of a block, which come in turns, have sums of their own? total: room in registers, for all
    steps, or for one where heads have their own.
    """

    number: int
    by_head: bool
    total: Any


def key_sums_of(problem: Problem, tile: Tile, summed: CustomSums) -> list[KeySum]:
    """Those that a kernel makes; made in the kernel."""
    by_head = [Axis.HEAD in read.axes and problem.group > 1 for read, _ in summed.of_keys]
    return [KeySum(n, own, named("total", T.alloc_fragment([tile.kv], FLOAT))) for n, own in enumerate(by_head)]


@T.macro
def sum_keys(of: KeySum, maths: PairMaths, buffers: Any, contribution: Any, factor: float) -> None:
    """Adds a tile's row sums to the sums of its keys: in registers; in memory that this block owns, if heads differ."""
    place, kv0, keys = maths.place, maths.kv0, maths.shape[0]
    if not of.by_head:
        if factor == 1:
            T.reduce_sum(contribution, of.total, dim=1, clear=False)
        else:
            part = T.alloc_fragment([keys], FLOAT)
            T.reduce_sum(contribution, part, dim=1)
            for j in T.Parallel(keys):
                of.total[j] += part[j] * factor
    else:
        T.reduce_sum(contribution, of.total, dim=1)
        for j in T.Parallel(keys):
            if kv0 + j < buffers[f"key_sum{of.number}"].shape[2]:
                buffers[f"key_sum{of.number}"][place.batch, place.head, kv0 + j] += of.total[j] * factor
