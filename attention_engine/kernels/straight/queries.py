"""The backward pass over queries: a block holds a tile of queries and walks over the keys.

No atomics: dQ, and gradients of custom inputs that a row sums up, are bitwise the same in every run.
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import Backward, row_variable
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Operand,
    Place,
    Sizes,
    accumulate,
    block_values,
    build,
    load,
    loop,
    multiply,
    named,
    reader,
    where_partial,
    window,
)
from attention_engine.kernels.pair_maths import PairMaths, keeps_products, of_pairs
from attention_engine.kernels.staged import StagedReads, copy_staged
from attention_engine.kernels.tiles import KeyWalk, either
from attention_engine.kernels.unseen import SeenTile
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile


def backward_queries(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, summed: tuple[Expr, ...], tile: Tile,
    row_pad: int, with_dq: bool = True,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., [tile_lists], do, rows..., [dq], sums...).

    sums: fp32 (batch, heads, queries), the row sums of the expressions `summed` over kept pairs. row_pad: of the rows.
    """
    sizes = Sizes(problem)
    plan = plan_tiles(schedule.mask)
    parameters = sizes.declare(attention_buffers.over_queries(problem, schedule, rows, summed, tile, row_pad, with_dq))
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    seen = key_condition(schedule.mask)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(T.ceildiv(sizes.q, tile.q), problem.heads, sizes.batch, threads=tile.threads) as (
            block,
            head,
            batch,
        ):
            q = Operand("q", problem, (tile.q, dim))
            do = Operand("do", problem, (tile.q, dim_v))
            k = Operand("k", problem, (tile.kv, dim))
            v = Operand("v", problem, (tile.kv, dim_v))
            keys = SeenTile(seen if with_dq else None, k, problem, tile.stages)
            products = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            weights = T.alloc_fragment([tile.q, tile.kv], FLOAT) if keeps_products(schedule) else products
            gradients = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            contribution = T.alloc_fragment([tile.q, tile.kv], FLOAT) if len(summed) > 0 else None
            if with_dq:
                gradients_in = Operand("gradients_in", problem, (tile.q, tile.kv), fragment=True)
                dq_sums = Accumulator("dq", problem, (tile.q, dim))
                dq = dq_sums.sum
                T.fill(dq, 0)
            row_tiles = {row_variable(n): named(f"{n}_tile", T.alloc_fragment([tile.q], FLOAT)) for n, _ in rows.rows}
            sums = [T.alloc_fragment([tile.q], FLOAT) for _ in summed]
            staged = StagedReads([*of_pairs(schedule), *summed], problem, tile)
            q0 = block * tile.q
            kv_head = head // problem.group
            read = reader(buffers, sizes.inside(problem, batch, head))
            place = Place(batch, head, block_values(schedule.block, batch, head, read), read, problem.approximate)
            load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
            load(do, window(buffers["do"], batch, head, q0, tile.q, dim_v))
            for name, _ in rows.rows:
                T.copy(buffers[name][batch, head, q0 : q0 + tile.q], row_tiles[row_variable(name)])
            for total in sums:
                T.fill(total, 0)
            walk = KeyWalk(plan, sizes, tile, buffers, batch, head, block)
            for step in loop(walk.count, tile.stages):
                visit = walk.at(step)
                kv0 = visit.start
                maths = PairMaths(schedule, (tile.q, tile.kv), place, row_tiles, sizes, q0, kv0, False, staged)
                keys.ask(buffers["k"], batch, kv_head, kv0)
                keys.take(buffers["k"], batch, kv_head, kv0, place)
                T.clear(products)
                multiply(q, k, products, transpose_B=True)
                load(v, window(buffers["v"], batch, kv_head, kv0, tile.kv, dim_v))
                T.clear(gradients)
                multiply(do, v, gradients, transpose_B=True)
                if len(staged.tiles) > 0:
                    copy_staged(staged, buffers, batch, head, q0, kv0)
                maths.weigh(products, weights)
                for total, expr in zip(sums, summed, strict=True):
                    maths.contribute(products, weights, gradients, expr, contribution)
                    T.reduce_sum(contribution, total, dim=1, clear=False)
                if with_dq:
                    maths.differentiate(products, weights, gradients)
                    outside = T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
                    partial = either(visit.is_partial(kv0), outside)
                    where_partial(partial, bind(maths.mask, gradients))
                    load(gradients_in, gradients)
                    accumulate(gradients_in, k, dq_sums)
            if with_dq:
                if schedule.scale != 1:
                    for i, d in T.Parallel(tile.q, dim):
                        dq[i, d] *= schedule.scale
                T.copy(dq, window(buffers["dq"], batch, head, q0, tile.q, dim))
            for number, total in enumerate(sums):
                T.copy(total, buffers[f"sum{number}"][batch, head, q0 : q0 + tile.q])

    return build("backward_queries" if with_dq else "exact_delta", parameters, body)
