"""What the copying group of a backward block over keys on Hopper does: it brings what the others compute with.

A block of a grid has one item (KeyItem) and brings its keys and values first. A persistent one has many, told of by
notes (key_items.py): the next item's first queries come while the present one is under way, and its keys and values as
soon as the present ones' gradients have left by their tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.kernels.common import Sizes, window
from attention_engine.kernels.diagonals import SkewedSums
from attention_engine.kernels.finished_units import store_together
from attention_engine.kernels.items import KeyBlocks, Shares, stage_of
from attention_engine.kernels.key_items import (
    ASKED_AHEAD,
    BATCH,
    BLOCK,
    FIRST,
    HEAD,
    ITEMS,
    NO_MORE,
    NOTES,
    NOTING,
    POSITION,
    SHARED_HEAD,
    SHARED_TILE,
    STEPS,
    UNIT,
    KeyItem,
    Notes,
    deal,
    tell_lengths,
)
from attention_engine.kernels.rows import dealt
from attention_engine.kernels.spare_warps import (
    Rows,
    SpareWarps,
    prepare_together,
    see_unit,
    tell_when_added,
    wait_for_unit,
)
from attention_engine.kernels.tiles import HandedQueries, QueryWalk, Visit
from attention_engine.kernels.warps import WARP
from attention_engine.passes.tile_plan import TilePlan


@dataclass(frozen=True)
class Form:
    """What a kernel over keys is built for; scale: of the sums of dQ; early, late: the rows that come with queries, and
    with their gradients; delta: the one that its blocks make for later ones."""

    problem: Problem
    tile: Tile
    sizes: Sizes
    plan: TilePlan
    blocks: KeyBlocks
    scale: float
    early: list[str]
    late: list[str]
    with_dq: bool
    delta: tuple[str, Expr] | None

    @property
    def persistent(self) -> bool:
        """Do blocks walk over items?"""
        return self.blocks.places > 0

    @property
    def dim(self) -> int:
        """Of queries and keys, in tiles."""
        return padded(self.problem.dim)

    @property
    def dim_v(self) -> int:
        """Of values, in tiles."""
        return padded(self.problem.dim_v)


@dataclass(frozen=True)
class Memory:
    """A block's tiles and barriers; of a persistent one alone: k_empty, v_empty, entries, notes. added: a barrier for
    each item that may be noted, since the warp that waits for one may be late by an item."""

    k: Any
    v: Any
    shared: dict[str, Any]
    gradients_out: Any
    weights_out: Any
    products: Any
    weights: Any
    gradients: Any
    weights_in: Any
    gradients_in: Any
    dk: Any
    dv: Any
    dq: Any
    skewed: SkewedSums | None
    key_sums: list[Any]
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    added: Any
    zeroes: Any
    shares_at: list[Any]
    rows: Rows | None
    entries: Any
    notes: Notes | None


@T.macro
def copy_step(
    form: Form, buffers: Any, shared: Any, at: Any, stage: Any, empty: Any, full: Any, rows_too: list[str]
) -> None:  # fmt: skip
    """A stage's queries, or gradients of the output, and some rows beside; at: which, head dim, place and turn."""
    name, head_dim, batch, head, q0, turn = at
    T.barrier_wait(empty[stage], turn ^ 1)
    T.tma_copy(
        window(buffers[name], batch, head, q0, form.tile.q, head_dim), shared[name][stage, :, :], barrier=full[stage]
    )
    for row in rows_too:
        T.tma_copy(
            buffers[row][batch, head, q0 : q0 + form.tile.q], shared[row][stage, : form.tile.q], barrier=full[stage]
        )
    T.barrier_arrive(full[stage])


@T.macro
def copy_tile(
    form: Form, buffers: Any, name: str, head_dim: int, to: Any, item: KeyItem, empty: Any, full: Any
) -> None:  # fmt: skip
    """An item's keys, or values; of a persistent block, when the tile is free."""
    if form.persistent:
        T.barrier_wait(empty, item.items_before % 2 ^ 1)
    kv0 = item.block * form.tile.kv
    T.tma_copy(window(buffers[name], item.batch, item.kv_head, kv0, form.tile.kv, head_dim), to, barrier=full)
    T.barrier_arrive(full)


@T.macro
def copy_keys(form: Form, buffers: Any, memory: Memory, item: KeyItem) -> None:
    """An item's keys and values."""
    copy_tile(form, buffers, "k", form.dim, memory.k, item, memory.k_empty, memory.k_full)
    copy_tile(form, buffers, "v", form.dim_v, memory.v, item, memory.v_empty, memory.v_full)


@T.macro
def copy_queries(form: Form, buffers: Any, memory: Memory, item: KeyItem, visit: Visit, step: Any) -> None:
    """What a step's products read beside those; of a list, a persistent block's others learn the entry so, too."""
    head = visit.head
    q0 = visit.start
    stage, turn = item.stage(step, form.tile.stages)
    at = "q", form.dim, item.batch, head, q0, turn
    if memory.entries is not None:
        T.barrier_wait(memory.q_empty[stage], turn ^ 1)
        if T.get_thread_binding() == 0:
            memory.entries[stage] = visit.entry
    copy_step(form, buffers, memory.shared, at, stage, memory.q_empty, memory.q_full, form.early)
    at = "do", form.dim_v, item.batch, head, q0, turn
    copy_step(form, buffers, memory.shared, at, stage, memory.do_empty, memory.do_full, form.late)


