"""Tokens exchanged for heads, and back, differentiable: each rank then has all tokens of some heads.

A rank's heads may be exchanged in groups. The first group's attention runs while the others are sent, and a group's
output goes home while the next group's attention runs. So what nothing runs beside is the first group's way and the
last one's way home. A send takes the SMs that it finds free: copies run before each kernel which it is to run beside.
Backward all groups are exchanged at once.

Each send takes some 20 us beside its bytes. So tensors that go the same way lie side by side in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.distributed.copies import copy, packed
from attention_engine.distributed.exchange import Sent, Tokens, Works, wait


@dataclass(frozen=True)
class Group:
    """Some of the heads that each rank gets: of `of` parts of them `count`, from the one numbered `first` on."""

    first: int
    count: int
    of: int

    @staticmethod
    def some(counts: Sequence[int]) -> list[Group]:
        """Groups of so many parts, one after another."""
        return [Group(sum(counts[:n]), count, sum(counts)) for n, count in enumerate(counts)]

    def places(self, heads: int, rank: int, ranks: int) -> tuple[int, int]:
        """The first of them that a rank gets of so many heads, and how many they are."""
        own = heads // ranks
        return rank * own + own * self.first // self.of, own * self.count // self.of

    def part(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        """Those of a rank in a tensor (..., heads, dim)."""
        return tensor.narrow(-2, *self.places(tensor.shape[-2], rank, ranks))


class _Joined:
    """Memory for tensors like these, (tokens, batch, heads, dim), side by side for each token and batch."""

    def __init__(self, tokens: int, likes: Sequence[Tensor]) -> None:
        widths = [like.shape[2] * like.shape[3] for like in likes]
        self.memory = likes[0].new_empty(tokens, likes[0].shape[1], sum(widths))
        parts = zip(self.memory.split(widths, 2), likes, strict=True)
        self.parts = [part.unflatten(2, like.shape[2:]) for part, like in parts]


class _ToHeads:
    """A group's heads of this rank's tokens, on their way to who has these heads; and those that come."""

    def __init__(self, mine: Sequence[Tensor], tokens: Tokens, group: Group) -> None:
        """mine: tensors (batch, own tokens, heads, dim), of one batch and dtype."""
        ranks, first = tokens.ranks, [t.movedim(1, 0) for t in mine]
        self.runs = tokens.of_rank(ranks.rank)
        self.own = [group.part(t, ranks.rank, ranks.size) for t in first]
        joined = _Joined(tokens.layout.length, self.own)
        self.whole = joined.parts
        # (batch, all tokens, the group's heads of this rank, dim); .data, as autograd refuses views that share memory
        # which is written after they were handed out, and `keep` and NCCL write it before anything reads it
        self.found = [t.movedim(0, 1).data for t in joined.parts]
        sent = {rank: self._packed([group.part(t, rank, ranks.size) for t in first]) for rank in ranks.others}
        self.sends: list[Sent] = [(sent[rank][here], rank) for rank in ranks.others for _, here in self.runs]
        self.takes: list[Sent] = [
            (joined.memory[there], rank) for rank in ranks.others for there, _ in tokens.of_rank(rank)
        ]

    @staticmethod
    def _packed(parts: Sequence[Tensor]) -> Tensor:
        """Tensors side by side."""
        if len(parts) == 1:
            return packed(parts[0])
        joined = _Joined(parts[0].shape[0], parts)
        for part, into in zip(parts, joined.parts, strict=True):
            copy(part, into)
        return joined.memory

    def keep(self, which: slice = slice(None)) -> None:
        """Copies what doesn't move of these tensors."""
        for own, whole in zip(self.own[which], self.whole[which], strict=True):
            for there, here in self.runs:
                copy(own[here], whole[there])


class _ToTokens:
    """Heads of all tokens, on their way to who has these tokens; and those that come."""

    def __init__(self, of_heads: Sequence[Tensor], groups: Sequence[Group], tokens: Tokens) -> None:
        """of_heads: tensors (batch, all tokens, a group's heads of this rank, dim), of one batch and dtype; groups:
        those of each of them."""
        self.ranks, self.groups, self.runs = tokens.ranks, groups, tokens.of_rank(tokens.ranks.rank)
        self.first = [t.movedim(1, 0) for t in of_heads]
        came = {rank: _Joined(tokens.own, self.first) for rank in self.ranks.others}
        self.came = {rank: joined.parts for rank, joined in came.items()}
        self.sends: list[Sent] = []
        self.takes: list[Sent] = []
        if len(of_heads) == 1:  # runs are sent from where they stand
            self.first = [packed(self.first[0])]
            for rank in self.ranks.others:
                self.sends += [(self.first[0][there], rank) for there, _ in tokens.of_rank(rank)]
                self.takes += [(came[rank].memory[here], rank) for _, here in self.runs]
            return
        for rank in self.ranks.others:
            sent = _Joined(tokens.layout.count(rank), self.first)
            for first, into in zip(self.first, sent.parts, strict=True):
                for there, here in tokens.of_rank(rank):
                    copy(first[there], into[here])
            self.sends.append((sent.memory, rank))
            self.takes.append((came[rank].memory, rank))

    def _of_rank(self, wholes: Sequence[Tensor], rank: int) -> list[Tensor]:
        """A rank's heads of the groups in tensors (batch, own tokens, all heads, dim), tokens first."""
        each = zip(wholes, self.groups, strict=True)
        return [group.part(whole.movedim(1, 0), rank, self.ranks.size) for whole, group in each]

    def keep(self, wholes: Sequence[Tensor]) -> None:
        """Brings own heads to where they belong."""
        for first, into in zip(self.first, self._of_rank(wholes, self.ranks.rank), strict=True):
            for there, here in self.runs:
                copy(first[there], into[here])

    def finish(self, wholes: Sequence[Tensor]) -> None:
        """The same of what came."""
        for rank, came in self.came.items():
            for part, into in zip(came, self._of_rank(wholes, rank), strict=True):
                copy(part, into)


