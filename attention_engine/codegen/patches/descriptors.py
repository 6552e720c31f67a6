"""Descriptors of products' operands are added to as one number of 64 bits, by a rule on the CUDA text.

A product of a tile is made by several instructions, each with a descriptor of its own: the first one's, and so many
bytes further. TileLang adds those to the lower 32 bits. ptxas then makes the upper ones anew for each (UMOV), behind
the product before, which reads them; of 64 bits it adds both by one instruction (UIADD3.64). The addresses in a
descriptor never carry into the upper bits.
"""

from __future__ import annotations

import re

VERSION, PROOF = "0.1.15", "test_tilelang_adds_to_the_lower_half_of_a_descriptor"
FLAGS = ["-DATTENTION_ENGINE_WHOLE_DESCRIPTORS=1"]  # in the compiler's cache key: another text is another kernel

_FURTHER = re.compile(r"uint64_t\((?P<first>desc_\w+) \+ (?P<further>\(.+? >> 4\))\)(?=, )")


def with_whole_descriptors(cuda: str) -> str:
    """The source with the descriptors of instructions made of 64-bit sums."""
    return _FURTHER.sub(r"(uint64_t(\g<first>) + uint64_t(\g<further>))", cuda)
