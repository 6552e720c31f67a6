"""What the copying group's other three warps do while a block of the backward pass computes: they prepare for others.

The sums of dQ must be zero before blocks add to them, and delta must be the row sums of o * dO. A kernel of its own
that does both moves bytes while tensor cores idle. So the blocks of a unit (items.KeyBlocks: those of some heads, which
the GPU starts together) do both for the unit that is `units_ahead` of theirs. The first units have nobody before them:
rows.preprocess does it for those.

A block waits for what blocks before it prepare, as their first act. A GPU starts blocks in order, and persistent blocks
take their items in order (keys/items.py). So the blocks that are waited for run or are over.

A spare warp has 24 registers. An address of 64 bits takes two of them, which ptxas would take from the products'
registers, and then products wait for each other (C7512). So rows of o and dO come to shared memory, and zeroes leave
from there, by copies of the TMA unit: one thread works out such a copy's address. What a warp knows of its share stands
in shared memory too.

Persistent blocks also store dQ of units that are done (keys/finished_units.py). The blocks of a grid do not: there,
most of the kernel that stores dQ is hidden already where blocks end, and the last blocks would end later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bind
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import Layout

from attention_engine.ir.expr import Expr, Op, topological
from attention_engine.ir.program import DELTA
from attention_engine.kernels.common import FLOAT, Buffers, Place, named, reader, window
from attention_engine.kernels.delta import FEW, HALVES, ROWS, sum_halves
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.notes import note_in, number_of, size_of
from attention_engine.kernels.items import HeadTile, KeyBlocks, Shares
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.warps import SPARE, SPARE_START, WARP, preparing
from attention_engine.kernels.workspace import FINISHED, PREPARED, counter, take_sums_for_granted

ZEROES, FEW_ZEROES = 256, 64  # that are written at once; wide heads leave room for few
OF_HEAD, OF_TILE = number_of(HeadTile, "head"), number_of(HeadTile, "tile")
# Numbers of 16 bits that a thread takes at once: FEW where it has few registers, or products would wait for each other
# (ptxas C7512); many where it has at least ROOMY registers.
MANY, ROOMY = 8, 40
PROXY_FENCE = """
#ifndef FENCE_PROXY_OF_MEMORY
#define FENCE_PROXY_OF_MEMORY
static __device__ __forceinline__ void fence_proxy_of_memory() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
#endif
"""  # what the TMA unit reads of memory from here on is what threads wrote before (PTX ISA, "async proxy")


class Target(NamedTuple):
    """Where a warp's rows go, and the parity of the barrier on which their copies in arrive."""

    batch: Any
    head: Any
    query: Any
    parity: Any


PARITY = number_of(Target, "parity")


@dataclass(frozen=True)
class SpareRows:
    """Each spare warp's shared memory for rows of o and dO and for what is worked out of them, where that goes (in
    registers those numbers would be three too many), and the barrier of the copies in."""

    o: list[Any]
    do: list[Any]
    sums: list[Any]
    target: list[Any]
    arrived: Any
    at_once: int  # numbers of o and of dO that a thread takes at once

    @staticmethod
    def allocate(form: KeyForm) -> SpareRows:
        """Made in the kernel."""
        shape, warps, dtype = [ROWS, form.dim_v], range(len(preparing(form.tile))), form.problem.dtype
        copying_registers, _ = form.registers
        o, do = ([named(f"{n}_rows{w}", T.alloc_shared(shape, dtype)) for w in warps] for n in ("o", "do"))
        sums = [named(f"delta_row{w}", T.alloc_shared([ROWS], FLOAT)) for w in warps]
        target = [named("place", T.alloc_shared([size_of(Target)], "int32")) for _ in warps]
        T.annotate_layout({rows: Layout(shape, lambda i, d: i * shape[1] + d) for rows in o})  # as loads leave them
        arrived = T.alloc_barrier(arrive_count=[WARP] * len(warps))
        return SpareRows(o, do, sums, target, arrived, FEW if copying_registers < ROOMY else MANY)


@dataclass(frozen=True)
class SpareMemory:
    """What the spare warps have in shared memory: zeroes that they write at once, if the block prepares for others; for
    each warp, which tile of its block's share it is at; rows, where blocks make delta or store dQ."""

    zeroes: Any
    at: list[Any]
    rows: SpareRows | None

    @staticmethod
    def allocate(form: KeyForm) -> SpareMemory:
        """Made in the kernel."""
        wide = max(form.problem.dim, form.problem.dim_v) > 128
        size = [FEW_ZEROES if wide else ZEROES]
        return SpareMemory(
            zeroes=named("zeroes", T.alloc_shared(size, FLOAT)) if form.prepares and not form.tile.in_order else None,
            at=[T.alloc_shared([size_of(HeadTile)], "int32") for _ in preparing(form.tile)] if form.prepares else [],
            rows=SpareRows.allocate(form) if form.persistent or form.delta is not None else None,
        )


