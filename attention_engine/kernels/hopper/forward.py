"""The forward pass on Hopper: one warp copies ahead, two or three warpgroups compute, products run while they do.

The algorithm and the arguments of straight/forward.py, by hand: a block keeps its queries, and a producer warp streams
keys and values through stages of shared memory, with barriers in both directions. Each warpgroup has 64 queries. The
scores of a step are made together with the output of the step before, so that its row values and exponentials run while
the tensor cores do both. Order of a step: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608), algorithm 2.

Two groups that start together stay together, and then each unit idles while both wait for another; so they are parted.
Where products bound a step, groups issue them in turns. Two wait for the output of the step before when they have their
row maxima, so that the output is multiplied by its rows' factors while exponentials are made; three, and two whose
factors are made of weights, when they have those. Elsewhere the second of two starts when the first has weights. Sums
of weights stay in parts, one for each thread of a row: joined at each step, they keep ptxas from setting
multiplications between exponentials. HopperForward(woven=True): three wait as two do, and sums take weights in the
order in which those are made and packed. ptxas then sets a sum, half a packing and half a multiplication of the output
behind each exponential.

HopperForward(persistent=True): as many blocks as the GPU runs at once, each of which walks over work items (items.py).
The copying warp goes on to the next item's tiles while the others end the present one, and tells them by shared memory
which item is next. The next item's first scores are made behind the last output, which leaves a warpgroup at a time
(query_tiles.py). Where queries come ahead, a warp of its own works out which item is next and brings its queries.

Where a score is its product and other terms (ALiBi, a table of relative distances), the tile starts with those, written
while a group waits for its turn, and products add to them.
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import Buffers, Sizes, build
from attention_engine.kernels.hopper.chances import Cells
from attention_engine.kernels.hopper.forward_copies import copy_items, copy_keys, hand_out_items
from attention_engine.kernels.hopper.forward_dropout import choose_pairs, choose_pairs_of_items
from attention_engine.kernels.hopper.forward_form import MAKING, ForwardForm
from attention_engine.kernels.hopper.forward_steps import ForwardMemory, compute_item, start_scores
from attention_engine.kernels.hopper.notes import note_in, size_of, values_of
from attention_engine.kernels.hopper.query_tiles import NO_MORE, QueryNote
from attention_engine.kernels.items import Item, Round, at_least_one
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.warps import GROUP, WARP
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import why_not_forward


def forward(problem: Problem, schedule: ForwardSchedule, tile: Tile, at_once: int = 1) -> Any:
    """The PrimFunc of straight/forward.py: (q, k, v, custom..., [tile_lists, [items_dealt]], o, rows...).

    at_once: how many blocks the GPU runs at once, of a persistent form.
    """
    return _forward(problem, schedule, tile, at_once, unfinished=False)


def forward_of_part(problem: Problem, schedule: ForwardSchedule, tile: Tile, at_once: int = 1) -> Any:
    """The same over a part of each row's keys: o is stored as it was summed, in fp32."""
    assert not tile.queries_ahead, "whose tiles are handed back when their output has left by them"
    return _forward(problem, schedule, tile, at_once, unfinished=True)


def _forward(problem: Problem, schedule: ForwardSchedule, tile: Tile, at_once: int, unfinished: bool) -> Any:
    assert why_not_forward(problem, schedule) is None, "plan/choice.py asks first"
    sizes = Sizes(problem)
    plan = plan_tiles(schedule.mask)
    parameters = sizes.declare(attention_buffers.forward(problem, schedule, tile, unfinished=unfinished))
    form = ForwardForm(problem, schedule, tile, sizes, plan, at_once, unfinished)
    return build("forward", parameters, bind(run_items if tile.persistent else run_item, form))


@T.macro
def run_item(form: ForwardForm, buffers: Buffers) -> None:
    """A block for each item."""
    with T.Kernel(form.blocks, form.problem.heads, form.sizes.batch, threads=form.threads) as index:
        if form.blocks_of_an_sm > 1:
            T.annotate_min_blocks_per_sm(form.blocks_of_an_sm)
        memory = ForwardMemory.allocate(form)
        turn_of_block, head, batch = index
        block = form.blocks - 1 - turn_of_block if form.plan.later_is_longer else turn_of_block
        walk = form.walk(buffers, batch, head, block)
        item = Item(block, head, batch, at_least_one(walk), block * form.tile.q)
        if T.get_thread_binding() < GROUP:
            start_copying(form)
            if T.get_thread_binding() < WARP:
                memory.queries.copy(buffers, item)
                copy_keys(form, buffers, memory, item, walk)
        else:
            if form.drops_apart:
                if T.get_thread_binding() < GROUP + form.tile.threads:
                    compute_one(form, buffers, memory, item)
                else:
                    T.dec_max_nreg(MAKING)
                    choose_pairs(form, buffers, memory, item, walk, Cells.of_thread(form.tile))
            else:
                compute_one(form, buffers, memory, item)


