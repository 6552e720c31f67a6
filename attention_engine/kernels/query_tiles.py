"""The tiles of queries of a Hopper forward block: how they come, and how the output leaves by them.

A block that walks over items has room for a tile of the output beside, as a rule. Or that is a second tile of queries
(Tile.queries_ahead): the next item's come while the present ones are used. An item's output then leaves by the tile of
its queries, which nobody reads after its last scores; its copy out has read it by the time that the next item has its
first weights, and then the tile is handed back. Which of two tiles products read is worked out between them in each
step, so that long items lose what short ones win.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.kernels.common import named, window
from attention_engine.kernels.items import Item
from attention_engine.kernels.warps import GROUP, LEAVE, WARP, give_back, keeps_queries_ahead, output_fits

SWIZZLED = 64  # columns of a 16-bit tile that lie together in shared memory: 128 bytes
ALL = slice(None)
BLOCK, HEAD, BATCH, STEPS = range(4)  # an item's record
NUMBERS = 4
NO_MORE = -1  # steps, in the record after the last item's


class QueryTiles:
    """The tiles and their barriers; made in the kernel.

    count: of tiles. next_are_there: may a block ask for the next item's queries before its output has left?
    """

    def __init__(self, problem: Problem, tile: Tile) -> None:
        dim, dim_v = padded(problem.dim), padded(problem.dim_v)
        self.tile, self.dim, self.dim_v, self.groups = tile, dim, dim_v, tile.threads // GROUP
        room = tile.persistent and output_fits(problem, tile)
        self.count = 2 if tile.queries_ahead and keeps_queries_ahead(problem, tile) else 1
        self.through = dim == dim_v and (self.count == 2 or not room)  # the output leaves by its queries' tile
        self.next_are_there = tile.persistent and (self.count == 2 or not self.through)
        self.tiles = named("q_tile", T.alloc_shared([self.count, tile.q, dim], problem.dtype))
        own = room and not self.through
        self.own = named("o_tile", T.alloc_shared([tile.q, dim_v], problem.dtype)) if own else None
        self.full = named("q_full", T.alloc_barrier(arrive_count=[WARP] * self.count))
        hands_back = [self.groups * WARP if self.through else tile.threads // WARP] * self.count
        self.empty = named("q_empty", T.alloc_barrier(arrive_count=hands_back)) if tile.persistent else None
        self.record = named("record", T.alloc_shared([self.count, NUMBERS], "int32")) if tile.persistent else None
        self.noted = named("noted", T.alloc_barrier(arrive_count=[WARP] * self.count)) if self.count == 2 else None

    def slot(self, item: Item) -> Any:
        """Which tile an item's queries have."""
        return item.items_before % self.count

    def turn(self, item: Item) -> Any:
        """The parity of their barriers."""
        return item.items_before // self.count % 2

    def tile_of(self, item: Item) -> Any:
        """An item's queries."""
        return self.tiles[self.slot(item), :, :]

    def output_of(self, item: Item, rows: slice, columns: slice) -> Any:
        """Some of the tile by which an item's output leaves."""
        return self.tiles[self.slot(item), rows, columns] if self.own is None else self.own[rows, columns]

    def note(self, item: Item) -> None:
        """The copying warp tells which item is next, when the one before it in its tile is done with."""
        wait(self.empty, self.slot(item), self.turn(item) ^ 1)
        write_note(self, item)
        if self.noted is not None:
            arrive(self.noted, self.slot(item))

    def take_note(self, numbers: Any, item: Item) -> None:
        """The numbers of an item, whose queries may still be on their way."""
        wait(self.noted, self.slot(item), self.turn(item))
        self.read_note(numbers, item)

    def read_note(self, numbers: Any, item: Item) -> None:
        """The numbers of an item that is noted, told by a lane, so that ptxas sees a warp agree."""
        copy_numbers(numbers, self.record, self.slot(item))

    def copy(self, buffers: Any, item: Item) -> None:
        """The copying warp has an item's queries brought."""
        source = window(buffers["q"], item.batch, item.head, item.q0, self.tile.q, self.dim)
        copy_in(source, self.tiles, self.full, self.slot(item))

    def tell(self, item: Item) -> None:
        """The copying warp arrives: what it noted of an item is there, whose queries nobody needs."""
        arrive(self.full, self.slot(item))

    def wait_until_there(self, item: Item) -> None:
        """A computing thread waits for an item's queries."""
        wait(self.full, self.slot(item), self.turn(item))

    def give_back_after_scores(self, thread: Any, item: Item, last: Any) -> None:
        """Nobody reads the queries any more after the last step's scores, unless the output leaves by their tile."""
        if self.empty is not None and not self.through:
            give_back(thread, self.empty, self.slot(item), last)

    def give_back_before(self, thread: Any, item: Item) -> None:
        """Of two tiles the one of the item before: its output has left by now."""
        if self.count == 2:
            arrive_when_read(thread, [(self.empty, (item.items_before + 1) % 2)], item.items_before > 0)

    def store(self, buffers: Any, output: Any, item: Item, thread: Any) -> None:
        """A group's rows of the output leave."""
        if self.through or self.own is not None:
            leave_by_tile(self, buffers["o"], output, item, thread)
        else:
            leave(output, window(buffers["o"], item.batch, item.head, item.q0, self.tile.q, self.dim_v))
        if self.empty is not None and self.through and self.count == 1:
            arrive_when_read(thread, [(self.empty, 0)])


