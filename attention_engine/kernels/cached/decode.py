"""A few queries a request against keys in a cache: a block has one part of the keys of a request and key head.

Its tile's rows are the queries of all heads that share the key head (packed_rows.py), so that keys are read once. It
leaves its rows' states and its sum of weights times values in fp32, which another kernel joins, or the last block of a
row's parts (join.py); or, where rows are not cut, their output. Lengths, tables and the number of parts are run-time
values: the grid knows none of the lengths, and a block that has no key leaves states as they begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.bounds import either, is_partial, kv_range
from attention_engine.kernels.cached.join import Join, join_if_last
from attention_engine.kernels.cached.packed_rows import PackedMaths, Rows, of_heads
from attention_engine.kernels.cached.sources import Source, bring
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Operand,
    Place,
    Sizes,
    accumulate,
    block_values,
    build,
    load,
    loop,
    multiply,
    named,
    reader,
    split_operand,
    where_partial,
)
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.staged import StagedReads
from attention_engine.kernels.tile_maths import ScoreTile, multiply_rows, needs_another, row_variables
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import cached, cached_buffers
from attention_engine.plan.cached_buffers import Cache, Parts
from attention_engine.plan.forms import Tile


def decode(
    problem: Problem, schedule: ForwardSchedule, tile: Tile, cache: Cache, parts: Parts | None
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, [v], custom..., kv_lengths, [page_table], [q_starts], then part_o, part_<state>..., and if
    they are joined done, o, rows...; or, without parts, o, rows...)."""
    sizes = Sizes(problem)
    parameters = sizes.declare(cached_buffers.walk(problem, cache, schedule, parts))
    of = Steps(problem, schedule, tile, cache, sizes)
    dim, dim_v = padded(problem.dim), cached.value_columns(problem, cache)

    @T.macro
    def walk(buffers: Any, at: tuple[Any, Any, Any]) -> None:
        place, block, owner = at
        row_tiles = T.ceildiv(sizes.q * problem.group, tile.q)
        count_of_all = 1 if parts is None else sizes.spell(cached_buffers.PARTS)
        batch, part, parts_of_row = of.part(buffers, owner, place, count_of_all)
        kv_head, packed = of.rows(buffers, row_tiles, block, batch)
        q = Operand("q", problem, (tile.q, dim))
        k = Operand("k", problem, (tile.kv, dim))
        v = k if cache.shared else Operand("v", problem, (tile.kv, dim_v))
        weights = Operand("weights", problem, (tile.q, tile.kv), fragment=not cache.shared)
        scores = T.alloc_fragment([tile.q, tile.kv], FLOAT)
        other = T.alloc_fragment([tile.q, tile.kv], FLOAT) if needs_another(schedule) else None
        sums = Accumulator("output", problem, (tile.q, dim_v))
        written = T.alloc_fragment([tile.q], FLOAT) if len(schedule.rows) > 0 else None
        maths = of.maths(buffers, batch, packed, scores, other)
        keys = of.source(buffers, "k", batch, kv_head, packed, None)
        values = of.source(buffers, "k" if cache.shared else "v", batch, kv_head, packed, maths.place)
        of.bring_queries(q, buffers["q"], packed)
        T.fill(sums.sum, 0)
        maths.start()
        begin, count = of.tiles(packed, part, parts_of_row)
        for step in loop(count, tile.stages):
            kv0 = (begin + step) * tile.kv
            bring(keys if v is not k else values, k, kv0)
            T.clear(scores)
            of.multiply_keys(q, k, scores)
            maths.score(kv0)
            if schedule.fill is not None:
                where_partial(of.may_be_partial(packed, kv0), bind(maths.mask, kv0))
            maths.weigh(kv0)
            load(weights, scores)
            if schedule.rescale is not None:
                multiply_rows(sums.sum, maths.rows[schedule.rescale], tile, dim_v)
            if cache.shared:
                of.add_shared_values(weights, k, sums.sum, dim_v)
            else:
                bring(values, v, kv0)
                accumulate(weights, v, sums)
        of.leave(buffers, maths, sums.sum, written, None if parts is None else place)
        if parts is not None and parts.joined is not None:
            join_if_last(Join(problem, parts.joined, parts.at_once, sizes, buffers), packed, (batch, block))

    over_all = bind(over_parts, of, tile.threads, parts, walk)
    return build(name_of(parts), parameters, over_all)


def name_of(parts: Parts | None) -> str:
    """The kernel's name."""
    return "decode" if parts is None else "decode_parts" if parts.joined is None else "decode_joined_parts"


