"""Keys and values by TMA on Hopper, placed by hand: one warp copies tiles ahead, a warpgroup computes.

What decode.py does where keys and values lie at whole 16 bytes. The copying warp walks over a part's keys by itself, so
many tiles ahead as shared memory holds: that it must look up pages first keeps nobody waiting. A tile that lies in
several pages comes as one copy of each; in decode.py each thread looks up the page of each of its rows.

Where parts join themselves, calls are short. Without pages tiles are then dealt to parts in turns, and a part's first
ones are asked for before its request's length is known: they are the same of any length, and what lies behind it,
nobody multiplies. With pages each tile would be looked up in a line of the table that is not there yet.

Copies bring whole tiles. So rows of values that nobody sees, or that lie behind the request's last key, are cleared
before they are multiplied: there may be anything, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.cached.decode import name_of, over_parts
from attention_engine.kernels.cached.join import Join, join_if_last
from attention_engine.kernels.cached.latent import LEFT, LatentSteps, Part, bring_piece, clear_piece, part_at
from attention_engine.kernels.cached.packed_rows import Rows
from attention_engine.kernels.common import FLOAT, Sizes, build, named, where_partial
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tile_maths import multiply_rows, needs_another
from attention_engine.kernels.warps import GROUP, ROWS_WHOLE, SWIZZLED, WARP
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import cached_buffers
from attention_engine.plan.cached_buffers import Cache, Parts
from attention_engine.plan.forms import Tile

# Bytes of keys and values, at most, whose lines are the first to leave the cache. What was written there must go to
# memory when its place is taken: an H100's 50 MB of it cost a call that reads 34 MB 2 us, one of 134 MB 3.5. Calls that
# read more lose by that order (268 MB 1 %, 537 MB 4 %), and none gains where the cache holds what was read.
LITTLE = 150 << 20


def placed(
    problem: Problem, schedule: ForwardSchedule, tile: Tile, cache: Cache, parts: Parts | None
) -> Any:  # fmt: skip
    """The PrimFunc of decode.py: (q, k, v, custom..., kv_lengths, [page_table], [q_starts], then part_o,
    part_<state>..., [done, o, rows...], or o, rows...)."""
    sizes = Sizes(problem)
    parameters = sizes.declare(cached_buffers.walk(problem, cache, schedule, parts))
    short = parts is not None and parts.joined is not None and not cache.page
    steps = PlacedSteps(problem, schedule, tile, cache, sizes, short)

    @T.macro
    def walk(buffers: Any, at: tuple[Any, Any, Any]) -> None:
        memory = Memory.allocate(steps)
        ahead = steps.tiles_ahead(at[0])
        if steps.in_turns:
            copy_ahead(steps, buffers, memory, at, ahead)
        of, kv_head = part_at(steps, buffers, at, parts is not None)
        if T.get_thread_binding() >= GROUP:
            copy_tiles(steps, buffers, memory, of, kv_head, ahead)
        else:
            compute(steps, buffers, memory, of, ahead)
        if parts is not None and parts.joined is not None:  # behind all of that, so that it lies where tiles lay
            join(Join(problem, parts.joined, parts.at_once, sizes, buffers, meet, True), of, at[1])

    over_all = bind(over_parts, steps, GROUP + WARP, parts, walk)
    return build(name_of(parts), parameters, over_all)


@dataclass(frozen=True)
class PlacedSteps(LatentSteps):
    """What the kernel's steps have in common. short: do parts of rows join themselves, of keys without pages?"""

    short: bool

    @property
    def in_turns(self) -> bool:
        """Are tiles dealt to parts in turns? Not where a mask's bounds say which is the first."""
        return self.short and not any(bound.kv > 0 for bound in plan_tiles(self.schedule.mask).bounds.bounds)

    @property
    def reads_little(self) -> Any:
        """Do all requests together have so few keys that lines leave the cache in the order of LITTLE?"""
        if not self.short:
            return False
        each = self.problem.kv_heads * (self.problem.dim + self.problem.dim_v) * 2  # bytes of a key and its values
        return T.cast(self.sizes.batch, "int64") * T.cast(self.capacity, "int64") <= LITTLE // each

    def tiles_ahead(self, part: Any) -> Any:
        """How many tiles of a part are asked for before its request's length is known."""
        if not self.in_turns:
            return 0
        tiles = T.max(T.ceildiv(self.capacity, self.tile.kv) - part, 0)
        return name_value(T.min(T.ceildiv(tiles, self.sizes.spell(cached_buffers.PARTS)), self.tile.stages))

    def tiles_left(self, of: Part, ahead: Any) -> Any:
        """How many are asked for then."""
        return T.max(of.count - ahead, 0) if self.in_turns else of.count


