"""A pair's number for dropout, in place in a kernel: `ir/chance.py` on 32-bit registers.

Each pair spells out the whole call of its cell, and nvcc computes once what pairs of a thread share: the call, for the
eight pairs of a cell, and what of its first two rounds one index alone decides, for a row or a column of registers.
It takes counters for equal where they are spelled alike. So an index of a tile, which starts at a multiple of 16, is
spelled by what differs between threads and what differs between registers (`parts_of_indices`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tilelang.language as T

from attention_engine.ir.chance import IN_CELL, KEY_STEPS, LOW, MULTIPLIERS, OWN, ROUNDS, SHARED

WORD = "uint32"
UPPER_WORD = "__umulhi"  # of a product of two words
Hold = Callable[[Any], Any]


class InCell(NamedTuple):
    """An index as its cell's counter, and the bits 0 and 3 by which it stands in the cell."""

    counter: Any
    odd: Any
    upper: Any


def in_cell(index: Any) -> InCell:
    """Any index."""
    return InCell(T.bitwise_and(index, ~IN_CELL), T.bitwise_and(index, 1), T.bitwise_and(index, 8))


def in_cell_of_tile(of_thread: Any, of_register: Any) -> InCell:
    """The sum of two parts: bit 3 stands in the register's alone, bit 0 in either."""
    counter = T.bitwise_and(of_thread, ~1) + T.bitwise_and(of_register, ~IN_CELL)
    odd = T.bitwise_or(T.bitwise_and(of_thread, 1), T.bitwise_and(of_register, 1))
    return InCell(counter, odd, T.bitwise_and(of_register, 8))


def chance(hold: Hold, seed: Any, b: Any, h: Any, query: InCell, key: InCell) -> Any:
    """The pair's number, as int64. hold: gives a value a name, so that it is spelled once."""
    words = [hold(word) for word in _words_of_cell(hold, seed, b, h, query, key)]
    place = hold(_word(key.odd * 8 + query.odd * 4 + T.shift_right(query.upper, 2) + T.shift_right(key.upper, 3)))
    number = T.bitwise_and(T.bitwise_xor(words[0], T.shift_right(words[1], T.uint32(1))), T.uint32(2**SHARED - 1))
    for n, word in enumerate(words):
        for half in (0, 1):
            bit = T.bitwise_and(T.shift_right(word, place + T.uint32(16 * half)), T.uint32(1))
            first = OWN + SHARED - 1 - 2 * n - half
            number = hold(T.bitwise_or(number, T.shift_left(bit, T.uint32(first))))
    return T.cast(number, "int64")


def chance_below(hold: Hold, bound: int, seed: Any, b: Any, h: Any, query: InCell, key: InCell) -> Any:
    """Is the pair's number below this? All pairs of its cell are compared at once, and a pair asks its bit alone."""
    words = [hold(word) for word in _words_of_cell(hold, seed, b, h, query, key)]
    upper = [hold(T.shift_right(word, T.uint32(16))) for word in words]
    kept = _kept(hold, bound, [half for both in zip(words, upper, strict=True) for half in both], cells=1)
    of_query = hold(T.if_then_else(query.odd != 0, T.shift_right(kept, T.uint32(4)), kept))
    of_both = hold(T.if_then_else(key.odd != 0, T.shift_right(of_query, T.uint32(8)), of_query))
    place = T.shift_right(query.upper, 2) + T.shift_right(key.upper, 3)
    return T.bitwise_and(of_both, T.shift_left(T.uint32(1), _word(place))) < T.uint32(1)


def kept_in_cells(hold: Hold, bound: int, seed: Any, b: Any, h: Any, cells: list[tuple[Any, Any]]) -> Any:
    """Of one or two cells, a bit a pair at its place: 1 where its number is not below the bound. The second cell's are
    the upper half.

    cells: the least query and key of each.
    """
    words = [
        [hold(word) for word in _words_of_cell(hold, seed, b, h, *(InCell(i, T.int32(0), T.int32(0)) for i in cell))]
        for cell in cells
    ]
    halves = [hold(half) for both in zip(words[0], words[-1], strict=True) for half in _halves(*both)]
    return _kept(hold, bound, halves, len(cells))


