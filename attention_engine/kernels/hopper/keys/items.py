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
So the lowest item that is not done waits for nothing that is not done, and one item after another ends.

This takes for granted that a warp acts as one. Its lanes part where one of them waits alone, and need not meet again by
themselves. So a lane speaks for its warp, and what a warp reads in shared memory is written anew behind a `sync_warp`
alone. A lane left behind would else read another item's numbers and go another way than the rest, and they would wait
for each other.
The interpreter holds all kernels to that (codegen/simulator/lanes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.packing import FIRST_QUERY, KEYS_END, QUERIES_END, number_of_sequence
from attention_engine.kernels.common import Sizes, named
from attention_engine.kernels.hopper.barriers import arrive, give_back, wait
from attention_engine.kernels.hopper.notes import note_in, number_of
from attention_engine.kernels.items import FIRST_ROUND, HeadTile, KeyBlocks, Round, Shares
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.tiles import HandedQueries
from attention_engine.kernels.warps import GROUP, LEAVE, SPARE, SWIZZLED, WARP
from attention_engine.plan.forms import Tile

NUMBERS = 12  # room for a note, in whole words of 16 bytes
LENGTHS = 8  # room for lengths, likewise
NO_MORE = -1  # steps, in the note after the last item's
ASKED_AHEAD = 5  # steps before an item's copies end the next is asked for: soon enough, and none lies long
NOTING = SPARE[-1]  # the warp that notes items
NOTES = 2  # notes: the next item is noted while one is under way


class KeyNote(NamedTuple):
    """What is noted of an item: its unit and its number there; where the share begins of what its block prepares; its
    block of keys, key head and batch; the first piece of its walk where bounds say it, else its list's first entry; its
    steps."""

    unit: Any
    position: Any
    shared_head: Any
    shared_tile: Any
    block: Any
    kv_head: Any
    batch: Any
    first: Any
    steps: Any


class SequenceNote(NamedTuple):
    """The same of packed sequences: `block` is the row of the block's first key, `batch` its sequence; beside them one
    past the last key whose gradients leave, and the sequence's first query and one past its last."""

    unit: Any
    position: Any
    shared_head: Any
    shared_tile: Any
    block: Any
    kv_head: Any
    batch: Any
    first: Any
    steps: Any
    last_key: Any
    first_query: Any
    last_query: Any


class Ends(NamedTuple):
    """Numbers of an item's sequence: the last three of its note."""

    last_key: Any
    first_query: Any
    last_query: Any

    def known(self) -> Mapping[Expr, Any]:
        """What the program reads of them."""
        numbers = (KEYS_END, self.last_key), (FIRST_QUERY, self.first_query), (QUERIES_END, self.last_query)
        return {number_of_sequence(number): value for number, value in numbers}


ASKED_BY_COMPUTING = tuple(number_of(KeyNote, n) for n in ("block", "kv_head", "batch", "first", "steps"))


class Lengths(NamedTuple):
    """Lengths that are made of a kernel's arguments: tiles of queries of a head; blocks that share a unit's tiles;
    blocks of keys of a head, and of all heads; pairs of key head and batch, in all and of a unit; queries."""

    tiles: Any
    sharing: Any
    blocks: Any
    count: Any
    pairs: Any
    together: Any
    queries: Any


@dataclass(frozen=True)
class KeyItem:
    """A block of keys of one key head and batch, and its steps; the block's round in which it comes.

    unit: its unit of blocks. Computing threads do not ask for it. sequence: of packed sequences, which are one batch; a
    block is then told by its first row.
    """

    block: Any
    kv_head: Any
    batch: Any
    steps: Any
    round: Round = FIRST_ROUND
    unit: Any = None
    sequence: Any = None
    noted_ends: Ends | None = None

    @property
    def b(self) -> Any:
        """What the program calls b."""
        return self.batch if self.sequence is None else self.sequence

    @property
    def ends(self) -> Ends:
        """Numbers of its sequence."""
        assert self.noted_ends is not None, "blocks of packed sequences have them"
        return self.noted_ends

    def first_key(self, tile: Tile) -> Any:
        """The row of its first key."""
        return self.block * tile.kv if self.sequence is None else self.block


def handed_walk(item: KeyItem, first: Any, entries: Any, stages: int) -> HandedQueries:
    """An item's walk as computing warps see it; entries: of a list, a stage each, as the copying warp notes them."""
    return HandedQueries(item.steps, lambda step: entries[item.round.stage(step, stages)[0]], first)


class Notes:
    """Notes of items in shared memory, and their barriers; made in the kernel.

    Rounds take the notes in turn. A warp reads a note's numbers where it uses them, for it has few registers.
    """

    def __init__(self, tile: Tile) -> None:
        self.within = tile.within_sequences
        self.kind: type[KeyNote] | type[SequenceNote] = SequenceNote if self.within else KeyNote
        self.record = named("record", T.alloc_shared([NOTES, NUMBERS], "int32"))
        self.numbers = named("lengths", T.alloc_shared([LENGTHS], "int32"))
        self.noted = named("noted", T.alloc_barrier(arrive_count=[WARP] * NOTES))
        self.read = named("read", T.alloc_barrier(arrive_count=[(GROUP + tile.threads) // WARP] * NOTES))
        self.asked = named("asked", T.alloc_barrier(arrive_count=WARP))

    @property
    def lengths(self) -> Lengths:
        """The lengths that are told."""
        return note_in(Lengths, self.numbers)

    def blocks(self, blocks: KeyBlocks) -> KeyBlocks:
        """The same blocks by the lengths that are told."""
        lengths = self.lengths
        return blocks.by_lengths(lengths.blocks, lengths.pairs, lengths.together)

    def shares(self, blocks: KeyBlocks) -> Shares:
        """The tiles that blocks share, by the lengths that are told."""
        return Shares(self.blocks(blocks), self.lengths.tiles, self.lengths.sharing)

    def sizes(self, sizes: Sizes) -> Sizes:
        """The same sizes with the queries' length as it is told."""
        other = copy(sizes)
        other.q = self.lengths.queries
        return other

    def start(self, of: Round) -> None:
        """A warp begins to note a round's item, when all warps are done with the note before the last."""
        wait(self.read, of.items % NOTES, of.items // NOTES % 2 ^ 1)

    def write(self, of: Round, **numbers: Any) -> None:
        """A lane writes some numbers of a round's item, by name: what is worked out next reads them from there."""
        write_numbers(self.record, of.items % NOTES, {number_of(self.kind, n): x for n, x in numbers.items()})

    def tell(self, of: Round) -> None:
        """The round's item is noted."""
        arrive(self.noted, of.items % NOTES)

    def wait(self, of: Round) -> None:
        """A warp waits until the round's item is noted."""
        wait(self.noted, of.items % NOTES, of.items // NOTES % 2)

    def note(self, of: Round) -> KeyNote | SequenceNote:
        """What is noted of a round's item, read anew at each use."""
        return note_in(self.kind, self.record, of.items % NOTES)

    def item(self, of: Round) -> KeyItem:
        """A round's item, as it is noted."""
        note = self.note(of)
        if self.within:
            return KeyItem(note.block, note.kv_head, 0, note.steps, of, note.unit, note.batch)
        return KeyItem(note.block, note.kv_head, note.batch, note.steps, of, note.unit)

    def share(self, of: Round) -> HeadTile:
        """Where what a round's item prepares beside begins."""
        note = self.note(of)
        return HeadTile(note.shared_head, note.shared_tile)

    def give_back(self, of: Round) -> None:
        """A warp needs a round's note no more."""
        give_back_note(self.read, of.items % NOTES)

    @macro_method
    def take(self, numbers: Any, items_before: Any) -> None:
        """A lane reads what computing warps ask of the item after so many, and tells it to its warp, so that ptxas sees
        a warp agree."""
        of = Round(items_before)
        self.wait(of)
        asked = [*ASKED_BY_COMPUTING, *([number_of(SequenceNote, n) for n in Ends._fields] if self.within else [])]
        for number in asked:
            numbers[number] = T.shfl_sync(self.note(of)[number], 0)
        self.give_back(of)

    @macro_method
    def tell_lengths(self, shares: Shares, blocks: KeyBlocks, queries: Any) -> None:
        """A lane notes what is made of a kernel's arguments: read anew at each use, no warp holds it, nor a
        reciprocal."""
        lengths = Lengths(
            tiles=shares.tiles, sharing=shares.sharing, blocks=blocks.blocks, count=blocks.count, pairs=blocks.pairs,
            together=blocks.together, queries=queries,
        )  # fmt: skip
        each_number = list(range(len(lengths)))
        if T.get_thread_binding() % WARP == 0:
            for number in each_number:
                self.numbers[number] = lengths[number]
        T.sync_warp()


@T.macro
def write_numbers(record: Any, slot: Any, numbers: Mapping[int, Any]) -> None:
    """A lane writes, when all have read what stood there."""
    T.sync_warp()
    if T.get_thread_binding() % WARP == 0:
        for which, number in numbers.items():
            record[slot, which] = number
    T.sync_warp()


@T.macro
def give_back_note(read: Any, slot: Any) -> None:
    """A lane arrives for its warp, when all of the warp have read: lanes that parted at a wait need not be together
    again, and the others would find the numbers of the item after the next."""
    T.sync_warp()
    give_back(T.get_thread_binding(), read, slot)


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
    batch, kv_head, kv0 = item.batch, item.kv_head, item.first_key(tile)
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
