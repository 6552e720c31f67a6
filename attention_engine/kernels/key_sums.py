"""Gradients of what pairs read by their key: sums of a tile's rows, which are keys."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import FLOAT, Place
from attention_engine.plan.forms import Tile


def heads_of_sum(read: Expr, problem: Problem) -> int:
    """Heads of the sums of a key's read: key heads, where query heads that share keys share the entry too."""
    return problem.heads if Axis.HEAD in read.axes else problem.kv_heads


def shared_between_heads(read: Expr, problem: Problem) -> bool:
    """Do the heads of a block, which come in turns, have sums of their own for this read?"""
    return Axis.HEAD in read.axes and problem.group > 1


@T.macro
def sum_keys(read: Expr, problem: Problem, contribution: Any, total: Any, tile: Tile, buffers: Any, number: int,
             place: Place, kv0: Any, factor: float) -> None:  # fmt: skip
    """Adds a tile's row sums to the sums of its keys: in registers; in memory that this block owns, if heads differ."""
    if not shared_between_heads(read, problem):
        if factor == 1:
            T.reduce_sum(contribution, total, dim=1, clear=False)
        else:
            part = T.alloc_fragment([tile.kv], FLOAT)
            T.reduce_sum(contribution, part, dim=1)
            for j in T.Parallel(tile.kv):
                total[j] += part[j] * factor
    else:
        T.reduce_sum(contribution, total, dim=1)
        for j in T.Parallel(tile.kv):
            if kv0 + j < buffers[f"key_sum{number}"].shape[2]:
                buffers[f"key_sum{number}"][place.batch, place.head, kv0 + j] += total[j] * factor
