"""What the copying group's other three warps do while a block of the backward pass computes: zeroes for those after it.

The sums of dQ must be zero before blocks add to them. Half of what a kernel of its own before the backward pass moved
were zeroes, while tensor cores idled. So the blocks of a unit (items.KeyBlocks: those of some heads, which the GPU
starts together) write the next unit's, and rows.py writes the first's. A block waits for zeroes that blocks before it
write as their first act; a GPU starts blocks in order, so those run or are over.

To store dQ of units that are done as well would take more than the 24 registers that such a warp has: addresses of 64
bits, which ptxas then takes from the products' registers, and products wait for each other (C7512).
"""

from __future__ import annotations

import math
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.kernels.common import Buffers
from attention_engine.kernels.items import KeyBlocks
from attention_engine.kernels.rows import FINISHED, ZEROED, take_sums_for_granted
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.warps import SPARE, WARP

ZEROES = 1024  # that a warp writes at once, 16 bytes a thread


class SpareWarps:
    """What the spare warps of a block do; index: the block's of the grid."""

    def __init__(self, problem: Problem, tile: Tile, blocks: KeyBlocks, index: Any, queries: Any) -> None:
        self.problem, self.blocks = problem, blocks
        self.size = tile.q * padded(problem.dim)
        self.number, self.position = blocks.position(index)
        self.blocks_of_a_unit = name_value(blocks.together * blocks.blocks)
        self.tiles = name_value(T.ceildiv(queries, tile.q))

    def turns(self, pairs: Any) -> Any:
        """How many tiles of so many pairs of key head and batch are this block's: the one with its own number in its
        unit, and each so many blocks further."""
        count = pairs * self.problem.group * self.tiles
        return T.truncdiv(T.max(count - self.position + self.blocks_of_a_unit - 1, 0), self.blocks_of_a_unit)

    def place(self, first_pair: Any, turn: Any) -> tuple[Any, Any]:
        """The tile of a turn: batch * heads + head, and which of the head's it is."""
        number = name_value(self.position + turn * self.blocks_of_a_unit)
        pair = name_value(T.truncdiv(number, self.tiles))
        return name_value(first_pair * self.problem.group + pair), name_value(number - pair * self.tiles)


@T.macro
def count(counter: Any) -> None:
    """Counts what this thread did, and all that it knows of, as done. TileLang forgets an atomic's order unless its
    result is asked for."""
    T.evaluate(T.atomic_add(counter, 1, memory_order="release", return_prev=True))


@T.macro
def wait_for_zeroes(blocks: KeyBlocks, index: Any, buffers: Buffers) -> None:
    """Until the sums of dQ that this block adds to are zero."""
    number, _ = blocks.position(index)
    if number > 0:
        while T.atomic_load(buffers["counters"][number, ZEROED], memory_order="acquire") < 0:
            pass


@T.macro
def write_zeroes(work: SpareWarps, buffers: Buffers, warp: int) -> None:
    """A spare warp's part of the next unit's zeroes."""
    at_once = math.gcd(work.size, ZEROES)
    next_unit = name_value(work.number + 1)
    first_pair, pairs = work.blocks.pairs_of(next_unit)
    take_for_granted(next_unit > 0)
    if first_pair < work.blocks.pairs:
        for turn in T.unroll(work.turns(pairs), unroll_factor=1):
            row, tile = work.place(first_pair, turn)
            take_sums_for_granted(buffers, row, tile, work.size)
            for part in T.unroll(T.ceildiv(work.size // at_once - warp, len(SPARE)), unroll_factor=1):
                for x in T.Parallel(at_once):
                    buffers["workspace"][row, tile * work.size + (part * len(SPARE) + warp) * at_once + x] = 0.0
        T.sync_warp()
        if T.get_thread_binding() % WARP == 0:
            count(buffers["counters"][next_unit, ZEROED])


@T.macro
def spare_work(work: SpareWarps, buffers: Buffers, added: Any) -> None:
    """All that the spare warps do. One of them tells that this block has added all to the sums, when it has: `added`
    is its barrier."""
    thread = T.get_thread_binding()
    for warp in SPARE:
        if T.And(thread >= WARP * warp, thread < WARP * (warp + 1)):
            write_zeroes(work, buffers, warp - 1)
    if thread == SPARE[0] * WARP:
        T.barrier_wait(added, 0)
        count(buffers["counters"][work.number, FINISHED])
