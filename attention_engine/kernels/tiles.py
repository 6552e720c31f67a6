"""Which tiles a block walks over, and which of them may hold a masked pair: from a mask's bounds, or from a tile map.

Affine masks give loop bounds and need no map. For every other mask a kernel (tile_map.py) writes, for each row of
tiles, a list of tiles that hold the kept pairs: lists[batch or 0, head or 0, row, 0] is their count, and the entries
after it are 2 * piece + (1 where some pair of the tile is masked), in rising order. The first entry of an empty list is
EMPTY, for walks that take one step at least. A list keeps a pipelined loop whole, which an `if` around its body would
not.

A tile begins at any piece (PIECE queries or keys). A walk over queries begins at the first piece that the mask's bounds
keep, a tile of a list where the map found a kept pair. Were tiles cut at multiples of their length, a walk over n
tiles' length would take n + 1 steps as a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.packing import start_in_sequence
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX
from attention_engine.kernels.apart import Halves, Ring
from attention_engine.kernels.bounds import (
    BoundHere,
    is_partial,
    kv_range,
    q_range,
    width_of,
    with_starts,
)
from attention_engine.kernels.common import Place, reader
from attention_engine.kernels.splice import name_as, name_value, take_for_granted
from attention_engine.passes.analyse_mask import Bound, MaskPlan
from attention_engine.passes.index_ranges import LONGEST
from attention_engine.passes.tile_plan import TilePlan
from attention_engine.plan.attention_buffers import LISTS
from attention_engine.plan.forms import Tile

EMPTY = 1  # a tile from 0 on, of which some pair is masked
PIECE = 16  # queries or keys; tiles begin at multiples of it


@dataclass(frozen=True)
class Visit:
    """A step of a walk: its tile's first query or key; whether the tile may hold a masked pair; the query head, where
    steps have several; the list's entry, where there is a list; whether it may hold keys that nobody sees, where fewer
    tiles than the partial ones do."""

    start: Any
    partial: Callable[[Any], Any]
    head: Any = None
    entry: Any = None
    unseen: Callable[[Any], Any] | None = None

    def is_partial(self, start: Any) -> Any:
        """May the tile, its start under the name it has by now, hold a masked pair (of those within the lengths)?
        Python's truth where it is known."""
        return self.partial(start)

    def holds_unseen(self, start: Any) -> Any:
        """The same of keys that nobody sees."""
        return self.partial(start) if self.unseen is None else self.unseen(start)


@dataclass(frozen=True)
class HandedList:
    """A row of a tile map that another warp reads: how many steps it has, and the entry that is noted for a step."""

    count: Any
    noted: Callable[[Any], Any]

    def entry(self, step: Any) -> Any:
        """What the list holds for a step, read here, once. A lane tells its warp, so that ptxas sees a warp agree."""
        return name_as("entry", T.shfl_sync(self.noted(step), 0))


@dataclass(frozen=True)
class HandedQueries(HandedList):
    """A walk over queries that another warp begins: how many steps; its first piece, where bounds say it."""

    first: Any


@dataclass(frozen=True)
class Walks:
    """What the walks of a kernel's blocks have in common."""

    plan: TilePlan
    problem: Problem
    sizes: Any
    tile: Tile
    apart: Ring | Halves | None = None


