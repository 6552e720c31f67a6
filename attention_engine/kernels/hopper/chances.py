"""Dropout of a Hopper block by a group of warps that holds no tile: it makes the random bits a step or two ahead, and
hands them on through shared memory, a bit a pair.

A computing thread has two rows of each sixteen, and two neighbouring columns of each eight. So it has the eight pairs
of a cell (ir/chance.py) whose row has one parity, and the thread four lanes on has the others. One making thread serves
such two: a call of Philox for each sixteen columns. Two calls are compared at once, and leave a word of which each
reader has half of each byte: bytes go by the cell and a column's parity, halves by a row's, and bits by bit 3 of query
and key.

Rows are queries in the forward pass, and keys in the backward pass over keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.chance import WORD, kept_in_cells
from attention_engine.kernels.common import named, over_pairs, store
from attention_engine.kernels.hopper.barriers import Ring, give_back, wait
from attention_engine.kernels.items import stage_of
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.warps import GROUP, WARP
from attention_engine.plan.forms import Tile

CELL = 16  # rows, and columns, in which a thread has one cell
STAGES = 2


def words_of(columns: int) -> int:
    """How many words hold the bits of a making thread's cells in so many columns."""
    return -(-columns // (2 * CELL))


@dataclass(frozen=True)
class Chances:
    """The bits of a block's steps: each making thread's words, one for two cells."""

    bits: Ring

    @staticmethod
    def allocate(tile: Tile, columns: int) -> Chances | None:
        """Made in the kernel; None where weights are dropped otherwise, or none are. columns: of a tile of pairs."""
        if not tile.drops_apart:
            return None
        bits = Ring(
            tile=named("bits", T.alloc_shared([STAGES, words_of(columns), GROUP], WORD)),
            full=named("bits_full", T.alloc_barrier(arrive_count=[GROUP // WARP] * STAGES)),
            empty=named("bits_empty", T.alloc_barrier(arrive_count=[tile.threads // WARP] * STAGES)),
        )
        return Chances(bits)

    def hand_back(self, thread: Any, step: Any) -> None:
        """Nobody of the thread's warp reads the bits of a step any more."""
        give_back(thread, self.bits.empty, stage_of(step, STAGES)[0])


@dataclass(frozen=True)
class Cells:
    """Whose pairs a making thread chooses: its number, its cells' first row in a tile, and first column."""

    maker: Any
    row: Any
    column: Any

    @staticmethod
    def of_thread(tile: Tile) -> Cells:
        """This thread's."""
        maker = name_value(T.get_thread_binding() - (GROUP + tile.threads))
        return Cells(maker, name_value(maker // 16 * CELL + maker // 4 % 4 * 2), name_value(maker % 4 * 2))


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
    rows_are_keys: bool = False

    def words(self, cells: Cells) -> list[Any]:
        """A making thread's."""
        return [self._word(cells, number) for number in range(words_of(self.columns))]

    def _word(self, cells: Cells, number: int) -> Any:
        firsts = range(number * 2 * CELL, min((number + 1) * 2 * CELL, self.columns), CELL)
        row, column = name_value(self.row0 + cells.row), name_value(self.column0 + cells.column)
        places = [(column + first, row) if self.rows_are_keys else (row, column + first) for first in firsts]
        kept = kept_in_cells(name_value, self.bound, self.seed, self.batch, self.head, places)
        return _with_queries_in_bytes(kept) if self.rows_are_keys else kept


def _with_queries_in_bytes(kept: Any) -> Any:
    """A word whose bytes go by a key's parity, and halves of bytes by a query's, the other way round."""
    apart = T.bitwise_xor(kept, T.shift_right(kept, T.uint32(4)))
    apart = name_value(T.bitwise_and(apart, T.uint32(0x00F0_00F0)))
    return T.bitwise_xor(kept, T.bitwise_xor(apart, T.shift_left(apart, T.uint32(4))))


@T.macro
def make_bits(chances: Chances, cells: Cells, draw: Draw, step: Any) -> None:
    """A making thread's bits of one tile, that of the step after so many of its block."""
    words = draw.words(cells)
    slot, turn = stage_of(step, STAGES)
    wait(chances.bits.empty, slot, turn ^ 1)
    store_words(chances, words, slot, cells.maker)
    T.sync_warp()
    give_back(T.get_thread_binding(), chances.bits.full, slot)


def store_words(chances: Chances, words: list[Any], slot: Any, maker: Any) -> None:
    """Puts a making thread's words where its readers find them."""
    for number, word in enumerate(words):
        store(chances.bits.tile, word, slot, number, maker)


@dataclass(frozen=True)
class Bits:
    """A computing thread's words of a tile, whose halves of bytes are the upper ones."""

    chances: Chances
    step: Any
    words: tuple[Any, ...]

    @staticmethod
    def of_step(chances: Chances, thread: Any, step: Any) -> Bits:
        """Those of the step after so many of a block, when they are there."""
        slot, turn = stage_of(step, STAGES)
        wait(chances.bits.full, slot, turn)
        number = name_value(thread - GROUP)
        row = number % WARP // 4
        maker, down = number // WARP * 16 + row // 2 * 4 + number % 4, T.cast((1 - row % 2) * 4, WORD)
        count = chances.bits.tile.shape[1]
        words = (name_value(T.shift_left(chances.bits.tile[slot, n, maker], down)) for n in range(int(count)))
        return Bits(chances, step, tuple(words))

    def hand_back(self, thread: Any) -> None:
        """Nobody of the thread's warp reads them any more."""
        self.chances.hand_back(thread, self.step)

    def keep(self, i: Any, j: Any, rows_are_keys: bool = False) -> Any:
        """Is the pair at row i and column j kept?"""
        of_row, of_column = i % CELL // 8, j % CELL // 8
        in_half = of_column * 2 + of_row if rows_are_keys else of_row * 2 + of_column
        place = j // CELL % 2 * 16 + j % 2 * 8 + 4 + in_half
        word = self.words[-1]
        for number, earlier in reversed(list(enumerate(self.words[:-1]))):
            word = T.if_then_else(j < (number + 1) * 2 * CELL, earlier, word)
        return T.uint32(0) < T.bitwise_and(word, T.shift_left(T.uint32(1), T.cast(place, WORD)))


def drop_pairs(bits: Bits, scores: Any, tile: Tile) -> None:
    """Entries whose bit is 0 become 0."""

    def entry(i: Any, j: Any) -> None:
        store(scores, T.if_then_else(bits.keep(i, j), scores[i, j], T.float32(0)), i, j)

    over_pairs(tile.q, tile.kv, entry)
