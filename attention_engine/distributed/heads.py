"""Tokens exchanged for heads, and back, differentiable: each rank then has all tokens of some heads.

A rank's heads may be exchanged in groups, one after another, so that the first group's attention runs while the second
is sent, and the first's output goes home while the second's runs. A send takes the SMs that it finds free, so that
copies run before each kernel which it is to run beside. Backward all groups are exchanged at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.distributed.copies import copy, packed
from attention_engine.distributed.exchange import Sent, Tokens, Works, wait


class _ToHeads:
    """A group's heads of this rank's tokens, on their way to who has these heads; and those that come."""

    def __init__(self, mine: Tensor, tokens: Tokens, group: int, groups: int) -> None:
        """mine: (batch, own tokens, heads, dim)."""
        ranks, first = tokens.ranks, mine.movedim(1, 0)
        of_ranks = [heads.chunk(groups, 2)[group] for heads in first.chunk(ranks.size, 2)]
        self.own, self.runs = of_ranks[ranks.rank], tokens.of_rank(ranks.rank)
        _, batch, heads, dim = self.own.shape
        size, strides = (batch, tokens.layout.length, heads, dim), (heads * dim, batch * heads * dim, dim, 1)
        self.found = mine.new_empty_strided(size, strides)  # (batch, all tokens, the group's heads of this rank, dim)
        self.whole = self.found.movedim(1, 0)
        sent = {rank: packed(of_ranks[rank]) for rank in ranks.others}
        self.sends: list[Sent] = [(sent[rank][here], rank) for rank in ranks.others for _, here in self.runs]
        self.takes: list[Sent] = [
            (self.whole[there], rank) for rank in ranks.others for there, _ in tokens.of_rank(rank)
        ]

    def keep(self) -> None:
        """Copies what doesn't move."""
        for there, here in self.runs:
            copy(self.own[here], self.whole[there])


