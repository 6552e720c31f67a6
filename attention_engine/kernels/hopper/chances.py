"""Dropout of a Hopper block by a group of warps that holds no tile: it makes the random bits a step or two ahead, and
hands them on through shared memory, a bit a pair.

A computing thread has two rows of each sixteen, and two neighbouring columns of each eight. So it has the eight pairs
of a cell (ir/chance.py) whose row has one parity, and the thread four lanes on has the others. One making thread serves
such two: a call of Philox for each sixteen columns, whose words are compared four bytes at once. What is left of a word
are the first bits of its bytes, 1 where a pair is kept. Those of the first sixteen columns stay there, those of the
next move one bit down, and so on: a computing thread reads two words a tile, for columns of either parity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.chance import WORD, kept_bytes
from attention_engine.kernels.common import named, over_pairs, store
from attention_engine.kernels.hopper.barriers import Ring, give_back, wait
from attention_engine.kernels.items import stage_of
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.warps import GROUP, WARP
from attention_engine.plan.forms import Tile

CELL = 16  # rows, and columns, in which a thread has one cell
STAGES = 2


@dataclass(frozen=True)
class Chances:
    """The bits of a block's steps: each computing thread's two words."""

    bits: Ring

    @staticmethod
    def allocate(tile: Tile) -> Chances | None:
        """Made in the kernel; None where weights are dropped otherwise, or none are."""
        if not tile.drops_apart:
            return None
        bits = Ring(
            tile=named("bits", T.alloc_shared([STAGES, 2, tile.threads], WORD)),
            full=named("bits_full", T.alloc_barrier(arrive_count=[GROUP] * STAGES)),
            empty=named("bits_empty", T.alloc_barrier(arrive_count=[tile.threads // WARP] * STAGES)),
        )
        return Chances(bits)

    def hand_back(self, thread: Any, step: Any) -> None:
        """Nobody of the thread's warp reads the bits of a step any more."""
        give_back(thread, self.bits.empty, stage_of(step, STAGES)[0])


@dataclass(frozen=True)
class Cells:
    """Whose pairs a making thread chooses: its cells' first row in a tile, and first column; where the first of its two
    readers stands among the computing threads."""

    row: Any
    column: Any
    reader: Any

    @staticmethod
    def of_thread(tile: Tile) -> Cells:
        """This thread's."""
        maker = T.get_thread_binding() - (GROUP + tile.threads)
        warp, row, column = maker // 16, maker // 4 % 4, maker % 4
        reader = name_value(warp * WARP + row * 8 + column)
        return Cells(name_value(warp * CELL + row * 2), name_value(column * 2), reader)


@dataclass(frozen=True)
class Draw:
    """What decides over the pairs of a tile beside their places in it."""

    bound: int  # below which a pair's number says that it is dropped
    seed: Any
    batch: Any
    head: Any
    row0: Any
    column0: Any
    columns: int

    def kept(self, cells: Cells, number: Any) -> list[Any]:
        """Of one of a thread's cells, the first bits of each word's bytes; words by the parities of row and column."""
        query, key = self.row0 + cells.row, self.column0 + cells.column + number * CELL
        return kept_bytes(name_value, self.bound, self.seed, self.batch, self.head, query, key)


@T.macro
def make_bits(chances: Chances, cells: Cells, draw: Draw, step: Any) -> None:
    """A making thread's bits of one tile, that of the step after so many of its block."""
    even_even = T.alloc_var(WORD, 0)
    even_odd = T.alloc_var(WORD, 0)
    odd_even = T.alloc_var(WORD, 0)
    odd_odd = T.alloc_var(WORD, 0)
    for n in T.unroll(draw.columns // CELL):
        kept = draw.kept(cells, n)
        down = T.cast(n, WORD)
        even_even = even_even + T.shift_right(kept[0], down)
        even_odd = even_odd + T.shift_right(kept[1], down)
        odd_even = odd_even + T.shift_right(kept[2], down)
        odd_odd = odd_odd + T.shift_right(kept[3], down)
    slot, turn = stage_of(step, STAGES)
    wait(chances.bits.empty, slot, turn ^ 1)
    chances.bits.tile[slot, 0, cells.reader] = even_even
    chances.bits.tile[slot, 1, cells.reader] = even_odd
    chances.bits.tile[slot, 0, cells.reader + 4] = odd_even
    chances.bits.tile[slot, 1, cells.reader + 4] = odd_odd
    T.barrier_arrive(chances.bits.full[slot])


@dataclass(frozen=True)
class Bits:
    """A computing thread's two words of a tile: of columns of even and of odd numbers."""

    chances: Chances
    step: Any
    of_even: Any
    of_odd: Any

    @staticmethod
    def of_step(chances: Chances, thread: Any, step: Any) -> Bits:
        """Those of the step after so many of a block, when they are there."""
        slot, turn = stage_of(step, STAGES)
        wait(chances.bits.full, slot, turn)
        words = (name_value(chances.bits.tile[slot, parity, thread - GROUP]) for parity in (0, 1))
        return Bits(chances, step, *words)

    def hand_back(self, thread: Any) -> None:
        """Nobody of the thread's warp reads them any more."""
        self.chances.hand_back(thread, self.step)

    def keep(self, i: Any, j: Any) -> Any:
        """Is the pair at row i and column j kept?"""
        byte = 3 - (i % 16 // 8 * 2 + j % 16 // 8)  # bits 3 of query and key say which
        bit = T.shift_left(T.uint32(1), T.cast(byte * 8 + 7 - j // CELL, WORD))
        return T.uint32(0) < T.bitwise_and(T.if_then_else(j % 2 == 0, self.of_even, self.of_odd), bit)


@T.macro
def drop_step(chances: Chances, scores: Any, tile: Tile, thread: Any, step: Any) -> None:
    """Weights of a step that meet no value become 0."""
    bits = Bits.of_step(chances, thread, step)
    drop_pairs(bits, scores, tile)
    bits.hand_back(thread)


def drop_pairs(bits: Bits, scores: Any, tile: Tile) -> None:
    """Entries whose bit is 0 become 0."""

    def entry(i: Any, j: Any) -> None:
        store(scores, T.if_then_else(bits.keep(i, j), scores[i, j], T.float32(0)), i, j)

    over_pairs(tile.q, tile.kv, entry)
