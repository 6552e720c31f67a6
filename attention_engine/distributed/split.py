"""Who shares a sequence, in which role: ranks that exchange tokens for heads, and ranks that get all keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from attention_engine.distributed.exchange import Ranks, Tokens, gather
from attention_engine.distributed.layout import Layout, Run

METHODS = ("gather", "ring", "heads")
PAIRS = tuple(pair for each in METHODS[:2] for pair in ((each, "heads"), ("heads", each)))  # on two dimensions
SMALLEST_RING = 3  # ranks


@dataclass(frozen=True)
class Split:
    """Who shares a sequence. heads: ranks that exchange tokens for heads; gather: ranks that get all keys. With both,
    each rank is one of either: those that exchange hold neighbours in a layout, and gather as one. ring: do keys go
    round, one rank's at a time?"""

    heads: Ranks | None
    gather: Ranks | None
    ring: bool = False

    @property
    def goes_round(self) -> bool:
        """Do keys go round? Two ranks gather them: a ring of any size holds as many, those of two ranks, at once."""
        return self.ring and self.gather is not None and self.gather.size >= SMALLEST_RING

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(ranks.size for ranks in (self.heads, self.gather) if ranks is not None)

    @property
    def rank(self) -> int:
        """Which of them this one is, in layouts."""
        if self.gather is None or self.heads is None:
            ranks = self.heads or self.gather
            assert ranks is not None
            return ranks.rank
        return self.gather.rank * self.heads.size + self.heads.rank

    @property
    def groups(self) -> list[Ranks]:
        """The groups that this rank is of, those that exchange first."""
        return [ranks for ranks in (self.heads, self.gather) if ranks is not None]

    def exchanged(self, layout: Layout) -> Tokens | None:
        """How tokens are shared by those that exchange."""
        if self.heads is None:
            return None
        if self.gather is None:
            return Tokens(self.heads, layout)
        return Tokens(self.heads, _groups(layout, self.heads.size)[1][self.gather.rank])

    def gathered(self, layout: Layout) -> Tokens | None:
        """How what those have is shared by those that gather."""
        if self.gather is None:
            return None
        return Tokens(self.gather, layout if self.heads is None else _groups(layout, self.heads.size)[0])

    def whole(self, tensor: Tensor, layout: Layout, dim: int) -> Tensor:
        """All tokens of a tensor, in the order of the sequence."""
        for tokens in (self.exchanged(layout), self.gathered(layout)):
            if tokens is not None:
                (tensor,) = gather(tokens, dim, tensor)
        return tensor


@lru_cache(maxsize=256)
def _groups(layout: Layout, size: int) -> tuple[Layout, tuple[Layout, ...]]:
    """A layout of groups of so many ranks; and how each group's ranks share what the group holds."""
    ranks = [layout.runs[n : n + size] for n in range(0, layout.ranks, size)]
    pieces = [[(run.start, run.start + run.count) for runs in group for run in runs] for group in ranks]
    of_groups = Layout.of_places(layout.name, pieces)
    shared = []
    for group, held in zip(ranks, of_groups.runs, strict=True):
        at = [[_at(held, run.start, run.count) for run in runs] for runs in group]
        shared.append(Layout.of_places(layout.name, at))
    return of_groups, tuple(shared)


def _at(held: Sequence[Run], start: int, count: int) -> tuple[int, int]:
    """Where a group's memory has these tokens."""
    for run in held:
        if run.start <= start < run.start + run.count:
            first = run.at + start - run.start
            return first, first + count
    raise AssertionError("a group holds what its ranks hold")
