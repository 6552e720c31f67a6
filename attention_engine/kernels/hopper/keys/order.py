"""Blocks over keys add to dQ one after another, those of earlier keys first: it then has the same bits in every run.

A ticket in memory for each tile of queries of a head counts the blocks of keys that have added to it. A block adds when
the ticket shows the number of its keys. A thread of its first spare warp looks at the ticket, tells the computing
threads by a barrier, and raises the ticket when they have added. All blocks of a head walk over its tiles in the same
direction: each comes to a tile as the one before it leaves, and only the first blocks wait, for their start.

No wait is for ever: a block waits for the block of keys before its own, of the same head, alone. That one meets every
tile that this one does (`may_add_in_order` in plan/hopper.py) and has a lower number, so the GPU has started it. The
first block of keys waits for nobody. Inside a block, the copying warp and the products wait for neither ticket but
through the additions of the step before.
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
from attention_engine.kernels.tiles import QueryWalk
from attention_engine.kernels.warps import SPARE, WARP


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
    if T.get_thread_binding() == SPARE[0] * WARP:
        for step in T.serial(item.steps):
            visit = walk.at(step)
            row = name_value(item.batch * heads + visit.head)
            tile = name_value(T.truncdiv(visit.start, form.tile.q))
            take_for_granted(T.And(row >= 0, row < tickets.shape[0]))
            take_for_granted(T.And(tile >= 0, tile < tickets.shape[1]))
            while T.atomic_load(tickets[row, tile], memory_order="acquire") < block:
                pass
            T.barrier_arrive(order.may)
            T.barrier_wait(order.has, step % 2)
            T.evaluate(T.atomic_add(tickets[row, tile], 1, memory_order="release", return_prev=True))
