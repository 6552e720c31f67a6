"""Who adds to a tile of dQ before a block over keys does, where blocks add in order (keys/order.py): one of its head,
or nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

from attention_engine.kernels.apart import Halves, Ring
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.keys.items import KeyItem
from attention_engine.kernels.hopper.notes import number_of
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import QueryWalk

NOBODY = 0  # has added to a tile; others are named by 1 + their block of keys
NEVER = 1 << 23  # beyond all tiles


class Tiles(NamedTuple):
    """What a block knows of its head's tiles. first_later: the first that sees the keys after the block's. Where heads
    alternate, the first that is far (kernels/apart.py): far for this block, far_earlier for that of the keys before its
    own, far_later for that of the keys after them. NEVER or 0 where there are no such keys."""

    first_later: Any
    far: Any
    far_earlier: Any
    far_later: Any


FIRST_LATER, FAR, FAR_EARLIER, FAR_LATER = (number_of(Tiles, name) for name in Tiles._fields)


@dataclass(frozen=True)
class Neighbours:
    """Who adds to a tile before a block does. tiles: in shared memory, as the thread that reads them has no registers
    for them (ptxas C7512)."""

    form: KeyForm
    item: KeyItem
    walk: QueryWalk
    tiles: Any

    @macro_method
    def note_tiles(self) -> None:
        """Before the first step."""
        form, block = self.form, self.item.block
        if form.blocks.latest_first or form.blocks.alternates:
            self.tiles[FIRST_LATER] = self.first_later()
        if form.blocks.alternates:
            self.tiles[FAR] = self.first_far(block)
            self.tiles[FAR_EARLIER] = self.far_earlier()
            self.tiles[FAR_LATER] = T.if_then_else(block + 1 < form.blocks.blocks, self.first_far(block + 1), NEVER)

    def first_later(self) -> Any:
        """The first tile that sees the keys after the block's."""
        block = self.item.block + 1
        return T.if_then_else(block < self.form.blocks.blocks, self.walk.first_tile_of(block), NEVER)

    def far_earlier(self) -> Any:
        """The first tile that is far for the block of the keys before its own."""
        return T.if_then_else(self.item.block > 0, self.first_far(self.item.block - 1), 0)

    def first_far(self, block: Any) -> Any:
        """The first tile that is far for a block, where heads alternate."""
        assert isinstance(self.form.apart, Halves)
        return self.walk.first_tile_of(block) + self.form.apart.near(block)

    @macro_method
    def find(self, before: Any, tile: Any, step: Any) -> None:
        """Writes down who adds to the tile of a step before the block: its name, or NOBODY."""
        form, block = self.form, self.item.block
        if form.blocks.alternates:
            self.find_alternating(before, tile)
        elif form.blocks.latest_first:
            before[0] = T.if_then_else(tile >= self.tiles[FIRST_LATER], block + 2, NOBODY)
        elif isinstance(form.apart, Ring):
            last = T.if_then_else(block == 0, form.blocks.blocks, block)
            own = form.apart.own_tiles(block, self.walk.tiles_of_a_head)
            before[0] = T.if_then_else(self.walk.tile_of(step)[0] < own, NOBODY, last)
        else:
            before[0] = block

    @macro_method
    def find_alternating(self, before: Any, tile: Any) -> None:
        """The same where heads alternate. To a tile those blocks for which it is near add in the order of their keys,
        then the others in the opposite order. Of odd heads, all that is turned around."""
        block = self.item.block
        if self.item.kv_head % 2 == 0:
            if tile < self.tiles[FAR]:
                before[0] = T.if_then_else(tile < self.tiles[FAR_EARLIER], block, NOBODY)
            else:
                before[0] = T.if_then_else(tile >= self.tiles[FAR_LATER], block + 2, NOBODY)
                if T.And(tile < self.tiles[FAR_LATER], tile >= self.tiles[FIRST_LATER]):
                    before[0] = block + 2  # or the last one for which the tile is near
                    while T.And(before[0] < self.form.blocks.blocks, self.walk.first_tile_of(before[0]) <= tile):
                        before[0] += 1
        else:
            before[0] = block
            if tile < self.tiles[FAR]:
                before[0] = block + 2
                if tile < self.tiles[FIRST_LATER]:
                    before[0] = block  # or the last one for which the tile is far
                    while T.And(before[0] > 0, self.first_far(before[0] - 1) > tile):
                        before[0] -= 1


class FirstTiles:
    """To which tiles a block adds before all others, as computing threads ask at each step: they have registers for two
    numbers."""

    def __init__(self, form: KeyForm, item: KeyItem, walk: QueryWalk) -> None:
        self.form, self.item, self.walk = form, item, walk
        neighbours = Neighbours(form, item, walk, None)
        if isinstance(form.apart, Ring):
            self.own = name_value(form.apart.own_tiles(item.block, walk.tiles_of_a_head))
        elif form.blocks.alternates:
            self.begin, self.length = self._of_alternating(neighbours)
        elif form.blocks.latest_first:
            self.stop = name_value(neighbours.first_later() * form.tile.q)

    def _of_alternating(self, neighbours: Neighbours) -> tuple[Any, Any]:
        """From which query on they begin, and for how many: beyond the last one that 32 bits can tell, on from 0. A
        block of odd heads is the first where it is the last to see a tile that is near for all; the block of the first
        keys is so wherever a tile is far for it."""
        block, q = self.item.block, self.form.tile.q
        far, far_of_first = name_value(neighbours.first_far(block) * q), name_value(neighbours.first_far(0) * q)
        later, is_first = name_value(neighbours.first_later() * q), name_value(T.cast(block == 0, "int32"))
        even = self.item.kv_head % 2 == 0
        begin = T.if_then_else(even, neighbours.far_earlier() * q, is_first * far_of_first)
        stop = T.if_then_else(even, T.max(far, later), T.min(later, far_of_first - is_first))
        begin = name_value(T.cast(begin, "uint32"))
        return begin, name_value(T.cast(stop, "uint32") - begin)

    def hold(self, q0: Any, step: Any) -> Any:
        """Is a step's tile, which begins at the query q0, one of them?"""
        if isinstance(self.form.apart, Ring):
            return self.walk.tile_of(step)[0] < self.own
        if self.form.blocks.alternates:
            return T.cast(q0, "uint32") - self.begin < self.length
        return q0 < self.stop if self.form.blocks.latest_first else self.item.block == 0
