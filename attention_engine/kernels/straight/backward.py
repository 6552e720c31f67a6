"""The backward pass over keys: a block holds a tile of keys and walks over the queries (of all heads that share them).

Scores stand transposed, (keys, queries), so that weights and their gradients go from registers into the products that
make dV and dK. dQ is summed into an fp32 workspace by atomics, unless another kernel makes it (queries.py).
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import tilelang.language as T

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
from attention_engine.kernels.diagonals import sum_diagonals
from attention_engine.kernels.key_sums import shared_between_heads, sum_keys
from attention_engine.kernels.pair_maths import NOTHING, PairMaths, factor_of, keeps_products, of_pairs
from attention_engine.kernels.staged import StagedReads, copy_staged
from attention_engine.kernels.tiles import QueryWalk, either
from attention_engine.kernels.unseen import clear_operand
from attention_engine.kernels.workspace import take_sums_for_granted, workspace_offset
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile


def backward(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, vectors: bool, with_dq: bool,
    summed: CustomSums = NOTHING,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., [tile_lists], do, rows..., dk, dv, [workspace], custom sums...).

    custom sums: key_sum (batch, heads or key heads, keys), diagonal (batch, heads, strips, queries + keys), where entry
    query - key + keys - 1 is a diagonal's, and d_custom, like the custom inputs.
    """
    sizes = Sizes(problem)
    plan = plan_tiles(schedule.mask)
    parameters = sizes.declare(attention_buffers.over_keys(problem, schedule, rows, tile, with_dq, summed))
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    own_tile = [factor_of(schedule, e) is None for _, e in (*summed.of_keys, *summed.diagonals)]
    in_products = with_dq and not problem.splits and not any(own_tile[len(summed.of_keys) :])  # dS is shared anyhow
    own_shared_tile = len(summed.diagonals) > 0 and not in_products
    seen = key_condition(schedule.mask)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(T.ceildiv(sizes.kv, tile.kv), problem.kv_heads, sizes.batch, threads=tile.threads) as (
            block,
            kv_head,
            batch,
        ):
            k = Operand("k", problem, (tile.kv, dim))
            v = Operand("v", problem, (tile.kv, dim_v))
            q = Operand("q", problem, (tile.q, dim))
            do = Operand("do", problem, (tile.q, dim_v))
            products = T.alloc_fragment([tile.kv, tile.q], FLOAT)
            weights = T.alloc_fragment([tile.kv, tile.q], FLOAT) if keeps_products(schedule) else products
            gradients = T.alloc_fragment([tile.kv, tile.q], FLOAT)
            weights_in = Operand("weights_in", problem, (tile.kv, tile.q), fragment=not tile.shared_weights)
            gradients_in = Operand("gradients_in", problem, (tile.kv, tile.q), fragment=not tile.shared_weights)
            dk_sums = Accumulator("dk", problem, (tile.kv, dim))
            dv_sums = Accumulator("dv", problem, (tile.kv, dim_v))
            dk, dv = dk_sums.sum, dv_sums.sum
            row_tiles = {row_variable(n): named(f"{n}_tile", T.alloc_shared([tile.q], FLOAT)) for n, _ in rows.rows}
            contribution = T.alloc_fragment([tile.kv, tile.q], FLOAT) if any(own_tile) else gradients
            shared_tile = T.alloc_shared([tile.kv, tile.q], FLOAT) if own_shared_tile else None
            key_sums = [T.alloc_fragment([tile.kv], FLOAT) for _ in summed.of_keys]
            staged = StagedReads(of_pairs(schedule), problem, tile)
            kv0 = block * tile.kv
            load(k, window(buffers["k"], batch, kv_head, kv0, tile.kv, dim))
            load(v, window(buffers["v"], batch, kv_head, kv0, tile.kv, dim_v))
            if with_dq and seen is not None:
                of_keys = Place(batch, kv_head, {}, reader(buffers, sizes.inside(problem, batch, kv_head)))
                clear_operand(seen, of_keys, kv0, k)
            T.fill(dk, 0)
            T.fill(dv, 0)
            for total in key_sums:
                T.fill(total, 0)
            walk = QueryWalk(plan, problem, sizes, tile, buffers, batch, kv_head, block)
            for step in loop(walk.count, tile.stages):
                visit = walk.at(step)
                head = visit.head
                q0 = visit.start
                read = reader(buffers, sizes.inside(problem, batch, head))
                place = Place(batch, head, block_values(schedule.block, batch, head, read), read, problem.approximate)
                maths = PairMaths(schedule, (tile.kv, tile.q), place, row_tiles, sizes, q0, kv0, True, staged)
                load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
                T.clear(products)
                multiply(k, q, products, transpose_B=True, whole_rows=not tile.shared_weights)
                load(do, window(buffers["do"], batch, head, q0, tile.q, dim_v))
                T.clear(gradients)
                multiply(v, do, gradients, transpose_B=True, whole_rows=not tile.shared_weights)
                for name, _ in rows.rows:
                    T.copy(buffers[name][batch, head, q0 : q0 + tile.q], row_tiles[row_variable(name)])
                if len(staged.tiles) > 0:
                    copy_staged(staged, buffers, batch, head, q0, kv0)
                maths.weigh(products, weights)
                outside = T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
                partial = either(visit.is_partial(q0), outside)
                where_partial(partial, bind(maths.mask, weights))
                load(weights_in, weights)
                accumulate(weights_in, do, dv_sums, whole_rows=not tile.shared_weights)
                for scattered, expr in summed.scattered:
                    maths.scatter(products, weights, gradients, scattered, expr, buffers[f"d_custom_{scattered.name}"])
                for number, (key_read, expr) in enumerate(summed.of_keys):
                    if factor_of(schedule, expr) is None:
                        maths.contribute(products, weights, gradients, expr, contribution)
                        sum_keys(
                            key_read, problem, contribution, key_sums[number], tile, buffers, number, place, kv0, 1.0
                        )
                for number, (_, expr) in enumerate(summed.diagonals):
                    if factor_of(schedule, expr) is None:
                        maths.contribute(products, weights, gradients, expr, contribution)
                        T.copy(contribution, shared_tile)
                        sum_diagonals(summed, shared_tile, tile, buffers, number, place, q0, kv0, sizes, 1.0)
                maths.differentiate(products, weights, gradients)
                where_partial(partial, bind(maths.mask, gradients))
                for number, (key_read, expr) in enumerate(summed.of_keys):
                    factor = factor_of(schedule, expr)
                    if factor is not None:
                        sum_keys(
                            key_read, problem, gradients, key_sums[number], tile, buffers, number, place, kv0, factor
                        )
                load(gradients_in, gradients)
                accumulate(gradients_in, q, dk_sums, whole_rows=not tile.shared_weights)
                if not in_products:
                    for number, (_, expr) in enumerate(summed.diagonals):
                        factor = factor_of(schedule, expr)
                        if factor is not None:
                            T.copy(gradients, shared_tile)
                            sum_diagonals(summed, shared_tile, tile, buffers, number, place, q0, kv0, sizes, factor)
                if with_dq:
                    gradients_out = gradients_in.in_shared_memory(problem)
                    if gradients_out is not gradients_in:
                        T.copy(gradients_in.whole, gradients_out.whole)
                    if in_products:
                        for number, (_, expr) in enumerate(summed.diagonals):
                            factor, source = factor_of(schedule, expr), gradients_out.whole
                            sum_diagonals(summed, source, tile, buffers, number, place, q0, kv0, sizes, factor)
                    dq = T.alloc_fragment([tile.q, dim], FLOAT)
                    T.clear(dq)
                    multiply(gradients_out, k, dq, transpose_A=True, whole_rows=False)
                    take_sums_for_granted(buffers, batch * problem.heads + head, q0 * dim, tile.q * dim)
                    for i, d in T.Parallel(tile.q, dim):
                        T.atomic_add(
                            buffers["workspace"][
                                batch * problem.heads + head, q0 * dim + workspace_offset(i, d, tile, dim, vectors)
                            ],
                            dq[i, d],
                        )
            for number, (key_read, _) in enumerate(summed.of_keys):
                if not shared_between_heads(key_read, problem):
                    T.copy(key_sums[number], buffers[f"key_sum{number}"][batch, kv_head, kv0 : kv0 + tile.kv])
            if schedule.scale != 1:
                for j, d in T.Parallel(tile.kv, dim):
                    dk[j, d] *= schedule.scale
            T.copy(dk, window(buffers["dk"], batch, kv_head, kv0, tile.kv, dim))
            T.copy(dv, window(buffers["dv"], batch, kv_head, kv0, tile.kv, dim_v))

    return build("backward", parameters, body)
