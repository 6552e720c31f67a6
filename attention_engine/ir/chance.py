"""The numbers by which dropout chooses pairs: 23 random bits, which (seed, batch, head, query, key) alone decide.

They are Philox4x32 (Salmon, Moraes, Dror and Shaw, 2011: Parallel random numbers: as easy as 1, 2, 3), in 7 rounds: the
fewest that passed every test of BigCrush there. One call gives eight halves of words, and serves the sixteen pairs of a
cell: a pair's own bits are those at its place in each half, the first half's first. So a few bitwise operations compare
all pairs of a cell with a bound at once. A cell holds the queries that differ in bits 0 and 3 alone, and the keys that
do. Of tensor cores' sums a thread has such queries and keys: eight pairs of a cell, whether queries are its rows
(forward) or its columns (backward).

Behind its own eight bits a pair has the cell's fifteen: exclusive or of the first word and the second moved by one
place. No pair's own bits tell any of them. So numbers are uniform over 23 bits, and a probability is kept to
2^-23. What the pairs of a cell share decides where the own bits of two meet the probability's first, once in 2^16.
"""

from __future__ import annotations

from typing import Any

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 7
LOW = 0xFFFF_FFFF
IN_CELL = 0b1001  # bits of an index that tell the queries of a cell apart, or the keys
OWN, SHARED = 8, 15  # bits of a number: a pair's own, and its cell's
RANGE = 1 << OWN + SHARED
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
    """A pair's number: 0 to RANGE - 1. Python integers or int64 tensors, which broadcast."""
    key = seed & LOW, (seed >> 32) & LOW
    words = philox((q_idx & LOW & ~IN_CELL, b & LOW, kv_idx & LOW & ~IN_CELL, h & LOW), key)
    place = (kv_idx & 1) * 8 + (q_idx & 1) * 4 + (q_idx & 8) // 4 + (kv_idx & 8) // 8
    number = (words[0] ^ words[1] >> 1) & 2**SHARED - 1
    for first, word in zip(range(OWN + SHARED - 1, SHARED, -2), words, strict=True):
        number = number | (word >> place & 1) << first | (word >> place + 16 & 1) << first - 1
    return number


def threshold(probability: float) -> int:
    """A pair is dropped where its number is below this."""
    return min(round(probability * RANGE), RANGE - 1)
