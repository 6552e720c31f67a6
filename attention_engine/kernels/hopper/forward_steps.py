"""What the computing warpgroups of a Hopper forward block do: an item from its first scores to its output.

Order of a step (forward.py says why): the scores of this step and the output of the step before are issued
together; the weights of this step are made of the scores while the tensor cores make the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.kernels.bounds import either
from attention_engine.kernels.common import FLOAT, Buffers, named, where_partial
from attention_engine.kernels.hopper.barriers import Ring, finish_before, give_back
from attention_engine.kernels.hopper.chances import Bits, Chances, drop_pairs
from attention_engine.kernels.hopper.forward_form import BlockValues, ForwardForm
from attention_engine.kernels.hopper.mask_sides import MaskSides
from attention_engine.kernels.hopper.query_tiles import QueryTiles
from attention_engine.kernels.items import Item
from attention_engine.kernels.tile_maths import (
    ScoreTile,
    TileMaths,
    needs_another,
    rescale,
    row_variables,
    sums_in_parts,
)
from attention_engine.kernels.tiles import HandedList, KeyWalk, Visit
from attention_engine.kernels.unseen import clear_step
from attention_engine.kernels.warps import GROUP, ROWS_WHOLE, WARP, thread_of_row


@dataclass(frozen=True)
class ForwardMemory:
    """A block's tiles, registers and barriers."""

    queries: QueryTiles
    keys: Ring
    values: Ring
    weights: Any  # in 16 bits, an operand of the output
    scores: Any
    other: Any  # a second tile of scores, where a row value is made of another formula
    output: Any
    rows: dict[Expr, Any]
    parts: dict[Expr, Any]  # row states that threads hold in parts
    written: Any  # a row that the caller keeps
    chances: Chances | None  # where a group of its own chooses which weights are dropped
    entries: Any  # of a list, one for each stage: the copying warp notes them
    sides: MaskSides | None  # what a mask reads by one side alone

    @staticmethod
    def allocate(form: ForwardForm) -> ForwardMemory:
        """Made in the kernel."""
        problem, schedule, tile, stages = form.problem, form.schedule, form.tile, form.tile.stages
        queries = QueryTiles(problem, tile, GROUP // WARP * form.drops_apart, form.unfinished)
        k = named("k", T.alloc_shared([stages, tile.kv, form.dim], problem.dtype))
        v = named("v", T.alloc_shared([stages, tile.kv, form.dim_v], problem.dtype))
        weights = named("weights", T.alloc_fragment([tile.q, tile.kv], problem.dtype))
        scores = named("scores", T.alloc_fragment([tile.q, tile.kv], FLOAT))
        other = named("other", T.alloc_fragment([tile.q, tile.kv], FLOAT)) if needs_another(schedule) else None
        output = named("output", T.alloc_fragment([tile.q, form.dim_v], FLOAT))
        rows = {row: named(row.name, T.alloc_fragment([tile.q], FLOAT)) for row in row_variables(schedule)}
        parts = sums_in_parts(schedule, tile)
        written = named("written", T.alloc_fragment([tile.q], FLOAT)) if schedule.rows else None
        keys = Ring(
            tile=k,
            full=named("k_full", T.alloc_barrier(arrive_count=[WARP] * stages)),
            empty=named("k_empty", T.alloc_barrier(arrive_count=[form.warps] * stages)),
        )
        values = Ring(
            tile=v,
            full=named("v_full", T.alloc_barrier(arrive_count=[WARP] * stages)),
            empty=named("v_empty", T.alloc_barrier(arrive_count=[form.warps] * stages)),
        )
        beside = "shared.dyn" if form.blocks_of_an_sm == 1 else "shared"  # with barriers, or two blocks find no room
        entries = named("entries", T.alloc_shared([stages], "int32", beside)) if form.plan.mapped else None
        return ForwardMemory(
            queries=queries, keys=keys, values=values, weights=weights, scores=scores, other=other, output=output,
            rows=rows, parts=parts, written=written, chances=Chances.allocate(tile, tile.kv), entries=entries,
            sides=MaskSides.allocate(form, beside),
        )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The item that the computing threads of a block are at."""

    form: ForwardForm
    memory: ForwardMemory
    item: Item
    walk: KeyWalk
    maths: TileMaths
    steps: Any
    thread: Any

    @property
    def walk_of_starts(self) -> KeyWalk | None:
        """The walk, where what a tile starts with depends on the step."""
        return self.walk if self.form.starts_by_index else None

    def mask(self, step: Any, kv0: Any) -> None:
        """The mask of a step's tile, from the key kv0 on."""
        sides = self.memory.sides
        if sides is None:
            self.maths.mask(kv0)
        else:
            sides.mask(self.maths, self.item, step, kv0)

    def stage(self, step: Any) -> tuple[Any, Any]:
        """Where a step's keys and values are, and the parity of their barriers."""
        return self.item.round.stage(step, self.form.tile.stages)


def maths_of(form: ForwardForm, buffers: Buffers, memory: ForwardMemory, item: Item, block: BlockValues) -> TileMaths:
    """The maths of an item's tiles, with these of its block's values."""
    place = form.place_of(buffers, item, block)
    of = ScoreTile(memory.scores, memory.other, memory.rows, memory.parts, form.no_staged_reads())
    schedule = replace(form.schedule, dropped=None) if form.drops_apart else form.schedule
    return TileMaths(schedule, form.tile, form.sizes, place, item.q0, of)


@T.macro
def weigh(
    work: Work, step: Any, visit: Visit, before_weights: Callable[[], None] | None = None
) -> None:  # fmt: skip
    """A step's products become scores, and scores become weights."""
    form, maths, kv0 = work.form, work.maths, visit.start
    if not form.starts_ahead:
        maths.score(kv0)
    if form.schedule.fill is not None:
        where_partial(either(visit.is_partial(kv0), kv0 + form.tile.kv > form.sizes.kv), bind(work.mask, step, kv0))
    maths.weigh(kv0, before_weights)


@T.macro
def start_tile(form: ForwardForm, maths: TileMaths, walk: KeyWalk | None, step: Any) -> None:
    """Writes what a step's products add to, before its group waits for its turn: the group then issues them at once.

    walk: None where the tile starts alike in every step. Past the last step the tile is nobody's. It is then made as
    the first step's, which is far from the diagonal as a rule and so made soonest.
    """
    maths.start_scores(0 if walk is None else walk.at(T.if_then_else(step < walk.count, step, 0)).start)
    T.warpgroup_fence_operand(maths.scores, num_regs=form.tile.q * form.tile.kv // form.tile.threads)


@T.macro
def issue_scores(form: ForwardForm, memory: ForwardMemory, item: Item, stage: Any) -> None:
    """The products of queries and a stage's keys are on their way; they add to what the tile started with."""
    T.wgmma_gemm(
        memory.queries.tile_of(item.round), memory.keys.tile[stage, :, :], memory.scores, transpose_B=True,
        policy=ROWS_WHOLE, clear_accum=not form.starts_ahead,
    )  # fmt: skip


@T.macro
def start_scores(form: ForwardForm, buffers: Buffers, memory: ForwardMemory, item: Item) -> None:
    """The products of an item's first step are on their way. After the last item they are anything, and nobody's."""
    stage, turn = item.round.stage(0, form.tile.stages)
    if form.starts_ahead:
        walk = form.walk(buffers, item.b, item.head, item.block) if form.starts_by_index else None
        start_tile(form, maths_of(form, buffers, memory, item, form.values_of_start), walk, 0)
    if item.steps > 0:
        T.barrier_wait(memory.keys.full[stage], turn)
        form.turns.start_apart(T.get_thread_binding(), item.round.items)
    issue_scores(form, memory, item, stage)


@T.macro
def compute_item(
    form: ForwardForm, buffers: Buffers, memory: ForwardMemory, item: Item, start_next: Callable[[], None]
) -> None:  # fmt: skip
    """From the item's first scores, which are on their way, to its output."""
    steps, q0, thread, batch, head = item.steps, item.q0, T.get_thread_binding(), item.batch, item.head
    stages, mapped = form.tile.stages, form.plan.mapped
    handed = HandedList(steps, lambda step: memory.entries[item.round.stage(step, stages)[0]]) if mapped else None
    walk = form.walk(buffers, item.b, head, item.block, handed)
    maths = maths_of(form, buffers, memory, item, form.schedule.block)
    work = Work(form, memory, item, walk, maths, steps, thread)
    T.fill(memory.output, 0)
    maths.start()
    if memory.sides is not None:
        memory.sides.read_rows(buffers, item)
    make_first_weights(work)
    for after in T.serial(steps - 1):
        take_step(work, after)
    make_last_output(work, start_next)
    maths.join()
    maths.finish(memory.output, form.dim_v)
    memory.queries.store(buffers, memory.output, item, thread)
    for name, expr in form.schedule.rows:
        maths.write_row(memory.written, expr)
        store_row(memory.written, buffers[f"row_{name}"], batch, head, q0, form.tile.q, item.end)
    if not memory.queries.next_are_there:
        start_next()


def _stop(row: Any, end: Any) -> Any:
    """One past the last query that a block may store; a function, as a macro would name the number."""
    return row.shape[2] if end is None else end


@T.macro
def store_row(values: Any, row: Any, batch: Any, head: Any, q0: Any, rows: int, end: Any) -> None:
    """Writes the values of a block's queries to a row of the caller, by the four threads that hold each. end: one past
    the last that are the block's, where that isn't the row's end.

    T.copy would do, but TileLang plans how to vectorize it anew for each way that it tries to lay registers out: half
    of the time that lowering the kernel took.
    """
    for i in T.Parallel(rows, loop_layout=T.Fragment((rows,), forward_fn=thread_of_row, replicate=4)):
        if q0 + i < _stop(row, end):
            row[batch, head, q0 + i] = values[i]


@T.macro
def make_first_weights(work: Work) -> None:
    """The first step's scores, which are on their way, become weights; no output is due yet."""
    form, memory, item, thread = work.form, work.memory, work.item, work.thread
    bits = None if memory.chances is None else Bits.of_step(memory.chances, thread, item.round.steps)
    T.wait_wgmma(0)
    first, _ = work.stage(0)
    first_visit = work.walk.at(0)
    give_back(thread, memory.keys.empty, first)
    memory.queries.give_back_after_scores(thread, item.round, work.steps == 1)
    weigh(work, 0, first_visit)
    if bits is not None:
        bits.hand_back(thread)
        drop_pairs(bits, memory.scores, form.tile)
    T.copy(memory.scores, memory.weights)
    if form.starts_ahead:
        start_tile(form, work.maths, work.walk_of_starts, 1)
    memory.queries.give_back_before(thread, item.round)
    form.turns.let_second_start(thread, item.round.items)
    values = memory.values
    clear_step(form.seen, work.maths.place, first_visit, values.tile, values.full, work.stage(0), form.tile.threads)


@T.macro
def take_step(work: Work, after: Any) -> None:
    """The step after so many: its scores and the output of the step before, then its weights."""
    form, memory, item, thread, values = work.form, work.memory, work.item, work.thread, work.memory.values
    step = after + 1
    stage, turn = work.stage(step)
    before, turn_before = work.stage(after)
    T.barrier_wait(memory.keys.full[stage], turn)
    visit = work.walk.at(step)
    form.turns.take(thread)
    issue_scores(form, memory, item, stage)
    T.barrier_wait(values.full[before], turn_before)
    T.wgmma_gemm(memory.weights, values.tile[before, :, :], memory.output, policy=ROWS_WHOLE)
    form.turns.hand_on(thread)
    bits = None if memory.chances is None else Bits.of_step(memory.chances, thread, item.round.steps + step)
    T.wait_wgmma(1)  # the scores are there, the output on its way
    give_back(thread, memory.keys.empty, stage)
    memory.queries.give_back_after_scores(thread, item.round, step + 1 == work.steps)
    fenced = bind(until_output, form, memory, thread, before, turn_before)
    weigh(work, step, visit, fenced if form.waits_early else None)
    if not form.weighs_first:
        take_output(form, memory, thread, before)
    elif not form.waits_early:
        fenced()
    if bits is not None:
        bits.hand_back(thread)
        drop_pairs(bits, memory.scores, form.tile)
    T.copy(memory.scores, memory.weights)
    if form.starts_ahead:
        start_tile(form, work.maths, work.walk_of_starts, step + 1)
    clear_step(form.seen, work.maths.place, visit, values.tile, values.full, (stage, turn), form.tile.threads)


@T.macro
def take_output(form: ForwardForm, memory: ForwardMemory, thread: Any, step: Any) -> None:
    """Waits for the output of the step in a stage, and brings it to what rows hold by now."""
    T.wait_wgmma(0)
    give_back(thread, memory.values.empty, step)
    if form.schedule.rescale is not None:
        rescale(memory.output, memory.rows[form.schedule.rescale], form.tile, form.dim_v)


@T.macro
def until_output(form: ForwardForm, memory: ForwardMemory, thread: Any, step: Any, turn: Any) -> None:
    """The same, where the stage's values came in phase `turn`; what works on scores comes before."""
    finish_before(memory.scores, form.tile.q * form.tile.kv // form.tile.threads, memory.values.full, step, turn)
    take_output(form, memory, thread, step)


@T.macro
def make_last_output(work: Work, start_next: Callable[[], None]) -> None:
    """The last step's output is added, and the next item's first scores are issued behind it if its queries may be
    there."""
    form, memory, values = work.form, work.memory, work.memory.values
    last, last_turn = work.stage(work.steps - 1)
    T.barrier_wait(values.full[last], last_turn)
    T.wgmma_gemm(memory.weights, values.tile[last, :, :], memory.output, policy=ROWS_WHOLE)
    if memory.queries.next_are_there:
        start_next()
        T.wait_wgmma(1)  # the output is there, the next item's scores on their way
    else:
        T.wait_wgmma(0)
    if form.tile.persistent:
        give_back(work.thread, values.empty, last)
