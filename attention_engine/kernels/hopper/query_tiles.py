"""The tiles of queries of a Hopper forward block: how they come, and how the output leaves by them.

A block that walks over items has room for a tile of the output beside, as a rule. Or that is a second tile of queries
(HopperForward.queries_ahead): the next item's queries come while the present ones are used. An item's output then
leaves by the tile of its queries, which nobody reads after its last scores. Its copy out has read the tile by the time
that the next item has its first weights, and then the tile is handed back. Which of two tiles products read is worked
out between them in each step, so that long items lose what short ones win.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.common import named, window
from attention_engine.kernels.hopper.barriers import arrive, arrive_when_read, give_back, wait
from attention_engine.kernels.hopper.notes import size_of
from attention_engine.kernels.items import Item, Round
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.warps import GROUP, LEAVE, SWIZZLED, WARP, keeps_queries_ahead, output_fits
from attention_engine.plan.forms import Tile

ALL = slice(None)
NO_MORE = -1  # steps, in the note after the last item's


class QueryNote(NamedTuple):
    """What a block notes of an item: its block of queries, head, batch and steps."""

    block: Any
    head: Any
    batch: Any
    steps: Any


NO_ITEM = QueryNote(0, 0, 0, NO_MORE)


class QueryTiles:
    """The tiles and their barriers; made in the kernel.

    count: how many tiles there are. next_are_there: may a block ask for the next item's queries before its output has
    left? Items take the tiles in turn: which tile an item has, its round says.
    """

    def __init__(self, problem: Problem, tile: Tile, others: int = 0, unfinished: bool = False) -> None:
        """others: how many warps beside those that compute read notes, and hand their tiles back. unfinished: is
        the output stored in fp32, and so from registers?"""
        dim, dim_v = padded(problem.dim), padded(problem.dim_v)
        self.tile, self.dim, self.dim_v, self.groups = tile, dim, dim_v, tile.threads // GROUP
        room = tile.persistent and output_fits(problem, tile) and not unfinished
        self.count = 2 if tile.queries_ahead and keeps_queries_ahead(problem, tile) else 1
        by_queries = dim == dim_v and (self.count == 2 or not room)
        self.through = by_queries and not unfinished  # the output leaves by its queries' tile
        self.next_are_there = tile.persistent and (self.count == 2 or not self.through)
        self.tiles = named("q_tile", T.alloc_shared([self.count, tile.q, dim], problem.dtype))
        own = room and not self.through
        self.own = named("o_tile", T.alloc_shared([tile.q, dim_v], problem.dtype)) if own else None
        self.full = named("q_full", T.alloc_barrier(arrive_count=[WARP] * self.count))
        hands_back = [others + (self.groups * WARP if self.through else tile.threads // WARP)] * self.count
        self.empty = named("q_empty", T.alloc_barrier(arrive_count=hands_back)) if tile.persistent else None
        record = [self.count, size_of(QueryNote)]
        self.record: Any = named("record", T.alloc_shared(record, "int32")) if tile.persistent else None
        self.noted = named("noted", T.alloc_barrier(arrive_count=[WARP] * self.count)) if self.count == 2 else None

    def slot(self, of: Round) -> Any:
        """Which tile the queries of a round have."""
        return of.items % self.count

    def turn(self, of: Round) -> Any:
        """The parity of that tile's barriers."""
        return of.items // self.count % 2

    def tile_of(self, of: Round) -> Any:
        """The queries of a round."""
        return self.tiles[self.slot(of), :, :]

    def output_of(self, of: Round, rows: slice, columns: slice) -> Any:
        """Some of the tile by which the output of a round leaves."""
        return self.tiles[self.slot(of), rows, columns] if self.own is None else self.own[rows, columns]

    def wait_for_room(self, of: Round) -> None:
        """The copying warp waits until the item before it in its tile is done with."""
        wait(self.empty, self.slot(of), self.turn(of) ^ 1)

    def note(self, note: QueryNote, of: Round) -> None:
        """The copying warp notes which item a round has, when there is room."""
        self.wait_for_room(of)
        self._write(note, of)
        if self.noted is not None:
            arrive(self.noted, self.slot(of))

    def take_note(self, numbers: Any, of: Round) -> None:
        """A thread reads the note of a round, whose queries may still be on their way, into an array of its own."""
        wait(self.noted, self.slot(of), self.turn(of))
        self.read_note(numbers, of)

    def read_note(self, numbers: Any, of: Round) -> None:
        """The same where the note is known to be there."""
        copy_note(numbers, self.record, self.slot(of))

    def copy(self, buffers: Any, item: Item) -> None:
        """The copying warp has an item's queries brought."""
        source = window(buffers["q"], item.batch, item.head, item.q0, self.tile.q, self.dim)
        copy_in(source, self.tiles, self.full, self.slot(item.round))

    def tell(self, of: Round) -> None:
        """The copying warp arrives: the note of a round is there, and nobody needs its queries."""
        arrive(self.full, self.slot(of))

    def wait_until_there(self, of: Round) -> None:
        """A computing thread waits for the queries of a round."""
        wait(self.full, self.slot(of), self.turn(of))

    def give_back_after_scores(self, thread: Any, of: Round, last: Any) -> None:
        """Nobody reads the queries any more after the last step's scores, unless the output leaves by their tile."""
        if self.empty is not None and not self.through:
            give_back(thread, self.empty, self.slot(of), last)

    def give_back_before(self, thread: Any, of: Round) -> None:
        """Of two tiles, the one of the round before is handed back: its output has left by now."""
        if self.count == 2:
            arrive_when_read(thread, [(self.empty, (of.items + 1) % 2)], of.items > 0)

    def store(self, buffers: Any, output: Any, item: Item, thread: Any) -> None:
        """A group's rows of the output leave."""
        if item.end is not None:
            self._leave_within(buffers["o"], output, item, thread)
        elif self.through or self.own is not None:
            self._leave_by_tile(buffers["o"], output, item, thread)
        else:
            leave(output, window(buffers["o"], item.batch, item.head, item.q0, self.tile.q, self.dim_v))
        if self.empty is not None and self.through and self.count == 1:
            arrive_when_read(thread, [(self.empty, 0)])

    @macro_method
    def _write(self, note: QueryNote, of: Round) -> None:
        """A lane writes the note of a round."""
        slot = self.slot(of)
        each_number = list(range(size_of(QueryNote)))
        if T.get_thread_binding() % WARP == 0:
            for number in each_number:
                self.record[slot, number] = note[number]

    @macro_method
    def _leave_within(self, target: Any, output: Any, item: Item, thread: Any) -> None:
        """The same of packed sequences: a copy would not end where the sequence does, so that rows of its last block
        are stored each."""
        q0, end, rows, columns = item.q0, item.end, self.tile.q, self.dim_v
        if q0 + rows <= end:
            self._leave_by_tile(target, output, item, thread)
        else:
            for i, d in T.Parallel(rows, columns):
                if q0 + i < end:
                    target[item.batch, q0 + i, item.head, d] = output[i, d]

    @macro_method
    def _leave_by_tile(self, target: Any, output: Any, item: Item, thread: Any) -> None:
        """Copies the output to a tile and out from there, each group its rows."""
        together = SWIZZLED if self.dim_v % SWIZZLED == 0 else SWIZZLED // 2
        each_group, each_column = list(range(self.groups)), list(range(0, self.dim_v, together))
        q0 = item.q0
        if not self.through:
            T.tma_store_wait(0)  # has read the item before
        for group in each_group:
            if thread // GROUP == 1 + group:
                T.sync_threads(LEAVE + group, GROUP)  # nobody reads the rows any more
        T.copy(output, self.output_of(item.round, ALL, ALL))
        T.fence_proxy_async()
        for group in each_group:
            if thread // GROUP == 1 + group:
                T.sync_threads(LEAVE + group, GROUP)
                first = group * 64
                for at in each_column:
                    T.tma_copy(
                        self.output_of(item.round, slice(first, first + 64), slice(at, at + together)),
                        target[item.batch, q0 + first : q0 + first + 64, item.head, at : at + together],
                        leader_scope_threads=GROUP,
                    )


@T.macro
def copy_note(numbers: Any, record: Any, slot: Any) -> None:
    """A lane reads a note, and tells it to its warp, so that ptxas sees a warp agree."""
    each_number = list(range(size_of(QueryNote)))
    for number in each_number:
        numbers[number] = T.shfl_sync(record[slot, number], 0)


@T.macro
def copy_in(source: Any, tiles: Any, barriers: Any, number: Any) -> None:
    """Brings one of several tiles."""
    T.tma_copy(source, tiles[number, :, :], barrier=barriers[number])
    T.barrier_arrive(barriers[number])


@T.macro
def leave(output: Any, target: Any) -> None:
    """Stores the output from registers."""
    T.copy(output, target)
