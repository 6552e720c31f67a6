"""The backward pass over keys on Hopper: one warp copies ahead, two warpgroups compute, products run while they do.

The algorithm and the arguments of backward.py, by hand: a block keeps its keys and values, and a producer warp streams
queries, gradients of the output and rows through two stages of shared memory, with barriers in both directions.
Products are issued without waiting, so that the exponentials of a step run while the tensor cores make its gradient of
the weights, and dQ is added to the workspace while they make dK.
Order of a step: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608), its section on the backward pass.

Tile(persistent=True), at head dims 128: as many blocks as the GPU runs at once walk over blocks of keys
(key_items.py), which hides their starts and ends. It is for few steps, each of which has slightly more to work out.

Three forms, by the registers that dK and dV take of a thread (passes/by_hand.py):
- each warpgroup has 64 keys, whose weights and gradients stay in registers as operands of dV and dK;
- the same where dK and dV leave room for one tile of pairs (head dims 192 and 128, or 128 and 256): weights are packed
  to 16 bits before their gradients are made, and both are handed to dV and dK through shared memory;
- the warpgroups share 64 keys, queries of pairs and head dims of dK and dV halved between them (tile.shared_weights).
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, topological
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.ir.program import Backward, row_variable
from attention_engine.kernels.backward import (
    NOTHING,
    PairMaths,
    backward_parameters,
    factor_of,
    keeps_products,
)
from attention_engine.kernels.barriers import arrive_when_read, finish_before
from attention_engine.kernels.common import (
    FLOAT,
    Packed,
    Place,
    Sizes,
    Stage,
    block_values,
    build,
    named,
    reader,
    where_partial,
    window,
)
from attention_engine.kernels.diagonals import SkewedSums, add_held, finish_sums, hold, start_sums, sum_diagonals
from attention_engine.kernels.items import AHEAD, GIVEN, KeyBlocks, Shares
from attention_engine.kernels.key_copies import Form, Memory, copy_item, copy_items, prepare_items
from attention_engine.kernels.key_items import (
    NO_MORE,
    NOTES,
    NUMBERS,
    STEPS,
    KeyItem,
    Notes,
    handed_walk,
    leave_by_groups,
    of_keys,
)
from attention_engine.kernels.key_sums import shared_between_heads, sum_keys
from attention_engine.kernels.rows import place_in_workspace, take_sums_for_granted, transposes_dq
from attention_engine.kernels.spare_warps import (
    Rows,
    SpareWarps,
    prepare_together,
    room_for_zeroes,
    start_spare,
    tell_when_added,
)
from attention_engine.kernels.splice import hold_value, take_for_granted
from attention_engine.kernels.tiles import QueryWalk, either
from attention_engine.kernels.unseen import clear_keys
from attention_engine.kernels.warps import (
    COLUMNS_SHARED,
    COMPUTE,
    GROUP,
    ROWS_WHOLE,
    SPARE,
    TMA_FLOATS,
    WARP,
    registers,
)
from attention_engine.passes.by_hand import (
    backward_fits,
    backward_persists,
    makes_delta,
    pairs_in_turn,
    rows_of_delta,
    starts_longest_first,
    vanishes_with_weights,
)
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.tile_plan import plan_tiles


def backward_hopper(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, vectors: bool, with_dq: bool,
    summed: CustomSums = NOTHING, places: int = 0,
) -> Any:  # fmt: skip
    """The PrimFunc of backward.py, with dk, dv, [pairs_of_a_unit], [units_ahead, [units_given, o], [dq]], [workspace,
    counters], sums too; places: how many persistent blocks run at once, which store dQ but for the last units."""
    assert backward_fits(problem, schedule, summed), "default tiles ask first"
    sizes = Sizes()
    plan = plan_tiles(schedule.mask)
    blocks = KeyBlocks(problem, tile, sizes, starts_longest_first(problem, tile, plan), places)
    persistent = places > 0
    assert not persistent or (with_dq and backward_persists(problem, tile)), "default tiles ask first"
    of_delta = rows_of_delta(rows)[0] if with_dq and makes_delta(problem, rows, schedule, summed) else None
    order = blocks.parameters | ({AHEAD: blocks.ahead} if with_dq else {})
    if of_delta is not None:
        order |= {GIVEN: blocks.given, "o": sizes.tensor(sizes.q, problem.heads, problem.dim_v, problem)}
    if persistent:
        order["dq"] = sizes.tensor(sizes.q, problem.heads, problem.dim, problem)
    parameters = backward_parameters(sizes, problem, plan, rows, tile, with_dq, summed, order)
    dim, dim_v, dtype, stages = padded(problem.dim), padded(problem.dim_v), problem.dtype, tile.stages
    transposed = transposes_dq(tile, dim)
    shares = with_dq or len(summed.diagonals) > 0  # gradients of products with all threads
    dq_policy = ROWS_WHOLE if tile.q == tile.threads // 2 else COLUMNS_SHARED
    policy = COLUMNS_SHARED if tile.shared_weights else ROWS_WHOLE
    in_turn = pairs_in_turn(problem, tile)
    in_memory = tile.shared_weights or in_turn  # the operands of dV and dK
    factors = [factor_of(schedule, expr) for _, expr in summed.diagonals]
    skews = tile.skewed_sums and len(summed.diagonals) > 0
    masks_gradients = not in_turn or not vanishes_with_weights(schedule)
    seen = key_condition(schedule.mask)
    only_head = problem.group == 1  # then what a head's block values are is known before the first step
    dq_shape = (dim, tile.q) if transposed else (tile.q, dim)
    producer_registers, consumer_registers = registers(tile.threads, 40 if persistent and plan.mapped else 24)
    names = [n for n, _ in rows.rows]
    row_is_held = len(names) > 0  # over all steps; without rows ptxas would spill four bytes for it
    row_length = -(-tile.q // TMA_FLOATS) * TMA_FLOATS
    wanted = topological(schedule.weights) if schedule.mask is None else topological(schedule.weights, schedule.mask)
    early = [n for n in names if row_variable(n) in wanted]  # with the queries; the others with do, which comes later
    rows_too = early, [n for n in names if n not in early]
    form = Form(problem, tile, sizes, plan, blocks, schedule.scale, *rows_too, with_dq, of_delta)

    @T.macro
    def compute_item(buffers: Any, memory: Memory, item: KeyItem, walk: QueryWalk) -> None:
        """An item's dK and dV, in registers, and what it adds to dQ and to gradients of custom inputs."""
        k, v, shared, dk, dv, dq = memory.k, memory.v, memory.shared, memory.dk, memory.dv, memory.dq
        products, weights, gradients = memory.products, memory.weights, memory.gradients
        weights_in, gradients_in = memory.weights_in, memory.gradients_in
        weights_out, gradients_out = memory.weights_out, memory.gradients_out
        q_full, q_empty, do_full, do_empty = memory.q_full, memory.q_empty, memory.do_full, memory.do_empty
        key_sums, skewed = memory.key_sums, memory.skewed
        batch, kv_head, thread, kv0 = item.batch, item.kv_head, T.get_thread_binding(), item.block * tile.kv
        T.fill(dk, 0)
        T.fill(dv, 0)
        for total in key_sums:
            T.fill(total, 0)
        if skewed is not None:
            start_sums(skewed)
        T.warpgroup_fence_operand(dk, num_regs=tile.kv * dim // tile.threads)
        T.warpgroup_fence_operand(dv, num_regs=tile.kv * dim_v // tile.threads)
        own_read = reader(buffers, sizes.inside(problem, batch, kv_head))
        of_only_head = block_values(schedule.block, batch, kv_head, own_read) if only_head else {}
        first_row = batch * problem.heads + kv_head * problem.group
        first_row = hold_value(first_row) if with_dq and row_is_held else first_row
        T.barrier_wait(memory.k_full, item.items_before % 2)
        T.barrier_wait(memory.v_full, item.items_before % 2)
        unseen = (k, v) if not masks_gradients else (k,) if with_dq else ()
        clear_keys(seen, Place(batch, kv_head, {}, own_read), kv0, unseen, tile.threads)
        for step in T.serial(item.steps):
            stage, turn = item.stage(step, stages)
            visit = walk.at(step) if memory.entries is None else None
            T.barrier_wait(q_full[stage], turn)
            T.wgmma_gemm(k, shared["q"][stage, :, :], products, transpose_B=True, policy=policy, clear_accum=True)
            if memory.entries is not None:
                visit = walk.at(step)
            head = visit.head
            q0 = visit.start
            if with_dq:
                row = first_row + (head - kv_head * problem.group)
                row = row if row_is_held else hold_value(row)
                take_sums_for_granted(buffers, row, q0 * dim, tile.q * dim)
            read = reader(buffers, sizes.inside(problem, batch, head))
            block_of_head = of_only_head if only_head else block_values(schedule.block, batch, head, read)
            place = Place(batch, head, block_of_head, read, problem.approximate)
            staged: dict[Expr, Any] = {row_variable(n): Stage(shared[n], stage) for n in names}
            maths = PairMaths(schedule, (tile.kv, tile.q), place, staged, sizes, q0, kv0, transposed=True)
            corners = (q0, kv0), (q0 + tile.q - 1, kv0 + tile.kv - 1)
            outside = T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
            if in_turn:
                T.wait_wgmma(0)
                maths.weigh(products, weights)
                partial = either(visit.is_partial(q0), outside)
                where_partial(partial, bind(maths.mask, weights))
                T.copy(weights, weights_in)
            T.barrier_wait(do_full[stage], turn)
            T.wgmma_gemm(v, shared["do"][stage, :, :], gradients, transpose_B=True, policy=policy, clear_accum=True)
            if in_turn:
                T.copy(weights_in, weights_out[step % 2, :, :])
            else:
                T.wait_wgmma(1)  # the products are there, the gradients of the weights on their way
                maths.weigh(products, weights)
                finish_before(weights, tile.kv * tile.q // tile.threads, q_full, stage, turn)
            T.wait_wgmma(0)
            maths.differentiate(products, Packed(weights_in) if in_turn else weights, gradients)
            cleared = (gradients,) if in_turn else (weights, gradients)
            if schedule.mask is not None and masks_gradients:
                where_partial(visit.is_partial(q0), bind(maths.drop, *cleared))
            if masks_gradients:
                where_partial(outside, bind(maths.cut, *cleared))
            if not in_turn:
                T.copy(weights, weights_out[step % 2, :, :] if in_memory else weights_in)
            for number, (key_read, expr) in enumerate(summed.of_keys):
                factor = factor_of(schedule, expr)
                sum_keys(
                    key_read, problem, gradients, key_sums[number], tile, buffers, number, place, kv0, factor
                )
            if skewed is not None:
                hold(skewed, gradients, place, corners)
            if in_memory:
                T.copy(gradients, gradients_out[step % 2, :, :])
            else:
                T.copy(gradients, gradients_in)
                if shares:
                    T.copy(gradients_in, gradients_out[step % 2, :, :])
            if shares or in_memory:
                T.fence_proxy_async()
                T.sync_threads(COMPUTE, tile.threads)
            T.wgmma_gemm(
                weights_out[step % 2, :, :] if in_memory else weights_in,
                shared["do"][stage, :, :], dv, policy=policy,
            )  # fmt: skip
            if with_dq:
                if transposed:
                    T.wgmma_gemm(
                        k, gradients_out[step % 2, :, :], dq, transpose_A=True, policy=ROWS_WHOLE,
                        clear_accum=True,
                    )  # fmt: skip
                else:
                    T.wgmma_gemm(
                        gradients_out[step % 2, :, :], k, dq, transpose_A=True, policy=dq_policy,
                        clear_accum=True,
                    )  # fmt: skip
            T.wgmma_gemm(
                gradients_out[step % 2, :, :] if in_memory else gradients_in,
                shared["q"][stage, :, :], dk, policy=policy,
            )  # fmt: skip
            if skewed is not None:
                add_held(skewed, buffers, factors, place, corners, sizes)
            else:
                for number, factor in enumerate(factors):
                    source = Stage(gradients_out, step % 2)
                    sum_diagonals(summed, source, tile, buffers, number, place, q0, kv0, sizes, factor)
            T.wait_wgmma(1)  # all but dK
            if thread % WARP == 0:
                T.barrier_arrive(do_empty[stage])
            if with_dq:
                for i, j in T.Parallel(dq_shape[0], dq_shape[1]):
                    query, d = (j, i) if transposed else (i, j)
                    T.atomic_add(
                        buffers["workspace"][
                            row, q0 * dim + place_in_workspace(query, d, tile, dim, vectors),
                        ],
                        dq[i, j],
                    )  # fmt: skip
            T.wait_wgmma(0)
            if thread % WARP == 0:
                T.barrier_arrive(q_empty[stage])
        if skewed is not None:
            at = Place(batch, kv_head, {}, reader(buffers))  # of several heads a group, steps have added
            finish_sums(skewed, buffers, factors, at, kv0, sizes)
        for number, (key_read, _) in enumerate(summed.of_keys):
            if not shared_between_heads(key_read, problem):
                T.copy(key_sums[number], buffers[f"key_sum{number}"][batch, kv_head, kv0 : kv0 + tile.kv])
        if schedule.scale != 1:
            for j, d in T.Parallel(tile.kv, dim):
                dk[j, d] *= schedule.scale

    @T.macro
    def store(buffers: Any, memory: Memory, item: KeyItem) -> None:
        """dK and dV leave by the tiles of keys and values."""
        k, v, batch, kv_head, thread = memory.k, memory.v, item.batch, item.kv_head, T.get_thread_binding()
        kv0 = item.block * tile.kv
        T.sync_threads(COMPUTE, tile.threads)  # nobody reads k and v any more, nor adds to dQ
        if with_dq and thread == GROUP:
            T.barrier_arrive(memory.added[item.items_before % NOTES])
        T.copy(memory.dv, v)
        T.copy(memory.dk, k)
        T.fence_proxy_async()
        if persistent:
            leave_by_groups(v, buffers["dv"], item, tile)
            leave_by_groups(k, buffers["dk"], item, tile)
            arrive_when_read(thread, [(memory.v_empty, 0), (memory.k_empty, 0)])
        else:
            T.sync_threads(COMPUTE, tile.threads)
            T.copy(v, window(buffers["dv"], batch, kv_head, kv0, tile.kv, dim_v))
            T.copy(k, window(buffers["dk"], batch, kv_head, kv0, tile.kv, dim))
            if thread % GROUP == 0:
                T.tma_store_wait(0)  # has read: the memory may go

    @T.macro
    def compute_items(buffers: Any, memory: Memory) -> None:
        """Computes a persistent block's items."""
        numbers = T.alloc_local([NUMBERS], "int32")
        items_before = T.alloc_var("int32", 0)
        steps_before = T.alloc_var("int32", 0)
        memory.notes.take(numbers, items_before)
        while numbers[STEPS] != NO_MORE:
            block, kv_head, batch, first, steps = of_keys(numbers)
            done, steps_done = items_before + 0, steps_before + 0
            items_before = done + 1
            steps_before = steps_done + steps
            for index, length in ((batch, sizes.batch), (kv_head, problem.kv_heads), (block, blocks.blocks)):
                take_for_granted(T.And(index >= 0, index < length))
            take_for_granted(first >= 0)
            item = KeyItem(None, (), block, kv_head, batch, steps, done, steps_done)
            handed = handed_walk(item, first, memory.entries, stages)
            walk = QueryWalk(plan, problem, sizes, tile, buffers, batch, kv_head, block, handed)
            compute_item(buffers, memory, item, walk)
            store(buffers, memory, item)
            memory.notes.take(numbers, items_before)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(*blocks.grid, threads=GROUP + tile.threads) as index:
            T.pdl_sync()  # for the kernel before, whose rows and zeroes these are
            T.pdl_trigger()
            k = named("k_tile", T.alloc_shared([tile.kv, dim], dtype))
            v = named("v_tile", T.alloc_shared([tile.kv, dim_v], dtype))
            shared = {
                "q": named("q_tile", T.alloc_shared([stages, tile.q, dim], dtype)),
                "do": named("do_tile", T.alloc_shared([stages, tile.q, dim_v], dtype)),
            }
            for n in names:
                shared[n] = named(f"{n}_tile", T.alloc_shared([stages, row_length], FLOAT))
            pairs_out = [2, tile.kv, tile.q]
            gradients_out = named("gradients_out", T.alloc_shared(pairs_out, dtype)) if shares or in_memory else None
            weights_out = named("weights_out", T.alloc_shared(pairs_out, dtype)) if in_memory else None
            products = T.alloc_fragment([tile.kv, tile.q], FLOAT)
            weights = T.alloc_fragment([tile.kv, tile.q], FLOAT) if keeps_products(schedule) else products
            gradients = T.alloc_fragment([tile.kv, tile.q], FLOAT)
            weights_in = None if tile.shared_weights else T.alloc_fragment([tile.kv, tile.q], dtype)
            gradients_in = None if in_memory else T.alloc_fragment([tile.kv, tile.q], dtype)
            dk = T.alloc_fragment([tile.kv, dim], FLOAT)
            dv = T.alloc_fragment([tile.kv, dim_v], FLOAT)
            dq = T.alloc_fragment(dq_shape, FLOAT) if with_dq else None
            skewed = SkewedSums(summed, tile, problem.group, dtype) if skews else None
            key_sums = [T.alloc_fragment([tile.kv], FLOAT) for _ in summed.of_keys]
            leaders = tile.threads // GROUP * WARP  # those by whose copies dK and dV leave
            k_full, v_full = T.alloc_barrier(arrive_count=WARP), T.alloc_barrier(arrive_count=WARP)
            k_empty = T.alloc_barrier(arrive_count=leaders) if persistent else None
            v_empty = T.alloc_barrier(arrive_count=leaders) if persistent else None
            q_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            q_empty = T.alloc_barrier(arrive_count=[tile.threads // WARP] * stages)
            do_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            do_empty = T.alloc_barrier(arrive_count=[tile.threads // WARP] * stages)
            added = T.alloc_barrier(arrive_count=[1] * (NOTES if persistent else 1)) if with_dq else None
            zeroes = room_for_zeroes(problem) if with_dq else None
            shares_at = [T.alloc_shared([2], "int32") for _ in SPARE]
            rows_of_spare = Rows.allocate(problem, producer_registers) if persistent or of_delta is not None else None
            entries = named("entries", T.alloc_shared([stages], "int32")) if persistent and plan.mapped else None
            memory = Memory(
                k, v, shared, gradients_out, weights_out, products, weights, gradients, weights_in, gradients_in, dk,
                dv, dq, skewed, key_sums, k_full, v_full, k_empty, v_empty, q_full, q_empty, do_full, do_empty, added,
                zeroes, shares_at, rows_of_spare, entries, Notes(tile) if persistent else None,
            )  # fmt: skip
            item, walk, position = None, None, None
            if not persistent:
                block, kv_head, batch = blocks.place(index)
                unit, position = blocks.position(index)
                walk = QueryWalk(plan, problem, sizes, tile, buffers, batch, kv_head, block)
                item = KeyItem(unit, (), block, kv_head, batch, walk.count)
            thread = T.get_thread_binding()
            if thread < GROUP:
                T.dec_max_nreg(producer_registers)
                if thread < WARP:
                    if persistent:
                        copy_items(form, buffers, memory)
                    else:
                        copy_item(form, buffers, memory, item, walk)
                else:
                    if with_dq:
                        start_spare(zeroes, rows_of_spare)
                    if persistent:
                        prepare_items(form, buffers, memory)
                    if with_dq and not persistent:
                        of_blocks = Shares.of(blocks, tile, sizes.q)
                        own = of_blocks.first(position), zeroes, shares_at, rows_of_spare, of_delta
                        work = SpareWarps(problem, tile, of_blocks, item.unit, *own)
                        prepare_together(work, buffers)
                        tell_when_added(work, buffers, added, 0, 0)
            else:
                T.inc_max_nreg(consumer_registers)
                if persistent:
                    compute_items(buffers, memory)
                else:
                    compute_item(buffers, memory, item, walk)
                    store(buffers, memory, item)

    return build("backward", parameters, body)
