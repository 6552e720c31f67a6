"""The backward pass over keys on Hopper: one warp copies ahead, two warpgroups compute, products run while they do.

The algorithm and the arguments of straight/backward.py, by hand: a block keeps its keys and values, and a producer warp
streams queries, gradients of the output and rows through two stages of shared memory, with barriers in both directions.
Products are issued without waiting, so that the exponentials of a step run while the tensor cores make its gradient of
the weights, and dQ is added to the workspace while they make dK. Order of a step: FlashAttention-3 (Shah et al., 2024,
arXiv 2407.08608), its section on the backward pass.

HopperKeys(persistent=True), at head dims 128: as many blocks as the GPU runs at once walk over blocks of keys
(keys/items.py), which hides their starts and ends. It is for few steps, each of which has slightly more to work out.

Three forms, by the registers that dK and dV take of a thread (plan/hopper.py):
- each warpgroup has 64 keys, whose weights and gradients stay in registers as operands of dV and dK;
- the same where dK and dV leave room for one tile of pairs (head dims 192 and 128, or 128 and 256): weights are packed
  to 16 bits before their gradients are made, and both are handed to dV and dK through shared memory;
- the warpgroups share 64 keys, queries of pairs and head dims of dK and dV halved between them (tile.shared_weights).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem
from attention_engine.ir.program import Backward
from attention_engine.kernels.bounds import NO_NUMBERS
from attention_engine.kernels.common import Buffers, Sizes, block_values, build, reader
from attention_engine.kernels.hopper.chances import Cells, Draw, make_bits
from attention_engine.kernels.hopper.keys.copies import copy_item, copy_items, prepare_items
from attention_engine.kernels.hopper.keys.form import CHOOSING, KeyForm
from attention_engine.kernels.hopper.keys.items import NO_MORE, NUMBERS, Ends, KeyItem, handed_walk
from attention_engine.kernels.hopper.keys.memory import KeyMemory
from attention_engine.kernels.hopper.keys.order import keep_order
from attention_engine.kernels.hopper.keys.spare_warps import SpareWork, prepare_together, start_spare, tell_when_added
from attention_engine.kernels.hopper.keys.steps import compute_item, store
from attention_engine.kernels.hopper.notes import note_in, values_of
from attention_engine.kernels.items import HeadTile, KeyBlocks, Round, Shares
from attention_engine.kernels.pair_maths import NOTHING
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.tiles import QueryWalk
from attention_engine.kernels.warps import GROUP, WARP
from attention_engine.passes.drop_weights import SEED_OF_BLOCK, dropped_below
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.attention_buffers import ENDS, TURN
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import (
    backward_persists,
    heads_alternate,
    may_end_longest_first,
    starts_latest_first,
    starts_longest_first,
    walks_turn,
    why_not_over_keys,
)

NARROW = 64  # up to these head dims `share_of` waits: wider kernels would be no faster, and at S 2048 4 % slower


def backward(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, vectors: bool, with_dq: bool,
    summed: CustomSums = NOTHING, at_once: int = 0, wide: bool = False,
) -> Any:  # fmt: skip
    """The PrimFunc of straight/backward.py, with dk, dv, [pairs_of_a_unit], [units_ahead, [units_given, o], [dq]],
    [workspace, counters], sums too.

    at_once: how many persistent blocks run at once, which store dQ but for the last units; 0 for a grid. wide: dk
    and dv are fp32, and leave from registers.
    """
    form = key_form(problem, schedule, rows, tile, vectors, with_dq, summed, at_once, wide)
    parameters = form.sizes.declare(
        attention_buffers.over_keys(problem, schedule, rows, tile, with_dq, summed, form.persistent, wide=wide)
    )
    return build("backward", parameters, bind(run_items if form.persistent else run_item, form))


def key_form(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, vectors: bool, with_dq: bool,
    summed: CustomSums = NOTHING, at_once: int = 0, wide: bool = False,
) -> KeyForm:  # fmt: skip
    """What the kernel of these arguments is built for."""
    assert why_not_over_keys(problem, schedule, summed) is None, "plan/choice.py asks first"
    assert not at_once or (with_dq and backward_persists(problem, tile)), "default tiles ask first"
    sizes = Sizes(problem)
    plan = plan_tiles(schedule.mask)
    turn = sizes.variable(TURN) if walks_turn(problem, tile, plan) else None
    latest_first = starts_latest_first(problem, tile, plan)
    longest_first = starts_longest_first(problem, tile, plan)
    alternates = with_dq and heads_alternate(problem, tile, plan)
    ends = sizes.variable(ENDS) if with_dq and may_end_longest_first(problem, tile, plan) else None
    blocks = KeyBlocks.of(problem, tile, sizes, longest_first, at_once, turn, latest_first, alternates, ends)
    return KeyForm(problem, schedule, rows, tile, sizes, plan, blocks, summed, with_dq, vectors, wide)


@T.macro
def run_item(form: KeyForm, buffers: Buffers) -> None:
    """A block for each block of keys."""
    with T.Kernel(*form.blocks.grid, threads=form.threads) as index:
        wait_for_kernel_before()
        memory = KeyMemory.allocate(form)
        block, kv_head, batch = form.blocks.keys_of(index)
        unit, position = form.blocks.position(index)
        walk = form.walk(buffers, batch, kv_head, block, index=index)
        item = KeyItem(block, kv_head, batch, walk.count, unit=unit)
        thread = T.get_thread_binding()
        if thread < GROUP:
            start_copying(form)
            if thread < WARP:
                copy_item(form, buffers, memory, item, walk)
            else:
                if form.with_dq:
                    shares = Shares.of(form.blocks, form.tile, form.sizes.q)
                    work = SpareWork(form, memory.spare, shares, item.unit, share_of(form, shares, position))
                    if form.prepares:
                        start_spare(memory.spare)
                        prepare_together(work, buffers)
                    if memory.order is not None:
                        keep_order(form, buffers, memory.order, memory.queries, item, walk)
                    tell_when_added(work, buffers, memory.added, 0, 0)
        else:
            if form.tile.drops_apart:
                if thread < GROUP + form.tile.threads:
                    compute_one(form, buffers, memory, item, walk)
                else:
                    T.dec_max_nreg(CHOOSING)
                    choose_pairs(form, buffers, memory, item, walk)
            else:
                compute_one(form, buffers, memory, item, walk)


def share_of(form: KeyForm, shares: Shares, position: Any) -> Callable[[], HeadTile]:
    """Where a block's share begins. Where heads alternate or are narrow, it is worked out where it is asked for. Else
    ptxas would have products wait for one another (C7512), or spill at head dim 64."""
    if form.blocks.alternates or form.problem.dim <= NARROW:
        return bind(shares.first, position)
    first = shares.first(position)
    return lambda: first


@T.macro
def compute_one(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, walk: QueryWalk) -> None:
    """The only item of a block, by a computing thread."""
    start_computing(form)
    compute_item(form, buffers, memory, item, walk)
    store(form, buffers, memory, item)


@T.macro
def choose_pairs(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, walk: QueryWalk) -> None:
    """A making thread's bits of an item, step by step."""
    cells, batch, kv0 = Cells.of_thread(form.tile), item.batch, item.block * form.tile.kv
    values = tuple((v, e) for v, e in form.schedule.block if v is SEED_OF_BLOCK)
    read = reader(buffers, form.sizes.inside(form.problem, batch, item.kv_head))
    seed = block_values(values, batch, item.kv_head, read)[SEED_OF_BLOCK]
    for step in T.unroll(item.steps, unroll_factor=1):
        visit = walk.at(step)
        draw = Draw(
            dropped_below(form.schedule), seed, batch, visit.head, kv0, name_value(visit.start), form.tile.q, True
        )
        make_bits(memory.chances, cells, draw, item.round.steps + step)


