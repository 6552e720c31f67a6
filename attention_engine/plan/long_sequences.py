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

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attention_engine.ir.problem import Problem
from attention_engine.plan.forms import Tile
from attention_engine.plan.launches import Launch, Step

if TYPE_CHECKING:
    from attention_engine.plan.attention import AttentionPlan

LONG = 2000  # queries of a sequence in the mean
MOST_HEADS = 8  # of a key head: a step finds its head by as many comparisons


def are_long(queries: int, sequences: int | None) -> bool:
    """Are packed sequences long in the mean? queries: of all of them, and of none; None: they are not packed.

    >>> are_long(16384, 4), are_long(16384, 16)
    (True, False)
    """
    return sequences is not None and queries >= LONG * max(sequences, 1)


def walks_by_heads(problem: Problem, tile: Tile) -> bool:
    """Is there another kernel over keys for long sequences? Of one head alone, both would be the same."""
    return tile.within_sequences and 1 < problem.group <= MOST_HEADS


def over_keys_by_heads(plan: AttentionPlan) -> Launch | None:
    """The kernel over keys of long sequences; None where it is that of others."""
    tile = plan.tiles.backward
    if plan.by_queries or not walks_by_heads(plan.problem, tile):
        return None
    by_heads = tile.in_form(by_heads=True)
    given = tuple(by_heads if each is tile else each for each in plan.over_keys.given)
    return replace(plan.over_keys, name="backward of long sequences", given=given)


def of_long_sequences(plan: AttentionPlan, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps of a backward pass where sequences are long."""
    launch = over_keys_by_heads(plan)
    return tuple(launch if launch is not None and step is plan.over_keys else step for step in steps)
