"""The forward pass on Hopper: one warp copies ahead, two or three warpgroups compute, products run while they do.

The algorithm and the arguments of forward.py, by hand: a block keeps its queries, and a producer warp streams keys and
values through stages of shared memory, with barriers in both directions. Each warpgroup has 64 queries. The scores of
a step are made together with the output of the step before, so that its row values and exponentials run while the
tensor cores do both. Order of a step: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608), algorithm 2.

Two groups that start together stay together, and then each unit idles while both wait for another; so they are parted.
Where products bound a step, groups issue them in turns. Two wait for the output of the step before when they have their
row maxima, so that the output is multiplied by its rows' factors while exponentials are made; three, and two whose
factors are made of weights, when they have those. Elsewhere the second of two starts when the first has weights. Sums
of weights stay in parts, one for each thread of a row: joined at each step, they keep ptxas from setting
multiplications between exponentials.

Tile(persistent=True): as many blocks as the GPU runs at once, each of which walks over work items (items.py). The
copying warp goes on to the next item's tiles while the others end the present one, and tells them by shared memory
which item is next. The next item's first scores are made behind the last output, which leaves a warpgroup at a time
(query_tiles.py). Where queries come ahead, a warp of its own works out which item is next and brings its queries.

Where a score is its product and other terms (ALiBi, a table of relative distances), the tile starts with those, written
while a group waits for its turn, and products add to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, topological
from attention_engine.ir.key_condition import key_condition
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
from attention_engine.kernels.forward import (
    TileMaths,
    forward_parameters,
    needs_another,
    of_pairs,
    rescale,
    row_variables,
    sums_in_parts,
)
from attention_engine.kernels.items import Deal, Item, Items, at_least_one
from attention_engine.kernels.query_tiles import BATCH, BLOCK, HEAD, NO_MORE, NUMBERS, STEPS, QueryTiles
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.staged import StagedReads
from attention_engine.kernels.tiles import HandedList, KeyWalk, Visit, either
from attention_engine.kernels.turns import Turns
from attention_engine.kernels.unseen import clear_step
from attention_engine.kernels.warps import (
    GROUP,
    ROWS_WHOLE,
    WARP,
    finish_before,
    give_back,
    keeps_queries_ahead,
    registers,
)
from attention_engine.passes.by_hand import forward_fits, products_take_turns
from attention_engine.passes.row_terms import reads_places_alone, terms_beside_product
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import plan_tiles


@dataclass(frozen=True)
class Memory:
    """A block's tiles and barriers."""

    queries: QueryTiles
    k: Any
    v: Any
    weights: Any
    scores: Any
    other: Any
    output: Any
    rows: dict[Expr, Any]
    parts: dict[Expr, Any]
    written: Any
    entries: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