@T.macro
def copy_item(form: Form, buffers: Any, memory: Memory, item: KeyItem, walk: QueryWalk) -> None:
    """All that an item's products read."""
    first = walk.first_entry()
    copy_keys(form, buffers, memory, item)
    if form.with_dq:
        wait_for_unit(form.blocks, item.unit, buffers)
        see_unit(form.blocks, item.unit)
    for step in T.serial(item.steps):
        copy_queries(form, buffers, memory, item, walk.at(step, first), step)


@T.macro
def pass_on(empty: Any, full: Any, item: KeyItem) -> None:
    """Of an item without steps, whose keys and values nobody reads."""
    T.barrier_wait(empty, item.items_before % 2 ^ 1)
    T.barrier_arrive(full)


@T.macro
def copy_as_it_goes(form: Form, buffers: Any, memory: Memory, item: KeyItem, walk: QueryWalk) -> None:
    """The same as room for it is there: the item before is still under way, and its keys' and values' tiles are the
    last that are free. Some steps before it ends, the next one is asked for."""
    if item.steps == 0:
        T.barrier_arrive(memory.notes.asked)
        pass_on(memory.k_empty, memory.k_full, item)
        pass_on(memory.v_empty, memory.v_full, item)
    first = memory.notes.number(item.items_before, FIRST)
    for step in T.serial(item.steps):
        if step == T.max(item.steps - ASKED_AHEAD, 0):
            T.barrier_arrive(memory.notes.asked)
        copy_queries(form, buffers, memory, item, walk.at(step, first), step)
        if step == 0:
            copy_keys(form, buffers, memory, item)


@T.macro
def copy_items(form: Form, buffers: Any, memory: Memory) -> None:
    """Brings what a persistent block's items need, until none is left."""
    items_before = T.alloc_var("int32", 0)
    steps_before = T.alloc_var("int32", 0)
    T.barrier_arrive(memory.notes.asked)
    while items_before >= 0:
        memory.notes.wait(items_before)
        item = memory.notes.noted_item(items_before, steps_before)
        if item.steps == NO_MORE:
            T.loop_break()
        first = memory.notes.number(items_before, FIRST)
        handed = None if form.plan.mapped else HandedQueries(item.steps, lambda step: None, first)
        of_keys = item.batch, item.kv_head, item.block
        walk = QueryWalk(form.plan, form.problem, form.sizes, form.tile, buffers, *of_keys, handed)
        see_unit(form.blocks, item.unit)
        copy_as_it_goes(form, buffers, memory, item, walk)
        steps_before = steps_before + item.steps
        memory.notes.give_back(items_before)
        items_before = items_before + 1


@T.macro
def note_item(form: Form, buffers: Any, memory: Memory, items_before: Any) -> None:
    """A warp gets a block's next item, notes it number by number, as it has few registers, and waits until it is
    prepared."""
    notes = memory.notes
    told, number = notes.blocks(form.blocks), bind(notes.number, items_before)
    dealt_to = T.alloc_local([1], "int32")
    deal(dealt(buffers), dealt_to)
    notes.start(items_before)
    index = dealt_to[0] + 0
    notes.write(items_before, {STEPS: T.if_then_else(index < notes.lengths[ITEMS], 0, NO_MORE)})
    notes.write(items_before, {POSITION: T.min(index, notes.lengths[ITEMS] - 1)})
    unit, position = told.position(number(POSITION))
    notes.write(items_before, {UNIT: unit, POSITION: position})
    shared_head, shared_tile = notes.shares(form.blocks).first(number(POSITION))
    notes.write(items_before, {SHARED_HEAD: shared_head, SHARED_TILE: shared_tile})
    notes.write(items_before, {BLOCK: told.block_in_unit(number(UNIT), number(POSITION))})
    kv_head, batch = told.pair_in_unit(number(UNIT), number(POSITION), number(BLOCK))
    notes.write(items_before, {HEAD: kv_head, BATCH: batch})
    if number(STEPS) != NO_MORE:
        of_keys = number(BATCH), number(HEAD), number(BLOCK)
        walk = QueryWalk(form.plan, form.problem, notes.sizes(form.sizes), form.tile, buffers, *of_keys)
        notes.write(items_before, {FIRST: walk.first_entry() if form.plan.mapped else walk.first, STEPS: walk.count})
    wait_for_unit(form.blocks, number(UNIT), buffers)
    notes.tell(items_before)


@T.macro
def prepare_items(form: Form, buffers: Any, memory: Memory) -> None:
    """What spare warps do beside a persistent block's items. The last of them notes which is next."""
    items_before = T.alloc_var("int32", 0)
    thread = T.get_thread_binding()
    if thread >= NOTING * WARP:
        tell_lengths(memory.notes, Shares.of(form.blocks, form.tile, form.sizes.q), form.blocks, form.sizes.q)
    while items_before >= 0:
        if thread >= NOTING * WARP:
            T.barrier_wait(memory.notes.asked, items_before % 2)
            note_item(form, buffers, memory, items_before)
        memory.notes.wait(items_before)
        item = memory.notes.noted_item(items_before)
        if item.steps == NO_MORE:
            T.loop_break()
        told = memory.notes.shares(form.blocks)
        own = memory.zeroes, memory.shares_at, memory.rows, form.delta
        work = SpareWarps(form.problem, form.tile, told, item.unit, item.share, *own)
        prepare_together(work, buffers)
        store_together(work, buffers, form.scale)
        tell_when_added(work, buffers, memory.added, *stage_of(items_before, NOTES))
        memory.notes.give_back(items_before)
        items_before = items_before + 1