def _halves(one: Any, other: Any) -> tuple[Any, Any]:
    """The lower halves of two words in one, and the upper ones."""
    lower = T.bitwise_or(T.bitwise_and(one, T.uint32(0xFFFF)), T.shift_left(other, T.uint32(16)))
    upper = T.bitwise_or(T.shift_right(one, T.uint32(16)), T.bitwise_and(other, T.uint32(0xFFFF_0000)))
    return lower, upper


def _kept(hold: Hold, bound: int, halves: list[Any], cells: int) -> Any:
    """Which pairs' numbers reach the bound: a half holds a bit of each pair, of two cells in its lower and upper part.

    From the last bit to the first: a number reaches the bound's end where its bit is 1 and what is behind reaches the
    rest, or, of a bound whose bit is 0, where either holds.
    """
    own, rest = bound >> SHARED, bound & 2**SHARED - 1
    kept = None if rest == 0 else _shared_bits_reach(hold, rest, halves, cells)
    for n, half in enumerate(reversed(halves)):
        if own >> n & 1:
            kept = half if kept is None else T.bitwise_and(half, kept)
        elif kept is not None:
            kept = T.bitwise_or(half, kept)
    return T.uint32(LOW) if kept is None else hold(kept)


def _shared_bits_reach(hold: Hold, rest: int, halves: list[Any], cells: int) -> Any:
    """All bits of a half where its cell's shared bits reach this, else none. A sum of fifteen bits with what is missing
    has its sixteenth where they do, and carries nothing on: so two cells are asked at once."""
    both = 0x0001_0001
    shared = T.bitwise_xor(halves[0], T.shift_right(halves[2], T.uint32(1)))
    reach = T.bitwise_and(shared, T.uint32((2**SHARED - 1) * both)) + T.uint32((2**SHARED - rest) * both)
    ones = T.bitwise_and(T.shift_right(reach, T.uint32(SHARED)), T.uint32(both if cells > 1 else 1))
    return hold(ones * T.uint32(0xFFFF))


def _words_of_cell(hold: Hold, seed: Any, b: Any, h: Any, query: InCell, key: InCell) -> list[Any]:
    low, high = hold(_word(seed)), hold(_word(T.shift_right(seed, 32)))
    words = [_word(query.counter), _word(b), _word(key.counter), _word(h)]
    for number in range(ROUNDS):
        first, second = (T.uint32(number * step & LOW) for step in KEY_STEPS)
        words = _round(hold, words, (low + first, high + second) if number else (low, high))
    return words


def _word(value: Any) -> Any:
    return T.cast(value, WORD)


def _round(hold: Hold, words: list[Any], keys: tuple[Any, Any]) -> list[Any]:
    a, b, c, d = words
    upper_a, upper_c = (_upper_word(x, by) for x, by in zip((a, c), MULTIPLIERS, strict=True))
    lower_a, lower_c = (hold(x * T.uint32(by)) for x, by in zip((a, c), MULTIPLIERS, strict=True))
    first = hold(T.bitwise_xor(T.bitwise_xor(upper_c, b), keys[0]))
    third = hold(T.bitwise_xor(T.bitwise_xor(upper_a, d), keys[1]))
    return [first, lower_c, third, lower_a]


def _upper_word(value: Any, by: int) -> Any:
    """Of a product of 64 bits. Beside a product of words, which is the lower one, CUDA's function for it can become one
    instruction for both (codegen/patches/choices.py). A cast product of 64 bits becomes two: NVVM joins its words at 64
    bits, and ptxas, which no longer sees that an operand has 32, adds a 0 to each upper word."""
    return T.call_extern(WORD, UPPER_WORD, value, T.uint32(by))
