"""What the copying warps of a Hopper forward block do: they bring queries, keys and values, and say which item is next.

A block of a grid has one item. A persistent block has many: one copying warp works out which is next, brings its
queries and notes it for the others. That warp brings keys and values too, unless queries come ahead: then another warp
reads the notes and brings them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.kernels.bounds import either
from attention_engine.kernels.common import Buffers, where_partial, window
from attention_engine.kernels.hopper.barriers import Ring
from attention_engine.kernels.hopper.forward_form import ForwardForm
from attention_engine.kernels.hopper.forward_steps import ForwardMemory
from attention_engine.kernels.hopper.notes import note_in, size_of, values_of
from attention_engine.kernels.hopper.query_tiles import NO_ITEM, NO_MORE, QueryNote
from attention_engine.kernels.items import Deal, Item, Round, at_least_one
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import KeyWalk, Visit
from attention_engine.kernels.warps import WARP
from attention_engine.plan.attention_buffers import DEALT


@T.macro
def copy_tile(source: Any, ring: Ring, stage: Any, beside: Callable[[], None] | None = None) -> None:
    """Brings a tile to a stage, of which nobody reads the tile before any more. beside: what else the warp does before
    it says that the tile is there."""
    T.tma_copy(source, ring.tile[stage, :, :], barrier=ring.full[stage])
    if beside is not None:
        beside()
    T.barrier_arrive(ring.full[stage])


def bring_sides(
    form: ForwardForm, buffers: Buffers, memory: ForwardMemory, item: Item, visit: Visit, step: Any
) -> None:  # fmt: skip
    """Brings what a step's mask reads by its keys alone, where the mask will be asked."""
    if memory.sides is not None and memory.sides.keys:
        kv0 = visit.start
        partial = either(visit.is_partial(kv0), kv0 + form.tile.kv > form.sizes.kv)
        where_partial(partial, bind(memory.sides.bring_keys, buffers, item, kv0, step))


@T.macro
def copy_keys(form: ForwardForm, buffers: Buffers, memory: ForwardMemory, item: Item, walk: KeyWalk) -> None:
    """Brings an item's keys and values, step by step."""
    kv_head = item.head // form.problem.group
    for step in T.unroll(item.steps, unroll_factor=1):  # four steps at once would spill
        visit = walk.at(step)
        kv0 = T.if_then_else(walk.count > 0, visit.start, form.sizes.kv)  # where no key is kept: zeros, no NaN
        stage, turn = item.round.stage(step, form.tile.stages)
        T.barrier_wait(memory.keys.empty[stage], turn ^ 1)
        if form.plan.mapped:  # noqa: SIM102 - Python's condition, then the kernel's
            if T.get_thread_binding() == 0:
                memory.entries[stage] = visit.entry
        copy_tile(
            window(buffers["k"], item.batch, kv_head, kv0, form.tile.kv, form.dim),
            memory.keys,
            stage,
            bind(bring_sides, form, buffers, memory, item, visit, step),
        )
        T.barrier_wait(memory.values.empty[stage], turn ^ 1)
        copy_tile(window(buffers["v"], item.batch, kv_head, kv0, form.tile.kv, form.dim_v), memory.values, stage)


@T.macro
def hand_out_items(form: ForwardForm, buffers: Buffers, memory: ForwardMemory, index: Any) -> None:
    """Brings the queries of a persistent block's items, and notes for the others which item is next, until none is
    left; brings their keys and values too, unless another warp does."""
    items = form.items_of(buffers)
    deal = Deal(items, index)
    items_before = T.alloc_var("int32", 0)
    steps_before = T.alloc_var("int32", 0)
    if form.counts_items:
        count = name_value(items.blocks * items.pairs)
        number = T.alloc_var("int32")
        number = deal.number
        taken = T.alloc_local([1], "int32")
        while number < count:
            done, steps_done = items_before + 0, steps_before + 0
            steps = hand_out(form, buffers, memory, deal.item_of(number + 0), Round(done, steps_done))
            items_before = done + 1
            steps_before = steps_done + steps
            memory.queries.wait_for_room(Round(items_before))
            take_number(buffers[DEALT], taken, count - 1)
            number = deal.grid + taken[0]
    else:
        for turn in T.unroll(deal.turns, unroll_factor=1):  # two turns at once would spill
            number = deal.number_in(turn)
            if number < deal.count:
                done, steps_done = items_before + 0, steps_before + 0
                steps = hand_out(form, buffers, memory, deal.item_of(number), Round(done, steps_done))
                items_before = done + 1
                steps_before = steps_done + steps
    memory.queries.note(NO_ITEM, Round(items_before))
    memory.queries.tell(Round(items_before))


@T.macro
def take_number(counter: Any, taken: Any, last: Any) -> None:
    """A warp counts on: taken[0] is what stood there. Each block begins with the item of its own number, and finds none
    left once: who takes the `last` number sets the counter back, for the next launch."""
    if T.get_thread_binding() % WARP == 0:
        taken[0] = T.atomic_add(counter[0], 1, return_prev=True)
        if taken[0] == last:
            counter[0] = 0
    taken[0] = T.shfl_sync(taken[0], 0)


def hand_out(form: ForwardForm, buffers: Buffers, memory: ForwardMemory, dealt: tuple[Any, Any, Any], of: Round) -> Any:
    """Brings the queries of one item, and notes it; its steps."""
    block, head, batch = form.dealt(buffers, *dealt)
    walk = form.walk(buffers, batch, head, block)
    steps = at_least_one(walk)
    item = form.item(buffers, block, head, batch, steps, name_value(form.first_query(block)), of)
    memory.queries.note(QueryNote(block, head, batch, steps), item.round)
    memory.queries.copy(buffers, item)
    if not form.queries_ahead:
        copy_keys(form, buffers, memory, item, walk)
    return steps


@T.macro
def copy_items(form: ForwardForm, buffers: Buffers, memory: ForwardMemory) -> None:
    """Brings the keys and values of the items that another warp hands out."""
    numbers = T.alloc_local([size_of(QueryNote)], "int32")
    noted = note_in(QueryNote, numbers)
    items_before = T.alloc_var("int32", 0)
    steps_before = T.alloc_var("int32", 0)
    memory.queries.take_note(numbers, Round(items_before))
    while noted.steps != NO_MORE:
        block, head, batch, steps = values_of(noted)
        walk = form.walk(buffers, batch, head, block)
        q0 = 0  # its queries are brought by the other warp
        copy_keys(form, buffers, memory, Item(block, head, batch, steps, q0, Round(0, steps_before + 0)), walk)
        items_before = items_before + 1
        steps_before = steps_before + steps
        memory.queries.take_note(numbers, Round(items_before))
