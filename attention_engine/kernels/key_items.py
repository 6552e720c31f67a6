"""The items of a persistent block of the backward pass over keys: how it gets them, how its warps learn which they are.

An item is a block of keys of one key head and batch (items.KeyBlocks). A counter in memory deals them in their order to
whoever is free, as a GPU starts blocks: what an item waits for, earlier ones do. A spare warp takes the next one when
the copying warp asks for it, some steps before it needs it, and notes it in shared memory for the others.

No wait is for ever, since each is for an item that was dealt before, or for an earlier step of the same one:
- an item is dealt to a block that runs, so one that has not started holds up none; the kernel after this one, which
  waits for units, starts when all blocks of this one have;
- a block notes an item when its warps are done with the one before the last, and when blocks of the unit `ahead` before
  the item's have prepared its unit: items with lower numbers, which were dealt before it;
- a spare warp prepares for a later unit first, which waits for nothing. It then stores dQ of the unit `behind` its own,
  once that unit's items are computed and counted: lower numbers too;
- products wait for copies, and copies for the notes and for the products before them in the same block.
So the lowest item that is not done waits for nothing that is not done, and one item after another ends. What this takes
for granted is that a warp acts as one. Its lanes part where one of them waits alone, and need not meet again by
themselves. So a lane speaks for its warp, and a place that the warp reads is written anew, behind a `sync_warp` alone:
a lane left behind would read another item's numbers, go another way than the rest, and they would wait for each other.
The interpreter holds all kernels to that (codegen/simulator/lanes.py).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Tile
from attention_engine.kernels.barriers import arrive, give_back, wait
from attention_engine.kernels.common import Sizes, named
from attention_engine.kernels.items import KeyBlocks, Shares, stage_of
from attention_engine.kernels.tiles import HandedQueries
from attention_engine.kernels.warps import GROUP, LEAVE, SPARE, SWIZZLED, WARP

# An item's record: its unit and its number there; the first of a unit's heads and tiles of queries that it prepares for
# it; its block of keys, key head and batch; the first piece of its walk, where bounds say it, and steps.
UNIT, POSITION, SHARED_HEAD, SHARED_TILE, BLOCK, HEAD, BATCH, FIRST, STEPS = range(9)
NUMBERS = 12  # with what makes records, and some of their numbers together, whole words of 16 bytes
# Lengths that are told: tiles of a head; blocks that share them; blocks of a head, and of all heads; pairs of key head
# and batch, and those of a unit; queries.
TILES, SHARING, KEY_BLOCKS, ITEMS, PAIRS, TOGETHER, QUERIES = range(7)
LENGTHS = 8
NO_MORE = -1  # steps, in the record after the last item's
ASKED_AHEAD = 5  # steps before an item's copies end the next is asked for: soon enough, and none lies long
NOTING = SPARE[-1]  # the warp that notes items
NOTES = 2  # records: the next item is noted while one is under way


@dataclass(frozen=True)
class KeyItem:
    """A block of keys of one key head and batch, its unit of blocks and what it prepares beside, and its steps; what
    was done before by the thread's block: items, and steps."""

    unit: Any
    share: tuple[Any, Any]
    block: Any
    kv_head: Any
    batch: Any
    steps: Any
    items_before: Any = 0
    steps_before: Any = 0

    def stage(self, step: Any, stages: int) -> tuple[Any, Any]:
        """Where a step's queries and gradients are, and the parity of their barriers."""
        return stage_of(self.steps_before + step, stages)


def of_keys(numbers: Any) -> tuple[Any, ...]:
    """Of an item that was taken: block of keys, key head, batch, first piece and steps."""
    return tuple(numbers[which] + 0 for which in (BLOCK, HEAD, BATCH, FIRST, STEPS))


def handed_walk(item: KeyItem, first: Any, entries: Any, stages: int) -> HandedQueries:
    """An item's walk as computing warps see it; entries: of a list, a stage each, as the copying warp notes them."""
    return HandedQueries(item.steps, lambda step: entries[item.stage(step, stages)[0]], first)


