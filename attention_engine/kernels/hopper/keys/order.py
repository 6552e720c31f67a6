"""Blocks over keys add to dQ one after another, in an order of their keys: it then has the same bits in every run.

A ticket in memory for each tile of queries of a head says which block of keys added to it last. A thread of a block's
first spare warp knows who adds before its block does (keys/adders.py). It looks at the ticket until that one has, and
tells the computing threads by a barrier. When they have added, it writes the block's name. Where heads alternate, the
copying warp does, when the step's tile of queries is free. The next block adds some 2.2 us later (H100). All blocks of
a head walk over its tiles in the same direction.

Where all blocks meet the same tiles, those of earlier keys add first. Each comes to a tile as the one before it leaves,
and only the first blocks wait, for their start.

Where a GPU runs all blocks of two heads at once, they start their walks a part of it apart, at head dim 128 (`Ring` in
kernels/apart.py): none waits for its start. The order at a tile is then that of a ring: the block that starts there,
those of later keys, and then those of the first keys on. Blocks of grouped heads do so in each head, one after another.

Where later keys have fewer queries, as under a causal mask, those of later keys add first, and start first. All walk up
from their own keys: at the same time a block is a tile or two behind the block of the keys after its own, which has
been at its tile by then. So they may start together, and nobody waits. A block whose tile the next keys don't see is
the tile's first. Where tiles have fewer queries than keys, the blocks of the last unit start the other way round, those
of the first keys first, so that no long block runs alone at the end. A block may start a little before the one for
which it waits: it comes to a tile that both meet later by more than a step.

Grouped heads under a causal mask, at head dim 128, alternate: their blocks must read the same tiles at the same time,
as all heads of a group are more than the L2 cache holds. Blocks of even key heads walk from the last queries down. They
start together, and the shortest, of the latest keys, ends first. In its place starts the longest one of an odd head, of
the first keys. Blocks of odd heads walk up, and as one that starts earlier has so much more to do, all end together.
Then the next even heads start.

Blocks of one even head follow one another over its tiles by a step, those of later keys first. So that they can start
together, each goes over some tiles before (`Halves` in kernels/apart.py): its near ones, those that its own keys see
first. The block of the last keys has none, the one of the first keys has most. To a tile thus first those blocks add
for which it is near, those of earlier keys first, and then the others, those of later keys first. Of odd heads all this
is turned around in time: far tiles first, near ones last, and the opposite order. A head's order hangs on its number
and on the lengths alone, so a batch changes no bit.

Where each tile meets some block, by the mask's bounds, a tile's first block stores, and nobody zeroes the sums before.

No wait is for ever: a block waits for blocks of the same head alone, which meet every tile for which they are waited
for (`may_add_in_order` in plan/hopper.py). Most have a lower number in the grid, so the GPU has started them. The first
of a head waits for nobody. In a last unit that starts longest first a block waits for one of a higher number: all
blocks before the unit end, and all of the unit then have a place (`pairs_that_end` in plan/units.py). In a ring a block
may wait for one of a higher number. All blocks of the heads before have been started, and as those end, the rest of its
head starts: it has fewer blocks than the GPU runs at once. Where heads alternate, a block may wait, at tiles near for
both, for the blocks of its head that start next, so many at most as `rows_that_meet` in plan/units.py says. Let all
blocks before one be done: the GPU has then started as many after it as it runs at once, those among them. What these
wait for is done, or is theirs to do. Nor do they wait in a circle: were all to start together and take as long for each
step, each wait would be for something earlier. Inside a block, the copying warp and the products wait for neither
ticket but through the additions of the step before. A name waits for the additions of its own step, and for no ticket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import Buffers, named
from attention_engine.kernels.hopper.barriers import Ring
from attention_engine.kernels.hopper.keys.adders import NOBODY, Neighbours, Tiles
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.keys.items import KeyItem
from attention_engine.kernels.hopper.notes import size_of
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.tiles import QueryWalk, Visit
from attention_engine.kernels.warps import ORDERING, WARP


@dataclass(frozen=True)
class Order:
    """How the threads of a block keep the order.

    may: the barrier on which computing threads are told that they may add to a step's dQ. has: the one on which their
    warps tell that they have. A phase of each is a step. Where the copying warp names tiles, `has` is None, and noted
    says for each stage where the ticket of its step stands. tiles: what the thread that looks at tickets knows of the
    head's tiles, the `Tiles`.
    """

    may: Any
    has: Any
    noted: Any
    tiles: Any

    @staticmethod
    def allocate(form: KeyForm) -> Order | None:
        """Made in the kernel; None where blocks add in any order."""
        if not (form.with_dq and form.tile.in_order):
            return None
        has, noted = None, None
        may = named("may_add", T.alloc_barrier(arrive_count=1))
        if form.names_while_copying:
            noted = named("noted_tickets", T.alloc_shared([form.tile.stages], "int32"))
        else:
            has = named("has_added", T.alloc_barrier(arrive_count=form.warps))
        return Order(may, has, noted, named("tiles", T.alloc_shared([size_of(Tiles)], "int32")))

    @macro_method
    def wait(self, step: Any) -> None:
        """A computing thread waits until the block may add to a step's dQ."""
        T.barrier_wait(self.may, step % 2)

    @macro_method
    def hand_on(self, thread: Any) -> None:
        """A warp has added. A lane tells it here, or as the step's tile of queries becomes free."""
        T.sync_warp()
        if self.has is not None:  # noqa: SIM102 - Python's condition, then the kernel's
            if thread % WARP == 0:
                T.barrier_arrive(self.has)