@T.macro
def start_spare(memory: SpareMemory) -> None:
    """Before the first block of keys."""
    each_warp = list(range(len(memory.at)))
    if memory.rows is not None:
        for warp in each_warp:
            memory.rows.target[warp][PARITY] = 0
    if memory.zeroes is not None:  # noqa: SIM102 - Python's condition, then the kernel's
        if T.get_thread_binding() < 2 * WARP:  # the first of them
            T.fill(memory.zeroes, 0)
    T.fence_proxy_async()
    T.sync_threads(SPARE_START, len(SPARE) * WARP)


@dataclass(frozen=True)
class SpareWork:
    """What the spare warps do beside a block of keys of the unit `number`. first: where the block's share begins of
    what its unit prepares for a later one."""

    form: KeyForm
    memory: SpareMemory
    shares: Shares
    number: Any
    first: Callable[[], HeadTile]

    @property
    def rows(self) -> SpareRows:
        """The memory for rows of o and dO."""
        assert self.memory.rows is not None, "nobody makes delta or stores dQ"
        return self.memory.rows

    @property
    def blocks(self) -> KeyBlocks:
        """All blocks of keys."""
        return self.shares.blocks

    @property
    def unit(self) -> Any:
        """The unit that they prepare."""
        return self.number + self.blocks.ahead

    @property
    def size(self) -> int:
        """How many sums of dQ a tile of queries has."""
        return self.form.tile.q * self.form.dim


@T.macro
def count(which: Any) -> None:
    """Counts what this thread did, and all that it knows of, as done. TileLang forgets an atomic's order unless its
    result is asked for."""
    T.evaluate(T.atomic_add(which, 1, memory_order="release", return_prev=True))


@T.macro
def wait_for_unit(blocks: KeyBlocks, number: Any, buffers: Buffers) -> None:
    """Until a block's unit is prepared."""
    if number >= blocks.ahead:
        while T.atomic_load(counter(buffers, number, PREPARED), memory_order="acquire") < 0:
            pass


@T.macro
def see_memory() -> None:
    """What a thread knows to be in memory is seen by the copies that it begins."""
    T.import_source(PROXY_FENCE)
    T.call_extern("void", "fence_proxy_of_memory")


@T.macro
def see_unit(blocks: KeyBlocks, number: Any) -> None:
    """What was prepared of a block's unit is."""
    if number >= blocks.ahead:
        see_memory()


