"""Stores to a swizzled tile find their places by turned bits, by a rule on the CUDA text that TileLang 0.1.15 prints.

Where a number of a tile stands is printed as a sum. Three of its terms are the bits of a piece of eight numbers, each
joined with a bit of the row: ((row's bit + piece's bit) & 1) * 8, 16 or 32. Of the sixteen stores of a thread, eight
have other pieces. For each of them the GPU works the sum out anew: 45 instructions in a step of the backward pass,
between the products that numbers are made of and those that wait for them. All other terms but the place in the piece
are multiples of 64. So the place in piece p is the place in piece 0 with the bits of 8 p turned: one instruction.
"""

from __future__ import annotations

import re

VERSION, PROOF = "0.1.15", "test_tilelang_adds_up_where_each_number_of_a_swizzled_tile_stands"
# A loop over a thread's pairs of numbers whose only line stores each.
_STORE = re.compile(
    r"(?P<head>for \(int (?P<i>\w+) = 0; (?P=i) < 16; \+\+(?P=i)\) \{\n"
    r" *\*\(uint1\*\)\(\(\((?:half_t|bfloat16_t)\*\)\w+\) \+ )(?P<place>\([^\n]*\))(?P<value>\) = [^\n]*;\n)"
)
_OF_PIECES = (
    "(((((thread & 31) >> 4) + ({i} >> 3)) & 1) * 32)",
    "(((((thread & 15) >> 3) + (({i} & 7) >> 2)) & 1) * 16)",
    "(((((thread & 7) >> 2) + (({i} & 3) >> 1)) & 1) * 8)",
)
_OF_ROWS = "(({i} & 1) * 512)"


def with_turned_bits(cuda: str) -> str:
    """The source with such places, where the index of a thread is called `thread`."""
    return _STORE.sub(_rewritten, cuda)


def _rewritten(store: re.Match[str]) -> str:
    i, place = store["i"], store["place"]
    of_rows = _OF_ROWS.format(i=i)
    others = place
    for term in (*(bits.format(i=i) for bits in _OF_PIECES), of_rows):
        if others.count(term) != 1:
            return store[0]
        others = others.replace(term, "0")
    name = re.compile(rf"\b{i}\b")
    if name.search(others):
        return store[0]
    first = name.sub("0", place)
    return f"{store['head']}(({first} ^ (({i} >> 1) * 8)) + {of_rows}){store['value']}"
