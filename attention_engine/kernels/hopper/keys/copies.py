"""What the copying group of a backward block over keys on Hopper does: it brings what the others compute with.

A block of a grid has one item (KeyItem) and brings its keys and values first. A persistent one has many, told of by
notes (keys/items.py): the next item's first queries come while the present one is under way, and its keys and values as
soon as the present ones' gradients have left by their tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.packing import FIRST_QUERY, QUERIES_END
from attention_engine.ir.program import PLACES
from attention_engine.kernels.common import Buffers, window
from attention_engine.kernels.hopper.barriers import Ring
from attention_engine.kernels.hopper.keys.finished_units import store_together
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.keys.items import ASKED_AHEAD, NO_MORE, NOTES, NOTING, KeyItem, deal
from attention_engine.kernels.hopper.keys.memory import KeyMemory
from attention_engine.kernels.hopper.keys.order import name_tile, note_ticket, wait_until_free
from attention_engine.kernels.hopper.keys.spare_warps import (
    SpareWork,
    prepare_together,
    see_unit,
    tell_when_added,
    wait_for_unit,
)
from attention_engine.kernels.items import Round, Shares, stage_of
from attention_engine.kernels.tiles import HandedQueries, QueryWalk, Visit
from attention_engine.kernels.warps import WARP
from attention_engine.kernels.workspace import dealt
from attention_engine.plan.attention_buffers import KEY_TILES


@dataclass(frozen=True)
class Copy:
    """Which tile of queries a step's copies bring, to which stage, and the parity of that stage's barriers."""

    batch: Any
    head: Any
    q0: Any
    stage: Any
    turn: Any


@T.macro
def copy_step(
    form: KeyForm, buffers: Buffers, memory: KeyMemory, name: str, ring: Ring, row_names: list[str], at: Copy
) -> None:  # fmt: skip
    """A tile of queries, or of gradients of the output, and some rows beside."""
    batch, dim = at.batch, int(ring.tile.shape[2])
    T.barrier_wait(ring.empty[at.stage], at.turn ^ 1)
    T.tma_copy(
        window(buffers[name], batch, at.head, at.q0, form.tile.q, dim), ring.tile[at.stage, :, :],
        barrier=ring.full[at.stage],
    )  # fmt: skip
    for row in row_names:
        T.tma_copy(
            buffers[row][batch, at.head, at.q0 : at.q0 + form.tile.q], memory.rows[row][at.stage, : form.tile.q],
            barrier=ring.full[at.stage],
        )  # fmt: skip
    T.barrier_arrive(ring.full[at.stage])


@T.macro
def copy_queries(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, visit: Visit, step: Any) -> None:
    """What a step's products read beside keys and values. Of a list, a persistent block's other warps learn the step's
    entry so, too."""
    head = visit.head
    q0 = visit.start
    stage, turn = item.round.stage(step, form.tile.stages)
    if memory.entries is not None:
        T.barrier_wait(memory.queries.empty[stage], turn ^ 1)
        if T.get_thread_binding() == 0:
            memory.entries[stage] = visit.entry
    at = Copy(item.batch, head, q0, stage, turn)
    copy_step(form, buffers, memory, "q", memory.queries, form.early_rows, at)
    copy_step(form, buffers, memory, "do", memory.output_gradients, form.late_rows, at)


def head_of_keys(form: KeyForm, item: KeyItem) -> Any:
    """The head of k and v that an item reads: of few key heads, each query head has a copy of one."""
    copies = form.problem.copies
    return item.kv_head if copies == 1 else T.truncdiv(item.kv_head, copies)


@T.macro
def copy_tile(form: KeyForm, buffers: Buffers, name: str, ring: Ring, item: KeyItem) -> None:
    """An item's keys, or values; of a persistent block, when the tile is free."""
    if form.persistent:
        T.barrier_wait(ring.empty, item.round.items % 2 ^ 1)
    kv0, dim = item.first_key(form.tile), int(ring.tile.shape[1])
    T.tma_copy(
        window(buffers[name], item.batch, head_of_keys(form, item), kv0, form.tile.kv, dim),
        ring.tile,
        barrier=ring.full,
    )
    T.barrier_arrive(ring.full)


@T.macro
def copy_keys(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem) -> None:
    """An item's keys and values."""
    copy_tile(form, buffers, "k", memory.keys, item)
    copy_tile(form, buffers, "v", memory.values, item)


@T.macro
def copy_item(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, walk: QueryWalk) -> None:
    """All that the products of a block's only item read."""
    first = walk.first_entry()
    copy_keys(form, buffers, memory, item)
    if form.prepares:
        wait_for_unit(form.blocks, item.unit, buffers)
        see_unit(form.blocks, item.unit)
    if form.names_while_copying:
        copy_and_name(form, buffers, memory, item, walk)
    else:
        for step in T.serial(item.steps):
            copy_queries(form, buffers, memory, item, walk.at(step, first), step)


@T.macro
def copy_and_name(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, walk: QueryWalk) -> None:
    """Brings what all steps read. When a step's tile of queries is free, its dQ has been added (keys/order.py): once
    the next copies to its stage are on their way, the step's ticket gets the block's name."""
    order, queries, stages = memory.order, memory.queries, form.tile.stages
    for step in T.serial(item.steps + stages):
        stage, _ = item.round.stage(step, stages)
        if step < item.steps:
            copy_queries(form, buffers, memory, item, walk.at(step), step)
        else:
            wait_until_free(queries, item, step, stages)
        if step >= stages:
            name_tile(buffers, order, item, stage)
        if step < item.steps:
            note_ticket(form, buffers, order, item, walk.at(step), stage)


