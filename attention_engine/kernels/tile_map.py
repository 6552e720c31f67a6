"""Writes the tile map of a mask: for each row of tiles, the list of tiles that hold a kept pair (tiles.py).

A block makes one row. It bounds the mask over many tiles at once, one a lane, by interval arithmetic; only tiles that
the bounds leave open are asked pair by pair. Nothing is held of the size of the pairs.
"""

from __future__ import annotations

import math
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.problem import Problem, Tile
from attention_engine.kernels.common import Place, Sizes, build, named, over_pairs, over_rows, reader, store
from attention_engine.kernels.mask_ranges import INT_HIGHEST, INT_LOWEST, MaskRanges, cut, index_ranges, range_of, value
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import EMPTY, LISTS, kv_range, list_parameters, q_range
from attention_engine.passes.tile_plan import TilePlan, plan_tiles

LANES = 128  # tiles that are bounded at once
STRIP = 16  # entries of each that are looked at together
PAIRS = 2048  # of a tile that are asked together
NONE, ALL, PART, OPEN = 0, 1, 2, 3


def tile_map(problem: Problem, mask: Expr, tile: Tile, over_keys: bool) -> Any:
    """The PrimFunc: (batch, query length, key length, custom inputs that the mask reads..., tile_lists).

    over_keys: for blocks that hold queries and walk over keys; else for those that hold keys.
    """
    sizes, plan = Sizes(), plan_tiles(mask)
    parameters = {"batch": sizes.batch, "q_length": sizes.q, "kv_length": sizes.kv}
    parameters.update(sizes.custom(problem, plan.reads))
    parameters.update(list_parameters(plan, sizes, problem, tile, over_keys))
    rows = T.ceildiv(sizes.q, tile.q) if over_keys else T.ceildiv(sizes.kv, tile.kv)
    batches = sizes.batch if plan.by_batch else 1

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(rows, plan.heads(problem, over_keys), batches, threads=LANES) as (row, head, batch):
            states = T.alloc_shared([LANES], "int32")
            order = T.alloc_shared([LANES], "int32")  # how many lanes up to each are kept (or open)
            open_lanes = T.alloc_shared([LANES], "int32")
            seen = T.alloc_shared([4], "int32")  # two pairs of flags: a warp may be one tile ahead of another
            count = T.alloc_var("int32", 0)
            row_maker = _Row(plan, problem, tile, over_keys, sizes, buffers, batch, head, row)
            row_maker.read_sides(0, moving=False)
            first, stop = row_maker.candidates()
            for chunk in T.serial(T.ceildiv(stop - first, LANES)):
                start = first + chunk * LANES
                row_maker.bound(start, stop, states)
                for lane in T.Parallel(LANES):
                    order[lane] = T.if_then_else(states[lane] == OPEN, 1, 0)
                T.cumsum(order, dim=0)
                for lane in T.Parallel(LANES):
                    if states[lane] == OPEN:
                        open_lanes[order[lane] - 1] = lane
                open_count = T.alloc_var("int32")
                open_count = order[LANES - 1]
                for number in T.serial(open_count):
                    flags = number % 2 * 2
                    lane = T.alloc_var("int32")
                    lane = open_lanes[number]
                    row_maker.read_sides(start + lane, moving=True)
                    seen[flags] = 0
                    seen[flags + 1] = 0
                    row_maker.ask(start + lane, seen, flags)
                    states[lane] = seen[flags] * (1 + seen[flags + 1])
                for lane in T.Parallel(LANES):
                    order[lane] = T.if_then_else(states[lane] == NONE, 0, 1)
                T.cumsum(order, dim=0)
                for lane in T.Parallel(LANES):
                    if states[lane] != NONE:
                        entry = 2 * (start + lane) + T.if_then_else(states[lane] == ALL, 0, 1)
                        row_maker.note(count + order[lane], entry)
                count = count + order[LANES - 1]
            row_maker.note(0, count)
            if count == 0:
                row_maker.note(1, EMPTY)

    return build("tile_map", parameters, body)


