"""Writes the tile map of a mask: for each row of tiles, the list of tiles that hold a kept pair (tiles.py).

A block makes one row. It bounds the mask over many tiles at once, one a lane, by interval arithmetic; only tiles that
the bounds leave open are asked pair by pair. Nothing is held of the size of the pairs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.problem import Problem, Tile
from attention_engine.kernels.common import Place, Sizes, build, named, over_pairs, over_rows, reader, store
from attention_engine.kernels.mask_ranges import INT_HIGHEST, INT_LOWEST, MaskRanges, cut, index_ranges, range_of
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import LISTS, TilePlan, kv_range, plan_tiles, q_range

LANES = 128  # tiles that are bounded at once
STRIP = 16  # entries of each that are looked at together
NONE, ALL, PART, OPEN = 0, 1, 2, 3


def tile_map(problem: Problem, mask: Expr, tile: Tile, over_keys: bool) -> Any:
    """The PrimFunc: (batch, query length, key length, custom inputs that the mask reads..., tile_lists).

    over_keys: for blocks that hold queries and walk over keys; else for those that hold keys.
    """
    sizes, plan = Sizes(), plan_tiles(mask)
    parameters = {"batch": sizes.batch, "q_length": sizes.q, "kv_length": sizes.kv}
    read = tuple(c for c in problem.custom if c[0] in plan.reads)
    parameters.update(sizes.custom(replace(problem, custom=read)))
    parameters.update(plan.parameters(sizes, problem, tile, over_keys))
    rows = T.ceildiv(sizes.q, tile.q) if over_keys else T.ceildiv(sizes.kv, tile.kv)
    batches = sizes.batch if plan.by_batch else 1

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(rows, plan.heads(problem, over_keys), batches, threads=LANES) as (row, head, batch):
            states = T.alloc_shared([LANES], "int32")
            seen = T.alloc_shared([4], "int32")  # two pairs of flags: a warp may be one tile ahead of another
            count = T.alloc_var("int32", 0)
            maker = _Row(plan, problem, tile, over_keys, sizes, buffers, batch, head, row, seen)
            first, stop = maker.candidates()
            for chunk in T.serial(T.ceildiv(stop - first, LANES)):
                start = first + chunk * LANES
                maker.bound(start, stop, states)
                for lane in T.serial(T.min(LANES, stop - start)):
                    state = T.alloc_var("int32")
                    state = states[lane]
                    if state == OPEN:
                        seen[2 * (lane % 2)] = 0
                        seen[2 * (lane % 2) + 1] = 0
                        for strip in T.serial(tile.q // maker.rows):
                            maker.ask(start + lane, strip, 2 * (lane % 2))
                        state = seen[2 * (lane % 2)] * (1 + seen[2 * (lane % 2) + 1])
                    if state != NONE:
                        count = count + 1
                        maker.note(count, 2 * (start + lane) + T.if_then_else(state == ALL, 0, 1))
            maker.note(0, count)

    return build("tile_map", parameters, body)


class _Row:
    """The row of tiles that a block looks at. Candidates are tiles, or (tile, head in the group) pairs: tiles.py."""

    def __init__(self, plan: TilePlan, problem: Problem, tile: Tile, over_keys: bool, sizes: Sizes, buffers: Any,
                 batch: Any, head: Any, row: Any, seen: Any) -> None:  # fmt: skip
        assert plan.mask is not None
        self.plan, self.problem, self.shape, self.over_keys, self.sizes = plan, problem, tile, over_keys, sizes
        self.buffers, self.batch, self.row, self.listed_head, self.seen = buffers, batch, row, head, seen
        self.mask, self.cuts = cut(plan.mask)
        self.group = 1 if over_keys else plan.candidates(problem)
        self.read = reader(buffers)
        fitting = (r for r in range(tile.q, 0, -1) if tile.q % r == 0 and (r * tile.kv <= LANES * STRIP or r == 1))
        self.rows = next(fitting)  # of the tile, that are asked together

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

    def bound(self, start: Any, stop: Any, states: Any) -> None:
        """states[lane] = NONE, ALL or OPEN for LANES candidates."""
        ends = {variable: self._find_ends(variable, node, start) for variable, node in self.cuts.items()}

        def entry(lane: Any) -> None:
            head, q0, kv0 = self._place(start + lane)
            q1 = T.min(q0 + self.shape.q, self.sizes.q) - 1
            kv1 = T.min(kv0 + self.shape.kv, self.sizes.kv) - 1
            places = index_ranges(self.batch, head, (q0, q1), (kv0, kv1))
            places.update({v: range_of(v, least[lane], most[lane]) for v, (least, most) in ends.items()})
            must, may = MaskRanges(places, self.read)(self.mask)
            inside = start + lane < stop
            state = T.if_then_else(must, ALL, T.if_then_else(may, OPEN, NONE))
            store(states, T.if_then_else(inside, state, NONE), lane)

        over_rows(LANES, entry)

    def _find_ends(self, variable: Expr, node: Expr, start: Any) -> tuple[Any, Any]:
        """The least and greatest value of a cut in each candidate's tile."""
        name = variable.name
        least, most = (named(f"{name}_{n}", T.alloc_fragment([LANES], "int32")) for n in ("least", "most"))
        of_queries = Axis.QUERY in node.axes
        length = self.shape.q if of_queries else self.shape.kv
        last = (self.sizes.q if of_queries else self.sizes.kv) - 1
        width = math.gcd(length, STRIP)
        low, high = (named(f"{name}_{n}", T.alloc_fragment([LANES, width], "int32")) for n in ("low", "high"))

        def entry(strip: Any, lane: Any, i: Any) -> None:
            head, q0, kv0 = self._place(start + lane)
            at = T.min((q0 if of_queries else kv0) + strip * width + i, last)
            place = Place(self.batch, head, {}, self.read)
            (value,) = place.splice(at if of_queries else None, None if of_queries else at, {})(node)
            value = name_value(T.cast(value, "int32"))
            store(low, T.min(low[lane, i], value), lane, i)
            store(high, T.max(high[lane, i], value), lane, i)

        find_ends(length // width, bind(over_pairs, LANES, width), entry, low, high, least, most)
        return least, most

    def ask(self, candidate: Any, strip: Any, flags: Any) -> None:
        """Notes in `seen` whether some pair of a strip of the tile is kept, and whether some is masked."""
        assert self.plan.mask is not None
        head, q0, kv0 = self._place(candidate)
        place = Place(self.batch, head, {}, self.read)

        def entry(i: Any, j: Any) -> None:
            q_idx, kv_idx = name_value(q0 + strip * self.rows + i), name_value(kv0 + j)
            (kept,) = place.splice(q_idx, kv_idx, {})(self.plan.mask)
            kept = name_value(kept)
            inside = T.And(q_idx < self.sizes.q, kv_idx < self.sizes.kv)
            note_if(T.And(inside, kept), self.seen, flags)
            note_if(T.And(inside, T.Not(kept)), self.seen, flags + 1)

        over_pairs(self.rows, self.shape.kv, entry)

    def note(self, position: Any, value: Any) -> None:
        """Writes one entry of the list."""
        batch = self.batch if self.plan.by_batch else 0
        store(self.buffers[LISTS], value, batch, self.listed_head if self.plan.by_head else 0, self.row, position)


@T.macro
def find_ends(strips: int, over: Any, entry: Any, low: Any, high: Any, least: Any, most: Any) -> None:
    """Least and greatest of the values that `entry` joins into `low` and `high`, strip by strip."""
    T.fill(low, INT_HIGHEST)
    T.fill(high, INT_LOWEST)
    for strip in T.serial(strips):
        over(bind(entry, strip))
    T.reduce_min(low, least, dim=1)
    T.reduce_max(high, most, dim=1)


@T.macro
def note_if(condition: Any, flags: Any, which: Any) -> None:
    """flags[which] becomes 1 where the condition holds; many lanes may say so."""
    if condition:
        flags[which] = 1