@T.macro
def compute_one(form: ForwardForm, buffers: Buffers, memory: ForwardMemory, item: Item) -> None:
    """The only item of a block, by a computing thread."""
    start_computing(form)
    memory.queries.wait_until_there(item.round)
    start_scores(form, buffers, memory, item)
    compute_item(form, buffers, memory, item, nothing)
    T.tma_store_wait(0)  # has read: the memory may go


@T.macro
def run_items(form: ForwardForm, buffers: Buffers) -> None:
    """As many blocks as the GPU runs at once, each of which walks over items."""
    with T.Kernel(form.items.grid, threads=form.threads) as index:
        memory = ForwardMemory.allocate(form)
        thread = T.get_thread_binding()
        if thread < GROUP:
            start_copying(form)
            if form.queries_ahead:
                if thread < WARP:
                    copy_items(form, buffers, memory)
                else:
                    if thread < 2 * WARP:
                        hand_out_items(form, buffers, memory, index)
            else:
                if thread < WARP:
                    hand_out_items(form, buffers, memory, index)
        else:
            if form.drops_apart:
                if thread < GROUP + form.tile.threads:
                    compute_all(form, buffers, memory)
                else:
                    T.dec_max_nreg(MAKING)
                    choose_pairs_of_items(form, buffers, memory)
            else:
                compute_all(form, buffers, memory)


@T.macro
def compute_all(form: ForwardForm, buffers: Buffers, memory: ForwardMemory) -> None:
    """All items of a block, by a computing thread."""
    start_computing(form)
    compute_items(form, buffers, memory)
    T.tma_store_wait(0)  # has read: the memory may go


@T.macro
def nothing() -> None:
    """What the only item of a block starts next."""
    T.evaluate(0)


@T.macro
def start_copying(form: ForwardForm) -> None:
    """The copying threads give registers back."""
    copying, _ = form.registers
    T.dec_max_nreg(copying)


@T.macro
def start_computing(form: ForwardForm) -> None:
    """The computing threads take the registers that were given back."""
    _, computing = form.registers
    T.inc_max_nreg(computing)
    form.turns.begin(T.get_thread_binding())


@T.macro
def take_item(
    form: ForwardForm, buffers: Buffers, memory: ForwardMemory, numbers: Any, items_before: Any, steps_before: Any
) -> None:  # fmt: skip
    """Notes the numbers of an item whose queries have come, and starts its first products."""
    memory.queries.wait_until_there(Round(items_before))
    memory.queries.read_note(numbers, Round(items_before))
    noted = note_in(QueryNote, numbers)
    block, head, batch = values_of(noted)[:3] if form.starts_by_index else noted[:3]
    of = Round(items_before, steps_before)
    item = form.item(buffers, block, head, batch, noted.steps, form.first_query(block), of)
    start_scores(form, buffers, memory, item)


@T.macro
def compute_items(form: ForwardForm, buffers: Buffers, memory: ForwardMemory) -> None:
    """Computes the items that a copying warp hands on."""
    numbers = T.alloc_local([size_of(QueryNote)], "int32")
    noted = note_in(QueryNote, numbers)
    items_before = T.alloc_var("int32", 0)
    steps_before = T.alloc_var("int32", 0)
    take_item(form, buffers, memory, numbers, items_before, steps_before)
    while noted.steps != NO_MORE:
        block, head, batch, steps = values_of(noted)
        done, steps_done = items_before + 0, steps_before + 0
        items_before = done + 1
        steps_before = steps_done + steps
        of = Round(done, steps_done)
        item = form.item(buffers, block, head, batch, steps, name_value(form.first_query(block)), of)
        start_next = bind(take_item, form, buffers, memory, numbers, items_before, steps_before)
        compute_item(form, buffers, memory, item, start_next)
    T.wait_wgmma(0)  # of no item