@T.macro
def wait(barriers: Any, number: Any, parity: Any) -> None:
    """For one of several barriers."""
    T.barrier_wait(barriers[number], parity)


@T.macro
def arrive(barriers: Any, number: Any) -> None:
    """At one of several barriers."""
    T.barrier_arrive(barriers[number])


@T.macro
def write_note(queries: QueryTiles, item: Item) -> None:
    """A lane writes an item's record."""
    slot = queries.slot(item)
    if T.get_thread_binding() % WARP == 0:
        queries.record[slot, BLOCK] = item.block
        queries.record[slot, HEAD] = item.head
        queries.record[slot, BATCH] = item.batch
        queries.record[slot, STEPS] = item.steps


@T.macro
def copy_numbers(numbers: Any, record: Any, slot: Any) -> None:
    """A lane reads an item's record, and tells it."""
    each_number = list(range(NUMBERS))
    for number in each_number:
        numbers[number] = T.shfl_sync(record[slot, number], 0)


@T.macro
def copy_in(source: Any, tiles: Any, barriers: Any, number: Any) -> None:
    """Brings one of several tiles."""
    T.tma_copy(source, tiles[number, :, :], barrier=barriers[number])
    T.barrier_arrive(barriers[number])


@T.macro
def arrive_when_read(thread: Any, empty: list[tuple[Any, Any]], when: Any = True) -> None:
    """The warp of each group that began the copies out arrives, when they have read: all of it, for which lane began
    them is the hardware's choice."""
    if T.And(thread % GROUP < WARP, when):
        T.tma_store_wait(0)
        for barrier_and_number in empty:
            arrive(*barrier_and_number)


@T.macro
def leave(output: Any, target: Any) -> None:
    """Stores the output from registers."""
    T.copy(output, target)


@T.macro
def leave_by_tile(queries: QueryTiles, target: Any, output: Any, item: Item, thread: Any) -> None:
    """Copies the output to a tile and out from there, each group its rows."""
    each_group, each_column = list(range(queries.groups)), list(range(0, queries.dim_v, SWIZZLED))
    q0 = item.q0
    if not queries.through:
        T.tma_store_wait(0)  # has read the item before
    for group in each_group:
        if thread // GROUP == 1 + group:
            T.sync_threads(LEAVE + group, GROUP)  # nobody reads the rows any more
    T.copy(output, queries.output_of(item, ALL, ALL))
    T.fence_proxy_async()
    for group in each_group:
        if thread // GROUP == 1 + group:
            T.sync_threads(LEAVE + group, GROUP)
            first = group * 64
            for at in each_column:
                T.tma_copy(
                    queries.output_of(item, slice(first, first + 64), slice(at, at + SWIZZLED)),
                    target[item.batch, q0 + first : q0 + first + 64, item.head, at : at + SWIZZLED],
                    leader_scope_threads=GROUP,
                )
