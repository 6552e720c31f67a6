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

from attention_engine.ir.chance import IN_CELL, KEY_STEPS, LOW, MULTIPLIERS, ROUNDS

WORD, PRODUCT = "uint32", "uint64"
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
    own, others = _words_of_pair(hold, _words_of_cell(hold, seed, b, h, query, key), query, key)
    first = T.bitwise_and(_own_byte_first(own, query, key), T.uint32(0xFF00_0000))
    return T.cast(T.bitwise_or(first, T.shift_right(others, T.uint32(8))), "int64")


def chance_below(hold: Hold, bound: int, seed: Any, b: Any, h: Any, query: InCell, key: InCell) -> Any:
    """Is the pair's number below this? What stands behind its own byte moves the byte's bound by 1 at most, and is the
    same for four pairs: so it is asked once for them, and a pair compares its own byte alone."""
    own, others = _words_of_pair(hold, _words_of_cell(hold, seed, b, h, query, key), query, key)
    most, rest = bound >> 24, bound & 0x00FF_FFFF
    least = T.uint32(most << 24)
    if rest:
        more = others < T.uint32(rest << 8)
        if most == 0xFF:  # the next bound is more than a word holds
            own_byte = T.bitwise_or(_own_byte_first(own, query, key), T.uint32(0x00FF_FFFF))
            return T.Or(own_byte < least, T.And(more, own_byte == T.uint32(LOW)))
        least = hold(T.if_then_else(more, T.uint32(most + 1 << 24), least))
    return _own_byte_first(own, query, key) < least


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
    of_a, of_c = (hold(T.cast(x, PRODUCT) * T.uint64(by)) for x, by in zip((a, c), MULTIPLIERS, strict=True))
    upper_a, upper_c = (_word(T.shift_right(x, T.uint64(32))) for x in (of_a, of_c))
    first = hold(T.bitwise_xor(T.bitwise_xor(upper_c, b), keys[0]))
    third = hold(T.bitwise_xor(T.bitwise_xor(upper_a, d), keys[1]))
    return [first, hold(_word(of_c)), third, hold(_word(of_a))]


def _words_of_pair(hold: Hold, words: list[Any], query: InCell, key: InCell) -> tuple[Any, Any]:
    """The word that holds the pair's own byte, and the exclusive or of the cell's others."""
    of_even, of_odd = (hold(T.if_then_else(key.odd != 0, words[n + 1], words[n])) for n in (0, 2))
    own = hold(T.if_then_else(query.odd != 0, of_odd, of_even))
    every = hold(T.bitwise_xor(T.bitwise_xor(words[0], words[1]), T.bitwise_xor(words[2], words[3])))
    return own, hold(T.bitwise_xor(every, own))


def _own_byte_first(own: Any, query: InCell, key: InCell) -> Any:
    """A word whose first byte is the pair's own."""
    return T.shift_left(own, _word(query.upper * 2 + key.upper))