def forward_hopper(problem: Problem, schedule: ForwardSchedule, tile: Tile, places: int = 1) -> Any:
    """The PrimFunc of forward.py: (q, k, v, custom..., [tile_lists], o, rows...); places: of a persistent form."""
    assert forward_fits(problem, schedule), "default tiles ask first"
    sizes = Sizes()
    plan = plan_tiles(schedule.mask)
    parameters = forward_parameters(sizes, problem, plan, schedule, tile)
    dim, dim_v, dtype, stages = padded(problem.dim), padded(problem.dim_v), problem.dtype, tile.stages
    groups = tile.threads // GROUP
    producer_registers, consumer_registers = registers(tile.threads)
    in_turn = groups > 2 or products_take_turns(schedule)
    turns = Turns(groups, in_turn)
    early = in_turn and groups == 2 and (schedule.rescale is None or schedule.rescales_early)  # it waits early
    warps = tile.threads // WARP
    blocks, seen = T.ceildiv(sizes.q, tile.q), key_condition(schedule.mask)
    items = Items(problem, tile, sizes, plan.later_is_longer, places)
    queries_ahead = tile.queries_ahead and keeps_queries_ahead(problem, tile)
    added = terms_beside_product(schedule.score)
    in_place = added is not None and reads_places_alone(added)
    starts_ahead = added is not None and (in_place or not plan.mapped)  # a list's next tile isn't known so early
    by_index = starts_ahead and not in_place
    of_scores = topological(schedule.score, *((schedule.ends.below, schedule.ends.above) if schedule.ends else ()))
    of_start = tuple((v, e) for v, e in schedule.block if v in of_scores)


    @T.macro
    def nothing() -> None: ...

    @T.macro
    def weigh(maths: TileMaths, visit: Visit, before_weights: Callable[[], None] | None = None) -> None:
        kv0 = visit.start
        if not starts_ahead:
            maths.score(kv0)
        if schedule.fill is not None:
            where_partial(either(visit.is_partial(kv0), kv0 + tile.kv > sizes.kv), bind(maths.mask, kv0))
        maths.weigh(kv0, before_weights)

    def maths_of(buffers: Any, memory: Memory, item: Item, block: tuple[tuple[Expr, Expr], ...]) -> TileMaths:
        """The maths of an item's tiles, with these of its block's values.

        What tiles start with is read without guards. A mask keeps them: without, ptxas spills in its few tiles.
        """
        known = sizes.inside(problem, item.batch, item.head) if by_index else ()
        for index, length in known:
            take_for_granted(T.And(index >= 0, index < length))
        read = reader(buffers, known)
        values = block_values(block, item.batch, item.head, read)
        place = Place(item.batch, item.head, values, read, problem.approximate)
        staged = StagedReads(of_pairs(schedule), problem, tile)  # of none: those biases run the twin
        return TileMaths(
            schedule, tile, place, memory.rows, memory.parts, memory.scores, memory.other, item.q0, sizes, staged
        )

    @T.macro
    def start_tile(maths: TileMaths, walk: KeyWalk | None, step: Any) -> None:
        """What a step's products add to, before its group waits for its turn: then it issues them at once. Past the
        last step that is nobody's: the first tile's, which is far from the diagonal as a rule and so made soonest."""
        maths.start_scores(walk.at(T.if_then_else(step < walk.count, step, 0)).start if by_index else 0)
        T.warpgroup_fence_operand(maths.scores, num_regs=tile.q * tile.kv // tile.threads)

    @T.macro
    def copy_keys(buffers: Any, memory: Memory, item: Item, walk: KeyWalk) -> None:
        kv_head = item.head // problem.group
        for step in T.unroll(item.steps, unroll_factor=1):  # four steps at once would spill
            visit = walk.at(step)
            kv0 = T.if_then_else(walk.count > 0, visit.start, sizes.kv)  # where no key is kept: zeros, no NaN
            stage, turn = item.stage(step, stages)
            T.barrier_wait(memory.k_empty[stage], turn ^ 1)
            if plan.mapped:  # noqa: SIM102 - Python's condition, then the kernel's
                if T.get_thread_binding() == 0:
                    memory.entries[stage] = visit.entry
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
    def take_output(memory: Memory, thread: Any, step: Any) -> None:
        """Waits for the output of a step, and brings it to what rows hold by now."""
        T.wait_wgmma(0)
        give_back(thread, memory.v_empty, step)
        if schedule.rescale is not None:
            rescale(memory.output, memory.rows[schedule.rescale], tile, dim_v)

    @T.macro
    def until_output(memory: Memory, thread: Any, step: Any, turn: Any) -> None:
        """The same, where values came in phase `turn`; what works on scores comes before."""
        finish_before(memory.scores, tile.q * tile.kv // tile.threads, memory.v_full, step, turn)
        take_output(memory, thread, step)

    @T.macro
    def start_scores(buffers: Any, memory: Memory, item: Item) -> None:
        """The products of an item's first step, on their way; of no item they are anything, and nobody's."""
        stage, turn = item.stage(0, stages)
        if starts_ahead:
            walk = KeyWalk(plan, sizes, tile, buffers, item.batch, item.head, item.block) if by_index else None
            start_tile(maths_of(buffers, memory, item, of_start), walk, 0)
        if item.steps > 0:
            T.barrier_wait(memory.k_full[stage], turn)
        turns.start_apart(T.get_thread_binding(), item.items_before)
        T.wgmma_gemm(
            memory.queries.tile_of(item), memory.k[stage, :, :], memory.scores, transpose_B=True, policy=ROWS_WHOLE,
            clear_accum=not starts_ahead,
        )  # fmt: skip

    @T.macro
    def compute_item(buffers: Any, memory: Memory, item: Item, start_next: Callable[[], None]) -> None:
        """From the item's first scores, which are on their way, to its output."""
        queries, k, v, weights, scores, output = (
            memory.queries, memory.k, memory.v, memory.weights, memory.scores, memory.output
        )  # fmt: skip
        steps, q0, thread, batch, head = item.steps, item.q0, T.get_thread_binding(), item.batch, item.head
        handed = HandedList(steps, lambda step: memory.entries[item.stage(step, stages)[0]]) if plan.mapped else None
        walk = KeyWalk(plan, sizes, tile, buffers, batch, head, item.block, handed)
        maths = maths_of(buffers, memory, item, schedule.block)
        T.fill(output, 0)
        maths.start()
        T.wait_wgmma(0)
        first, _ = item.stage(0, stages)
        first_visit = walk.at(0)
        give_back(thread, memory.k_empty, first)
        queries.give_back_after_scores(thread, item, steps == 1)
        weigh(maths, first_visit)
        T.copy(scores, weights)
        if starts_ahead:
            start_tile(maths, walk, 1)
        queries.give_back_before(thread, item)
        turns.let_second_start(thread, item.items_before)
        clear_step(seen, maths.place, first_visit, v, memory.v_full, item.stage(0, stages), tile.threads)
        for after in T.serial(steps - 1):
            step = after + 1
            stage, turn = item.stage(step, stages)
            before, turn_before = item.stage(after, stages)
            T.barrier_wait(memory.k_full[stage], turn)
            visit = walk.at(step)
            turns.take(thread)
            T.wgmma_gemm(
                queries.tile_of(item), k[stage, :, :], scores, transpose_B=True, policy=ROWS_WHOLE,
                clear_accum=not starts_ahead,
            )  # fmt: skip
            T.barrier_wait(memory.v_full[before], turn_before)
            T.wgmma_gemm(weights, v[before, :, :], output, policy=ROWS_WHOLE)
            turns.hand_on(thread)
            T.wait_wgmma(1)  # the scores are there, the output on its way
            give_back(thread, memory.k_empty, stage)
            queries.give_back_after_scores(thread, item, step + 1 == steps)
            fenced = bind(until_output, memory, thread, before, turn_before)
            weigh(maths, visit, fenced if early else None)
            if not in_turn:
                take_output(memory, thread, before)
            elif not early:
                fenced()
            T.copy(scores, weights)
            if starts_ahead:
                start_tile(maths, walk, step + 1)
            clear_step(seen, maths.place, visit, v, memory.v_full, (stage, turn), tile.threads)
        last, last_turn = item.stage(steps - 1, stages)
        T.barrier_wait(memory.v_full[last], last_turn)
        T.wgmma_gemm(weights, v[last, :, :], output, policy=ROWS_WHOLE)
        if queries.next_are_there:
            start_next()
            T.wait_wgmma(1)  # the output is there, the next item's scores on their way
        else:
            T.wait_wgmma(0)
        if tile.persistent:
            give_back(thread, memory.v_empty, last)
        maths.join()
        maths.finish(output, dim_v)
        queries.store(buffers, output, item, thread)
        for name, expr in schedule.rows:
            maths.write_row(memory.written, expr)
            T.copy(memory.written, buffers[f"row_{name}"][batch, head, q0 : q0 + tile.q])
        if not queries.next_are_there:
            start_next()

    @T.macro
    def hand_out_items(buffers: Any, memory: Memory, place: Any) -> None:
        """Brings the queries of a persistent block's items, and tells the others which they are, until none is left;
        their keys and values too, unless another warp does."""
        deal = Deal(items, place)
        items_before = T.alloc_var("int32", 0)
        steps_before = T.alloc_var("int32", 0)
        for turn in T.unroll(deal.turns, unroll_factor=1):  # two turns at once would spill
            section, pairs, position = deal.position(turn)
            if position < name_value(pairs * items.blocks):
                block, head, batch = deal.item(section, pairs, position)
                walk = KeyWalk(plan, sizes, tile, buffers, batch, head, block)
                steps, done, steps_done = at_least_one(walk), items_before + 0, steps_before + 0
                item = Item(block, head, batch, steps, name_value(block * tile.q), done, steps_done)
                memory.queries.note(item)
                memory.queries.copy(buffers, item)
                if not queries_ahead:
                    copy_keys(buffers, memory, item, walk)
                items_before = done + 1
                steps_before = steps_done + steps
        no_item = Item(0, 0, 0, NO_MORE, 0, items_before)
        memory.queries.note(no_item)
        memory.queries.tell(no_item)

    @T.macro
    def copy_items(buffers: Any, memory: Memory) -> None:
        """Copies the keys and values of the items that another warp hands out."""
        numbers = T.alloc_local([NUMBERS], "int32")
        items_before = T.alloc_var("int32", 0)
        steps_before = T.alloc_var("int32", 0)
        memory.queries.take_note(numbers, Item(0, 0, 0, 0, 0, items_before))
        while numbers[STEPS] != NO_MORE:
            block, head, batch, steps = numbers[BLOCK] + 0, numbers[HEAD] + 0, numbers[BATCH] + 0, numbers[STEPS] + 0
            walk = KeyWalk(plan, sizes, tile, buffers, batch, head, block)
            copy_keys(buffers, memory, Item(block, head, batch, steps, 0, 0, steps_before + 0), walk)
            items_before = items_before + 1
            steps_before = steps_before + steps
            memory.queries.take_note(numbers, Item(0, 0, 0, 0, 0, items_before))

    @T.macro
    def take_item(buffers: Any, memory: Memory, numbers: Any, items_before: Any, steps_before: Any) -> None:
        """Notes the numbers of an item whose queries have come, and starts its first products."""
        memory.queries.wait_until_there(Item(0, 0, 0, 0, 0, items_before))
        memory.queries.read_note(numbers, Item(0, 0, 0, 0, 0, items_before))
        block, head, batch = (numbers[n] + 0 if by_index else numbers[n] for n in (BLOCK, HEAD, BATCH))
        item = Item(block, head, batch, numbers[STEPS], block * tile.q, items_before, steps_before)
        start_scores(buffers, memory, item)

    @T.macro
    def compute_items(buffers: Any, memory: Memory) -> None:
        """Computes the items that the copying warp hands on."""
        numbers = T.alloc_local([NUMBERS], "int32")
        items_before = T.alloc_var("int32", 0)
        steps_before = T.alloc_var("int32", 0)
        take_item(buffers, memory, numbers, items_before, steps_before)
        while numbers[STEPS] != NO_MORE:
            block, head, batch, steps = numbers[BLOCK] + 0, numbers[HEAD] + 0, numbers[BATCH] + 0, numbers[STEPS] + 0
            done, steps_done = items_before + 0, steps_before + 0
            items_before = done + 1
            steps_before = steps_done + steps
            item = Item(block, head, batch, steps, name_value(block * tile.q), done, steps_done)
            compute_item(buffers, memory, item, bind(take_item, buffers, memory, numbers, items_before, steps_before))
        T.wait_wgmma(0)  # of no item

    @T.macro
    def body(buffers: Any) -> None:
        grid = [items.grid] if tile.persistent else [blocks, problem.heads, sizes.batch]
        with T.Kernel(*grid, threads=GROUP + tile.threads) as place:
            queries = QueryTiles(problem, tile)
            k = named("k_tile", T.alloc_shared([stages, tile.kv, dim], dtype))
            v = named("v_tile", T.alloc_shared([stages, tile.kv, dim_v], dtype))
            weights = T.alloc_fragment([tile.q, tile.kv], dtype)
            scores = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            other = T.alloc_fragment([tile.q, tile.kv], FLOAT) if needs_another(schedule) else None
            output = T.alloc_fragment([tile.q, dim_v], FLOAT)
            rows = {v: named(v.name, T.alloc_fragment([tile.q], FLOAT)) for v in row_variables(schedule)}
            parts = sums_in_parts(schedule, tile)
            written = T.alloc_fragment([tile.q], FLOAT) if len(schedule.rows) > 0 else None
            k_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            k_empty = T.alloc_barrier(arrive_count=[warps] * stages)
            v_full = T.alloc_barrier(arrive_count=[WARP] * stages)
            v_empty = T.alloc_barrier(arrive_count=[warps] * stages)
            entries = named("entries", T.alloc_shared([stages], "int32")) if plan.mapped else None
            memory = Memory(
                queries, k, v, weights, scores, other, output, rows, parts, written, entries,
                k_full, k_empty, v_full, v_empty,
            )  # fmt: skip
            item, walk = None, None
            if not tile.persistent:
                turn_of_block, head, batch = place
                block = blocks - 1 - turn_of_block if plan.later_is_longer else turn_of_block
                walk = KeyWalk(plan, sizes, tile, buffers, batch, head, block)
                item = Item(block, head, batch, at_least_one(walk), block * tile.q)
            thread = T.get_thread_binding()
            if thread < GROUP:
                T.dec_max_nreg(producer_registers)
                if thread < WARP:
                    if queries_ahead:
                        copy_items(buffers, memory)
                    elif tile.persistent:
                        hand_out_items(buffers, memory, place)
                    else:
                        queries.copy(buffers, item)
                        copy_keys(buffers, memory, item, walk)
                else:
                    if queries_ahead:  # noqa: SIM102 - Python's condition, then the kernel's
                        if thread < 2 * WARP:
                            hand_out_items(buffers, memory, place)
            else:
                T.inc_max_nreg(consumer_registers)
                turns.begin(thread)
                if tile.persistent:
                    compute_items(buffers, memory)
                else:
                    queries.wait_until_there(item)
                    start_scores(buffers, memory, item)
                    compute_item(buffers, memory, item, nothing)
                T.tma_store_wait(0)  # has read: the memory may go

    return build("forward", parameters, body)
