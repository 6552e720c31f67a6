"""The kernel over keys of packed sequences that are long in the mean: its blocks walk over one head after another.

Blocks of a sequence are dealt one after another, and later ones have fewer tiles of queries. Where heads take turns at
each tile, a block that begins some steps later stays as far behind. Head by head it catches up, by the difference of
their tiles with each head, and meets queries that the L2 cache still holds. Blocks of a short sequence begin together,
and stay so where heads take turns. On an H100, bf16, causal softmax, 32 query heads and 8 key heads, TFLOP/s in turns
and by heads: 16384 rows of 4096 in the mean 554 and 572, 32768 rows 543 and 562, 2 x 8192 545 and 570, 4 x 4096 520 and
533; unlike lengths of 2048 in the mean 513 and 529, 32768 rows 506 and 518, 8 x 2048 445 and 441; 1024 in the mean 353
and 347.

There are two kernels, and a call launches one of them, as its tensors' sizes say on the host. One with both walks, that
asks when it runs, gains less: 533 and 521 at 4000 in the mean.
"""

from __future__ import annotations

from attention_engine.ir.problem import Problem
from attention_engine.plan.forms import Tile

LONG = 2000  # queries of a sequence in the mean
MOST_HEADS = 8  # of a key head: a step finds its head by as many comparisons


def are_long(queries: int) -> bool:
    """Are packed sequences long that have so many queries in the mean?

    >>> are_long(4096), are_long(1024)
    (True, False)
    """
    return queries >= LONG


def walks_by_heads(problem: Problem, tile: Tile) -> bool:
    """Is there another kernel over keys for long sequences? Of one head alone, both would be the same."""
    return tile.within_sequences and 1 < problem.group <= MOST_HEADS
