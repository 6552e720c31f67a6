"""Writes the tile map of a mask: for each row of tiles, a list of tiles that hold the kept pairs (tiles.py).

A block makes one row. It bounds the mask by interval arithmetic over many pieces of the row at once, one a thread, and
each against strips of the block's own side: a piece of which one strip is kept whole and another masked whole is known
to be part. Only what the bounds leave open is asked pair by pair. Tiles are then laid from the first piece on that
holds a kept pair; or, where queries see no later keys, up to the last one, if as many do: the diagonal then lies in one
tile, not in two. Nothing is held of the size of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.problem import Problem
from attention_engine.kernels.bounds import kv_range, q_range, with_starts
from attention_engine.kernels.common import Place, Sizes, build, named, over_pairs, over_rows, reader, store
from attention_engine.kernels.mask_ranges import MaskRanges, cut, held_as, index_ranges, range_of, value
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import EMPTY, PIECE
from attention_engine.kernels.warps import WARP
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.attention_buffers import DEALT, LISTS, deals_by_counter
from attention_engine.plan.forms import Tile

PIECES = 512  # that are bounded at once, one a thread
READERS = 4  # threads that read a piece's entries among them, so that a warp reads whole sectors
ASKED = 8  # pieces whose pairs are asked at once
KEPT, MASKED, OPEN = 1, 2, 4  # some pair is kept; some is masked; it must be asked. Of what lies outside none holds


def tile_map(problem: Problem, mask: Expr, tile: Tile, over_keys: bool) -> Any:
    """The PrimFunc: (batch, query length, key length, custom inputs that the mask reads..., tile_lists, [items_dealt]).

    over_keys: for blocks that hold queries and walk over keys; else for those that hold keys.
    """
    sizes, plan = Sizes(problem), plan_tiles(mask)
    parameters = sizes.declare(attention_buffers.tile_map(problem, plan, tile, over_keys))
    rows = T.ceildiv(sizes.q, tile.q) if over_keys else T.ceildiv(sizes.kv, tile.kv)
    heads, group = plan.heads(problem, over_keys), 1 if over_keys else plan.candidates(problem)
    of_tile = (tile.kv if over_keys else tile.q) // PIECE
    tiles = -(-PIECES // of_tile)  # that the pieces make, at most
    ends_whole = over_keys and plan.later_is_longer

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(rows, heads, sizes.batch if plan.by_batch else 1, threads=PIECES) as (row, head, batch):
            states = T.alloc_shared([PIECES + of_tile], "int32")
            of_tiles = T.alloc_shared([tiles], "int32")
            ranks = T.alloc_shared([-(-tiles // WARP) * WARP], "int32")  # how many tiles up to each are kept
            count = T.alloc_var("int32", 0)
            at = T.alloc_var("int32")
            strips = _Row(problem, plan, tile, over_keys, sizes, buffers, (batch, head, row))
            first, stop = strips.pieces()
            for in_group in T.serial(group):
                strips.begin(in_group)
                at = first
                for _ in T.serial(T.ceildiv(stop - first, PIECES - of_tile + 1)):  # so many pieces each does, or more
                    if at < stop:
                        strips.bound(at, stop, states)
                        begin = first_kept(states)
                        if ends_whole:
                            begin = ends_with_a_tile(begin, last_kept(states), of_tile, at + PIECES >= stop)
                        whole = T.if_then_else(
                            at + PIECES < stop, T.truncdiv(PIECES - begin, of_tile), T.ceildiv(PIECES - begin, of_tile)
                        )
                        join_pieces(states, begin, whole, of_tile, of_tiles, ranks)
                        for n in T.Parallel(tiles):
                            if T.bitwise_and(of_tiles[n], KEPT) != 0:
                                entry = 2 * strips.candidate(at + begin + n * of_tile) + T.truncdiv(of_tiles[n], MASKED)
                                strips.note(count + ranks[n], entry)
                        count = count + ranks[tiles - 1]
                        at = at + begin + whole * of_tile
            strips.note(0, count)
            if deals_by_counter(plan, tile, over_keys):  # noqa: SIM102 - Python's condition, then the kernel's
                if row + head + batch == 0:
                    buffers[DEALT][0] = 0
            if count == 0:
                strips.note(1, EMPTY)

    return build("tile_map", parameters, body)


class _Row:
    """The row of tiles that a block writes, for one after another of the heads that share the list. Of its tiles one
    side (queries or keys) is the block's own, in strips of PIECE, and the other moves, in pieces."""

    def __init__(self, problem: Problem, plan: TilePlan, tile: Tile, over_keys: bool, sizes: Sizes, buffers: Any,
                 listed: tuple[Any, Any, Any]) -> None:  # fmt: skip
        assert plan.mask is not None
        self.plan, self.over_keys, self.sizes, self.buffers = plan, over_keys, sizes, buffers
        self.batch, self.listed_head, self.row = listed
        self.group = 1 if over_keys else plan.candidates(problem)
        self.head, self.in_group = self.listed_head, 0
        if plan.by_group:  # any of the heads that share the list
            self.head = name_value(self.listed_head * problem.group)
        self.own_length, self.shape = tile.q if over_keys else tile.kv, tile
        self.start = self.row * self.own_length  # of the block's own side
        self.own_size, self.size = (sizes.q, sizes.kv) if over_keys else (sizes.kv, sizes.q)
        self.mask, self.cuts = cut(plan.mask)
        self.read = reader(buffers)
        self.own = {v: self._shared(v, "side", self.own_length) for v in self.cuts if not self._moves(v)}
        lengths = {v: PIECES if self._moves(v) else self.own_length // PIECE for v in self.cuts}
        self.least, self.most = ({v: self._shared(v, n, lengths[v]) for v in self.cuts} for n in ("least", "most"))

    @staticmethod
    def _shared(variable: Expr, name: str, length: int) -> Any:
        return named(f"{variable.name}_{name}", T.alloc_shared([length], held_as(variable)))

    def _moves(self, variable: Expr) -> bool:
        return (Axis.QUERY in variable.axes) is not self.over_keys

    def candidate(self, piece: Any) -> Any:
        """What a list calls a tile that begins there."""
        return piece * self.group + self.in_group if self.group > 1 else piece

    def pieces(self) -> tuple[Any, Any]:
        """First and one past the last piece that may hold a kept pair, by the mask's bounds."""
        of_range = kv_range if self.over_keys else q_range
        last = self.start + self.own_length - 1
        bounds = with_starts(self.plan.bounds, self.buffers, self.batch)
        first, stop = of_range(bounds, self.start, last, PIECE, T.ceildiv(self.size, PIECE))
        return name_value(first), name_value(stop)

    def _value(self, variable: Expr, at: Any) -> Any:
        """A cut's value at a query or key, or at the last one that there is."""
        place = Place(self.batch, self.head, {}, self.read)
        at = T.min(at, (self.size if self._moves(variable) else self.own_size) - 1)
        splice = place.splice(at, None, {}) if Axis.QUERY in variable.axes else place.splice(None, at, {})
        return name_value(T.cast(splice(self.cuts[variable])[0], held_as(variable)))

    def begin(self, in_group: Any) -> None:
        """Turns to a head: reads the cuts of the block's own side, and finds the ends of its strips."""
        if self.group > 1:
            self.head, self.in_group = name_value(self.listed_head * self.group + in_group), in_group
        if self.own:
            over_rows(self.own_length, self._read_own)
            over_rows(self.own_length // PIECE, self._find_own_ends)

    def _read_own(self, i: Any) -> None:
        for variable, side in self.own.items():
            store(side, self._value(variable, self.start + i), i)

    def _find_own_ends(self, n: Any) -> None:
        for variable, side in self.own.items():
            self._store_ends(variable, [side[n * PIECE + i] for i in range(PIECE)], self.least, self.most, n)

    @staticmethod
    def _store_ends(variable: Expr, values: Iterable[Any], least: Any, most: Any, *at: Any) -> None:
        values = list(values)
        store(least[variable], reduce(T.min, values), *at)
        store(most[variable], reduce(T.max, values), *at)

    def bound(self, at: Any, stop: Any, states: Any) -> None:
        """The states of the pieces from `at` on."""
        moving = [v for v in self.cuts if self._moves(v)]
        if moving:
            low, high = ({v: T.alloc_fragment([PIECES, READERS], held_as(v)) for v in moving} for _ in range(2))

            def read(piece: Any, reader: Any) -> None:
                first = (at + piece) * PIECE + reader
                values = {v: [self._value(v, first + i) for i in range(0, PIECE, READERS)] for v in moving}
                for variable, found in values.items():  # all are read before the first is used
                    self._store_ends(variable, found, low, high, piece, reader)

            over_pairs(PIECES, READERS, read)
            for variable in moving:
                join_ends(low[variable], high[variable], self.least[variable], self.most[variable])
        opened = T.alloc_shared([1], "int32")
        size = T.ceildiv(self.size, PIECE)
        join_strips(self.own_length // PIECE, size, at, stop, self._bound_strip, self._bound_entry, states, opened)
        ask_open(opened, states, lambda piece, j: _Question(self, (at + piece) * PIECE + j), self.own_length)

    def _bound_strip(self, piece: Any, at: Any, strip: Any) -> Any:
        """What the bounds say of a piece and a strip of the block's own side."""
        ends = {v: (self.least[v][strip], self.most[v][strip]) for v in self.own}
        return self._bound(piece, at, self.start + strip * PIECE, PIECE, ends)

    def _bound_entry(self, piece: Any, at: Any, i: Any) -> Any:
        """What they say of a piece and one entry of the block's own side."""
        return self._bound(piece, at, self.start + i, 1, {v: (side[i], side[i]) for v, side in self.own.items()})

    def _bound(self, piece: Any, at: Any, own: Any, length: int, ends: dict[Expr, tuple[Any, Any]]) -> Any:
        moving = (at + piece) * PIECE
        of_own = own, T.min(own + length, self.own_size) - 1
        of_moving = moving, T.min(moving + PIECE, self.size) - 1
        q, kv = (of_own, of_moving) if self.over_keys else (of_moving, of_own)
        ranges = index_ranges(self.batch, self.head, q, kv)
        for variable in self.cuts:
            of_piece = (self.least[variable][piece], self.most[variable][piece]) if self._moves(variable) else None
            ranges[variable] = range_of(variable, *(of_piece or ends[variable]))
        must, may = MaskRanges(ranges, self.read)(self.mask)
        found = T.if_then_else(must, KEPT, T.if_then_else(may, OPEN, MASKED))
        return name_value(T.if_then_else(own < self.own_size, found, 0))

    def note(self, position: Any, entry: Any) -> None:
        """Writes one entry of the list."""
        batch = self.batch if self.plan.by_batch else 0
        store(self.buffers[LISTS], entry, batch, self.plan.list_of(self.listed_head), self.row, position)


@T.macro
def join_ends(low: Any, high: Any, least: Any, most: Any) -> None:
    """The ends of pieces, from those of the entries that each reader has."""
    least_found = T.alloc_fragment([PIECES], low.dtype)
    most_found = T.alloc_fragment([PIECES], low.dtype)
    T.reduce_min(low, least_found, dim=1)
    T.reduce_max(high, most_found, dim=1)
    T.copy(least_found, least)
    T.copy(most_found, most)


class _Question:
    """A query or key of the side that moves, its cuts read once: what does it hold with entries of the other side?"""

    def __init__(self, row: _Row, moving: Any) -> None:
        self.row, self.moving = row, name_value(moving)
        self.cuts = {v: row._value(v, self.moving) for v in row.cuts if row._moves(v)}

    def __call__(self, i: Any) -> Any:
        row, own = self.row, name_value(self.row.start + i)
        q_idx, kv_idx = (own, self.moving) if row.over_keys else (self.moving, own)
        cuts = self.cuts | {v: side[i] for v, side in row.own.items()}
        place = Place(row.batch, row.head, {}, row.read)
        (keep,) = place.splice(q_idx, kv_idx, {v: value(v, held) for v, held in cuts.items()})(row.mask)
        inside = T.And(own < row.own_size, self.moving < row.size)
        return T.if_then_else(inside, T.if_then_else(keep, KEPT, MASKED), 0)


@T.macro
def join_strips(strips: int, size: Any, at: Any, stop: Any, of_strip: Callable[..., Any],
                of_entry: Callable[..., Any], states: Any, opened: Any) -> None:  # fmt: skip
    """The states of the pieces from `at` on, from the bounds of each with all strips of the block's own side, and with
    the entries of a strip that these leave open."""
    opened[0] = 0
    T.sync_threads()
    for piece in T.Parallel(PIECES):
        found = T.alloc_var("int32")
        found = 0
        if at + piece < stop:
            for strip in T.serial(strips):
                of_all = T.alloc_var("int32")
                of_all = of_strip(piece, at, strip)
                if T.And(of_all == OPEN, T.bitwise_and(found, KEPT + MASKED) != KEPT + MASKED):
                    of_all = 0
                    for i in T.serial(PIECE):
                        of_all = T.bitwise_or(of_all, of_entry(piece, at, strip * PIECE + i))
                found = T.bitwise_or(found, of_all)
            if T.bitwise_and(found, KEPT + MASKED) == KEPT + MASKED:
                found = KEPT + MASKED
            if found >= OPEN:
                opened[0] = 1
        else:
            found = T.if_then_else(at + piece < size, MASKED, 0)
        states[piece] = found
    for past in T.Parallel(states.shape[0] - PIECES):
        states[PIECES + past] = T.if_then_else(at + PIECES + past < size, MASKED, 0)


@T.macro
def ask_open(opened: Any, states: Any, question: Callable[..., Any], own_length: int) -> None:
    """Asks pieces that are open pair by pair, some at once."""
    numbers = T.alloc_shared([PIECES], "int32")
    pieces = T.alloc_shared([PIECES], "int32")
    seen = T.alloc_shared([2, ASKED], "int32")  # is a pair kept, is one masked?
    parts = PIECES // (ASKED * PIECE)
    if opened[0] != 0:
        for piece in T.Parallel(PIECES):
            numbers[piece] = T.if_then_else(states[piece] >= OPEN, 1, 0)
        T.cumsum(numbers, dim=0)
        count = T.alloc_var("int32")
        count = numbers[PIECES - 1]
        for piece in T.Parallel(PIECES):
            if states[piece] >= OPEN:
                pieces[numbers[piece] - 1] = piece
        for turn in T.serial(T.ceildiv(count, ASKED)):
            for which, n in T.Parallel(2, ASKED):
                seen[which, n] = 0
            for n, j, part in T.Parallel(ASKED, PIECE, parts):
                if turn * ASKED + n < count:
                    found = T.alloc_var("int32")
                    found = 0
                    ask = question(pieces[turn * ASKED + n], j)
                    for i in T.serial(own_length // parts):
                        found = T.bitwise_or(found, ask(i * parts + part))
                    if T.bitwise_and(found, KEPT) != 0:
                        seen[0, n] = 1
                    if T.bitwise_and(found, MASKED) != 0:
                        seen[1, n] = 1
            for n in T.Parallel(ASKED):
                if turn * ASKED + n < count:
                    states[pieces[turn * ASKED + n]] = seen[0, n] * KEPT + seen[1, n] * MASKED


def first_kept(states: Any) -> Any:
    """The first piece that holds a kept pair; PIECES, if none does."""
    return name_value(least(states, lambda piece: T.if_then_else(holds_a_pair(states, piece), piece, PIECES)))


def last_kept(states: Any) -> Any:
    """The last piece that holds a kept pair; 0, if none does."""
    return name_value(-least(states, lambda piece: T.if_then_else(holds_a_pair(states, piece), -piece, 0)))


def holds_a_pair(states: Any, piece: Any) -> Any:
    """Is some pair of a piece kept?"""
    return T.bitwise_and(states[piece], KEPT) != 0


@T.macro
def least(states: Any, of_piece: Callable[[Any], Any]) -> Any:
    """The least of what pieces have."""
    warps = PIECES // WARP
    found = T.alloc_fragment([warps, WARP], "int32")
    of_warps = T.alloc_fragment([warps], "int32")
    of_all = T.alloc_shared([warps], "int32")
    for warp, lane in T.Parallel(warps, WARP):
        found[warp, lane] = of_piece(warp * WARP + lane)
    T.reduce_min(found, of_warps, dim=1)
    T.copy(of_warps, of_all)
    return reduce(T.min, [of_all[warp] for warp in range(warps)])


def ends_with_a_tile(begin: Any, last: Any, of_tile: int, all_are_there: Any) -> Any:
    """Where tiles begin that end with the last piece, if there is room before the first, and nothing comes behind."""
    spare = name_value((of_tile - (last - begin + 1) % of_tile) % of_tile)
    return name_value(begin - T.if_then_else(T.And(all_are_there, T.And(last >= begin, begin >= spare)), spare, 0))


@T.macro
def join_pieces(states: Any, begin: Any, whole: Any, of_tile: int, tiles: Any, ranks: Any) -> None:
    """What the tiles from `begin` on hold, `whole` of them, and how many up to each hold a kept pair."""
    count = tiles.shape[0]
    for n in T.Parallel(ranks.shape[0]):
        found = T.alloc_var("int32")
        found = 0
        if n < whole:
            for piece in T.serial(of_tile):
                found = T.bitwise_or(found, states[begin + n * of_tile + piece])
        ranks[n] = T.bitwise_and(found, KEPT)
        if n < count:
            tiles[n] = found
    T.cumsum(ranks, dim=0)
