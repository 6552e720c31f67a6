"""What the group of a Hopper forward block does that chooses which weights dropout drops, item by item."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import Buffers
from attention_engine.kernels.hopper.barriers import give_back
from attention_engine.kernels.hopper.chances import Cells, Draw, make_bits
from attention_engine.kernels.hopper.forward_form import ForwardForm
from attention_engine.kernels.hopper.forward_steps import ForwardMemory
from attention_engine.kernels.hopper.notes import note_in, size_of, values_of
from attention_engine.kernels.hopper.query_tiles import NO_MORE, QueryNote, QueryTiles
from attention_engine.kernels.items import Item, Round
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import KeyWalk
from attention_engine.passes.drop_weights import SEED_OF_BLOCK, dropped_below


@T.macro
def choose_pairs(
    form: ForwardForm, buffers: Buffers, memory: ForwardMemory, item: Item, walk: KeyWalk, cells: Cells
) -> None:  # fmt: skip
    """A making thread's bits of an item, step by step."""
    place = form.place_of(buffers, item, form.values_of_chances)
    bound, seed = dropped_below(form.schedule), place.block[SEED_OF_BLOCK]
    for step in T.unroll(item.steps, unroll_factor=1):
        kv0 = name_value(walk.at(step).start)
        draw = Draw(bound, seed, item.batch, item.head, item.q0, kv0, form.tile.kv)
        make_bits(memory.chances, cells, draw, item.round.steps + step)


@T.macro
def choose_pairs_of_items(form: ForwardForm, buffers: Buffers, memory: ForwardMemory) -> None:
    """The same of the items that a copying warp hands on."""
    numbers = T.alloc_local([size_of(QueryNote)], "int32")
    noted = note_in(QueryNote, numbers)
    items_before = T.alloc_var("int32", 0)
    steps_before = T.alloc_var("int32", 0)
    cells = Cells.of_thread(form.tile)
    take_item(memory.queries, numbers, items_before)
    while noted.steps != NO_MORE:
        block, head, batch, steps = values_of(noted)
        walk = form.walk(buffers, batch, head, block)
        item = Item(block, head, batch, steps, name_value(block * form.tile.q), Round(0, steps_before + 0))
        choose_pairs(form, buffers, memory, item, walk, cells)
        items_before = items_before + 1
        steps_before = steps_before + steps
        take_item(memory.queries, numbers, items_before)


@T.macro
def take_item(queries: QueryTiles, numbers: Any, items_before: Any) -> None:
    """Reads the note of an item whose queries have come."""
    queries.wait_until_there(Round(items_before))
    queries.read_note(numbers, Round(items_before))
    give_back(T.get_thread_binding(), queries.empty, queries.slot(Round(items_before)))
