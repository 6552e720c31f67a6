"""What the copying group's other three warps do while a block of the backward pass computes: they prepare for others.

The sums of dQ must be zero before blocks add to them, and delta be the row sums of o * dO. A kernel of its own that
does both moves bytes while tensor cores idle. So the blocks of a unit (items.KeyBlocks: those of some heads, which the
GPU starts together) do both for the unit that is `units_ahead` of theirs, and rows.py does it for the first ones. A
block waits for what blocks before it prepare as their first act; a GPU starts blocks in order, so those run or are
over.

Such a warp has 24 registers, and addresses of 64 bits take two of them, which ptxas then takes from the products'
registers, and products wait for each other (C7512). So rows of o and dO come through shared memory, by copies of the
TMA unit, whose addresses one thread works out at once.

Another act of that kind, dQ of units that are done, was written (16 head dims of a tile at a time, to 16 bits in shared
memory; no spills) and left out: it is hidden for the most part already, and the last blocks of a grid ended later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, Op, topological
from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.ir.program import DELTA
from attention_engine.kernels.common import FLOAT, Buffers, Place, named, reader, window
from attention_engine.kernels.items import KeyBlocks, Shares
from attention_engine.kernels.rows import FINISHED, PREPARED, take_sums_for_granted
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.warps import SPARE, WARP

ZEROES = 1024  # that a warp writes at once, 16 bytes a thread
ROWS, HALVES = 16, 2  # of o and dO that a warp takes at once: a thread has half a row
WORD = 2  # numbers of 16 bits that a thread takes at once; with more, products wait for each other (ptxas C7512)
PROXY_FENCE = """
#ifndef FENCE_PROXY_OF_MEMORY
#define FENCE_PROXY_OF_MEMORY
static __device__ __forceinline__ void fence_proxy_of_memory() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
#endif
"""  # what the TMA unit reads of memory from here on is what threads wrote before (PTX ISA, "async proxy")


@dataclass(frozen=True)
class Delta:
    """The main kernel's row that delta is needed for, by name, and each warp's shared memory: rows of o and dO, what
    they sum to, where it goes (batch, head, query; in registers those would be three too many) and the copies' barrier.
    """

    name: str
    expr: Expr
    o: list[Any]
    do: list[Any]
    row: list[Any]
    place: list[Any]
    arrived: Any

    @staticmethod
    def allocate(row: tuple[str, Expr], problem: Problem) -> Delta:
        """For a row of `by_hand.rows_of_delta`."""
        shape, warps = [ROWS, padded(problem.dim_v)], range(len(SPARE))
        o, do = ([named(f"{n}_rows{w}", T.alloc_shared(shape, problem.dtype)) for w in warps] for n in ("o", "do"))
        sums = [named(f"delta_row{w}", T.alloc_shared([ROWS], FLOAT)) for w in warps]
        place = [T.alloc_shared([4], "int32") for _ in warps]
        return Delta(*row, o, do, sums, place, T.alloc_barrier(arrive_count=[WARP] * len(SPARE)))


class SpareWarps:
    """What the spare warps of a block do; index: the block's of the grid; delta: if they make it."""

    def __init__(
        self, problem: Problem, tile: Tile, blocks: KeyBlocks, index: Any, queries: Any, delta: Delta | None
    ) -> None:
        self.problem, self.tile, self.blocks, self.delta = problem, tile, blocks, delta
        self.size = tile.q * padded(problem.dim)
        self.number, self.position = blocks.position(index)
        self.unit = name_value(self.number + blocks.ahead)
        self.shares = Shares(blocks, problem, tile, queries)


@T.macro
def count(counter: Any) -> None:
    """Counts what this thread did, and all that it knows of, as done. TileLang forgets an atomic's order unless its
    result is asked for."""
    T.evaluate(T.atomic_add(counter, 1, memory_order="release", return_prev=True))


@T.macro
def wait_for_unit(blocks: KeyBlocks, index: Any, buffers: Buffers) -> None:
    """Until this block's unit is prepared."""
    number, _ = blocks.position(index)
    T.import_source(PROXY_FENCE)
    if number >= blocks.ahead:
        while T.atomic_load(buffers["counters"][number, PREPARED], memory_order="acquire") < 0:
            pass
        T.call_extern("void", "fence_proxy_of_memory")