def _begin(tokens: Tokens, each: Sequence[_ToHeads] | Sequence[_ToTokens]) -> Works:
    """All of them at once: one after another they fill no link."""
    sends, takes = [one for way in each for one in way.sends], [one for way in each for one in way.takes]
    return tokens.ranks.begin_exchange(sends, takes)


def _alike(tensors: Sequence[Tensor], shared: Sequence[Tokens]) -> list[list[int]]:
    """The numbers of tensors that go side by side: of the same tokens, batch and dtype."""
    found: dict[object, list[int]] = {}
    for n, (tensor, tokens) in enumerate(zip(tensors, shared, strict=True)):
        found.setdefault((tokens.layout, tensor.shape[0], tensor.dtype), []).append(n)
    return [*found.values()]


def _empty(of_heads: Tensor, tokens: Tokens, group: Group) -> Tensor:
    """For all heads of this rank's tokens. of_heads: a group's."""
    batch, _, heads, dim = of_heads.shape
    return of_heads.new_empty(batch, tokens.own, heads * group.of // group.count * tokens.ranks.size, dim)


class Trip:
    """One call's tensors, to heads and back, in groups. shared: how the tokens are of each tensor that comes; the last
    is q, whose tokens outputs have."""

    def __init__(self, shared: Sequence[Tokens], groups: Sequence[Group]) -> None:
        self.shared, self.groups = shared, groups
        self.coming: list[list[_ToHeads]] = []  # of each group
        self.works: list[Works] = []  # of the first group, and of all others
        self.going: list[tuple[list[tuple[_ToTokens, list[int]]], Works]] = []
        self.results: list[Tensor] = []

    def begin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends all groups of (batch, own tokens, heads, dim). What comes, tensor by tensor of each group, is there
        after `arrive`."""
        alike, found = _alike(tensors, self.shared), list[Tensor]()
        for number, group in enumerate(self.groups):
            ways = [_ToHeads([tensors[n] for n in each], self.shared[each[0]], group) for each in alike]
            self.coming.append(ways)
            if number == 0:
                self.works.append(_begin(self.shared[0], ways))
            of_group = {
                n: t for way, each in zip(ways, alike, strict=True) for n, t in zip(each, way.found, strict=True)
            }
            found += [of_group[n] for n in range(len(tensors))]
        if len(self.groups) > 1:
            self.works.append(_begin(self.shared[0], [way for ways in self.coming[1:] for way in ways]))
        return found

    @torch.no_grad()
    def arrive(self, number: int) -> None:
        """A group's tensors are there from here on; groups arrive in order.

        Copies of what doesn't move, of all groups, run beside the first group's sends. One tensor is left for after
        them: the other groups' sends begin beside its copy, before a kernel takes all SMs.
        """
        left = self.coming[1][0] if number == 0 and len(self.coming) > 1 else None
        if number == 0:
            for way in [way for ways in self.coming for way in ways]:
                way.keep(slice(1, None) if way is left else slice(None))
        if number < len(self.works):
            wait(self.works[number])
        if left is not None:
            left.keep(slice(1))
        self.coming[number] = []

    @torch.no_grad()
    def depart(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Sends home what a group has of all tokens, (batch, all tokens, own heads, dim)."""
        of_q, group = self.shared[-1], self.groups[number]
        if number == 0:
            self.results = [_empty(t, of_q, group) for t in tensors]
        alike = _alike(tensors, [of_q] * len(tensors))
        ways = [(_ToTokens([tensors[n] for n in each], [group] * len(each), of_q), each) for each in alike]
        self.going.append((ways, _begin(of_q, [way for way, _ in ways])))
        for way, each in ways:
            way.keep([self.results[n] for n in each])

    def finish(self) -> list[Tensor]:
        """What came home of all groups, (batch, own tokens, all heads, dim)."""
        for ways, works in self.going:
            wait(works)
            for way, each in ways:
                way.finish([self.results[n] for n in each])
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
        count, shared, groups = len(ctx.shared), ctx.shared, ctx.groups
        found = [_empty(d, tokens, groups[0]) for d, tokens in zip(arriving[:count], shared, strict=True)]
        ways = []
        for each in _alike(arriving, [*shared] * len(groups)):
            of_groups = [groups[n // count] for n in each]
            way = _ToTokens([arriving[n] for n in each], of_groups, shared[each[0] % count])
            ways.append((way, [found[n % count] for n in each]))
        works = _begin(shared[0], [way for way, _ in ways])
        for way, wholes in ways:
            way.keep(wholes)
        wait(works)
        for way, wholes in ways:
            way.finish(wholes)
        return None, *found


class _ToTokensInGroups(torch.autograd.Function):
    """(trip, those of each group, which the trip's `depart` sent...) -> them joined."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, *of_groups: Tensor) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.groups = trip.shared[-1], trip.groups
        return tuple(trip.finish())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        ways = [_ToHeads([d], ctx.tokens, group) for group in ctx.groups for d in arriving]
        works = _begin(ctx.tokens, ways)
        for way in ways:
            way.keep()
        wait(works)
        return None, *(found for way in ways for found in way.found)


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