class KeyWalk:
    """The tiles of keys that a block of queries walks over: `count` steps.

    handed: by a list that another warp reads.
    """

    def __init__(
        self, of: Walks, buffers: Any, batch: Any, head: Any, row: Any, handed: HandedList | None = None
    ) -> None:  # fmt: skip
        plan, sizes, tile = of.plan, of.sizes, of.tile
        self.plan, self.shape, self.q0 = plan, tile, row * tile.q
        self.bounds = with_starts(plan.bounds, buffers, batch)
        self.lists: HandedList | _Lists | None = handed
        if plan.mapped and handed is None:
            listed = T.truncdiv(head, of.problem.group) if plan.by_group else head
            self.lists = _Lists(plan, buffers, batch, listed, row)
        if self.lists is not None:
            self.count = self.lists.count
            return
        tiles = T.ceildiv(sizes.kv, tile.kv)
        first, stop = kv_range(self.bounds, self.q0, self.q0 + tile.q - 1, tile.kv, tiles)
        self.first = name_as("first", first)
        self.count = name_as("count", stop - self.first)

    def at(self, step: Any) -> Visit:
        """The tile of a step."""
        if self.lists is not None:
            entry = self.lists.entry(step)
            take_for_granted(entry >= 0)
            return Visit(entry // 2 * PIECE, lambda _: entry % 2 != 0, entry=entry)
        return Visit((self.first + step) * self.shape.kv, self._is_partial)

    def _is_partial(self, kv0: Any) -> Any:
        return is_partial(self.bounds, self.q0, self.q0 + self.shape.q - 1, kv0, kv0 + self.shape.kv - 1)


class SequenceWalk(KeyWalk):
    """The same of packed sequences: a block's queries, from the row q0 on, are of one of them, and so are its keys.

    Tiles begin at the sequence's first key. A bound of the mask says where its keys end.
    """

    def __init__(self, of: Walks, buffers: Any, sequence: Any, q0: Any) -> None:
        self.plan, self.shape, self.q0, self.lists = of.plan, of.tile, q0, None
        self.bounds = with_starts(of.plan.bounds, buffers, sequence)
        start = start_in_sequence(KV_IDX)
        (before,) = Place(sequence, 0, {}, reader(buffers)).splice(None, None, {})(start)
        self.origin = name_as("origin", 0 - before)
        tiles = T.ceildiv(of.sizes.kv, of.tile.kv)
        here = MaskPlan(tuple(self._from_origin(b) for b in self.bounds.bounds), self.bounds.exact)
        first, stop = kv_range(here, q0, q0 + of.tile.q - 1, of.tile.kv, tiles)
        self.first = name_as("first", first)
        self.count = name_as("count", stop - self.first)

    def _from_origin(self, bound: Bound) -> Bound:
        reach = bound.reach + abs(bound.kv) * LONGEST
        whole = width_of(reach)
        offset = whole(bound.offset) + whole(bound.kv) * whole(self.origin)
        return BoundHere(bound.q, bound.kv, name_as("offset", offset), greatest=reach)

    def at(self, step: Any) -> Visit:
        """The tile of a step."""
        start = self.origin + (self.first + step) * self.shape.kv
        return Visit(start, self._is_partial, unseen=self._holds_unseen)

    def _holds_unseen(self, kv0: Any) -> Any:
        """May the tile hold keys that nobody sees, by the bounds of keys alone?"""
        of_keys = MaskPlan(tuple(b for b in self.bounds.bounds if b.q == 0), True)
        return is_partial(of_keys, self.q0, self.q0, kv0, kv0 + self.shape.kv - 1)


class QueryWalk:
    """The tiles of queries, of all heads that share a block's keys, that the block walks over: `count` steps.

    backwards: from the last tile to the first, if that holds in the kernel; None: never. by_heads: all tiles of a head,
    then those of the next; else all heads of a tile.
    """

    def __init__(
        self, of: Walks, buffers: Any, batch: Any, kv_head: Any, row: Any, handed: HandedQueries | None = None,
        backwards: Any = None, by_heads: bool = False,
    ) -> None:  # fmt: skip
        plan, sizes, tile = of.plan, of.sizes, of.tile
        self.plan, self.shape, self.group, self.kv_head, self.handed = plan, tile, of.problem.group, kv_head, handed
        self.kv0 = row * tile.kv
        self.bounds = with_starts(plan.bounds, buffers, batch)
        self.lists: _Lists | None = None
        self.begin, self.stride, self.tiles = None, None, None
        self.turned, self.tiles_of_a_head = None, None
        if handed is not None:
            self.first, self.count = handed.first, handed.count
            self.tiles = name_value(T.truncdiv(self.count, self.group)) if by_heads else None
            return
        self.first = 0
        if plan.mapped:
            self.lists = _Lists(plan, buffers, batch, kv_head, row)
            self.count = self.lists.count if plan.by_head else self.group * self.lists.count
            self.tiles = self.lists.count if by_heads else None
            return
        pieces = T.ceildiv(sizes.q, PIECE)
        self.pieces = pieces
        first, stop = q_range(self.bounds, self.kv0, self.kv0 + tile.kv - 1, PIECE, pieces)
        if tile.in_order:  # blocks meet the same tiles
            first = self.first_tile_of(row) * (tile.q // PIECE)
            stop = T.max(T.min(stop, pieces), first)
        self.first = name_as("first", first)
        tiles = T.ceildiv(stop - self.first, tile.q // PIECE)
        self.count = name_as("count", self.group * tiles)
        self.tiles = name_value(tiles) if by_heads else None
        if of.apart is not None:
            self.turned, self.tiles_of_a_head = name_value(of.apart.start_of(row, kv_head, tiles)), name_value(tiles)
        if backwards is True:
            self.begin, self.stride = name_value(self.first * PIECE + (tiles - 1) * tile.q), -tile.q
        elif backwards is not None:
            last = self.first * PIECE + (tiles - 1) * tile.q
            self.begin = name_value(T.if_then_else(backwards, last, self.first * PIECE))
            self.stride = name_value(T.if_then_else(backwards, -tile.q, tile.q))

    def first_tile_of(self, row: Any) -> Any:
        """The first tile that a block of keys walks over, of all tiles, where blocks meet the same ones. It has no name
        of its own: a loop's condition may ask for it."""
        first, _ = q_range(self.bounds, row * self.shape.kv, (row + 1) * self.shape.kv - 1, PIECE, self.pieces)
        return T.truncdiv(first, self.shape.q // PIECE)

    def first_entry(self) -> Any:
        """The first entry of a list, read together with its count by who would wait for one after the other."""
        return None if self.lists is None else self.lists.entry(0)

    def tile_of(self, step: Any) -> tuple[Any, Any]:
        """The number of a step's tile in the walk over one head, from the block's start on; which head of the group."""
        if self.tiles is None:
            return step // self.group, step % self.group
        head = name_value(T.truncdiv(step, self.tiles))
        return name_value(step - head * self.tiles), head

    def turned_tile_of(self, step: Any) -> Any:
        """The number of a step's tile in the walk that starts nowhere else."""
        tile = self.tile_of(step)[0]
        if self.turned is None:
            return tile
        turned = name_value(tile + self.turned)
        return name_value(T.if_then_else(turned >= self.tiles_of_a_head, turned - self.tiles_of_a_head, turned))

    def at(self, step: Any, first: Any = None) -> Visit:
        """The tile and the query head of a step; first: the `first_entry`, where it was read."""
        first_head, (tile, in_turn) = self.kv_head * self.group, self.tile_of(step)
        if self.turned is not None:
            tile = self.turned_tile_of(step)
        if not self.plan.mapped:
            start = self.first * PIECE + tile * self.shape.q
            if self.begin is not None:
                start = self.begin + tile * self.stride
            return Visit(start, self._is_partial, first_head + in_turn)
        if self.handed is not None:
            entry = self.handed.entry(step)
        else:
            assert self.lists is not None, "who is handed nothing reads the list"
            entry = self.lists.entry(step if self.plan.by_head else tile, first)
        piece, in_group = (entry // 2, in_turn)
        if self.plan.by_head:
            piece, in_group = entry // (2 * self.group), entry // 2 % self.group
        return Visit(piece * PIECE, lambda _: entry % 2 != 0, first_head + in_group, entry)

    def _is_partial(self, q0: Any) -> Any:
        return is_partial(self.bounds, q0, q0 + self.shape.q - 1, self.kv0, self.kv0 + self.shape.kv - 1)


class _Lists:
    """One row of a tile map."""

    def __init__(self, plan: TilePlan, buffers: Any, batch: Any, head: Any, row: Any) -> None:
        self.buffer = buffers[LISTS]
        self.listed = (batch if plan.by_batch else 0, plan.list_of(head), row)
        for index, length in zip(self.listed, self.buffer.shape, strict=False):
            take_for_granted(T.And(index >= 0, index < length))
        of_count = (*self.listed, 0)
        self.count = name_as("count", self.buffer[of_count])
        take_for_granted(self.count < self.buffer.shape[3])

    def entry(self, step: Any, first: Any = None) -> Any:
        """What the list holds for a step; read here, once, unless it is the first step's, which was read."""
        of_entry = (*self.listed, step + 1)
        entry = self.buffer[of_entry]
        return name_as("entry", entry) if first is None else name_value(T.if_then_else(step == 0, first, entry))


class SequenceQueryWalk(QueryWalk):
    """The same of packed sequences: a block's keys, from the row kv0 on, are of one. known: numbers of the sequence.

    It goes from the last tile to the first: blocks of a sequence that run together, of which later ones have fewer
    tiles, meet the same queries so, while the L2 cache holds them. By heads, from the last tile of a head to its first,
    from the last head to the first: a later block catches up with each head, as it has fewer tiles of it.
    """

    def __init__(
        self, of: Walks, buffers: Any, sequence: Any, kv_head: Any, kv0: Any, handed: HandedQueries | None,
        known: Mapping[Expr, Any],
    ) -> None:  # fmt: skip
        tile = of.tile
        self.plan, self.shape, self.group, self.kv_head, self.handed = of.plan, tile, of.problem.group, kv_head, handed
        self.kv0, self.lists = kv0, None
        self.bounds = with_starts(of.plan.bounds, buffers, sequence, known)
        if handed is not None:
            self.first, self.count = handed.first, handed.count
            return
        pieces = T.ceildiv(of.sizes.q, PIECE)
        first, stop = q_range(self.bounds, kv0, kv0 + tile.kv - 1, PIECE, pieces)
        self.first = name_as("first", first)
        self.count = name_as("count", self.group * T.ceildiv(stop - self.first, tile.q // PIECE))

    def at(self, step: Any, first: Any = None) -> Visit:
        """The tile and the query head of a step."""
        left = self.count - 1 - step
        tile, head = left // self.group, left % self.group
        if self.shape.by_heads:  # comparisons: a division takes more instructions
            tiles = self.count // self.group
            head = sum((T.cast(left >= tiles * n, "int32") for n in range(1, self.group)), T.int32(0))
            tile = left - head * tiles
        return Visit(self.first * PIECE + tile * self.shape.q, self._is_partial, self.kv_head * self.group + head)