class _ToTokens:
    """A group's heads of all tokens, on their way to who has these tokens; and those that come."""

    def __init__(self, of_heads: Tensor, tokens: Tokens, group: int, groups: int) -> None:
        """of_heads: (batch, all tokens, the group's heads of this rank, dim)."""
        ranks, first = tokens.ranks, packed(of_heads.movedim(1, 0))
        self.first, self.runs, self.rank, self.heads = first, tokens.of_rank(ranks.rank), ranks.rank, first.shape[2]
        self.group, self.groups = group, groups
        self.came = {rank: first.new_empty(tokens.own, *first.shape[1:]) for rank in ranks.others}
        self.sends: list[Sent] = [(first[there], rank) for rank in ranks.others for there, _ in tokens.of_rank(rank)]
        self.takes: list[Sent] = [(self.came[rank][here], rank) for rank in ranks.others for _, here in self.runs]

    def _of_rank(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's heads of the group in what is (batch, own tokens, all heads, dim), tokens first."""
        return whole.movedim(1, 0).narrow(2, (rank * self.groups + self.group) * self.heads, self.heads)

    def keep(self, whole: Tensor) -> None:
        """Brings own heads to where they belong."""
        for there, here in self.runs:
            copy(self.first[there], self._of_rank(whole, self.rank)[here])

    def finish(self, whole: Tensor) -> None:
        """The same of what came."""
        for rank, came in self.came.items():
            copy(came, self._of_rank(whole, rank))


def _begin(tokens: Tokens, each: Sequence[_ToHeads] | Sequence[_ToTokens]) -> Works:
    """All of them at once: one after another they fill no link."""
    sends, takes = [one for way in each for one in way.sends], [one for way in each for one in way.takes]
    return tokens.ranks.begin_exchange(sends, takes)


def _empty(of_heads: Tensor, tokens: Tokens, groups: int) -> Tensor:
    """For all heads of this rank's tokens."""
    batch, _, heads, dim = of_heads.shape
    return of_heads.new_empty(batch, tokens.own, heads * groups * tokens.ranks.size, dim)


class Trip:
    """One call's tensors, to heads and back, in groups. shared: how the tokens are of each tensor that comes; the last
    is q, whose tokens outputs have."""

    def __init__(self, shared: Sequence[Tokens], groups: int) -> None:
        self.shared, self.groups = shared, groups
        self.coming: deque[tuple[list[_ToHeads], Works]] = deque()
        self.going: list[tuple[list[_ToTokens], Works]] = []
        self.results: list[Tensor] = []

    def begin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends all groups of (batch, own tokens, heads, dim). What comes, tensor by tensor of each group, is there
        after `arrive`."""
        for group in range(self.groups):
            ways = [_ToHeads(t, of, group, self.groups) for t, of in zip(tensors, self.shared, strict=True)]
            self.coming.append((ways, _begin(self.shared[0], ways)))
        return [way.found for ways, _ in self.coming for way in ways]

    @torch.no_grad()
    def arrive(self, group: int) -> None:
        """A group's tensors are there from here on; groups arrive in order.

        Copies of what doesn't move, of all groups, run beside the first group's sends. One tensor of each later group
        is copied after them instead: the next sends begin beside that copy, before a kernel takes all SMs.
        """
        ways, works = self.coming.popleft()
        if group == 0:
            for way in [*ways, *(way for later, _ in self.coming for way in later[1:])]:
                way.keep()
        wait(works)
        if self.coming:
            first, *_ = self.coming[0][0]
            first.keep()

    @torch.no_grad()
    def depart(self, group: int, tensors: Sequence[Tensor]) -> None:
        """Sends home what a group has of all tokens, (batch, all tokens, own heads, dim)."""
        of_q = self.shared[-1]
        if group == 0:
            self.results = [_empty(t, of_q, self.groups) for t in tensors]
        ways = [_ToTokens(t, of_q, group, self.groups) for t in tensors]
        self.going.append((ways, _begin(of_q, ways)))
        for way, whole in zip(ways, self.results, strict=True):
            way.keep(whole)

    def finish(self) -> list[Tensor]:
        """What came home of all groups, (batch, own tokens, all heads, dim)."""
        for ways, works in self.going:
            wait(works)
            for way, whole in zip(ways, self.results, strict=True):
                way.finish(whole)
        found, self.going, self.results = self.results, [], []
        return found


class _ToHeadsInGroups(torch.autograd.Function):
    """(trip, tensors...) -> those of each group, which the trip's `arrive` waits for."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shared, ctx.groups = trip.shared, trip.groups
        return tuple(trip.begin(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        count, groups, ways, found = len(ctx.shared), ctx.groups, [], []
        for n, tokens in enumerate(ctx.shared):
            found.append(_empty(arriving[n], tokens, groups))
            ways.append([_ToTokens(arriving[n + count * group], tokens, group, groups) for group in range(groups)])
        works = _begin(ctx.shared[0], [way for each in ways for way in each])
        for each, whole in zip(ways, found, strict=True):
            for way in each:
                way.keep(whole)
        wait(works)
        for each, whole in zip(ways, found, strict=True):
            for way in each:
                way.finish(whole)
        return None, *found


class _ToTokensInGroups(torch.autograd.Function):
    """(trip, how many tensors, those of each group, which the trip's `depart` sent) -> them joined."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, *of_groups: Tensor) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.groups = trip.shared[-1], trip.groups
        return tuple(trip.finish())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        ways = [_ToHeads(t, ctx.tokens, group, ctx.groups) for group in range(ctx.groups) for t in arriving]
        works = _begin(ctx.tokens, ways)
        for way in ways:
            way.keep()
        wait(works)
        return None, *(way.found for way in ways)


def to_heads(trip: Trip, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Of each tensor (batch, own tokens, heads, dim), group by group, (batch, all tokens, the group's own heads, dim):
    there after the trip's `arrive`."""
    found: tuple[Tensor, ...] = _ToHeadsInGroups.apply(trip, *tensors)  # type: ignore[no-untyped-call]
    return [found[n : n + len(tensors)] for n in range(0, len(found), len(tensors))]


def to_tokens(trip: Trip, of_groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """The other way round, of what each group sent by the trip's `depart`."""
    given = [t for each in of_groups for t in each]
    found: tuple[Tensor, ...] = _ToTokensInGroups.apply(trip, *given)  # type: ignore[no-untyped-call]
    return found
