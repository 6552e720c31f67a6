"""Blocks over keys add to dQ one after another, in an order of their keys: it then has the same bits in every run.

A ticket in memory for each tile of queries of a head says which block of keys has added to it. A thread of a block's
first spare warp looks at the ticket, tells the computing threads by a barrier, and changes the ticket when they have
added. All blocks of a head walk over its tiles in the same direction.

Where all blocks meet the same tiles, those of earlier keys add first, and the ticket counts them. Each comes to a tile
as the one before it leaves, and only the first blocks wait, for their start.

Where a GPU runs all blocks of two heads at once, they start their walks a part of it apart, at head dim 128
(kernels/apart.py): none waits for its start. The order at a tile is then that of a ring: the block that starts there,
those of later keys, and then those of the first keys on. Blocks of grouped heads do so in each head, one after another.

Where later keys have fewer queries, as under a causal mask, those of later keys add first, and start first. All walk up
from their own keys: at the same time a block is a tile or two behind the block of the keys after its own, which has
been at its tile by then. So they may start together, and nobody waits. The ticket shows the number of the block that
added last; a block whose tile the next keys don't see is the tile's first.

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

NOBODY = 1 << 30  # a tile beyond all


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
        after = first_tile_after(form, buffers, item)
        for step in T.serial(item.steps):
            visit = walk.at(step)
            row = name_value(item.batch * heads + visit.head)
            tile = name_value(T.truncdiv(visit.start, form.tile.q))
            take_for_granted(T.And(row >= 0, row < tickets.shape[0]))
            take_for_granted(T.And(tile >= 0, tile < tickets.shape[1]))
            before = block
            if form.apart is not None:
                before = name_value(form.apart.blocks_before(block, walk.turned_tile_of(step), walk.tiles_of_a_head))
            if form.blocks.latest_first:
                while T.And(tile >= after, T.atomic_load(tickets[row, tile], memory_order="acquire") != block + 1):
                    pass
            else:
                while T.atomic_load(tickets[row, tile], memory_order="acquire") < before:
                    pass
            T.barrier_arrive(order.may)
            T.barrier_wait(order.has, step % 2)
            raised = 1 if not form.blocks.latest_first else T.if_then_else(tile >= after, -1, block)
            T.evaluate(T.atomic_add(tickets[row, tile], raised, memory_order="release", return_prev=True))


def tiles_first(form: KeyForm, buffers: Buffers, item: KeyItem, walk: QueryWalk) -> Any:
    """To which tiles a block comes before all others: those below this number, of its steps where blocks start
    apart, else of all tiles."""
    if form.apart is not None:
        return name_value(form.apart.own_tiles(item.block, walk.tiles_of_a_head))
    return first_tile_after(form, buffers, item)


def first_tile_after(form: KeyForm, buffers: Buffers, item: KeyItem) -> Any:
    """Where later keys add first, the first tile of queries that sees the keys after a block's own; beyond them all
    where there are none."""
    if not form.blocks.latest_first:
        return NOBODY
    walk = form.walk(buffers, item.batch, item.kv_head, item.block + 1)
    first = T.truncdiv(walk.first * PIECE, form.tile.q)
    return name_value(T.if_then_else(item.block + 1 < form.blocks.blocks, first, NOBODY))
