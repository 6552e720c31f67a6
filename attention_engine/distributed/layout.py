"""Which tokens of a sequence each rank holds: runs of neighbours, one after another in the rank's memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attention_engine.distributed.needs import KeptPieces
from attention_engine.errors import LengthNotInLayout

PIECES_OF_A_RANK = 8  # of a layout that is dealt by counts
TRIED = 4  # ranks that may give a piece for one of the rank that takes longest
Cost: TypeAlias = Callable[[Sequence[int]], float]  # what a rank takes, of the numbers of its pieces


@dataclass(frozen=True)
class Run:
    """Tokens start, start + 1, ... of the sequence, `count` of them; `at`: where the rank's memory has the first."""

    start: int
    count: int
    at: int

    @property
    def here(self) -> slice:
        """The tokens in the rank's memory."""
        return slice(self.at, self.at + self.count)


@dataclass(frozen=True)
class Layout:
    """runs[rank]: what each rank holds, in the order of its memory. Every token of the sequence is held once.

    >>> Layout.zigzag(12, 2).places(0)
    tensor([ 0,  1,  2,  9, 10, 11])
    """

    name: str
    runs: tuple[tuple[Run, ...], ...]
    kept: KeptPieces | None = field(default=None, compare=False, repr=False)  # what it was dealt by, in this process

    def __reduce__(self) -> Any:
        return Layout, (self.name, self.runs)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Made once: each call looks up by its layouts."""
        return hash((self.name, self.runs))

    @staticmethod
    def of_places(name: str, pieces: Sequence[Iterable[tuple[int, int]]]) -> Layout:
        """The layout in which each rank holds these pieces, (first, one past the last); neighbours become one run."""
        ranks = []
        for rank in pieces:
            runs: list[Run] = []
            at = 0
            for first, stop in sorted(rank):
                if stop <= first:
                    continue
                if runs and runs[-1].start + runs[-1].count == first:
                    before = runs.pop()
                    runs.append(Run(before.start, before.count + stop - first, before.at))
                else:
                    runs.append(Run(first, stop - first, at))
                at += stop - first
            ranks.append(tuple(runs))
        return Layout(name, tuple(ranks))

    @staticmethod
    def contiguous(length: int, ranks: int) -> Layout:
        """Each rank holds neighbours: for masks that give all queries as many keys."""
        cuts = _cuts(length, ranks)
        return Layout.of_places("contiguous", [[cut] for cut in cuts])

    @staticmethod
    def zigzag(length: int, ranks: int) -> Layout:
        """Each rank holds a piece of the first half and its mirror image: for masks that give later queries more."""
        cuts = _cuts(length, 2 * ranks)
        return Layout.of_places("zigzag", [[cuts[rank], cuts[2 * ranks - 1 - rank]] for rank in range(ranks)])

    @staticmethod
    def dealt(counts: Sequence[int], length: int, ranks: int, cost: Cost | None = None) -> Layout:
        """Pieces dealt so that ranks have as many pieces and as much work: for packed documents.

        counts: the work of equal pieces of the sequence, one after another, a multiple of `ranks` of them.
        `ContextParallel.deal` counts a mask's tiles. cost: what a rank takes for these pieces, by their numbers; None:
        the sum of their counts.
        """
        pieces = len(counts)
        if pieces % ranks:
            raise LengthNotInLayout(
                f"{pieces} pieces can't be dealt evenly to {ranks} ranks. Count a multiple of them."
            )
        of_pieces: Cost = (lambda held: sum(counts[piece] for piece in held)) if cost is None else cost
        neighbours = [[*range(pieces // ranks * rank, pieces // ranks * (rank + 1))] for rank in range(ranks)]
        ways = [_even_out(held, of_pieces) for held in (_largest_first(counts, ranks), neighbours)]
        found = min(ways, key=lambda held: max(map(of_pieces, held)))
        cuts = _cuts(length, pieces)
        return Layout.of_places("dealt", [[cuts[piece] for piece in each] for each in found])

    @property
    def ranks(self) -> int:
        """How many ranks share the sequence."""
        return len(self.runs)

    @cached_property
    def length(self) -> int:
        """Of the whole sequence."""
        return sum(self.count(rank) for rank in range(self.ranks))

    @cached_property
    def most(self) -> int:
        """The most tokens that a rank holds: collectives send as many of each."""
        return max(self.count(rank) for rank in range(self.ranks))

    def count(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(run.count for run in self.runs[rank])

    def places(self, rank: int) -> Tensor:
        """The indices of a rank's tokens in the sequence, in the order of its memory."""
        return torch.cat(
            [torch.arange(run.start, run.start + run.count) for run in self.runs[rank]] or [torch.arange(0)]
        )


@lru_cache(maxsize=256)
def order_of_gathered(layout: Layout, device: torch.device) -> Tensor:
    """Where each token of the sequence stands when all ranks' tokens, `most` of each, lie one after another."""
    found = torch.empty(layout.length, dtype=torch.int64)
    for rank in range(layout.ranks):
        found[layout.places(rank)] = torch.arange(layout.count(rank)) + rank * layout.most
    return found.to(device)


@lru_cache(maxsize=256)
def order_of_sent(layout: Layout, device: torch.device) -> Tensor:
    """Which token of the sequence stands where: the other way round. Where a rank holds fewer than `most`, any."""
    found = torch.zeros(layout.ranks, layout.most, dtype=torch.int64)
    for rank in range(layout.ranks):
        found[rank, : layout.count(rank)] = layout.places(rank)
    return found.flatten().to(device)


def _largest_first(counts: Sequence[int], ranks: int) -> list[list[int]]:
    """As many pieces to each rank, the largest first, each to who has the least work so far."""
    free = [(0, rank) for rank in range(ranks)]  # a heap: the work that each has so far
    held: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(range(len(counts)), key=lambda n: (-counts[n], n)):
        load, rank = heappop(free)
        held[rank].append(piece)
        if len(held[rank]) < len(counts) // ranks:
            heappush(free, (load + counts[piece], rank))
    return held


def _even_out(held: list[list[int]], cost: Cost) -> list[list[int]]:
    """Swaps a piece of the rank that takes longest for one of a rank that takes least, the best of all such swaps, as
    long as both then take less than the one did."""
    costs = [cost(pieces) for pieces in held]
    for _ in range(sum(map(len, held))):
        most = costs.index(max(costs))
        least = sorted((rank for rank in range(len(held)) if rank != most), key=costs.__getitem__)[:TRIED]
        ways = ((_swapped(held[most], m, held[rank], n), rank) for rank in least
                for m, n in itertools.product(range(len(held[most])), range(len(held[rank]))))  # fmt: skip
        left = [(max(cost(mine), cost(theirs)), rank, mine, theirs) for (mine, theirs), rank in ways]
        if not left or min(left)[0] >= costs[most]:
            break
        _, rank, held[most], held[rank] = min(left)
        costs[most], costs[rank] = cost(held[most]), cost(held[rank])
    return held


def _swapped(mine: Sequence[int], m: int, theirs: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """Two ranks' pieces, with one of each given for the other."""
    return [*mine[:m], *mine[m + 1 :], theirs[n]], [*theirs[:n], *theirs[n + 1 :], mine[m]]


def _cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """The sequence in parts that differ by one token at most."""
    ends = [length * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(ends))