class Notes:
    """Records of items in shared memory, and their barriers; made in the kernel."""

    def __init__(self, tile: Tile) -> None:
        self.record = named("record", T.alloc_shared([NOTES, NUMBERS], "int32"))
        self.lengths = named("lengths", T.alloc_shared([LENGTHS], "int32"))
        self.noted = named("noted", T.alloc_barrier(arrive_count=[WARP] * NOTES))
        self.read = named("read", T.alloc_barrier(arrive_count=[(GROUP + tile.threads) // WARP] * NOTES))
        self.asked = named("asked", T.alloc_barrier(arrive_count=WARP))

    def blocks(self, blocks: KeyBlocks) -> KeyBlocks:
        """The same by the lengths that are told."""
        return blocks.told(self.lengths[KEY_BLOCKS], self.lengths[PAIRS], self.lengths[TOGETHER])

    def shares(self, blocks: KeyBlocks) -> Shares:
        """The tiles that blocks share, by the lengths that are told."""
        return Shares(self.blocks(blocks), self.lengths[TILES], self.lengths[SHARING])

    def sizes(self, sizes: Sizes) -> Sizes:
        """The same with the queries' length as it is told."""
        other = copy(sizes)
        other.q = self.lengths[QUERIES]
        return other

    def start(self, items_before: Any) -> None:
        """A warp begins to note an item, when all are done with the one before the last."""
        wait(self.read, items_before % NOTES, items_before // NOTES % 2 ^ 1)

    def write(self, items_before: Any, numbers: dict[int, Any]) -> None:
        """Some of an item's numbers, which a lane writes: what is worked out next reads them from there."""
        write_numbers(self.record, items_before % NOTES, list(numbers.items()))

    def tell(self, items_before: Any) -> None:
        """The item is noted."""
        arrive(self.noted, items_before % NOTES)

    def wait(self, items_before: Any) -> None:
        """Until the next item is noted."""
        wait(self.noted, items_before % NOTES, items_before // NOTES % 2)

    def number(self, items_before: Any, which: int) -> Any:
        """A number of an item that is noted, read here. Warps that have few registers read it anew at each use."""
        return self.record[items_before % NOTES, which]

    def noted_item(self, items_before: Any, steps_before: Any = 0) -> KeyItem:
        """An item that is noted, whose numbers are read where they are used."""
        share = self.number(items_before, SHARED_HEAD), self.number(items_before, SHARED_TILE)
        of_keys = [self.number(items_before, which) for which in (BLOCK, HEAD, BATCH, STEPS)]
        return KeyItem(self.number(items_before, UNIT), share, *of_keys, items_before, steps_before)

    def give_back(self, items_before: Any) -> None:
        """A warp needs an item's record no more."""
        give_back_record(self.read, items_before % NOTES)

    def take(self, numbers: Any, items_before: Any) -> None:
        """A warp reads the next item's numbers."""
        take_note(self, numbers, items_before)


@T.macro
def tell_lengths(notes: Notes, shares: Shares, blocks: KeyBlocks, queries: Any) -> None:
    """A warp notes what is made of a kernel's arguments: read anew at each use, no warp holds it, nor a reciprocal."""
    if T.get_thread_binding() % WARP == 0:
        notes.lengths[TILES] = shares.tiles
        notes.lengths[SHARING] = shares.sharing
        notes.lengths[KEY_BLOCKS] = blocks.blocks
        notes.lengths[ITEMS] = blocks.count
        notes.lengths[PAIRS] = blocks.pairs
        notes.lengths[TOGETHER] = blocks.together
        notes.lengths[QUERIES] = queries
    T.sync_warp()


@T.macro
def write_numbers(record: Any, slot: Any, numbers: list[tuple[int, Any]]) -> None:
    """A lane writes, when all have read what stood there."""
    T.sync_warp()
    if T.get_thread_binding() % WARP == 0:
        for which, number in numbers:
            record[slot, which] = number
    T.sync_warp()


@T.macro
def give_back_record(read: Any, slot: Any) -> None:
    """A lane arrives for its warp, when all of the warp have read: lanes that parted at a wait need not be together
    again, and the others would find the numbers of the item after the next."""
    T.sync_warp()
    give_back(T.get_thread_binding(), read, slot)


@T.macro
def take_note(notes: Notes, numbers: Any, items_before: Any) -> None:
    """A lane reads a record, and tells it, so that ptxas sees a warp agree."""
    notes.wait(items_before)
    each_number = [BLOCK, HEAD, BATCH, FIRST, STEPS]
    for number in each_number:
        numbers[number] = T.shfl_sync(notes.number(items_before, number), 0)
    notes.give_back(items_before)


@T.macro
def deal(counter: Any, dealt: Any) -> None:
    """A warp gets the number of its block's next item: dealt[0]."""
    if T.get_thread_binding() % WARP == 0:
        dealt[0] = T.atomic_add(counter, 1, return_prev=True)
    dealt[0] = T.shfl_sync(dealt[0], 0)


@T.macro
def leave_by_groups(results: Any, target: Any, item: KeyItem, tile: Tile) -> None:
    """Each group's results leave by its keys' rows of a tile, when all of the group have stored theirs."""
    each_group, each_column = list(range(tile.threads // GROUP)), list(range(0, int(results.shape[1]), SWIZZLED))
    batch, kv_head, kv0 = item.batch, item.kv_head, item.block * tile.kv
    for group in each_group:
        if T.get_thread_binding() // GROUP == 1 + group:
            T.sync_threads(LEAVE + group, GROUP)
            first = group * 64
            for at in each_column:
                T.tma_copy(
                    results[first : first + 64, at : at + SWIZZLED],
                    target[batch, kv0 + first : kv0 + first + 64, kv_head, at : at + SWIZZLED],
                    leader_scope_threads=GROUP,
                )
