"""Blocks over keys add to dQ one after another, in an order of their keys: it then has the same bits in every run.

A ticket in memory for each tile of queries of a head says which block of keys has added to it. A thread of a block's
first spare warp looks at the ticket, tells the computing threads by a barrier, and changes the ticket when they have
added. The next block adds some 2.5 us later (H100). All blocks of a head walk over its tiles in the same direction.

Where all blocks meet the same tiles, those of earlier keys add first, and the ticket counts them. Each comes to a tile
as the one before it leaves, and only the first blocks wait, for their start.

Where a GPU runs all blocks of two heads at once, they start their walks a part of it apart, at head dim 128
(kernels/apart.py): none waits for its start. The order at a tile is then that of a ring: the block that starts there,
those of later keys, and then those of the first keys on. Blocks of grouped heads do so in each head, one after another.

Where later keys have fewer queries, as under a causal mask, those of later keys add first, and start first. All walk up
from their own keys: at the same time a block is a tile or two behind the block of the keys after its own, which has
been at its tile by then. So they may start together, and nobody waits. The ticket shows the number of the block that
added last; a block whose tile the next keys don't see is the tile's first.

Grouped heads under a causal mask, at head dim 128, alternate: their blocks must read the same tiles at the same time,
as all heads of a group are more than the L2 cache holds. Of even key heads the blocks of later keys start first, and
add first. All walk from the last queries down, each a little behind the one before it. They end in that order, the
shortest first. In their places the blocks of odd key heads start, those of earlier keys first. These walk up and add in
that order: a block starts as the ones before it come to its first tile, and they all end one after another, as the next
even heads want it. So a row of odd heads starts for each few rows of even ones (`rows_between` in plan/units.py).
Where whole heads leave places of a GPU free, the blocks that start there wait. A head's order hangs on its number
alone, so a batch changes no bit.

Where each tile meets some block, by the mask's bounds, a tile's first block stores, and nobody zeroes the sums before.

No wait is for ever: a block waits for its neighbour alone, of the same head. That one meets every tile for which it is
waited for (`may_add_in_order` in plan/hopper.py) and has a lower number in the grid, so the GPU has started it. The
first of a head waits for nobody. In a ring a block may wait for one of a higher number. All blocks of the heads before
have been started, and as those end, the rest of its head starts: it has fewer blocks than the GPU runs at once. Inside
a block, the copying warp and the products wait for neither ticket but through the additions of the step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import Buffers, named
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.keys.items import KeyItem
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.tiles import PIECE, QueryWalk
from attention_engine.kernels.warps import ORDERING, WARP

NOBODY = 1 << 30  # beyond all tiles and queries


@dataclass(frozen=True)
class Order:
    """The barriers of a block: it may add to a step's dQ; it has. A phase of each is a step."""

    may: Any
    has: Any

    @staticmethod
    def allocate(form: KeyForm) -> Order | None:
        """Made in the kernel; None where blocks add in any order."""
        if not (form.with_dq and form.tile.in_order):
            return None
        may = named("may_add", T.alloc_barrier(arrive_count=1))
        return Order(may, named("has_added", T.alloc_barrier(arrive_count=form.warps)))

    @macro_method
    def wait(self, step: Any) -> None:
        """A computing thread waits until the block may add to a step's dQ."""
        T.barrier_wait(self.may, step % 2)

    @macro_method
    def hand_on(self, thread: Any) -> None:
        """A lane tells that its warp has added."""
        T.sync_warp()
        if thread % WARP == 0:
            T.barrier_arrive(self.has)


@T.macro
def keep_order(form: KeyForm, buffers: Buffers, order: Order, item: KeyItem, walk: QueryWalk) -> None:
    """A thread looks at the tickets of a block's steps, and raises them."""
    tickets, heads, block = buffers["tickets"], form.problem.heads, item.block
    if T.get_thread_binding() == ORDERING * WARP:
        after = first_query_after(form, buffers, item)
        latest = adds_latest_first(form, item)
        for step in T.serial(item.steps):
            visit = walk.at(step)
            row = name_value(item.batch * heads + visit.head)
            q0 = name_value(visit.start)
            tile = name_value(T.truncdiv(q0, form.tile.q))
            take_for_granted(T.And(row >= 0, row < tickets.shape[0]))
            take_for_granted(T.And(tile >= 0, tile < tickets.shape[1]))
            before = block
            if form.apart is not None:
                before = name_value(form.apart.blocks_before(block, walk.turned_tile_of(step), walk.tiles_of_a_head))
            if form.names_adders:
                while T.And(q0 >= after, T.atomic_load(tickets[row, tile], memory_order="acquire") != block + latest):
                    pass
            else:
                while T.atomic_load(tickets[row, tile], memory_order="acquire") < before:
                    pass
            T.barrier_arrive(order.may)
            T.barrier_wait(order.has, step % 2)
            raised: Any = 1
            if form.names_adders:
                raised = T.if_then_else(q0 >= after, -1, block)
            if form.alternates:
                raised = T.if_then_else(latest == 0, 1, raised)
            T.evaluate(T.atomic_add(tickets[row, tile], raised, memory_order="release", return_prev=True))


def tiles_first(form: KeyForm, buffers: Buffers, item: KeyItem, walk: QueryWalk) -> Any:
    """To which tiles a block comes before all others: where blocks start apart, to so many of its walk's first ones;
    else to those of queries below this number."""
    if form.apart is not None:
        return name_value(form.apart.own_tiles(item.block, walk.tiles_of_a_head))
    return first_query_after(form, buffers, item)


def first_query_after(form: KeyForm, buffers: Buffers, item: KeyItem) -> Any:
    """From the tile of which query on others add before a block: where later keys add first, the first that sees the
    keys after its own, beyond them all where there are none. Where earlier keys do, the first of all, but for the first
    block."""
    if not form.names_adders:
        return NOBODY
    walk = form.walk(buffers, item.batch, item.kv_head, item.block + 1)
    first = name_value(T.if_then_else(item.block + 1 < form.blocks.blocks, walk.first * PIECE, NOBODY))
    if form.alternates:
        of_odd = T.if_then_else(item.block == 0, NOBODY, 0)
        return name_value(T.if_then_else(adds_latest_first(form, item) == 1, first, of_odd))
    return first


def adds_latest_first(form: KeyForm, item: KeyItem) -> Any:
    """1 where blocks of later keys add first, as those of even heads do where heads alternate; else 0."""
    return 1 - item.kv_head % 2 if form.alternates else int(form.blocks.latest_first)