@T.macro
def run_items(form: KeyForm, buffers: Buffers) -> None:
    """As many blocks as the GPU runs at once, each of which walks over items."""
    with T.Kernel(*form.blocks.grid, threads=GROUP + form.tile.threads):
        wait_for_kernel_before()
        memory = KeyMemory.allocate(form)
        thread = T.get_thread_binding()
        if thread < GROUP:
            start_copying(form)
            if thread < WARP:
                copy_items(form, buffers, memory)
            else:
                start_spare(memory.spare)
                prepare_items(form, buffers, memory)
        else:
            start_computing(form)
            compute_items(form, buffers, memory)


@T.macro
def wait_for_kernel_before() -> None:
    """Its rows and zeroes are what this one reads. The kernel after this one may start as this one's blocks do."""
    T.pdl_sync()
    T.pdl_trigger()


@T.macro
def start_copying(form: KeyForm) -> None:
    """The copying group's threads give registers back."""
    copying, _ = form.registers
    T.dec_max_nreg(copying)


@T.macro
def start_computing(form: KeyForm) -> None:
    """The computing threads take the registers that were given back."""
    _, computing = form.registers
    T.inc_max_nreg(computing)


@T.macro
def compute_items(form: KeyForm, buffers: Buffers, memory: KeyMemory) -> None:
    """Computes a persistent block's items."""
    numbers = T.alloc_local([NUMBERS], "int32")
    noted = note_in(memory.notes.kind, numbers)
    items_before = T.alloc_var("int32", 0)
    steps_before = T.alloc_var("int32", 0)
    memory.notes.take(numbers, items_before)
    while noted.steps != NO_MORE:
        block, kv_head, batch, first, steps = values_of(noted)[4:9]
        done, steps_done = items_before + 0, steps_before + 0
        items_before = done + 1
        steps_before = steps_done + steps
        lengths = [(batch, form.sizes.batch), (kv_head, form.problem.kv_heads), (block, form.blocks.blocks)]
        if form.within:
            lengths = [(kv_head, form.problem.kv_heads), (block, form.sizes.kv)]
        for index, length in lengths:
            take_for_granted(T.And(index >= 0, index < length))
        take_for_granted(first >= 0)
        item = KeyItem(block, kv_head, batch, steps, Round(done, steps_done))
        known = NO_NUMBERS
        if form.within:
            last_key, first_query, last_query = tuple(values_of(noted))[9:]
            ends = Ends(last_key, first_query, last_query)
            item = KeyItem(block, kv_head, 0, steps, Round(done, steps_done), sequence=batch, noted_ends=ends)
            known = ends.known()
        handed = handed_walk(item, first, memory.entries, form.tile.stages)
        walk = form.walk(buffers, batch, kv_head, block, handed, known=known)
        compute_item(form, buffers, memory, item, walk)
        store(form, buffers, memory, item)
        memory.notes.take(numbers, items_before)
