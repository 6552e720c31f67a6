"""The forward pass on Hopper: one warp copies ahead, two or three warpgroups compute, products run while they do.

The algorithm and the arguments of forward.py, by hand: a block keeps its queries, and a producer warp streams keys and
values through stages of shared memory, with barriers in both directions. Each warpgroup has 64 queries. The scores of
a step are made together with the output of the step before, so that its row values and exponentials run while the
tensor cores do both. Order of a step: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608), algorithm 2.
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.kernels.common import (
    FLOAT,
    Place,
    Sizes,
    block_values,
    build,
    named,
    reader,
    where_partial,
    window,
)
from attention_engine.kernels.forward import TileMaths, forward_parameters, needs_another, of_pairs, row_variables
from attention_engine.kernels.staged import StagedReads
from attention_engine.kernels.tiles import KeyWalk, either
from attention_engine.kernels.warps import COMPUTE, GROUP, ROWS_WHOLE, TURN, WARP, finish_before, registers
from attention_engine.passes.by_hand import forward_fits
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import plan_tiles


def forward_hopper(problem: Problem, schedule: ForwardSchedule, tile: Tile) -> Any:
    """The PrimFunc of forward.py: (q, k, v, custom..., [tile_lists], o, rows...)."""
    assert forward_fits(problem, schedule), "default tiles ask first"
    sizes = Sizes()
    plan = plan_tiles(schedule.mask)
    parameters = forward_parameters(sizes, problem, plan, schedule, tile)
    dim, dim_v, dtype, stages = padded(problem.dim), padded(problem.dim_v), problem.dtype, tile.stages
    later_is_longer = any(b.q > 0 and b.kv < 0 for b in plan.bounds.bounds)  # then blocks start with the last queries
    producer_registers, consumer_registers = registers(tile.threads)
    groups = tile.threads // GROUP
    in_turn = groups > 2  # measured: two find turns of their own, three need to be told

    @T.macro
    def weigh(maths: TileMaths, walk: KeyWalk, step: Any) -> None:
        kv_tile = walk.tile(step)
        kv0 = kv_tile * tile.kv
        maths.score(kv0)
        if schedule.fill is not None:
            where_partial(either(walk.is_partial(step, kv_tile), kv0 + tile.kv > sizes.kv), bind(maths.mask, kv0))
        maths.weigh(kv0)

    @T.macro
    def body(buffers: Any) -> None:
        blocks = T.ceildiv(sizes.q, tile.q)
        with T.Kernel(blocks, problem.heads, sizes.batch, threads=GROUP + tile.threads) as (turn_of_block, head, batch):
            q = named("q_tile", T.alloc_shared([tile.q, dim], dtype))
            k = named("k_tile", T.alloc_shared([stages, tile.kv, dim], dtype))
            v = named("v_tile", T.alloc_shared([stages, tile.kv, dim_v], dtype))
            weights = T.alloc_fragment([tile.q, tile.kv], dtype)
            scores = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            other = T.alloc_fragment([tile.q, tile.kv], FLOAT) if needs_another(schedule) else None
            output = T.alloc_fragment([tile.q, dim_v], FLOAT)
            rows = {v: named(v.name, T.alloc_fragment([tile.q], FLOAT)) for v in row_variables(schedule)}
            written = T.alloc_fragment([tile.q], FLOAT) if len(schedule.rows) > 0 else None
            q_full = T.alloc_barrier(arrive_count=WARP)
            k_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            k_empty = T.alloc_barrier(arrive_count=[tile.threads // WARP] * stages)
            v_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            v_empty = T.alloc_barrier(arrive_count=[tile.threads // WARP] * stages)
            block = blocks - 1 - turn_of_block if later_is_longer else turn_of_block
            q0 = block * tile.q
            kv_head = head // problem.group
            walk = KeyWalk(plan, sizes, tile, buffers, batch, head, block)
            steps = walk.count
            thread = T.get_thread_binding()
            if thread < GROUP:
                T.dec_max_nreg(producer_registers)
                if thread < WARP:
                    T.tma_copy(window(buffers["q"], batch, head, q0, tile.q, dim), q, barrier=q_full)
                    T.barrier_arrive(q_full)
                    for step in T.serial(steps):
                        kv0 = walk.tile(step) * tile.kv
                        stage = step % stages
                        turn = (step // stages) % 2
                        T.barrier_wait(k_empty[stage], turn ^ 1)
                        T.tma_copy(
                            window(buffers["k"], batch, kv_head, kv0, tile.kv, dim), k[stage, :, :],
                            barrier=k_full[stage],
                        )  # fmt: skip
                        T.barrier_arrive(k_full[stage])
                        T.barrier_wait(v_empty[stage], turn ^ 1)
                        T.tma_copy(
                            window(buffers["v"], batch, kv_head, kv0, tile.kv, dim_v), v[stage, :, :],
                            barrier=v_full[stage],
                        )  # fmt: skip
                        T.barrier_arrive(v_full[stage])
            else:
                T.inc_max_nreg(consumer_registers)
                staged = StagedReads(of_pairs(schedule), problem, tile)  # of none: those biases run the twin
                T.fill(output, 0)
                for variable, value in schedule.initial:
                    T.fill(rows[variable], value)
                read = reader(buffers)
                place = Place(batch, head, block_values(schedule.block, batch, head, read), read, problem.approximate)
                maths = TileMaths(schedule, tile, place, rows, scores, other, q0, sizes, staged)
                T.barrier_wait(q_full, 0)
                if steps > 0:
                    T.barrier_wait(k_full[0], 0)
                    T.wgmma_gemm(q, k[0, :, :], scores, transpose_B=True, policy=ROWS_WHOLE, clear_accum=True)
                    T.wait_wgmma(0)
                    if thread % WARP == 0:
                        T.barrier_arrive(k_empty[0])
                    weigh(maths, walk, 0)
                    T.copy(scores, weights)
                    if in_turn and thread < 2 * GROUP:
                        T.named_barrier_arrive(TURN, 2 * GROUP)
                    for after in T.serial(steps - 1):
                        step = after + 1
                        stage = step % stages
                        before = after % stages
                        T.barrier_wait(k_full[stage], (step // stages) % 2)
                        if in_turn:
                            T.sync_threads(TURN + thread // GROUP - 1, 2 * GROUP)
                        T.wgmma_gemm(q, k[stage, :, :], scores, transpose_B=True, policy=ROWS_WHOLE, clear_accum=True)
                        T.barrier_wait(v_full[before], (after // stages) % 2)
                        T.wgmma_gemm(weights, v[before, :, :], output, policy=ROWS_WHOLE)
                        if in_turn:
                            T.named_barrier_arrive(TURN + thread // GROUP % groups, 2 * GROUP)
                        T.wait_wgmma(1)  # the scores are there, the output on its way
                        if thread % WARP == 0:
                            T.barrier_arrive(k_empty[stage])
                        weigh(maths, walk, step)
                        if in_turn:
                            each = tile.q * tile.kv // tile.threads
                            finish_before(scores, each, v_full, before, (after // stages) % 2)
                        T.wait_wgmma(0)
                        if thread % WARP == 0:
                            T.barrier_arrive(v_empty[before])
                        if schedule.rescale is not None:
                            for i, d in T.Parallel(tile.q, dim_v):
                                output[i, d] *= rows[schedule.rescale][i]
                        T.copy(scores, weights)
                    last = (steps - 1) % stages
                    T.barrier_wait(v_full[last], ((steps - 1) // stages) % 2)
                    T.wgmma_gemm(weights, v[last, :, :], output, policy=ROWS_WHOLE)
                    T.wait_wgmma(0)
                maths.finish(output, dim_v)
                if dim == dim_v:
                    T.sync_threads(COMPUTE, tile.threads)  # nobody reads the queries any more
                    T.copy(output, q)
                    T.fence_proxy_async()
                    T.sync_threads(COMPUTE, tile.threads)
                    T.copy(q, window(buffers["o"], batch, head, q0, tile.q, dim_v))
                else:
                    T.copy(output, window(buffers["o"], batch, head, q0, tile.q, dim_v))
                for name, expr in schedule.rows:
                    maths.write_row(written, expr)
                    T.copy(written, buffers[f"row_{name}"][batch, head, q0 : q0 + tile.q])
                if thread % GROUP == 0:
                    T.tma_store_wait(0)  # has read: the memory may go

    return build("forward", parameters, body)