@T.macro
def write_zeroes(work: SpareWork, buffers: Buffers, warp: int, row: Any, tile: Any) -> None:
    """A spare warp's part of a tile's zeroes: copies of those that are in shared memory."""
    at_once = int(work.memory.zeroes.shape[0])
    parts = work.size // at_once
    take_sums_for_granted(buffers, row, tile * work.size, work.size)
    for turn in T.unroll(-(-(parts - warp) // len(SPARE)), unroll_factor=1):
        first = name_value(tile * work.size + (turn * len(SPARE) + warp) * at_once)
        T.tma_copy(work.memory.zeroes, buffers["workspace"][row, first : first + at_once])


@T.macro
def wait_for_rows(rows: SpareRows, warp: int, batch: Any, head: Any, q0: Any) -> None:
    """Until what a warp began to bring is there, and what it began to store has been read; notes where this goes."""
    for number, value in enumerate((batch, head, q0)):
        rows.target[warp][number] = value
    parity = name_value(rows.target[warp][PARITY])
    T.barrier_arrive(rows.arrived[warp])
    T.barrier_wait(rows.arrived[warp], parity)
    T.tma_store_wait(0)
    T.sync_warp()
    rows.target[warp][PARITY] = parity ^ 1


@T.macro
def make_delta(
    work: SpareWork, buffers: Buffers, delta: tuple[str, Expr], warp: int, head_of_all: Any, tile_of_head: Any
) -> None:  # fmt: skip
    """A spare warp's part of a tile's delta, ROWS at a time."""
    form, rows, (name, expr) = work.form, work.rows, delta
    problem, tile, dim_v, parts, warps = form.problem, form.tile, form.dim_v, form.tile.q // ROWS, preparing(form.tile)
    o, do, row, target = rows.o[warp], rows.do[warp], rows.sums[warp], note_in(Target, rows.target[warp])
    sums, total = T.alloc_fragment([ROWS, HALVES], FLOAT), T.alloc_fragment([ROWS], FLOAT)
    for turn in T.unroll(-(-(parts - warp) // len(warps)), unroll_factor=1):
        batch = name_value(T.truncdiv(head_of_all, problem.heads))
        head = name_value(head_of_all - batch * problem.heads)
        q0 = name_value(tile_of_head * tile.q + (turn * len(warps) + warp) * ROWS)
        T.tma_copy(window(buffers["o"], batch, head, q0, ROWS, dim_v), o, barrier=rows.arrived[warp])
        T.tma_copy(window(buffers["do"], batch, head, q0, ROWS, dim_v), do, barrier=rows.arrived[warp])
        wait_for_rows(rows, warp, batch, head, q0)
        sum_halves(sums, o, do, rows.at_once)
        T.reduce_sum(sums, total, dim=1)
        for i in T.Parallel(ROWS):
            row[i] = row_value(expr, total[i])
        T.fence_proxy_async()
        T.sync_warp()
        T.tma_copy(row, buffers[name][target.batch, target.head, target.query : target.query + ROWS])


def row_value(expr: Expr, delta: Any) -> Any:
    """What pairs read of a row, where no gradient arrives at returned rows."""
    values = {node: T.float32(0) for node in topological(expr) if node.op is Op.VAR} | {DELTA: delta}
    (value,) = Place(0, 0, {}, reader({})).splice(0, None, values)(expr)
    return value


@T.macro
def prepare(work: SpareWork, buffers: Buffers, warp: int) -> None:
    """A spare warp's part of what a block prepares."""
    first_pair, pairs = work.blocks.pairs_of(work.unit)
    group = work.form.problem.group
    take_for_granted(work.unit > 0)
    if first_pair < work.blocks.pairs:
        act = bind(prepare_tile, work, buffers, warp, first_pair * group)
        walk_share(work, work.memory.at[warp], pairs * group, act)
        T.tma_store_wait(0, read=False)  # is written, not only read: what is counted as done must be
        T.sync_warp()
        if T.get_thread_binding() % WARP == 0:
            count(counter(buffers, work.unit, PREPARED))


@T.macro
def prepare_tile(work: SpareWork, buffers: Buffers, warp: int, first_head: Any, head: Any, tile: Any) -> None:
    """Of one tile of queries of a unit's head."""
    if work.memory.zeroes is not None:
        write_zeroes(work, buffers, warp, first_head + head, tile)
    if work.form.delta is not None:  # noqa: SIM102 - Python's condition, then the kernel's
        if work.unit >= work.blocks.given:
            make_delta(work, buffers, work.form.delta, warp, first_head + head, tile)


@T.macro
def walk_share(work: SpareWork, at: Any, heads: Any, act: Callable[[Any, Any], None]) -> None:
    """A warp's acts at the tiles of its block's share of a unit of so many heads: act(head of the unit, tile). at:
    where it notes which it is at: in its acts it has no registers for that."""
    T.sync_warp()  # all have left the walk before: one that has not would walk on by the numbers of this one
    first = work.first()
    at[OF_HEAD] = first.head
    at[OF_TILE] = first.tile
    T.sync_warp()
    while at[OF_HEAD] < heads:
        act(at[OF_HEAD], at[OF_TILE])
        step_on(work, at)


@T.macro
def step_on(work: SpareWork, at: Any) -> None:
    """To the next tile of a share."""
    head = T.alloc_var("int32")
    tile = T.alloc_var("int32")
    head = at[OF_HEAD]
    tile = at[OF_TILE] + work.shares.sharing
    while tile >= work.shares.tiles:
        tile = tile - work.shares.tiles
        head = head + 1
    T.sync_warp()  # all have read
    at[OF_HEAD] = head
    at[OF_TILE] = tile
    T.sync_warp()


@T.macro
def prepare_together(work: SpareWork, buffers: Buffers) -> None:
    """What the spare warps prepare beside a block of keys."""
    thread = T.get_thread_binding()
    for number, warp in enumerate(preparing(work.form.tile)):
        if T.And(thread >= WARP * warp, thread < WARP * (warp + 1)):
            prepare(work, buffers, number)


@T.macro
def tell_when_added(work: SpareWork, buffers: Buffers, added: Any, number: Any, turn: Any) -> None:
    """One of them tells that the block has added all to the sums, when it has: `added` are its barriers."""
    if T.get_thread_binding() == SPARE[0] * WARP:
        T.barrier_wait(added[number], turn)
        count(counter(buffers, work.number, FINISHED))
