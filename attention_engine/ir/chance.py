"""The numbers by which dropout chooses pairs: 32 random bits, which (seed, batch, head, query, key) alone decide.

They are Philox4x32 (Salmon, Moraes, Dror and Shaw, 2011: Parallel random numbers: as easy as 1, 2, 3), in 7 rounds: the
fewest that passed every test of BigCrush there. One call gives four words, so sixteen bytes, and serves the sixteen
pairs of a cell. A cell holds the queries that differ in bits 0 and 3 alone, and the keys that do. Of tensor cores' sums
a thread has such queries and keys: eight pairs of a cell, whether queries are its rows (forward) or its columns
(backward).

A pair's own byte comes first in its number; behind it come three bytes of the four words, joined by exclusive or. They
are independent of any one word, and of any two. So numbers are uniform over 32 bits, and a probability is kept to
2^-32. What two pairs of a cell share decides where both own bytes meet the probability's first, once in 2^16.
"""

from __future__ import annotations

from typing import Any

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 7
LOW = 0xFFFF_FFFF
IN_CELL = 0b1001  # bits of an index that tell the queries of a cell apart, or the keys
RANGE = 2**32
MOST_SEED = 2**63 - 1

Words = tuple[Any, Any, Any, Any]


def philox(counter: Words, key: tuple[Any, Any], rounds: int = ROUNDS) -> Words:
    """Four words of 32 bits. Python integers, or int64 tensors, whose products wrap and keep their bits."""
    a, b, c, d = counter
    for number in range(rounds):
        first, second = ((k + number * step) & LOW for k, step in zip(key, KEY_STEPS, strict=True))
        of_a, of_c = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (of_c >> 32) & LOW ^ b ^ first, of_c & LOW, (of_a >> 32) & LOW ^ d ^ second, of_a & LOW
    return a, b, c, d


def chance(seed: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A pair's number: 0 to 2^32 - 1. Python integers or int64 tensors, which broadcast."""
    key = seed & LOW, (seed >> 32) & LOW
    words = philox((q_idx & LOW & ~IN_CELL, b & LOW, kv_idx & LOW & ~IN_CELL, h & LOW), key)
    odd_query, odd_key = q_idx & 1, kv_idx & 1
    of_even = words[0] * (1 - odd_key) + words[1] * odd_key
    of_odd = words[2] * (1 - odd_key) + words[3] * odd_key
    own = of_even * (1 - odd_query) + of_odd * odd_query
    joined = words[0] ^ words[1] ^ words[2] ^ words[3]
    shift = (q_idx & 8) * 2 + (kv_idx & 8)
    return (own << shift) & 0xFF00_0000 | joined >> 8


def threshold(probability: float) -> int:
    """A pair is dropped where its number is below this."""
    return min(round(probability * RANGE), RANGE - 1)
