"""The gradient of a bias that each pair has its own entry of: a block owns a tile of it and stores it once.

It walks over the batches and heads that share the entries, in order, and makes their products anew: no atomics, and no
sums in memory. Other reads that differ from pair to pair are scattered by the caller from such tiles, rows by rows.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import Backward, row_variable
from attention_engine.kernels.bounds import kv_range, with_starts
from attention_engine.kernels.common import (
    FLOAT,
    Operand,
    Sizes,
    build,
    load,
    loop,
    multiply,
    named,
    place_at,
    window,
)
from attention_engine.kernels.pair_maths import PairMaths, PairTile
from attention_engine.passes.schedule import BackwardSchedule, keeps_products
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile


def backward_pairs(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, read: Expr, expr: Expr, tile: Tile, row_pad: int,
    dtype: str,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., do, rows..., first query, d_pairs).

    d_pairs: (batch or 1, heads or 1, queries from the first on, keys), as many queries as it has, the sums of `expr`
    over the batches and heads that `read` doesn't depend on. The first query is that of a tile.
    """
    sizes = Sizes(problem)
    parameters = sizes.declare(attention_buffers.pairs(problem, rows, read, row_pad, dtype))
    by_batch, by_head = Axis.BATCH in read.axes, Axis.HEAD in read.axes
    first_query, count = sizes.variable("first_query"), sizes.variable("queries")
    owners = [sizes.batch if by_batch else 1, problem.heads if by_head else 1]
    bounds = plan_tiles(schedule.mask).bounds.of_all_batches()
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    sharers = (1 if by_batch else sizes.batch) * (1 if by_head else problem.heads)

    @T.macro
    def body(buffers: Any) -> None:
        grid = T.ceildiv(sizes.kv, tile.kv), T.ceildiv(count, tile.q), owners[0] * owners[1]
        with T.Kernel(*grid, threads=tile.threads) as (kv_tile, q_tile, owner):
            q, k = Operand("q", problem, (tile.q, dim)), Operand("k", problem, (tile.kv, dim))
            v, do = Operand("v", problem, (tile.kv, dim_v)), Operand("do", problem, (tile.q, dim_v))
            products = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            weights = T.alloc_fragment([tile.q, tile.kv], FLOAT) if keeps_products(schedule) else products
            gradients = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            contribution = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            total = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            row_tiles = {row_variable(n): named(f"{n}_tile", T.alloc_shared([tile.q], FLOAT)) for n, _ in rows.rows}
            q0, kv0 = first_query + q_tile * tile.q, kv_tile * tile.kv
            here = with_starts(bounds, buffers, 0)
            first, stop = kv_range(here, q0, q0 + tile.q - 1, tile.kv, T.ceildiv(sizes.kv, tile.kv))
            steps = T.if_then_else(T.And(kv_tile >= first, kv_tile < stop), sharers, 0)
            T.fill(total, 0)
            for step in loop(steps, tile.stages):
                batch = owner // owners[1] if by_batch else step // (1 if by_head else problem.heads)
                head = owner % owners[1] if by_head else step % problem.heads
                kv_head = head // problem.group
                place = place_at(schedule.block, problem, sizes, buffers, batch, head)
                maths = PairMaths(schedule, sizes, place, PairTile((tile.q, tile.kv), False, q0, kv0, row_tiles))
                load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
                load(k, window(buffers["k"], batch, kv_head, kv0, tile.kv, dim))
                T.clear(products)
                multiply(q, k, products, transpose_B=True)
                load(do, window(buffers["do"], batch, head, q0, tile.q, dim_v))
                load(v, window(buffers["v"], batch, kv_head, kv0, tile.kv, dim_v))
                T.clear(gradients)
                multiply(do, v, gradients, transpose_B=True)
                for name, _ in rows.rows:
                    T.copy(buffers[name][batch, head, q0 : q0 + tile.q], row_tiles[row_variable(name)])
                maths.weigh(products, weights)
                maths.contribute(products, weights, gradients, expr, contribution)
                for i, j in T.Parallel(tile.q, tile.kv):
                    total[i, j] += contribution[i, j]
            at = buffers["d_pairs"]
            rows_of_tile = slice(q_tile * tile.q, q_tile * tile.q + tile.q)
            T.copy(total, at[owner // owners[1], owner % owners[1], rows_of_tile, kv0 : kv0 + tile.kv])

    return build("backward_pairs", parameters, body)
