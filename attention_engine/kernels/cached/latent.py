"""Keys that are values too, on Hopper: one warp copies tiles ahead, two warpgroups have half of the output each.

What decode.py does, placed by hand for heads as wide as latent attention's (keys of 576 columns, of which the first
512 are values). A tile of 64 rows has 64 x 512 sums in fp32, which are all registers of two warpgroups. The left one
makes the scores of a step, their weights and the row values; it multiplies the left half of the values by weights that
it holds. The right one takes weights and factors from shared memory, for the right half. While it does, the left one is
at the next step's scores: so the tensor cores work while weights are made. Both read one tile, which came once.

Keys come by TMA in pieces: the columns of each half of the values, and those that are keys alone. It brings whole
tiles. So rows of keys that nobody sees, or that lie behind the request's last, are cleared once the scores are made:
there may be anything, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T
from tvm import DataType

from attention_engine.ir.expr import Expr, topological
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem
from attention_engine.kernels.bounds import either
from attention_engine.kernels.cached.decode import Steps, over_parts
from attention_engine.kernels.cached.packed_rows import PackedMaths, Rows, of_heads
from attention_engine.kernels.common import FLOAT, Sizes, build, named, store, where_partial
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.tile_maths import multiply_rows, needs_another, row_variables
from attention_engine.kernels.warps import GROUP, ROWS_WHOLE, WARP, registers, thread_of_row
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.plan import cached_buffers
from attention_engine.plan.cached_buffers import Cache, Parts
from attention_engine.plan.forms import Tile

LEFT = 1  # the named barrier on which the left group meets
COPYING, COMPUTING = registers(2 * GROUP)


def latent(
    problem: Problem, schedule: ForwardSchedule, tile: Tile, cache: Cache, parts: Parts | None
) -> Any:  # fmt: skip
    """The PrimFunc of decode.py: (q, k, custom..., kv_lengths, [page_table], [q_starts], then part_o, part_<state>...
    or o, rows...)."""
    sizes = Sizes(problem)
    parameters = sizes.declare(cached_buffers.walk(problem, cache, schedule, parts))
    steps = LatentSteps(problem, schedule, tile, cache, sizes)

    @T.macro
    def walk(buffers: Any, at: tuple[Any, Any, Any]) -> None:
        memory = Memory.allocate(steps)
        of, kv_head = part_at(steps, buffers, at, parts is not None)
        if T.get_thread_binding() >= 2 * GROUP:
            T.inc_max_nreg(COMPUTING)
            make_right(steps, buffers, memory, of)
        else:
            if T.get_thread_binding() >= GROUP:
                T.inc_max_nreg(COMPUTING)
                make_left(steps, buffers, memory, of)
            else:
                T.dec_max_nreg(COPYING)
                if T.get_thread_binding() < WARP:
                    copy_tiles(steps, buffers, memory, of, kv_head)

    over_all = bind(over_parts, steps, 3 * GROUP, parts, walk)
    return build("decode" if parts is None else "decode_parts", parameters, over_all)


@dataclass(frozen=True)
class Part:
    """A block's rows, request, first tile of keys and number of tiles. number: of the part; None: rows are whole.
    stride: tiles from one of its tiles to the next."""

    rows: Rows
    batch: Any
    begin: Any
    count: Any
    number: Any
    stride: Any = 1


@dataclass(frozen=True)
class LatentSteps(Steps):
    """What the kernel's steps have in common."""

    def hold(self, value: Any) -> Any:
        """What a block works out once is held."""
        return name_value(value)

    @property
    def half(self) -> int:
        """Columns of each half of the values."""
        return self.problem.dim_v // 2

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The columns in which keys come: of the left half of values, of the right, and of keys alone."""
        ends = (self.half, self.problem.dim_v, self.problem.dim)
        return [(first, end) for first, end in zip((0, *ends), ends, strict=False) if first < end]

    @property
    def read_at_the_end(self) -> list[Expr]:
        """The row values that the output is made with."""
        rows = (*row_variables(self.schedule), *(v for v, _ in of_heads(self.schedule)))
        return [v for v in rows if v in topological(self.schedule.output)]

    def tile_at(self, buffers: Any, batch: Any, kv0: Any) -> tuple[Any, Any]:
        """The first indices of a tile's first key in the cache."""
        page = self.cache.page
        if not page:
            return batch, kv0
        return name_value(buffers["page_table"][batch, kv0 // page]), kv0 % page

    def holds_unseen(self, packed: Rows, kv0: Any) -> Any:
        """May a tile of keys have rows that nobody sees?"""
        behind = kv0 + (self.tile.kv - 1) >= packed.stop
        return behind if key_condition(self.schedule.mask) is None else either(behind, self.may_be_partial(packed, kv0))

    def is_unseen(self, maths: PackedMaths, kv0: Any) -> Callable[[Any], Any]:
        """Of a key of the tile: does nobody see it?"""
        seen = key_condition(self.schedule.mask)

        def unseen(j: Any) -> Any:
            behind = kv0 + j >= maths.stop
            if seen is None:
                return behind
            return T.Or(behind, T.Not(maths.place.splice(None, kv0 + j, {})(seen)[0]))

        return unseen


@dataclass(frozen=True)
class Memory:
    """A block's shared memory: queries and keys in pieces of columns, and what the left group hands to the right."""

    queries: list[Any]
    keys: list[Any]  # each (stages, keys, columns)
    full: Any
    empty: Any
    weights: Any
    factors: Any
    rows: Any  # values of rows that the output is made with; None: none
    handed: Any  # weights and factors are there
    taken: Any  # and read

    @staticmethod
    def allocate(steps: LatentSteps) -> Memory:
        """Made in the kernel."""
        problem, tile, stages = steps.problem, steps.tile, steps.tile.stages
        widths = [end - first for first, end in steps.pieces]
        queries = [named(f"q{n}", T.alloc_shared([tile.q, w], problem.dtype)) for n, w in enumerate(widths)]
        keys = [named(f"k{n}", T.alloc_shared([stages, tile.kv, w], problem.dtype)) for n, w in enumerate(widths)]
        rescales = steps.schedule.rescale is not None
        at_the_end = len(steps.read_at_the_end)
        return Memory(
            queries=queries, keys=keys,
            full=named("full", T.alloc_barrier(arrive_count=[WARP] * stages)),
            empty=named("empty", T.alloc_barrier(arrive_count=[2 * GROUP // WARP] * stages)),
            weights=named("handed_weights", T.alloc_shared([tile.q, tile.kv], problem.dtype)),
            factors=named("handed_factors", T.alloc_shared([tile.q], FLOAT)) if rescales else None,
            rows=named("handed_rows", T.alloc_shared([at_the_end, tile.q], FLOAT)) if at_the_end else None,
            handed=named("handed", T.alloc_barrier(arrive_count=[GROUP])),
            taken=named("taken", T.alloc_barrier(arrive_count=[GROUP // WARP])),
        )  # fmt: skip


@T.macro
def part_at(steps: LatentSteps, buffers: Any, at: tuple[Any, Any, Any], in_parts: bool) -> tuple[Part, Any]:
    """What the block there works on, and its head of keys."""
    place, block, owner = at
    parts = steps.sizes.spell(cached_buffers.PARTS) if in_parts else 1
    batch, part, parts = steps.part(buffers, owner, place, parts)
    row_tiles = T.ceildiv(steps.sizes.q * steps.problem.group, steps.tile.q)
    kv_head, packed = steps.rows(buffers, row_tiles, block, batch)
    begin, count = steps.tiles(packed, part, parts)
    stride = parts if steps.in_turns else 1
    return Part(packed, batch, begin, count, place if in_parts else None, stride), kv_head


@T.macro
def copy_tiles(steps: LatentSteps, buffers: Any, memory: Memory, of: Part, kv_head: Any) -> None:
    """What the copying warp does."""
    for step in T.serial(of.count):
        kv0 = (of.begin + step) * steps.tile.kv
        stage = step % steps.tile.stages
        at = steps.tile_at(buffers, of.batch, kv0)
        T.barrier_wait(memory.empty[stage], (step // steps.tile.stages) % 2 ^ 1)
        copy_pieces(steps, buffers["k"], memory, stage, at, kv_head)
        T.barrier_arrive(memory.full[stage])


@T.macro
def copy_pieces(steps: LatentSteps, source: Any, memory: Memory, stage: Any, at: tuple[Any, Any], head: Any) -> None:
    """Brings a tile to a stage, of which nobody reads the tile before any more."""
    owner, first = at
    for piece, (start, end) in zip(memory.keys, steps.pieces):
        T.tma_copy(
            source[owner, first : first + steps.tile.kv, head, start:end], piece[stage, :, :],
            barrier=memory.full[stage],
        )  # fmt: skip


@T.macro
def make_left(steps: LatentSteps, buffers: Any, memory: Memory, of: Part) -> None:
    """What the left group does: scores, weights, row values, and the left half of the output."""
    schedule, tile, packed, stages = steps.schedule, steps.tile, of.rows, steps.tile.stages
    thread = T.get_thread_binding()
    scores = named("scores", T.alloc_fragment([tile.q, tile.kv], FLOAT))
    other = named("other", T.alloc_fragment([tile.q, tile.kv], FLOAT)) if needs_another(schedule) else None
    weights = named("weights", T.alloc_fragment([tile.q, tile.kv], steps.problem.dtype))
    output = named("left", T.alloc_fragment([tile.q, steps.half], FLOAT))
    written = named("written", T.alloc_fragment([tile.q], FLOAT)) if len(schedule.rows) > 0 else None
    maths = steps.maths(buffers, of.batch, packed, scores, other)
    bring_queries(steps, buffers["q"], memory, packed)
    T.fill(output, 0)
    maths.start()
    for step in T.serial(of.count):
        kv0 = (of.begin + step) * tile.kv
        stage = step % stages
        T.barrier_wait(memory.full[stage], (step // stages) % 2)
        multiply_pieces(memory, stage, scores)
        maths.score(kv0)
        if schedule.fill is not None:
            where_partial(steps.may_be_partial(packed, kv0), bind(maths.mask, kv0))
        where_partial(
            steps.holds_unseen(packed, kv0), bind(clear_rows, memory, stage, tile.kv, steps.is_unseen(maths, kv0))
        )
        maths.weigh(kv0)
        T.copy(scores, weights)
        T.barrier_wait(memory.taken[0], step % 2 ^ 1)
        T.copy(weights, memory.weights)
        if schedule.rescale is not None:
            hand_row(memory.factors, maths.rows[schedule.rescale], tile.q)
        T.fence_proxy_async()
        T.barrier_arrive(memory.handed[0])
        if schedule.rescale is not None:
            multiply_rows(output, maths.rows[schedule.rescale], tile, steps.half)
        T.wgmma_gemm(weights, memory.keys[0][stage, :, :], output, policy=ROWS_WHOLE)
        T.wait_wgmma(0)
        if thread % WARP == 0:
            T.barrier_arrive(memory.empty[stage])
    maths.finish_rows()
    if memory.rows is not None:
        T.barrier_wait(memory.taken[0], of.count % 2 ^ 1)
        for n, row in enumerate(steps.read_at_the_end):
            hand_row_of(memory.rows, n, maths.rows[row], tile.q)
        T.barrier_arrive(memory.handed[0])
    maths.finish_columns(output, steps.half)
    steps.leave_rows(buffers, maths, written, of.number)
    steps.leave_columns(buffers, output, packed, of.number, 0)


@T.macro
def make_right(steps: LatentSteps, buffers: Any, memory: Memory, of: Part) -> None:
    """What the right group does: the right half of the output."""
    schedule, tile, stages = steps.schedule, steps.tile, steps.tile.stages
    thread = T.get_thread_binding()
    output = named("right", T.alloc_fragment([tile.q, steps.half], FLOAT))
    factors = named("factors", T.alloc_fragment([tile.q], FLOAT)) if schedule.rescale is not None else None
    maths = steps.maths(buffers, of.batch, of.rows, None, None)
    T.fill(output, 0)
    for step in T.serial(of.count):
        stage = step % stages
        T.barrier_wait(memory.full[stage], (step // stages) % 2)
        T.barrier_wait(memory.handed[0], step % 2)
        if schedule.rescale is not None:
            T.copy(memory.factors, factors)
            multiply_rows(output, factors, tile, steps.half)
        T.wgmma_gemm(memory.weights, memory.keys[1][stage, :, :], output, policy=ROWS_WHOLE)
        T.wait_wgmma(0)
        if thread % WARP == 0:
            T.barrier_arrive(memory.taken[0])
            T.barrier_arrive(memory.empty[stage])
    if memory.rows is not None:
        T.barrier_wait(memory.handed[0], of.count % 2)
        for n, row in enumerate(steps.read_at_the_end):
            take_row(memory.rows, n, maths.rows[row], tile.q)
    maths.finish_columns(output, steps.half)
    steps.leave_columns(buffers, output, of.rows, of.number, steps.half)


@T.macro
def multiply_pieces(memory: Memory, stage: Any, scores: Any) -> None:
    """scores = queries @ keys^T, piece by piece of their columns."""
    for n, (queries, keys) in enumerate(zip(memory.queries, memory.keys)):
        T.wgmma_gemm(
            queries, keys[stage, :, :], scores, transpose_B=True, policy=ROWS_WHOLE, clear_accum=n == 0
        )  # fmt: skip
    T.wait_wgmma(0)


@T.macro
def bring_queries(steps: LatentSteps, source: Any, memory: Memory, packed: Rows) -> None:
    """The block's queries; 0 in rows that there are not."""
    for piece, (start, _) in zip(memory.queries, steps.pieces):
        bring_piece(piece, start, source, packed, steps.problem.dtype)
    T.fence_proxy_async()
    T.sync_threads(LEFT, GROUP)


@T.macro
def bring_piece(piece: Any, start: int, source: Any, packed: Rows, dtype: str) -> None:
    """Columns of the queries, from `start` on."""
    for i, d in T.Parallel(*piece.shape):
        owner, row, head = packed.at(i)
        piece[i, d] = T.if_then_else(packed.exists(i), source[owner, row, head, start + d], T.cast(0, dtype))


@T.macro
def hand_row(target: Any, values: Any, rows: int) -> None:
    """A row of numbers to shared memory, by the four threads that hold each."""
    for i in T.Parallel(rows, loop_layout=T.Fragment((rows,), forward_fn=thread_of_row, replicate=4)):
        target[i] = values[i]


@T.macro
def hand_row_of(target: Any, n: int, values: Any, rows: int) -> None:
    """The same, to one of several."""
    for i in T.Parallel(rows, loop_layout=T.Fragment((rows,), forward_fn=thread_of_row, replicate=4)):
        target[n, i] = values[i]


@T.macro
def take_row(source: Any, n: int, values: Any, rows: int) -> None:
    """A row of numbers, of several that were handed."""
    for i in T.Parallel(rows):
        values[i] = source[n, i]


@T.macro
def clear_rows(memory: Memory, stage: Any, keys: int, is_unseen: Callable[[Any], Any]) -> None:
    """0 in the rows of values that nobody sees, when all of the left group have their scores."""
    T.sync_threads(LEFT, GROUP)
    for tile in memory.keys[:2]:
        clear_piece(tile, stage, keys, is_unseen)
    T.fence_proxy_async()
    T.sync_threads(LEFT, GROUP)


@T.macro
def clear_piece(tile: Any, stage: Any, keys: int, is_unseen: Callable[[Any], Any]) -> None:
    """The same of some of the columns."""
    wide = 128 // DataType(tile.dtype).bits  # what one store may write
    for j, piece in T.Parallel(keys, int(tile.shape[-1]) // wide):
        if is_unseen(j):
            for d in T.vectorized(wide):
                store(tile, T.cast(0, tile.dtype), stage, j, piece * wide + d)