class _Row:
    """The row of tiles that a block looks at. Candidates are tiles, or (tile, head in the group) pairs: tiles.py.

    Of a candidate's tile one side (queries or keys) is the block's own, and the other moves.
    """

    def __init__(self, plan: TilePlan, problem: Problem, tile: Tile, over_keys: bool, sizes: Sizes, buffers: Any,
                 batch: Any, head: Any, row: Any) -> None:  # fmt: skip
        assert plan.mask is not None
        self.plan, self.problem, self.shape, self.over_keys, self.sizes = plan, problem, tile, over_keys, sizes
        self.buffers, self.batch, self.row, self.listed_head = buffers, batch, row, head
        self.mask, self.cuts = cut(plan.mask)
        self.group = 1 if over_keys else plan.candidates(problem)
        self.read = reader(buffers)
        lengths = {variable: tile.q if self._of_queries(variable) else tile.kv for variable in self.cuts}
        self.sides = {v: named(f"{v.name}_side", T.alloc_shared([n], "int32")) for v, n in lengths.items()}

    def _of_queries(self, variable: Expr) -> bool:
        return Axis.QUERY in variable.axes

    def _moves(self, variable: Expr) -> bool:
        """Does a cut differ between the candidates of a row?"""
        return self._of_queries(variable) is not self.over_keys or (self.group > 1 and Axis.HEAD in variable.axes)

    def candidates(self) -> tuple[Any, Any]:
        """First and one past the last candidate, by the mask's bounds."""
        if self.over_keys:
            q0, tiles = self.row * self.shape.q, T.ceildiv(self.sizes.kv, self.shape.kv)
            return kv_range(self.plan.bounds, q0, q0 + self.shape.q - 1, self.shape.kv, tiles)
        kv0, tiles = self.row * self.shape.kv, T.ceildiv(self.sizes.q, self.shape.q)
        first, stop = q_range(self.plan.bounds, kv0, kv0 + self.shape.kv - 1, self.shape.q, tiles)
        return first * self.group, stop * self.group

    def _place(self, candidate: Any) -> tuple[Any, Any, Any]:
        """Head, first query and first key of a candidate."""
        if self.over_keys:
            return self.listed_head, self.row * self.shape.q, candidate * self.shape.kv
        by_head = self.listed_head * self.group + candidate % self.group if self.plan.by_head else self.listed_head
        return by_head, candidate // self.group * self.shape.q, self.row * self.shape.kv

    def _value(self, variable: Expr, candidate: Any, i: Any) -> Any:
        """A cut's value at the tile's i-th query or key, or at the last one that there is."""
        head, q0, kv0 = self._place(candidate)
        place = Place(self.batch, head, {}, self.read)
        if self._of_queries(variable):
            splice = place.splice(T.min(q0 + i, self.sizes.q - 1), None, {})
        else:
            splice = place.splice(None, T.min(kv0 + i, self.sizes.kv - 1), {})
        return name_value(T.cast(splice(self.cuts[variable])[0], "int32"))

    def read_sides(self, candidate: Any, moving: bool) -> None:
        """Reads the cuts of a candidate's moving side, or those of the block's own."""
        for variable, side in self.sides.items():
            if self._moves(variable) is moving:
                over_rows(side.shape[0], lambda i, v=variable, s=side: store(s, self._value(v, candidate, i), i))

    def bound(self, start: Any, stop: Any, states: Any) -> None:
        """states[lane] = NONE, ALL or OPEN for LANES candidates."""
        ends = {v: self._find_ends(v, start) if self._moves(v) else self._find_own_ends(v) for v in self.cuts}

        def entry(lane: Any) -> None:
            head, q0, kv0 = self._place(start + lane)
            q1 = T.min(q0 + self.shape.q, self.sizes.q) - 1
            kv1 = T.min(kv0 + self.shape.kv, self.sizes.kv) - 1
            places = index_ranges(self.batch, head, (q0, q1), (kv0, kv1))
            for variable, (least, most) in ends.items():
                at = lane if self._moves(variable) else 0
                places[variable] = range_of(variable, least[at], most[at])
            must, may = MaskRanges(places, self.read)(self.mask)
            state = T.if_then_else(must, ALL, T.if_then_else(may, OPEN, NONE))
            store(states, T.if_then_else(start + lane < stop, state, NONE), lane)

        over_rows(LANES, entry)

    def _find_ends(self, variable: Expr, start: Any) -> tuple[Any, Any]:
        """The least and greatest value of a cut in each candidate's tile."""
        name, length = variable.name, self.shape.q if self._of_queries(variable) else self.shape.kv
        least, most = (named(f"{name}_{n}", T.alloc_shared([LANES], "int32")) for n in ("least", "most"))
        width = math.gcd(length, STRIP)
        low, high = (named(f"{name}_{n}", T.alloc_fragment([LANES, width], "int32")) for n in ("low", "high"))

        def entry(strip: Any, lane: Any, i: Any) -> None:
            found = self._value(variable, start + lane, strip * width + i)
            store(low, T.min(low[lane, i], found), lane, i)
            store(high, T.max(high[lane, i], found), lane, i)

        find_ends(length // width, bind(over_pairs, LANES, width), entry, low, high, least, most, LANES)
        return least, most

    def _find_own_ends(self, variable: Expr) -> tuple[Any, Any]:
        """The same of a cut of the block's own side: one number each."""
        name, side = variable.name, self.sides[variable]
        length = side.shape[0]
        least, most = (named(f"{name}_{n}", T.alloc_shared([1], "int32")) for n in ("least", "most"))
        low, high = (named(f"{name}_{n}", T.alloc_fragment([1, length], "int32")) for n in ("low", "high"))

        def entry(strip: Any, lane: Any, i: Any) -> None:
            store(low, side[i], lane, i)
            store(high, side[i], lane, i)

        find_ends(1, bind(over_pairs, 1, length), entry, low, high, least, most, 1)
        return least, most

    def ask(self, candidate: Any, seen: Any, flags: Any) -> None:
        """Notes in `seen` whether some pair of the candidate's tile is kept, and whether some is masked."""
        head, q0, kv0 = self._place(candidate)
        place = Place(self.batch, head, {}, self.read)
        fitting = (r for r in range(self.shape.q, 0, -1) if self.shape.q % r == 0)
        rows = next(r for r in fitting if r * self.shape.kv <= PAIRS or r == 1)
        kept, masked = (
            named(n, T.alloc_fragment([rows, self.shape.kv], "int32")) for n in ("some_kept", "some_masked")
        )

        def entry(strip: Any, i: Any, j: Any) -> None:
            row = strip * rows + i
            q_idx, kv_idx = name_value(q0 + row), name_value(kv0 + j)
            of_sides = {v: value(v, s[row if self._of_queries(v) else j]) for v, s in self.sides.items()}
            (keep,) = place.splice(q_idx, kv_idx, of_sides)(self.mask)
            keep = name_value(keep)
            inside = T.And(q_idx < self.sizes.q, kv_idx < self.sizes.kv)
            store(kept, T.if_then_else(T.And(inside, keep), 1, kept[i, j]), i, j)
            store(masked, T.if_then_else(T.And(inside, T.Not(keep)), 1, masked[i, j]), i, j)

        note_pairs(self.shape.q // rows, rows, self.shape.kv, entry, kept, masked, seen, flags)

    def note(self, position: Any, entry: Any) -> None:
        """Writes one entry of the list."""
        batch = self.batch if self.plan.by_batch else 0
        store(self.buffers[LISTS], entry, batch, self.listed_head if self.plan.by_head else 0, self.row, position)


@T.macro
def find_ends(
    strips: int, over: Any, entry: Any, low: Any, high: Any, least: Any, most: Any, count: int
) -> None:
    """Least and greatest of the values that `entry` joins into `low` and `high`, strip by strip."""
    T.fill(low, INT_HIGHEST)
    T.fill(high, INT_LOWEST)
    for strip in T.serial(strips):
        over(bind(entry, strip))
    least_found = T.alloc_fragment([count], "int32")
    most_found = T.alloc_fragment([count], "int32")
    T.reduce_min(low, least_found, dim=1)
    T.reduce_max(high, most_found, dim=1)
    T.copy(least_found, least)
    T.copy(most_found, most)


@T.macro
def note_pairs(strips: int, rows: int, columns: int, entry: Any, kept: Any, masked: Any, seen: Any, flags: Any) -> None:
    """seen[flags] and seen[flags + 1] become 1 where an entry of `kept`, of `masked` does, strip by strip until both
    are."""
    for strip in T.serial(strips):
        T.sync_threads()
        both = T.alloc_var("bool")
        both = seen[flags] + seen[flags + 1] == 2
        T.sync_threads()  # all have read
        if T.Not(both):
            T.fill(kept, 0)
            T.fill(masked, 0)
            over_pairs(rows, columns, bind(entry, strip))
            for i, j in T.Parallel(rows, columns):
                if kept[i, j] != 0:
                    seen[flags] = 1
                if masked[i, j] != 0:
                    seen[flags + 1] = 1