@dataclass(frozen=True)
class Steps:
    """What the kernel's steps have in common."""

    problem: Problem
    schedule: ForwardSchedule
    tile: Tile
    cache: Cache
    sizes: Sizes

    @property
    def in_turns(self) -> bool:
        """Are tiles dealt to parts in turns? Then no length says which are a part's first."""
        return False

    def hold(self, value: Any) -> Any:
        """What a block works out once is held, or TileLang would spell its divisions out at each use; but for blocks
        that have no register left."""
        return value if cached.by_columns(self.problem, self.cache) else name_value(value)

    def part(self, buffers: Any, owner: Any, place: Any, parts: Any) -> tuple[Any, Any, Any]:
        """The request of a block, which of its parts the block has, and how many it has. Behind the last part that is
        dealt come parts of the first request, behind its last, where it has no tiles."""
        if not self.cache.dealt:
            return owner, place, parts
        starts, requests = buffers[cached_buffers.PART_STARTS], buffers[cached_buffers.PART_REQUESTS]
        batch = name_value(T.max(requests[place], 0))
        first = name_value(starts[batch])
        return batch, place - first, name_value(starts[batch + 1] - first)

    @property
    def capacity(self) -> Any:
        """The most keys that a request may have."""
        if not self.cache.page:
            return self.sizes.kv
        return self.sizes.spell(cached_buffers.PAGES_OF_A_REQUEST) * self.cache.page

    def rows(self, buffers: Any, row_tiles: Any, block: Any, batch: Any) -> tuple[Any, Rows]:
        """A block's key head, and its rows."""
        group, queries, owner, row = self.problem.group, self.sizes.q, batch, 0
        if self.cache.packed:
            starts = buffers["cu_seqlens_q"]
            owner, row = 0, self.hold(starts[batch])
            queries = self.hold(starts[batch + 1] - starts[batch])
        kv_head, first = self.hold(block // row_tiles), self.hold(block % row_tiles * self.tile.q)
        known = T.max(T.min(buffers["kv_lengths"][batch], self.capacity), 0)  # no other is read, whatever a length says
        stop = self.hold(known)
        begins = buffers["q_starts"][batch] if self.cache.starts else buffers["kv_lengths"][batch] - queries
        return kv_head, Rows(first, kv_head * group, self.hold(begins), queries, stop, group, owner, row)

    def maths(self, buffers: Any, batch: Any, packed: Rows, scores: Any, other: Any) -> PackedMaths:
        """The maths of the block's tiles."""
        schedule, problem, tile = self.schedule, self.problem, self.tile
        read = reader(buffers, ((batch, self.sizes.batch),))
        of_all = [(v, e) for v, e in schedule.block if Axis.HEAD not in e.axes]
        block = block_values(of_all, batch, packed.first_head, read)
        place = Place(batch, packed.first_head, block, read, problem.approximate)
        of_rows = [*row_variables(schedule), *(v for v, _ in of_heads(schedule))]
        rows = {v: named(v.name, T.alloc_fragment([tile.q], FLOAT)) for v in of_rows}
        of = ScoreTile(scores, other, rows, {}, StagedReads([], problem, tile))
        return PackedMaths(schedule, tile, self.sizes, place, packed, of)

    def source(self, buffers: Any, name: str, batch: Any, head: Any, packed: Rows, place: Place | None) -> Source:
        """Where the request's keys or values lie. place: of values, which are read where a key may be seen alone."""
        condition = None if place is None else key_condition(self.schedule.mask)
        seen = None
        if condition is not None and place is not None:
            at = place

            def seen(key: Any) -> Any:
                return at.splice(None, key, {})(condition)[0]

        table = buffers["page_table"] if self.cache.page else None
        return Source(buffers[name], table, batch, head, packed.stop, self.cache.page, seen)

    def tiles(self, packed: Rows, part: Any, parts: Any) -> tuple[Any, Any]:
        """The first tile of a part, and how many it has; a request's tiles are dealt evenly: in runs, or in turns."""
        tiles = T.ceildiv(packed.stop, self.tile.kv)
        first, stop = kv_range(plan_tiles(self.schedule.mask).bounds, *packed.places(self.tile.q), self.tile.kv, tiles)
        if self.cache.packed:  # there are as many blocks of rows as one request could have
            stop = T.if_then_else(packed.exists(0), stop, 0)
        if self.in_turns:
            begin = self.hold(first + part)
            return begin, self.hold(T.ceildiv(T.max(stop - begin, 0), parts))
        each = T.ceildiv(T.max(stop - first, 0), parts)
        begin = self.hold(first + part * each)
        return begin, self.hold(T.max(T.min(stop, begin + each) - begin, 0))

    def may_be_partial(self, packed: Rows, kv0: Any) -> Any:
        """May a tile of keys hold a masked pair, or end behind the request's last key?"""
        bounds, last = plan_tiles(self.schedule.mask).bounds, kv0 + (self.tile.kv - 1)
        return either(is_partial(bounds, *packed.places(self.tile.q), kv0, last), last >= packed.stop)

    def bring_queries(self, q: Operand, source: Any, packed: Rows) -> None:
        """The block's queries; 0 in rows that there are not."""
        _bring_queries(q, source, packed, self.problem)

    def multiply_keys(self, q: Operand, k: Operand, scores: Any) -> None:
        """scores += q @ k^T."""
        if cached.by_columns(self.problem, self.cache):
            _multiply_by_columns(q.whole, k.whole, scores, True)
        else:
            multiply(q, k, scores, transpose_B=True)

    def add_shared_values(self, weights: Operand, k: Operand, output: Any, dim_v: int) -> None:
        """output += weights @ the first columns of k. Where they are wide, two warpgroups have half of them each."""
        values = k.whole[0 : self.tile.kv, 0:dim_v]
        if cached.by_columns(self.problem, self.cache):
            _multiply_by_columns(weights.whole, values, output, False)
        else:
            _multiply_by_rows(weights.whole, values, output)

    def leave(self, buffers: Any, maths: PackedMaths, output: Any, written: Any, part: Any) -> None:
        """What the block has found goes to memory: of a part, its sums and states."""
        maths.finish(output, cached.value_columns(self.problem, self.cache))
        self.leave_columns(buffers, output, maths.packed, part)
        self.leave_rows(buffers, maths, written, part)

    def leave_columns(self, buffers: Any, output: Any, packed: Rows, part: Any, first: int = 0) -> None:
        """Columns of the output, or of a part's sums, from `first` on."""
        target = buffers["o" if part is None else "part_o"]
        _leave_sums(target, output, self._in_parts(packed), part, self.tile.q, first, self.problem.dim_v)

    def leave_rows(self, buffers: Any, maths: PackedMaths, written: Any, part: Any) -> None:
        """The rows that are returned, or a part's states."""
        prefix = "row_" if part is None else "part_"
        for row, expr in self.schedule.rows:
            maths.write_row(written, expr)
            _leave_row(buffers[f"{prefix}{row}"], written, self._in_parts(maths.packed), part, self.tile.q)

    def _in_parts(self, packed: Rows) -> Rows:
        """Rows as parts hold them: those of parts that are dealt have a place for all requests."""
        return replace(packed, owner=0) if self.cache.dealt else packed


@T.macro
def over_parts(
    of: Steps, threads: int, parts: Parts | None, walk: Callable[[Any, tuple[Any, Any, Any]], None], buffers: Any
) -> None:  # fmt: skip
    """A block for each part of each tile of rows: walk(buffers, (place of the part, key head and tile, request))."""
    sizes, cache, problem = of.sizes, of.cache, of.problem
    row_tiles = T.ceildiv(sizes.q * problem.group, of.tile.q)
    count = 1 if parts is None else sizes.spell(cached_buffers.PARTS)
    batches = 1 if cache.dealt else sizes.batch
    blocks = problem.kv_heads * row_tiles
    first = count if cache.dealt else blocks  # heads that read the same pages run beside each other
    then = blocks if cache.dealt else count
    with T.Kernel(first, then, batches, threads=threads) as (x, y, owner):
        at = (x, y, owner) if cache.dealt else (y, x, owner)
        if parts is not None and parts.overlaps:
            T.pdl_trigger()  # once all blocks run, those that join their parts may begin, and wait for them
        if cache.dealt:  # behind the last part there is nothing to do
            if buffers[cached_buffers.PART_REQUESTS][at[0]] >= 0:
                walk(buffers, at)
        else:
            walk(buffers, at)


@T.macro
def _bring_queries(q: Operand, source: Any, packed: Rows, problem: Problem) -> None:
    for i, d in T.Parallel(q.shape[0], q.shape[1]):
        owner, row, head = packed.at(i)
        asked = packed.exists(i) if q.shape[1] == problem.dim else T.And(packed.exists(i), d < problem.dim)
        q.whole[i, d] = T.if_then_else(asked, source[owner, row, head, d], T.cast(0, problem.dtype))
    split_operand(q)


@T.macro
def _multiply_by_columns(a: Any, b: Any, c: Any, transposed: bool) -> None:
    T.gemm(a, b, c, transpose_B=transposed, policy=T.GemmWarpPolicy.FullCol)


@T.macro
def _multiply_by_rows(a: Any, b: Any, c: Any) -> None:
    T.gemm(a, b, c, policy=T.GemmWarpPolicy.FullRow)


@T.macro
def _leave_sums(target: Any, output: Any, packed: Rows, part: Any, rows: int, first: int, columns: int) -> None:
    for i, d in T.Parallel(rows, output.shape[1]):
        owner, row, head = packed.at(i)
        if T.And(packed.exists(i), first + d < columns):
            if part is None:
                target[owner, row, head, first + d] = output[i, d]
            else:
                target[part, owner, row, head, first + d] = output[i, d]


@T.macro
def _leave_row(target: Any, written: Any, packed: Rows, part: Any, rows: int) -> None:
    for i in T.Parallel(rows):
        owner, row, head = packed.at(i)
        if packed.exists(i):
            if part is None:
                target[owner, head, row] = written[i]
            else:
                target[part, owner, row, head] = written[i]