@T.macro
def write_zeroes(work: SpareWarps, buffers: Buffers, warp: int) -> None:
    """A spare warp's part of the zeroes."""
    at_once = math.gcd(work.size, ZEROES)
    for turn in T.unroll(work.shares.count(work.unit, work.position), unroll_factor=1):
        row, tile = work.shares.place(work.unit, work.position, turn)
        take_sums_for_granted(buffers, row, tile * work.size, work.size)
        for part in T.unroll(T.ceildiv(work.size // at_once - warp, len(SPARE)), unroll_factor=1):
            for x in T.Parallel(at_once):
                buffers["workspace"][row, tile * work.size + (part * len(SPARE) + warp) * at_once + x] = 0.0


@T.macro
def make_delta(work: SpareWarps, buffers: Buffers, warp: int) -> None:
    """A spare warp's part of delta, ROWS at a time. Threads begin at columns of their own, or they would meet in a bank
    of shared memory."""
    problem, tile, shares, delta = work.problem, work.tile, work.shares, work.delta
    dim_v, parts = padded(problem.dim_v), tile.q // ROWS
    o, do, row, place = delta.o[warp], delta.do[warp], delta.row[warp], delta.place[warp]
    half_row, words = dim_v // HALVES, dim_v // HALVES // WORD
    sums, total = T.alloc_fragment([ROWS, HALVES], FLOAT), T.alloc_fragment([ROWS], FLOAT)
    count_of_all = shares.count(work.unit, work.position) * parts
    turns = name_value(T.ceildiv(count_of_all - warp, len(SPARE)))
    for turn in T.unroll(turns, unroll_factor=1):
        part = name_value(turn * len(SPARE) + warp)
        head_of_all, block = shares.place(work.unit, work.position, T.truncdiv(part, parts))
        batch = name_value(T.truncdiv(head_of_all, problem.heads))
        head = name_value(head_of_all - batch * problem.heads)
        q0 = name_value(block * tile.q + T.truncmod(part, parts) * ROWS)
        T.tma_copy(window(buffers["o"], batch, head, q0, ROWS, dim_v), o, barrier=delta.arrived[warp])
        T.tma_copy(window(buffers["do"], batch, head, q0, ROWS, dim_v), do, barrier=delta.arrived[warp])
        for number, value in enumerate((batch, head, q0)):
            place[number] = value
        T.barrier_arrive(delta.arrived[warp])
        T.barrier_wait(delta.arrived[warp], turn % 2)
        T.tma_store_wait(0)  # has read the rows before
        T.sync_warp()
        T.fill(sums, 0)
        for word in T.unroll(words, unroll_factor=1):
            for i, half in T.Parallel(ROWS, HALVES):
                for x in T.unroll(WORD):
                    d = half * half_row + (word + i * HALVES + half) % words * WORD + x
                    sums[i, half] += T.cast(o[i, d], FLOAT) * T.cast(do[i, d], FLOAT)
        T.reduce_sum(sums, total, dim=1)
        for i in T.Parallel(ROWS):
            row[i] = row_value(delta.expr, total[i])
        T.fence_proxy_async()
        T.sync_warp()
        T.tma_copy(row, buffers[delta.name][place[0], place[1], place[2] : place[2] + ROWS])
    T.tma_store_wait(0, read=False)  # is written, not only read: what is counted as done must be


def row_value(expr: Expr, delta: Any) -> Any:
    """What pairs read of a row, where no gradient arrives at returned rows."""
    values = {node: T.float32(0) for node in topological(expr) if node.op is Op.VAR} | {DELTA: delta}
    (value,) = Place(0, 0, {}, reader({})).splice(0, None, values)(expr)
    return value


@T.macro
def prepare(work: SpareWarps, buffers: Buffers, warp: int) -> None:
    """A spare warp's part of what this block prepares."""
    first_pair, _ = work.blocks.pairs_of(work.unit)
    take_for_granted(work.unit > 0)
    if first_pair < work.blocks.pairs:
        write_zeroes(work, buffers, warp)
        if work.delta is not None:  # noqa: SIM102 - Python's condition, then the kernel's
            if work.unit >= work.blocks.given:
                make_delta(work, buffers, warp)
        T.sync_warp()
        if T.get_thread_binding() % WARP == 0:
            count(buffers["counters"][work.unit, PREPARED])


@T.macro
def spare_work(work: SpareWarps, buffers: Buffers, added: Any) -> None:
    """All that the spare warps do. One of them tells that this block has added all to the sums, when it has: `added`
    is its barrier."""
    thread = T.get_thread_binding()
    for warp in SPARE:
        if T.And(thread >= WARP * warp, thread < WARP * (warp + 1)):
            prepare(work, buffers, warp - 1)
    if thread == SPARE[0] * WARP:
        T.barrier_wait(added, 0)
        count(buffers["counters"][work.number, FINISHED])
