"""Writes lists of tiles (tiles.py) from lists of blocks: a map says which blocks a call named, and bounds the rest.

Tiles divide blocks, or blocks tiles, so no pair is looked at. A block of threads makes one row: each thread asks the
map about one tile, and a sum over threads says where in the list the tile stands.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.block_lists import BLOCK_LIST
from attention_engine.ir.expr import Expr
from attention_engine.ir.problem import Problem
from attention_engine.kernels.bounds import is_partial, kv_range, q_range
from attention_engine.kernels.common import Buffers, Sizes, build, store
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tiles import EMPTY, PIECE
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.attention_buffers import DEALT, LISTS, deals_by_counter
from attention_engine.plan.forms import Tile

THREADS = 256  # tiles that are asked about at once


def block_map(problem: Problem, mask: Expr, tile: Tile, over_keys: bool) -> Any:
    """The PrimFunc: (batch, query length, key length, the map of blocks, tile_lists, [items_dealt]).

    over_keys: for blocks that hold queries and walk over keys; else for those that hold keys.
    """
    sizes, plan = Sizes(problem), plan_tiles(mask)
    assert plan.blocks is not None and plan.follows_blocks(tile.q, tile.kv), "plan/attention.py asked"
    parameters = sizes.declare(attention_buffers.tile_map(problem, plan, tile, over_keys))
    rows = T.ceildiv(sizes.q, tile.q) if over_keys else T.ceildiv(sizes.kv, tile.kv)
    heads, group = plan.heads(problem, over_keys), 1 if over_keys else plan.candidates(problem)

    @T.macro
    def body(buffers: Buffers) -> None:
        with T.Kernel(rows, heads, sizes.batch if plan.by_batch else 1, threads=THREADS) as (row, head, batch):
            ranks = T.alloc_shared([THREADS], "int32")  # how many tiles up to each are kept
            count = T.alloc_var("int32", 0)
            of = _Row(problem, plan, tile, over_keys, sizes, buffers, (batch, head, row))
            first, stop = of.tiles()
            for in_group in T.serial(group):
                for chunk in T.serial(T.ceildiv(stop - first, THREADS)):
                    begin = first + chunk * THREADS
                    for n in T.Parallel(THREADS):
                        ranks[n] = T.if_then_else(begin + n < stop, of.keeps(begin + n, in_group), 0)
                    T.cumsum(ranks, dim=0)
                    for n in T.Parallel(THREADS):
                        if begin + n < stop:  # noqa: SIM102 - the second reads memory
                            if of.keeps(begin + n, in_group) != 0:
                                of.note(count + ranks[n], of.entry(begin + n, in_group))
                    count = count + ranks[THREADS - 1]
            of.note(0, count)
            if deals_by_counter(plan, tile, over_keys):  # noqa: SIM102 - Python's condition, then the kernel's
                if row + head + batch == 0:
                    buffers[DEALT][0] = 0
            if count == 0:
                of.note(1, EMPTY)

    return build("block_map", parameters, body)


class _Row:
    """The row of tiles that a block writes: one side, queries or keys, is its own, and the other moves."""

    def __init__(self, problem: Problem, plan: TilePlan, tile: Tile, over_keys: bool, sizes: Sizes, buffers: Buffers,
                 listed: tuple[Any, Any, Any]) -> None:  # fmt: skip
        assert plan.blocks is not None
        self.plan, self.over_keys, self.buffers = plan, over_keys, buffers
        self.batch, self.listed_head, self.row = listed
        self.group, self.heads_of_a_list = plan.candidates(problem), plan.blocks.sharing
        self.by_group, self.group_of_keys = plan.by_group, problem.group
        self.map = buffers[f"custom_{BLOCK_LIST}"]
        of_q, of_kv = (tile.q, plan.blocks.q, sizes.q), (tile.kv, plan.blocks.kv, sizes.kv)
        (self.own, self.own_block, self.own_size), (self.moving, self.moving_block, self.size) = (
            (of_q, of_kv) if over_keys else (of_kv, of_q)
        )
        self.start = self.row * self.own

    def tiles(self) -> tuple[Any, Any]:
        """First and one past the last tile that may hold a kept pair, by the mask's bounds."""
        of_range = kv_range if self.over_keys else q_range
        last = self.start + self.own - 1
        first, stop = of_range(self.plan.bounds, self.start, last, self.moving, T.ceildiv(self.size, self.moving))
        return name_value(first), name_value(stop)

    def _listed(self, number: Any, in_group: Any) -> list[tuple[Any, Any]]:
        """Of each pair of blocks that a tile meets: does the map hold it; is there such a pair?"""
        of_own = [(self.start + at, self.own_block) for at in range(0, self.own, self.own_block)]
        of_moving = [(number * self.moving + at, self.moving_block) for at in range(0, self.moving, self.moving_block)]
        found = []
        for own, own_block in of_own:
            for moving, moving_block in of_moving:
                there: Any = True
                if len(of_own) > 1:
                    there = own < self.own_size
                if len(of_moving) > 1:
                    there = T.And(there, moving < self.size) if there is not True else moving < self.size
                at = T.truncdiv(own, own_block), T.truncdiv(moving, moving_block)
                q, kv = at if self.over_keys else at[::-1]
                place = (self.batch if self.plan.by_batch else 0, self._head(in_group), q, kv)
                rows, columns = self.map.shape[2:]
                safe = (*place[:2], T.min(q, rows - 1), T.min(kv, columns - 1))
                found.append((T.And(there, self.map[safe] != 0) if there is not True else self.map[safe] != 0, there))
        return found

    def _head(self, in_group: Any) -> Any:
        """Of the map."""
        if self.heads_of_a_list == 0:
            return 0
        if self.by_group or not self.plan.by_head:
            return self.listed_head
        head = self.listed_head if self.over_keys else self.listed_head * self.group + in_group
        return T.truncdiv(head, self.heads_of_a_list)

    def keeps(self, number: Any, in_group: Any) -> Any:
        """Does a tile hold a pair that lists keep: 1 or 0."""
        kept: Any = None
        for exists, _ in self._listed(number, in_group):
            kept = exists if kept is None else T.Or(kept, exists)
        return T.if_then_else(kept, 1, 0)

    def entry(self, number: Any, in_group: Any) -> Any:
        """What the list says of a tile that it holds."""
        own, moving = self.start, number * self.moving
        q0, kv0 = (own, moving) if self.over_keys else (moving, own)
        q_tile, kv_tile = (self.own, self.moving) if self.over_keys else (self.moving, self.own)
        bounds = self.plan.bounds
        partial: Any = False
        for bound in bounds.bounds:
            of_one = type(bounds)((bound,), True)
            one = is_partial(of_one, q0, q0 + q_tile - 1, kv0, kv0 + kv_tile - 1)
            partial = one if partial is False else T.Or(partial, one)
        listed = self._listed(number, in_group)
        if len(listed) > 1:
            for exists, there in listed:
                lacks = T.Not(exists) if there is True else T.And(there, T.Not(exists))
                partial = lacks if partial is False else T.Or(partial, lacks)
        piece = T.truncdiv(moving, PIECE)
        candidate = piece * self.group + in_group if not self.over_keys and self.group > 1 else piece
        return 2 * candidate + (0 if partial is False else T.if_then_else(partial, 1, 0))

    def note(self, position: Any, entry: Any) -> None:
        """Writes one entry of the list."""
        batch = self.batch if self.plan.by_batch else 0
        store(self.buffers[LISTS], entry, batch, self.plan.list_of(self.listed_head), self.row, position)