@dataclass(frozen=True)
class Ring:
    """Tiles of keys, or of values, that the copying warp fills and the others read."""

    tiles: Any  # (stages, keys, columns)
    full: Any
    empty: Any

    @staticmethod
    def allocate(name: str, steps: LatentSteps, columns: int) -> Ring:
        """Made in the kernel."""
        tile = steps.tile
        return Ring(
            named(f"{name}_tiles", T.alloc_shared([tile.stages, tile.kv, columns], steps.problem.dtype)),
            named(f"{name}_full", T.alloc_barrier(arrive_count=[WARP] * tile.stages)),
            named(f"{name}_empty", T.alloc_barrier(arrive_count=[GROUP // WARP] * tile.stages)),
        )


@dataclass(frozen=True)
class Memory:
    """A block's shared memory."""

    queries: Any
    keys: Ring
    values: Ring

    @staticmethod
    def allocate(steps: LatentSteps) -> Memory:
        """Made in the kernel."""
        problem, tile = steps.problem, steps.tile
        dim, dim_v = padded(problem.dim), padded(problem.dim_v)
        queries = named("q_tile", T.alloc_shared([tile.q, dim], problem.dtype))
        return Memory(queries, Ring.allocate("k", steps, dim), Ring.allocate("v", steps, dim_v))


@T.macro
def copy_ahead(steps: PlacedSteps, buffers: Any, memory: Memory, at: tuple[Any, Any, Any], ahead: Any) -> None:
    """What the copying warp does before a length is known."""
    if T.get_thread_binding() >= GROUP:
        kv_head = at[1] // T.ceildiv(steps.sizes.q * steps.problem.group, steps.tile.q)
        for stage, place in enumerate(places_ahead(steps, at)):
            if stage < ahead:
                copy_pieces(steps, buffers["k"], memory.keys, stage, [place], kv_head)
                T.barrier_arrive(memory.keys.full[stage])
                copy_pieces(steps, buffers["v"], memory.values, stage, [place], kv_head)
                T.barrier_arrive(memory.values.full[stage])


@T.macro
def copy_tiles(steps: PlacedSteps, buffers: Any, memory: Memory, of: Part, kv_head: Any, ahead: Any) -> None:
    """What it does then."""
    for later in T.serial(steps.tiles_left(of, ahead)):
        step = ahead + later
        kv0 = (of.begin + step * of.stride) * steps.tile.kv
        stage, round_trip = step % steps.tile.stages, (step // steps.tile.stages) % 2 ^ 1
        pieces = pieces_of(steps, buffers, of, kv0)
        T.barrier_wait(memory.keys.empty[stage], round_trip)
        copy_pieces(steps, buffers["k"], memory.keys, stage, pieces, kv_head)
        T.barrier_arrive(memory.keys.full[stage])
        T.barrier_wait(memory.values.empty[stage], round_trip)
        copy_pieces(steps, buffers["v"], memory.values, stage, pieces, kv_head)
        T.barrier_arrive(memory.values.full[stage])


def pieces_of(steps: PlacedSteps, buffers: Any, of: Part, kv0: Any) -> list[tuple[Any, Any]]:
    """The first indices in the cache of each piece of a tile of keys: a page, or a tile where it lies in one.

    What lies behind the request's last key comes from that key's page: the table may name no other there.
    """
    page, keys = steps.cache.page, steps.tile.kv
    if not page or page % keys == 0:
        return [steps.tile_at(buffers, of.batch, kv0)]
    last = (of.rows.stop - 1) // page
    table = buffers["page_table"]
    return [(name_value(table[of.batch, T.min(kv0 // page + n, last)]), 0) for n in range(keys // page)]


def places_ahead(steps: PlacedSteps, at: tuple[Any, Any, Any]) -> list[tuple[Any, Any]]:
    """The first indices in the cache of each of a part's first tiles."""
    part, _, batch = at
    parts = steps.sizes.spell(cached_buffers.PARTS)
    return [(batch, (part + stage * parts) * steps.tile.kv) for stage in range(steps.tile.stages)]


@T.macro
def copy_pieces(
    steps: PlacedSteps, source: Any, ring: Ring, stage: Any, pieces: list[tuple[Any, Any]], head: Any
) -> None:
    """Brings a tile to a stage, of which nobody reads the tile before any more."""
    keys, columns = steps.tile.kv // len(pieces), int(ring.tiles.shape[2])
    for n, (owner, first) in enumerate(pieces):
        for d in range(0, columns, SWIZZLED):  # columns that lie together
            copy_piece(
                source[owner, first : first + keys, head, d : d + SWIZZLED],
                ring.tiles[stage, n * keys : (n + 1) * keys, d : d + SWIZZLED], ring.full, stage, steps.reads_little,
            )  # fmt: skip


@T.macro
def copy_piece(source: Any, target: Any, full: Any, stage: Any, reads_little: Any) -> None:
    """Columns of a page, or of a tile. Where a call reads little, its lines are the first to leave the cache."""
    if reads_little:
        T.tma_copy(source, target, barrier=full[stage], eviction_policy="evict_first")
    else:
        T.tma_copy(source, target, barrier=full[stage])


@T.macro
def compute(steps: PlacedSteps, buffers: Any, memory: Memory, of: Part, ahead: Any) -> None:
    """What the others do."""
    schedule, tile, packed, problem = steps.schedule, steps.tile, of.rows, steps.problem
    thread, dim_v = T.get_thread_binding(), padded(problem.dim_v)
    scores = named("scores", T.alloc_fragment([tile.q, tile.kv], FLOAT))
    other = named("other", T.alloc_fragment([tile.q, tile.kv], FLOAT)) if needs_another(schedule) else None
    weights = named("weights", T.alloc_fragment([tile.q, tile.kv], problem.dtype))
    output = named("output", T.alloc_fragment([tile.q, dim_v], FLOAT))
    written = named("written", T.alloc_fragment([tile.q], FLOAT)) if len(schedule.rows) > 0 else None
    maths = steps.maths(buffers, of.batch, packed, scores, other)
    bring_queries(memory.queries, buffers["q"], packed, problem.dtype)
    T.fill(output, 0)
    maths.start()
    for step in T.serial(of.count):
        kv0 = (of.begin + step * of.stride) * tile.kv
        stage, trip = step % tile.stages, (step // tile.stages) % 2
        T.barrier_wait(memory.keys.full[stage], trip)
        T.wgmma_gemm(
            memory.queries, memory.keys.tiles[stage, :, :], scores, transpose_B=True, policy=ROWS_WHOLE,
            clear_accum=True,
        )  # fmt: skip
        T.wait_wgmma(0)
        if thread % WARP == 0:
            T.barrier_arrive(memory.keys.empty[stage])
        maths.score(kv0)
        if schedule.fill is not None:
            where_partial(steps.may_be_partial(packed, kv0), bind(maths.mask, kv0))
        maths.weigh(kv0)
        T.copy(scores, weights)
        if schedule.rescale is not None:
            multiply_rows(output, maths.rows[schedule.rescale], tile, dim_v)
        T.barrier_wait(memory.values.full[stage], trip)
        where_partial(
            steps.holds_unseen(packed, kv0),
            bind(clear_rows, memory.values, stage, tile.kv, steps.is_unseen(maths, kv0)),
        )
        T.wgmma_gemm(weights, memory.values.tiles[stage, :, :], output, policy=ROWS_WHOLE)
        T.wait_wgmma(0)
        if thread % WARP == 0:
            T.barrier_arrive(memory.values.empty[stage])
    if steps.in_turns:
        await_unread(memory, of, ahead)
    steps.leave(buffers, maths, output, written, of.number)


@T.macro
def await_unread(memory: Memory, of: Part, ahead: Any) -> None:
    """Tiles behind the request's last key have come all the same, to where rows will be joined."""
    for unread in T.serial(T.max(ahead - of.count, 0)):
        T.barrier_wait(memory.keys.full[of.count + unread], 0)
        T.barrier_wait(memory.values.full[of.count + unread], 0)


@T.macro
def join(how: Join, of: Part, block: Any) -> None:
    """What those that compute do at last."""
    if T.get_thread_binding() < GROUP:
        join_if_last(how, of.rows, (of.batch, block))


@T.macro
def meet() -> None:
    """The threads that compute wait for each other."""
    T.sync_threads(LEFT, GROUP)


@T.macro
def bring_queries(target: Any, source: Any, packed: Rows, dtype: str) -> None:
    """The block's queries; 0 in rows that there are not."""
    bring_piece(target, 0, source, packed, dtype)
    T.fence_proxy_async()
    meet()


@T.macro
def clear_rows(ring: Ring, stage: Any, keys: int, is_unseen: Callable[[Any], Any]) -> None:
    """0 in the rows of values that nobody sees."""
    clear_piece(ring.tiles, stage, keys, is_unseen)
    T.fence_proxy_async()
    meet()
