"""Who works on what: items of a forward pass, and the units and shares of a backward pass over keys.

An item of a forward pass is a block of queries of one head and batch. Persistent blocks are dealt items like cards. In
each turn every block gets one. Every other turn is dealt backwards, so that who got a long item gets a short one. Where
later queries see more keys, items go in sections of several heads: the L2 cache holds all keys and values of a section.
The last section goes from the longest items to the shortest, the one before it the other way round, and so on, so that
where sections meet all items are alike, and a turn may have some of both. Counted on paper for an H100, causal work of
512 to 32768 queries then ends within 3 %, mostly 1 %, of what a dealer reaches who hands an item to whoever is free.
Measured, that dealer, a counter in memory, is slower: by 1 to 10 %, and by 28 % at head dim 128, S 2048 and batch 8.
Where a mask's lists say how long items are, nothing is known of their order, and it deals: of six documents, turns had
left the busiest block 1.8 times the mean.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tilelang.language as T

from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.common import Sizes
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import KeyWalk
from attention_engine.plan.attention_buffers import AHEAD, KEY_TILES, MADE_BEFORE, TOGETHER, most_key_tiles
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import L2_BYTES

NO_HEAD = 1 << 30


@dataclass(frozen=True)
class Round:
    """One item of a block after another: how many items, and how many steps, the block has done before this one."""

    items: Any = 0
    steps: Any = 0

    def stage(self, step: Any, stages: int) -> tuple[Any, Any]:
        """Where a step of this round finds its tiles, and the parity of their barriers."""
        return stage_of(self.steps + step, stages)


FIRST_ROUND = Round()  # the only one of a block that has one item


@dataclass(frozen=True)
class Item:
    """A block of queries of one head and batch, from the query q0 on; its steps, at least one; the block's round in
    which it comes. Of packed sequences, which are one batch: the sequence, and one past its last query."""

    block: Any
    head: Any
    batch: Any
    steps: Any
    q0: Any
    round: Round = FIRST_ROUND
    sequence: Any = None
    end: Any = None

    @property
    def b(self) -> Any:
        """What the program calls b."""
        return self.batch if self.sequence is None else self.sequence


def stage_of(count: Any, stages: int) -> tuple[Any, Any]:
    """Of the step after so many, over all items of a block: its stage, and the parity of that stage's barriers."""
    return count % stages, (count // stages) % 2


class Items:
    """All work items of a call, for a GPU that runs so many blocks at once.

    longest_last: do later blocks of queries walk over more keys? Then the last go first. most: where memory says how
    many blocks of queries a head has (`of`), how many it may have.
    """

    def __init__(
        self, problem: Problem, tile: Tile, sizes: Sizes, longest_last: bool, at_once: int, most: Any = None
    ) -> None:  # fmt: skip
        self.heads, self.group, self.longest_last, self.at_once = problem.heads, problem.group, longest_last, at_once
        self.blocks, self.pairs = T.ceildiv(sizes.q, tile.q), sizes.batch * problem.heads
        self.most = self.blocks if most is None else most
        self.kv_length = sizes.kv
        self.keys_in_cache = L2_BYTES // (2 * (padded(problem.dim) + padded(problem.dim_v)))

    @property
    def grid(self) -> Any:
        """How many blocks share the items."""
        return T.min(self.most * self.pairs, self.at_once)

    def counted(self) -> Items:
        """The same where a counter deals them. Sections are twice as large: at the end of one, each block holds an item
        ahead. Lists leave keys out, so that the cache holds more heads."""
        other = copy(self)
        other.keys_in_cache = 2 * self.keys_in_cache
        return other

    def of(self, blocks: Any) -> Items:
        """The same where a head has so many blocks."""
        other = copy(self)
        other.blocks = blocks
        return other


class Deal:
    """What the persistent block of a number is dealt: it has `turns`, in each of which it gets one item or none."""

    def __init__(self, items: Items, number: Any) -> None:
        self.items, self.number = items, number
        self.grid = name_value(items.grid)
        self.together = name_value(self._pairs_of_a_section() if items.longest_last else items.pairs)
        self.count = name_value(items.pairs * items.blocks)
        self.turns = name_value(_ceiling(self.count, self.grid))
        self.last = name_value(T.truncdiv(items.pairs - 1, self.together))  # section

    def _pairs_of_a_section(self) -> Any:
        """As many as make an even number of turns, the nearest to what the cache holds; sections of one size."""
        items, blocks, pairs, two_waves = self.items, self.items.blocks, self.items.pairs, 2 * self.grid
        cached = T.max(T.truncdiv(items.keys_in_cache, T.max(items.kv_length, 1)), 1) * items.group
        rounds = T.max(T.truncdiv(T.min(cached, pairs) * blocks + self.grid, two_waves), 1)
        most = name_value(T.max(T.min(T.truncdiv(rounds * two_waves, blocks), pairs), 1))
        return _ceiling(pairs, T.max(T.truncdiv(pairs + T.truncdiv(most, 2), most), 1))

    def number_in(self, turn: Any) -> Any:
        """The number of the item that this block gets in a turn; `count` or more where it gets none."""
        dealt = T.if_then_else(turn % 2 == 0, self.number, self.grid - 1 - self.number)
        return name_value(turn * self.grid + dealt)

    def item_of(self, number: Any) -> tuple[Any, Any, Any]:
        """Block of queries, head and batch of the item with this number."""
        blocks = self.items.blocks
        if self.items.longest_last:
            section = name_value(T.truncdiv(number, self.together * blocks))
            first = name_value(section * self.together)
            pairs = name_value(T.min(self.together, self.items.pairs - first))
            position = name_value(number - first * blocks)
            row = name_value(T.truncdiv(position, pairs))
            block = T.if_then_else((self.last - section) % 2 == 0, blocks - 1 - row, row)
            pair = first + position - row * pairs
        else:
            pair = name_value(T.truncdiv(number, blocks))
            block = number - pair * blocks
        batch = name_value(T.truncdiv(pair, self.items.heads))
        return name_value(block), name_value(pair - batch * self.items.heads), batch


def at_least_one(walk: KeyWalk) -> Any:
    """The steps of a walk, at least one: an item is never empty. Where no pair is kept, that step's tile is masked."""
    return name_value(T.max(walk.count, 1))


@dataclass(frozen=True)
class KeyBlocks:
    """The blocks of a backward pass over keys, in the order the GPU starts them. A block has a block of keys of one
    pair (of key head and batch). The blocks of `together` pairs are a unit.

    Units start one after another. Where earlier keys have more queries, the longest blocks of a unit start first (the
    shortest, where blocks add to dQ in order: hopper/keys/order.py says why). The unit then has as many pairs as the L2
    cache holds queries and gradients of: a GPU would else end with the long blocks of the last head, most of its SMs
    idle. Where all blocks are as long, a unit is one pair, and blocks have the GPU's own numbers.

    Where a list says the order of a unit's blocks, units that prepare none later are dealt in turns, a block of each:
    the longest of the last unit would else begin when nearly all is done, and most SMs wait for them.
    """

    blocks: Any  # of keys, of a head
    heads: int
    batch: Any
    pairs: Any  # in all
    longest_first: bool
    at_once: int  # persistent blocks that the GPU runs at once; 0: a grid has a block for each block of keys
    together: Any  # pairs of a unit
    ahead: Any  # how far ahead the unit is that a unit's blocks prepare
    given: Any  # units whose delta isn't theirs to make
    most: Any = None  # blocks of a head, where a list in memory says how many there are (`listed`)
    turn: Any = None  # after how many blocks walks over queries turn; None: they don't
    latest_first: bool = False  # do blocks of a unit start with the last keys?
    alternates: bool = False  # do even key heads and odd ones go through their tiles in opposite directions?
    ends: Any = None  # 1: the blocks of the last unit start with the first keys, where others start with the last ones

    @staticmethod
    def of(
        problem: Problem, tile: Tile, sizes: Sizes, longest_first: bool, at_once: int = 0, turn: Any = None,
        latest_first: bool = False, alternates: bool = False, ends: Any = None,
    ) -> KeyBlocks:  # fmt: skip
        """The blocks of a kernel with this tile."""
        most = sizes.spell(most_key_tiles(problem, tile)) if tile.within_sequences else None
        return KeyBlocks(
            blocks=T.ceildiv(sizes.kv, tile.kv), heads=problem.kv_heads, batch=sizes.batch,
            pairs=sizes.batch * problem.kv_heads, longest_first=longest_first, at_once=at_once,
            together=sizes.variable(TOGETHER) if longest_first else 1, ahead=sizes.variable(AHEAD),
            given=sizes.variable(MADE_BEFORE), most=most, turn=turn, latest_first=latest_first, alternates=alternates,
            ends=ends,
        )  # fmt: skip

    def listed(self, buffers: Any) -> KeyBlocks:
        """The same in a kernel, where a list may say how many blocks a head has."""
        return self if self.most is None else replace(self, blocks=name_value(buffers[KEY_TILES][0, 0]))

    @property
    def of_a_unit(self) -> Any:
        """How many blocks a unit has, but for the last one, which may have fewer."""
        return self.together * self.blocks if self.longest_first else self.blocks

    @property
    def pairs_before(self) -> Any:
        """How many pairs' units no block prepares for."""
        return self.together * self.ahead

    @property
    def whole(self) -> Any:
        """How many units have all their blocks: the last may have fewer."""
        return T.truncdiv(self.pairs, self.together)

    @property
    def behind(self) -> Any:
        """How far behind theirs the unit is whose dQ a whole unit's blocks store, where they are persistent
        (hopper/keys/finished_units.py): as far as the one that they prepare is ahead, when no block of it is under
        way."""
        return self.ahead

    @property
    def pairs_stored(self) -> Any:
        """The first of so many pairs are of units that blocks store."""
        return T.max(self.whole - self.behind, 0) * self.together

    @property
    def count(self) -> Any:
        """Of all blocks."""
        return self.blocks * self.pairs

    @property
    def grid(self) -> list[Any]:
        """Of the kernel."""
        if self.at_once:
            count = self.count if self.most is None else self.most * self.pairs
            return [T.min(count, self.at_once)]
        return [self.count] if self.longest_first else [self.blocks, self.heads, self.batch]

    def by_lengths(self, blocks: Any, pairs: Any, together: Any) -> KeyBlocks:
        """The same by other names of how many blocks a head has, how many pairs there are, and how many a unit has."""
        return replace(self, blocks=blocks, pairs=pairs, together=together if self.longest_first else 1)

    def pairs_of(self, unit: Any) -> tuple[Any, Any]:
        """The first pair of key head and batch of a unit, and how many it has."""
        first = unit * self.together
        return first, T.min(self.together, self.pairs - first) if self.longest_first else 1

    def position(self, index: Any) -> tuple[Any, Any]:
        """Of a block of the grid: its unit, and its own number there."""
        if not self.longest_first and not self.at_once:
            block, head, batch = index
            return batch * self.heads + head, block
        number = name_value(T.truncdiv(index, self.of_a_unit))
        if self.most is None:
            return number, name_value(index - number * self.of_a_unit)
        first = name_value(T.max(self.pairs - self.ahead, 0))
        last, of_last = name_value(self.pairs - first), name_value(index - first * self.blocks)
        number = name_value(T.if_then_else(of_last < 0, number, first + of_last % last))
        return number, name_value(T.if_then_else(of_last < 0, index - number * self.blocks, T.truncdiv(of_last, last)))

    def keys_of(self, index: Any) -> tuple[Any, Any, Any]:
        """Block of keys, key head and batch of a block of the grid."""
        if not self.longest_first and not self.at_once:
            block, head, batch = index
            return block, head, batch
        unit, position = self.position(index)
        if self.alternates:
            return self._alternating(unit, position)
        block = self.block_in_unit(unit, position)
        return block, *self.pair_in_unit(unit, position, block)

    def walks_back(self, index: Any) -> Any:
        """Does a block of the grid walk from the last queries to the first (plan/hopper.py)? None: none does."""
        return None if self.turn is None else name_value(T.truncdiv(index, self.turn)) % 2 == 0

    def _alternating(self, unit: Any, position: Any) -> tuple[Any, Any, Any]:
        """The same where heads alternate. A row has a block of each pair of one kind. First come the rows of even
        heads, from the last keys to the first, then those of odd ones, from the first keys to the last."""
        first, pairs = self.pairs_of(unit)
        of_a_kind = name_value(T.truncdiv(pairs, 2))
        row = name_value(T.truncdiv(position, of_a_kind))
        odd = name_value(T.cast(row >= self.blocks, "int32"))
        block = T.if_then_else(odd == 1, row - self.blocks, self.blocks - 1 - row)
        pair = name_value(first + 2 * (position - row * of_a_kind) + odd)
        batch = name_value(T.truncdiv(pair, self.heads))
        return name_value(block), name_value(pair - batch * self.heads), batch

    def block_in_unit(self, unit: Any, position: Any) -> Any:
        """The block of keys of a unit's block."""
        if not self.longest_first:
            return position
        row = name_value(T.truncdiv(position, self.pairs_of(unit)[1]))
        return name_value(self._turned(unit, row)) if self.latest_first else row

    def _turned(self, unit: Any, row: Any) -> Any:
        """Where blocks start with the last keys, which of them stand in a row; or in which row a block stands."""
        back = self.blocks - 1 - row
        if self.ends is None:
            return back
        return T.if_then_else(T.And(self.ends != 0, (unit + 1) * self.together >= self.pairs), row, back)

    def pair_in_unit(self, unit: Any, position: Any, block: Any) -> tuple[Any, Any]:
        """Its key head and batch."""
        pair = unit
        if self.longest_first:
            first, pairs = self.pairs_of(unit)
            row = self._turned(unit, block) if self.latest_first else block
            pair = name_value(first + position - row * pairs)
        batch = name_value(T.truncdiv(pair, self.heads))
        return name_value(pair - batch * self.heads), batch


class HeadTile(NamedTuple):
    """A tile of queries of one of a unit's heads."""

    head: Any
    tile: Any


class Shares:
    """The tiles of queries of a unit's heads, as the blocks of another unit share them out: a block's share begins with
    the tile at its own number, and goes on with every tile that is as many further as blocks share. Where blocks differ
    in length, the longest half of them have a share: those have the time. They are the first ones; the last ones where
    blocks start with the last keys; where heads alternate, those in the middle."""

    def __init__(self, blocks: KeyBlocks, tiles: Any, sharing: Any) -> None:
        self.blocks = blocks
        self.tiles, self.sharing = tiles, sharing  # tiles of a head; blocks that share

    @staticmethod
    def of(blocks: KeyBlocks, tile: Tile, queries: Any) -> Shares:
        """Of so many queries."""
        sharing = _ceiling(blocks.of_a_unit, 2) if blocks.longest_first else blocks.of_a_unit
        return Shares(blocks, name_value(T.ceildiv(queries, tile.q)), name_value(sharing))

    def first(self, position: Any) -> HeadTile:
        """The first tile in the share of the block at a position; of a head beyond them all where it has none."""
        none = False
        if self.blocks.alternates or self.blocks.latest_first:
            before = 2 if self.blocks.alternates else 1
            position = name_value(position - T.shift_right(self.blocks.of_a_unit, before))
            none = T.cast(position, "uint32") >= T.cast(self.sharing, "uint32")
        elif self.blocks.longest_first:
            none = position >= self.sharing
        head = name_value(T.truncdiv(position, self.tiles))
        return HeadTile(T.if_then_else(none, NO_HEAD, head), name_value(position - head * self.tiles))


def _ceiling(a: Any, b: Any) -> Any:
    """a / b rounded up; what rounds towards zero is shorter in CUDA, and nothing here is negative."""
    return T.truncdiv(a + b - 1, b)