@T.macro
def keep_order(
    form: KeyForm, buffers: Buffers, order: Order, queries: Ring, item: KeyItem, walk: QueryWalk
) -> None:  # fmt: skip
    """A thread looks at the tickets of a block's steps, and tells when the block may add. Unless the copying warp does,
    it also names the tiles to which the block has added."""
    if T.get_thread_binding() == ORDERING * WARP:
        tickets = buffers["tickets"]
        before = T.alloc_local([1], "int32")
        neighbours = Neighbours(form, item, walk, order.tiles)
        neighbours.note_tiles()
        for step in T.serial(item.steps):
            visit = walk.at(step)
            row = name_value(item.batch * form.problem.heads + visit.head)
            tile = name_value(T.truncdiv(visit.start, form.tile.q))
            take_for_granted(T.And(row >= 0, row < tickets.shape[0]))
            take_for_granted(T.And(tile >= 0, tile < tickets.shape[1]))
            neighbours.find(before, tile, step)
            if before[0] != NOBODY:
                while T.atomic_load(tickets[row, tile], memory_order="acquire") != before[0]:
                    pass
            if order.has is None:  # noqa: SIM102 - Python's condition, then the kernel's
                if step > 0:
                    wait_until_free(queries, item, step + (form.tile.stages - 1), form.tile.stages)
            T.barrier_arrive(order.may)
            if order.has is not None:
                T.barrier_wait(order.has, step % 2)
                T.atomic_store(tickets[row, tile], item.block + 1, memory_order="release")


@T.macro
def wait_until_free(ring: Ring, item: KeyItem, step: Any, stages: int) -> None:
    """Until a step's stage is free: all is done of the step that had it before."""
    stage, turn = item.round.stage(step, stages)
    T.barrier_wait(ring.empty[stage], turn ^ 1)


@T.macro
def name_tile(buffers: Buffers, order: Order, item: KeyItem, stage: Any) -> None:
    """The copying warp writes the block's name on the ticket that is noted for a stage: its step has been added."""
    tickets = buffers["tickets"]
    names = T.view(tickets, [tickets.shape[0] * tickets.shape[1]])
    if T.get_thread_binding() == 0:
        ticket = name_value(order.noted[stage] + 0)
        take_for_granted(T.And(ticket >= 0, ticket < names.shape[0]))
        T.atomic_store(names[ticket], item.block + 1, memory_order="release")


@T.macro
def note_ticket(form: KeyForm, buffers: Buffers, order: Order, item: KeyItem, visit: Visit, stage: Any) -> None:
    """The copying warp notes for a stage where the ticket of its next step stands."""
    tiles = T.cast(buffers["tickets"].shape[1], "int32")
    if T.get_thread_binding() == 0:
        row = item.batch * form.problem.heads + visit.head
        order.noted[stage] = row * tiles + T.truncdiv(visit.start, form.tile.q)
