"""The forward pass on Hopper: one warp copies ahead, two or three warpgroups compute, products run while they do.

The algorithm and the arguments of forward.py, by hand: a block keeps its queries, and a producer warp streams keys and
values through stages of shared memory, with barriers in both directions. Each warpgroup has 64 queries. The scores of
a step are made together with the output of the step before, so that its row values and exponentials run while the
tensor cores do both. Order of a step: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608), algorithm 2.

Tile(persistent=True): as many blocks as the GPU runs at once, each of which walks over work items (items.py). The
copying warp goes on to the next item's tiles while the others end the present one: queries are handed back when their
last product is made, and the output leaves by a tile of its own, where shared memory has room, a warpgroup at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
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
from attention_engine.kernels.items import Deal, Items
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.staged import StagedReads
from attention_engine.kernels.tiles import KeyWalk, Visit, either
from attention_engine.kernels.warps import (
    COMPUTE,
    GROUP,
    LEAVE,
    ROWS_WHOLE,
    SHARED_BYTES,
    TURN,
    WARP,
    finish_before,
    registers,
)
from attention_engine.passes.by_hand import forward_fits
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import plan_tiles

SWIZZLED = 64  # columns of a 16-bit tile that lie together in shared memory: 128 bytes


@dataclass(frozen=True)
class Item:
    """A block of queries of one head and batch, from the query q0 on; what was done before it by the thread's block:
    items, and steps."""

    q0: Any
    head: Any
    batch: Any
    walk: KeyWalk
    steps: Any
    items_before: Any = 0
    steps_before: Any = 0

    def stage(self, step: Any, stages: int) -> tuple[Any, Any]:
        """Where a step's keys and values are, and the parity of their barriers."""
        count = self.steps_before + step
        return count % stages, (count // stages) % 2


@dataclass(frozen=True)
class Memory:
    """A block's tiles and barriers: `o` in shared memory, where it has room; `output` in registers."""

    q: Any
    k: Any
    v: Any
    o: Any
    weights: Any
    scores: Any
    other: Any
    output: Any
    rows: dict[Expr, Any]
    written: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


def output_fits(problem: Problem, tile: Tile) -> bool:
    """Has shared memory room for a tile of the output beside queries, keys and values?"""
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    return 2 * (tile.q * (dim + dim_v) + tile.stages * tile.kv * (dim + dim_v)) <= SHARED_BYTES


def forward_hopper(problem: Problem, schedule: ForwardSchedule, tile: Tile, places: int = 1) -> Any:
    """The PrimFunc of forward.py: (q, k, v, custom..., [tile_lists], o, rows...); places: of a persistent form."""
    assert forward_fits(problem, schedule), "default tiles ask first"
    sizes = Sizes()
    plan = plan_tiles(schedule.mask)
    parameters = forward_parameters(sizes, problem, plan, schedule, tile)
    dim, dim_v, dtype, stages = padded(problem.dim), padded(problem.dim_v), problem.dtype, tile.stages
    groups = tile.threads // GROUP
    roomy = tile.persistent and groups == 2 and dim_v <= 128  # then who copies may keep count of more
    producer_registers, consumer_registers = registers(tile.threads, 40 if roomy else 24)
    each_group, each_column = list(range(groups)), list(range(0, dim_v, SWIZZLED))
    in_turn = groups > 2  # measured: two find turns of their own, three need to be told
    warps = tile.threads // WARP
    blocks = T.ceildiv(sizes.q, tile.q)
    items = Items(problem, tile, sizes, plan.later_is_longer, places)
    own_output = tile.persistent and output_fits(problem, tile)
    through_queries = dim == dim_v and not own_output

    @T.macro
    def weigh(maths: TileMaths, visit: Visit) -> None:
        kv_tile = visit.tile
        kv0 = kv_tile * tile.kv
        maths.score(kv0)
        if schedule.fill is not None:
            where_partial(either(visit.is_partial(kv_tile), kv0 + tile.kv > sizes.kv), bind(maths.mask, kv0))
        maths.weigh(kv0)

    @T.macro
    def copy_item(buffers: Any, memory: Memory, item: Item) -> None:
        q0, kv_head, walk = item.q0, item.head // problem.group, item.walk
        if tile.persistent:
            T.barrier_wait(memory.q_empty, item.items_before % 2 ^ 1)
        T.tma_copy(window(buffers["q"], item.batch, item.head, q0, tile.q, dim), memory.q, barrier=memory.q_full)
        T.barrier_arrive(memory.q_full)
        for step in T.serial(item.steps):
            kv0 = walk.at(step).tile * tile.kv
            stage, turn = item.stage(step, stages)
            T.barrier_wait(memory.k_empty[stage], turn ^ 1)
            T.tma_copy(
                window(buffers["k"], item.batch, kv_head, kv0, tile.kv, dim), memory.k[stage, :, :],
                barrier=memory.k_full[stage],
            )  # fmt: skip
            T.barrier_arrive(memory.k_full[stage])
            T.barrier_wait(memory.v_empty[stage], turn ^ 1)
            T.tma_copy(
                window(buffers["v"], item.batch, kv_head, kv0, tile.kv, dim_v), memory.v[stage, :, :],
                barrier=memory.v_full[stage],
            )  # fmt: skip
            T.barrier_arrive(memory.v_full[stage])

    @T.macro
    def give_back(thread: Any, barriers: Any, stage: Any) -> None:
        if thread % WARP == 0:
            T.barrier_arrive(barriers[stage])

    @T.macro
    def take_first_turn(thread: Any) -> None:
        """The first group needs nobody's leave to start."""
        if thread < 2 * GROUP:
            T.named_barrier_arrive(TURN, 2 * GROUP)

    @T.macro
    def give_back_queries(thread: Any, memory: Memory, last: Any) -> None:
        """Nobody reads the queries any more after the last step's scores, unless the output leaves by their tile."""
        if tile.persistent and not through_queries:  # noqa: SIM102 - Python's condition, then the kernel's
            if T.And(thread % WARP == 0, last):
                T.barrier_arrive(memory.q_empty)

    @T.macro
    def store_output(buffers: Any, memory: Memory, item: Item, thread: Any) -> None:
        q0 = item.q0
        if own_output:
            T.tma_store_wait(0)  # has read the item before
            for group in each_group:
                if thread // GROUP == 1 + group:
                    T.sync_threads(LEAVE + group, GROUP)
            T.copy(memory.output, memory.o)
            T.fence_proxy_async()
            for group in each_group:
                if thread // GROUP == 1 + group:
                    T.sync_threads(LEAVE + group, GROUP)
                    first = group * 64
                    for at in each_column:
                        T.tma_copy(
                            memory.o[first : first + 64, at : at + SWIZZLED],
                            buffers["o"][item.batch, q0 + first : q0 + first + 64, item.head, at : at + SWIZZLED],
                            leader_scope_threads=GROUP,
                        )
        elif dim == dim_v:
            T.sync_threads(COMPUTE, tile.threads)  # nobody reads the queries any more
            T.copy(memory.output, memory.q)
            T.fence_proxy_async()
            T.sync_threads(COMPUTE, tile.threads)
            T.copy(memory.q, window(buffers["o"], item.batch, item.head, q0, tile.q, dim_v))
            if tile.persistent:
                T.sync_threads(COMPUTE, tile.threads)  # the copy has read
                give_back(thread, memory.q_empty, 0)
        else:
            T.copy(memory.output, window(buffers["o"], item.batch, item.head, q0, tile.q, dim_v))

    @T.macro
    def multiply_rows(output: Any, factors: Any) -> None:
        for i, d in T.Parallel(tile.q, dim_v):
            output[i, d] *= factors[i]

    @T.macro
    def rescale(output: Any, factors: Any) -> None:
        if tile.lazy_rescale:
            changed = T.alloc_var("bool")
            changed = False
            for i in T.Parallel(tile.q):
                changed = T.Or(changed, factors[i] != 1)
            if T.any_sync(changed) != 0:
                multiply_rows(output, factors)
        else:
            multiply_rows(output, factors)

    @T.macro
    def compute_item(buffers: Any, memory: Memory, item: Item) -> None:
        q, k, v, weights, scores, output = (
            memory.q, memory.k, memory.v, memory.weights, memory.scores, memory.output
        )  # fmt: skip
        walk, steps, q0, thread = item.walk, item.steps, item.q0, T.get_thread_binding()
        staged = StagedReads(of_pairs(schedule), problem, tile)  # of none: those biases run the twin
        T.fill(output, 0)
        for variable, value in schedule.initial:
            T.fill(memory.rows[variable], value)
        read, batch, head = reader(buffers), item.batch, item.head
        place = Place(batch, head, block_values(schedule.block, batch, head, read), read, problem.approximate)
        maths = TileMaths(
            schedule, tile, place, memory.rows, scores, memory.other, q0, sizes, staged
        )
        T.barrier_wait(memory.q_full, item.items_before % 2)
        if steps > 0:
            first, first_turn = item.stage(0, stages)
            first_visit = walk.at(0)
            T.barrier_wait(memory.k_full[first], first_turn)
            T.wgmma_gemm(q, k[first, :, :], scores, transpose_B=True, policy=ROWS_WHOLE, clear_accum=True)
            T.wait_wgmma(0)
            give_back(thread, memory.k_empty, first)
            give_back_queries(thread, memory, steps == 1)
            weigh(maths, first_visit)
            T.copy(scores, weights)
            if in_turn and not tile.persistent:
                take_first_turn(thread)
            for after in T.serial(steps - 1):
                step = after + 1
                visit = walk.at(step)  # a list is read here, while the products are made
                stage, turn = item.stage(step, stages)
                before, turn_before = item.stage(after, stages)
                T.barrier_wait(memory.k_full[stage], turn)
                if in_turn:
                    T.sync_threads(TURN + thread // GROUP - 1, 2 * GROUP)
                T.wgmma_gemm(q, k[stage, :, :], scores, transpose_B=True, policy=ROWS_WHOLE, clear_accum=True)
                T.barrier_wait(memory.v_full[before], turn_before)
                T.wgmma_gemm(weights, v[before, :, :], output, policy=ROWS_WHOLE)
                if in_turn:
                    T.named_barrier_arrive(TURN + thread // GROUP % groups, 2 * GROUP)
                T.wait_wgmma(1)  # the scores are there, the output on its way
                give_back(thread, memory.k_empty, stage)
                give_back_queries(thread, memory, step + 1 == steps)
                weigh(maths, visit)
                if in_turn:
                    finish_before(scores, tile.q * tile.kv // tile.threads, memory.v_full, before, turn_before)
                T.wait_wgmma(0)
                give_back(thread, memory.v_empty, before)
                if schedule.rescale is not None:
                    rescale(memory.output, memory.rows[schedule.rescale])
                T.copy(scores, weights)
            last, last_turn = item.stage(steps - 1, stages)
            T.barrier_wait(memory.v_full[last], last_turn)
            T.wgmma_gemm(weights, v[last, :, :], output, policy=ROWS_WHOLE)
            T.wait_wgmma(0)
            if tile.persistent:
                give_back(thread, memory.v_empty, last)
        else:
            give_back_queries(thread, memory, True)
        maths.finish(output, dim_v)
        store_output(buffers, memory, item, thread)
        for name, expr in schedule.rows:
            maths.write_row(memory.written, expr)
            T.copy(memory.written, buffers[f"row_{name}"][batch, head, q0 : q0 + tile.q])

    @T.macro
    def over_items(buffers: Any, place: Any, only: Item | None, act: Callable[[Item], None]) -> None:
        if only is not None:
            act(only)
        else:
            deal = Deal(items, place)
            items_before = T.alloc_var("int32", 0)
            steps_before = T.alloc_var("int32", 0)
            for turn in T.serial(deal.turns):
                section, pairs, position = deal.position(turn)
                if position < name_value(pairs * items.blocks):
                    block, head, batch = deal.item(section, pairs, position)
                    walk = KeyWalk(plan, sizes, tile, buffers, batch, head, block)
                    steps, done, steps_done = walk.count, items_before + 0, steps_before + 0
                    act(Item(name_value(block * tile.q), head, batch, walk, steps, done, steps_done))
                    items_before = done + 1
                    steps_before = steps_done + steps

    @T.macro
    def body(buffers: Any) -> None:
        grid = [items.grid] if tile.persistent else [blocks, problem.heads, sizes.batch]
        with T.Kernel(*grid, threads=GROUP + tile.threads) as place:
            q = named("q_tile", T.alloc_shared([tile.q, dim], dtype))
            k = named("k_tile", T.alloc_shared([stages, tile.kv, dim], dtype))
            v = named("v_tile", T.alloc_shared([stages, tile.kv, dim_v], dtype))
            o = named("o_tile", T.alloc_shared([tile.q, dim_v], dtype)) if own_output else None
            weights = T.alloc_fragment([tile.q, tile.kv], dtype)
            scores = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            other = T.alloc_fragment([tile.q, tile.kv], FLOAT) if needs_another(schedule) else None
            output = T.alloc_fragment([tile.q, dim_v], FLOAT)
            rows = {v: named(v.name, T.alloc_fragment([tile.q], FLOAT)) for v in row_variables(schedule)}
            written = T.alloc_fragment([tile.q], FLOAT) if len(schedule.rows) > 0 else None
            q_full = T.alloc_barrier(arrive_count=WARP)
            q_empty = T.alloc_barrier(arrive_count=warps) if tile.persistent else None
            k_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            k_empty = T.alloc_barrier(arrive_count=[warps] * stages)
            v_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            v_empty = T.alloc_barrier(arrive_count=[warps] * stages)
            memory = Memory(
                q, k, v, o, weights, scores, other, output, rows, written,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
            )  # fmt: skip
            only = None
            if not tile.persistent:
                turn_of_block, head, batch = place
                block = blocks - 1 - turn_of_block if plan.later_is_longer else turn_of_block
                walk = KeyWalk(plan, sizes, tile, buffers, batch, head, block)
                steps = walk.count
                only = Item(block * tile.q, head, batch, walk, steps)
            thread = T.get_thread_binding()
            if thread < GROUP:
                T.dec_max_nreg(producer_registers)
                if thread < WARP:
                    over_items(buffers, place, only, bind(copy_item, buffers, memory))
            else:
                T.inc_max_nreg(consumer_registers)
                if in_turn and tile.persistent:
                    take_first_turn(thread)
                over_items(buffers, place, only, bind(compute_item, buffers, memory))
                if tile.persistent or thread % GROUP == 0:
                    T.tma_store_wait(0)  # has read: the memory may go

    return build("forward", parameters, body)
