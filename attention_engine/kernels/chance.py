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
EACH_BYTE = 0x01010101
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
    own, joined = _words_of_pair(hold, _words_of_cell(hold, seed, b, h, query, key), query, key)
    first = T.bitwise_and(_own_byte_first(own, query, key), T.uint32(0xFF00_0000))
    return T.cast(T.bitwise_or(first, T.shift_right(joined, T.uint32(8))), "int64")


def chance_below(hold: Hold, bound: int, seed: Any, b: Any, h: Any, query: InCell, key: InCell) -> Any:
    """Is the pair's number below this? What stands behind its own byte moves the byte's bound by 1 at most, and is the
    same for a cell: so it is asked once for that, and a pair compares its own byte alone."""
    own, joined = _words_of_pair(hold, _words_of_cell(hold, seed, b, h, query, key), query, key)
    most, rest = bound >> 24, bound & 0x00FF_FFFF
    least = T.uint32(most << 24)
    if rest:
        more = joined < T.uint32(rest << 8)
        if most == 0xFF:  # the next bound is more than a word holds
            own_byte = T.bitwise_or(_own_byte_first(own, query, key), T.uint32(0x00FF_FFFF))
            return T.Or(own_byte < least, T.And(more, own_byte == T.uint32(LOW)))
        least = hold(T.if_then_else(more, T.uint32(most + 1 << 24), least))
    return _own_byte_first(own, query, key) < least


def kept_bytes(
    hold: Hold, bound: int, seed: Any, b: Any, h: Any, query: Any, key: Any
) -> list[Any]:  # fmt: skip
    """Of each word of a cell, the first bits of its four bytes: 1 where the pair's number is not below the bound.

    query, key: the least of the cell. Of bytes of seven bits, a sum with what is missing to the bound has its first bit
    where it reaches it, and none is carried on: four bytes are compared at once.
    """
    of_query, of_key = (InCell(index, T.int32(0), T.int32(0)) for index in (query, key))
    words = [hold(word) for word in _words_of_cell(hold, seed, b, h, of_query, of_key)]
    most, rest = bound >> 24, bound & 0x00FF_FFFF
    upper = most >= 128  # bounds of 128 or more ask for bytes whose own first bit is 1
    missing = hold(T.uint32((128 - (most - 128 if upper else most)) * EACH_BYTE))
    if rest:
        more = _joined(hold, words) < T.uint32(rest << 8)
        missing = hold(T.if_then_else(more, missing - T.uint32(EACH_BYTE), missing))
    join = T.bitwise_and if upper else T.bitwise_or
    reaches = (T.bitwise_and(word, T.uint32(0x7F * EACH_BYTE)) + missing for word in words)
    return [
        hold(T.bitwise_and(join(reach, word), T.uint32(0x80 * EACH_BYTE)))
        for reach, word in zip(reaches, words, strict=True)
    ]


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
    upper_a, upper_c = (_upper_word(hold, x, by) for x, by in zip((a, c), MULTIPLIERS, strict=True))
    lower_a, lower_c = (hold(x * T.uint32(by)) for x, by in zip((a, c), MULTIPLIERS, strict=True))
    first = hold(T.bitwise_xor(T.bitwise_xor(upper_c, b), keys[0]))
    third = hold(T.bitwise_xor(T.bitwise_xor(upper_a, d), keys[1]))
    return [first, lower_c, third, lower_a]


def _upper_word(hold: Hold, value: Any, by: int) -> Any:
    """Of a product of 64 bits. Its lower word is a product of its own: where both are cast from one number, NVVM joins
    words at 64 bits, and ptxas, which no longer sees that an operand has 32, adds a 0 to each upper word, in the pipe
    that dropout keeps busiest."""
    return _word(T.shift_right(hold(T.cast(value, PRODUCT) * T.uint64(by)), T.uint64(32)))


def _words_of_pair(hold: Hold, words: list[Any], query: InCell, key: InCell) -> tuple[Any, Any]:
    """The word that holds the pair's own byte, and the exclusive or of the cell's others."""
    of_even, of_odd = (hold(T.if_then_else(key.odd != 0, words[n + 1], words[n])) for n in (0, 2))
    own = hold(T.if_then_else(query.odd != 0, of_odd, of_even))
    return own, _joined(hold, words)


def _joined(hold: Hold, words: list[Any]) -> Any:
    return hold(T.bitwise_xor(T.bitwise_xor(words[0], words[1]), T.bitwise_xor(words[2], words[3])))


def _own_byte_first(own: Any, query: InCell, key: InCell) -> Any:
    """A word whose first byte is the pair's own."""
    return T.shift_left(own, _word(query.upper * 2 + key.upper))
