"""Row sums of o * dO on tiles, in an order that is the same whoever makes them."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import FLOAT

ROWS, HALVES = 16, 2  # of o and dO that a warp takes at once: a thread has half a row
FEW = 2  # numbers of 16 bits that a thread takes at once, where it has few registers


@T.macro
def sum_halves(sums: Any, o: Any, do: Any, word: int) -> None:
    """sums[i, half] of o * dO, tiles of rows in shared memory that begin at a multiple of ROWS; word: how many numbers
    a thread takes at once. Threads begin at columns of their own, or they would meet in a bank of shared memory."""
    half_row, words = int(o.shape[1]) // HALVES, int(o.shape[1]) // HALVES // word
    T.fill(sums, 0)
    for number in T.unroll(words, unroll_factor=1):
        for i, half in T.Parallel(int(o.shape[0]), HALVES):
            turned = (number + place_of_row(i, o) * HALVES + half) % words
            for x in T.unroll(word):
                d = half * half_row + turned * word + x
                sums[i, half] += T.cast(o[i, d], FLOAT) * T.cast(do[i, d], FLOAT)


def place_of_row(i: Any, tile: Any) -> Any:
    """A row's number among the ROWS that a warp takes."""
    return i % ROWS if int(tile.shape[0]) > ROWS else i
