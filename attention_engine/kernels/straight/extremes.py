"""Before a backward pass that asks for them: the extremes of rows, and how many kept pairs reach each.

A pair must meet its row's extreme to the last bit, or nothing would. The forward pass made its products in another
order, and so may another kernel of the backward pass. So each of these has rows of its own, made by products like its
own: of the same tiles, the same way round, and of values by the same formulas, which are compiled without contraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import Backward
from attention_engine.kernels.common import (
    FLOAT,
    Operand,
    Sizes,
    build,
    load,
    loop,
    multiply,
    place_at,
    window,
)
from attention_engine.kernels.pair_maths import PairMaths, PairTile
from attention_engine.kernels.tile_maths import REDUCE
from attention_engine.kernels.tiles import KeyWalk, Walks
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile


def backward_extremes(problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, over_keys: bool) -> Any:
    """The PrimFunc: (q, k, v, custom..., [tile_lists], an extreme and its count for each of the schedule's...).

    Rows are fp32 (batch, heads, queries). over_keys: for the kernel over keys (backward.py), which has scores
    transposed; else for those whose tiles have queries first.
    """
    sizes = Sizes(problem)
    walks = Walks(plan_tiles(schedule.mask), problem, sizes, tile)
    parameters = sizes.declare(attention_buffers.extremes(problem, schedule, rows, tile))
    dim = padded(problem.dim)
    shape = (tile.kv, tile.q) if over_keys else (tile.q, tile.kv)

    @T.macro
    def body(buffers: Any) -> None:
        grid = T.ceildiv(sizes.q, tile.q), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block, head, batch):
            q = Operand("q", problem, (tile.q, dim))
            k = Operand("k", problem, (tile.kv, dim))
            products = T.alloc_fragment(shape, FLOAT)
            values = T.alloc_fragment(shape, FLOAT)
            shared = T.alloc_shared(shape, FLOAT) if over_keys else values
            rows_of_values = T.alloc_fragment([tile.q, tile.kv], FLOAT) if over_keys else values
            here = T.alloc_fragment([tile.q], FLOAT)
            reaching = T.alloc_fragment([tile.q], FLOAT)
            tops = [T.alloc_fragment([tile.q], FLOAT) for _ in schedule.extremes]
            counts = [T.alloc_fragment([tile.q], FLOAT) for _ in schedule.extremes]
            q0 = block * tile.q
            kv_head = head // problem.group
            place = place_at(schedule.block, problem, sizes, buffers, batch, head)
            load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
            for top, count, extreme in zip(tops, counts, schedule.extremes, strict=True):
                T.fill(top, -T.infinity(FLOAT) if extreme.kind == "max" else T.infinity(FLOAT))
                T.fill(count, 0)
            walk = KeyWalk(walks, buffers, batch, head, block)
            for step in loop(walk.count, tile.stages):
                kv0 = walk.at(step).start
                maths = PairMaths(schedule, sizes, place, PairTile(shape, over_keys, q0, kv0, {}))
                load(k, window(buffers["k"], batch, kv_head, kv0, tile.kv, dim))
                T.clear(products)
                if over_keys:
                    multiply(k, q, products, transpose_B=True, whole_rows=not tile.shared_weights)
                else:
                    multiply(q, k, products, transpose_B=True)
                for top, count, extreme in zip(tops, counts, schedule.extremes, strict=True):
                    maths.reach(products, extreme, values)
                    if over_keys:  # a row's numbers stand in several warps, where TileLang reduces none
                        T.copy(values, shared)
                        for i, j in T.Parallel(tile.q, tile.kv):
                            rows_of_values[i, j] = shared[j, i]
                    join(tile, Found(rows_of_values, here, reaching, top, count), extreme.kind)
            for top, count, extreme in zip(tops, counts, schedule.extremes, strict=True):
                for i in T.Parallel(tile.q):
                    count[i] = T.max(count[i], 1.0)
                T.copy(top, buffers[extreme.names[0]][batch, head, q0 : q0 + tile.q])
                T.copy(count, buffers[extreme.names[1]][batch, head, q0 : q0 + tile.q])

    return build("backward_extremes", parameters, body)


@dataclass(frozen=True)
class Found:
    """Values of a tile, row by row; what they and the tiles before reach, and how many of the tile do; the same of the
    tiles before."""

    values: Any
    here: Any
    reaching: Any
    top: Any
    count: Any


@T.macro
def join(tile: Tile, found: Found, kind: str) -> None:
    """Counts what a tile adds; a new extreme begins to count anew."""
    REDUCE[kind](found.values, found.here, dim=1)
    for i in T.Parallel(tile.q):
        found.here[i] = T.max(found.here[i], found.top[i]) if kind == "max" else T.min(found.here[i], found.top[i])
    for i, j in T.Parallel(tile.q, tile.kv):
        found.values[i, j] = T.if_then_else(found.values[i, j] == found.here[i], 1.0, 0.0)
    T.reduce_sum(found.values, found.reaching, dim=1)
    for i in T.Parallel(tile.q):
        found.count[i] = T.if_then_else(found.here[i] == found.top[i], found.count[i], 0.0) + found.reaching[i]
        found.top[i] = found.here[i]