@T.macro
def pass_on(ring: Ring, item: KeyItem) -> None:
    """Of an item without steps, nobody reads keys and values: what is there already is handed on."""
    T.barrier_wait(ring.empty, item.round.items % 2 ^ 1)
    T.barrier_arrive(ring.full)


@T.macro
def copy_as_it_goes(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, walk: QueryWalk) -> None:
    """All that an item's products read, as room for it is there: the item before is still under way, and its tiles of
    keys and values are the last that are free. Some steps before the item's copies end, the next item is asked for."""
    if item.steps == 0:
        T.barrier_arrive(memory.notes.asked)
        pass_on(memory.keys, item)
        pass_on(memory.values, item)
    first = memory.notes.note(item.round).first
    for step in T.serial(item.steps):
        if step == T.max(item.steps - ASKED_AHEAD, 0):
            T.barrier_arrive(memory.notes.asked)
        copy_queries(form, buffers, memory, item, walk.at(step, first), step)
        if step == 0:
            copy_keys(form, buffers, memory, item)


@T.macro
def copy_items(form: KeyForm, buffers: Buffers, memory: KeyMemory) -> None:
    """Brings what a persistent block's items need, until none is left."""
    notes = memory.notes
    items_before = T.alloc_var("int32", 0)
    steps_before = T.alloc_var("int32", 0)
    T.barrier_arrive(notes.asked)
    while items_before >= 0:
        notes.wait(Round(items_before))
        item = notes.item(Round(items_before, steps_before))
        if item.steps == NO_MORE:
            T.loop_break()
        first = notes.note(item.round).first
        handed = None if form.plan.mapped else HandedQueries(item.steps, lambda step: None, first)
        walk = form.walk(buffers, item.b, item.kv_head, item.block, handed)
        see_unit(form.blocks, item.unit)
        copy_as_it_goes(form, buffers, memory, item, walk)
        steps_before = steps_before + item.steps
        notes.give_back(Round(items_before))
        items_before = items_before + 1


@T.macro
def note_item(form: KeyForm, buffers: Buffers, memory: KeyMemory, items_before: Any) -> None:
    """A warp gets a block's next item, notes it number by number, as it has few registers, and waits until it is
    prepared."""
    notes, of = memory.notes, Round(items_before)
    blocks, noted = notes.blocks(form.blocks), notes.note(of)
    dealt_to = T.alloc_local([1], "int32")
    deal(dealt(buffers), dealt_to)
    notes.start(of)
    index = dealt_to[0] + 0
    notes.write(of, steps=T.if_then_else(index < notes.lengths.count, 0, NO_MORE))
    notes.write(of, position=T.min(index, notes.lengths.count - 1))
    unit, position = blocks.position(noted.position)
    notes.write(of, unit=unit, position=position)
    shared_head, shared_tile = notes.shares(form.blocks).first(noted.position)
    notes.write(of, shared_head=shared_head, shared_tile=shared_tile)
    notes.write(of, block=blocks.block_in_unit(noted.unit, noted.position))
    kv_head, batch = blocks.pair_in_unit(noted.unit, noted.position, noted.block)
    notes.write(of, kv_head=kv_head, batch=batch)
    if form.within:
        note_sequence(buffers, memory, of)
    if noted.steps != NO_MORE:
        walk = form.walk(buffers, noted.batch, noted.kv_head, noted.block, sizes=notes.sizes(form.sizes))
        notes.write(of, first=walk.first_entry() if form.plan.mapped else walk.first, steps=walk.count)
    wait_for_unit(form.blocks, noted.unit, buffers)
    notes.tell(of)


@T.macro
def note_sequence(buffers: Buffers, memory: KeyMemory, of: Round) -> None:
    """Of packed sequences, a warp notes which tile of keys an item has, in place of its number, and of which one."""
    notes, listed, places = memory.notes, buffers[KEY_TILES], buffers[f"custom_{PLACES}"]
    noted = notes.note(of)
    row = T.alloc_var("int32")
    row = noted.block + 1
    notes.write(of, batch=listed[row, 0], block=listed[row, 1], last_key=listed[row, 2])
    first_query, last_query = places[noted.batch, FIRST_QUERY], places[noted.batch, QUERIES_END]
    notes.write(of, first_query=first_query, last_query=last_query)


@T.macro
def prepare_items(form: KeyForm, buffers: Buffers, memory: KeyMemory) -> None:
    """What spare warps do beside a persistent block's items. The last of them notes which is next."""
    notes = memory.notes
    items_before = T.alloc_var("int32", 0)
    thread = T.get_thread_binding()
    if thread >= NOTING * WARP:
        listed = form.blocks.listed(buffers)
        notes.tell_lengths(Shares.of(listed, form.tile, form.sizes.q), listed, form.sizes.q)
    while items_before >= 0:
        if thread >= NOTING * WARP:
            T.barrier_wait(notes.asked, items_before % 2)
            note_item(form, buffers, memory, items_before)
        notes.wait(Round(items_before))
        item = notes.item(Round(items_before))
        if item.steps == NO_MORE:
            T.loop_break()
        work = SpareWork(form, memory.spare, notes.shares(form.blocks), item.unit, bind(notes.share, item.round))
        prepare_together(work, buffers)
        store_together(work, buffers)
        tell_when_added(work, buffers, memory.added, *stage_of(items_before, NOTES))
        notes.give_back(Round(items_before))
        items_before = items_before + 1
