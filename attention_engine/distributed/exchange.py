"""What ranks send one another; tokens that are gathered, differentiable.

Gradients that several ranks add to are added in at least fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from attention_engine.distributed.cost import NODE
from attention_engine.distributed.layout import Layout, order_of_gathered, order_of_sent
from attention_engine.distributed.needs import Range, joined, without

COLLECTIVES: Any = torch.ops._c10d_functional
WAIT: Any = COLLECTIVES.wait_tensor
Sent: TypeAlias = tuple[Tensor, int]  # and to which rank, or from which
Works: TypeAlias = list[dist.Work]


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence, and which of them this one is."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @cached_property
    def nodes(self) -> int:
        """How many nodes they are on, of NODE ranks each."""
        return len({rank // NODE for rank in dist.get_process_group_ranks(self.group)})

    @property
    def sends_directly(self) -> bool:
        """Does each send to each, from where tokens stand to where they belong? Between nodes a collective sends less
        by a NIC; and a compiler follows collectives alone."""
        return self.nodes == 1 and not is_compiling()

    @property
    def others(self) -> list[int]:
        """All ranks but this one, the next first."""
        return [(self.rank + n) % self.size for n in range(1, self.size)]

    def begin_gather(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of one shape, one after another along the first dimension; there after WAIT."""
        found: Tensor = COLLECTIVES.all_gather_into_tensor(mine.contiguous(), self.size, self.group.group_name)
        return found

    def begin_sum(self, all_of_them: Tensor) -> Tensor:
        """This rank's part, along the first dimension, of the sum of all ranks' tensors; there after WAIT."""
        mine = all_of_them.contiguous()
        found: Tensor = COLLECTIVES.reduce_scatter_tensor(mine, "sum", self.size, self.group.group_name)
        return found

    def begin_exchange(self, sends: Sequence[Sent], takes: Sequence[Sent]) -> Works:
        """Contiguous tensors to other ranks, and from them; there after a wait for what is returned."""
        both = ((dist.isend, sends), (dist.irecv, takes))
        ops = [
            dist.P2POp(way, tensor, dist.get_global_rank(self.group, rank), self.group)
            for way, each in both
            for tensor, rank in each
        ]
        return dist.batch_isend_irecv(ops) if ops else []


@dataclass(frozen=True)
class Tokens:
    """How a dimension of a tensor is shared: by which ranks, in which layout. needs: the tokens that each rank needs of
    the sequence, beside its own; None: all. first: those of them that it needs before the others."""

    ranks: Ranks
    layout: Layout
    needs: Sequence[Sequence[Range]] | None = None
    first: Sequence[Sequence[Range]] | None = None

    def padded(self, first: Tensor) -> Tensor:
        """As many tokens, along the first dimension, as the most of a rank: what follows says nothing."""
        missing = self.layout.most - first.shape[0]
        return first if missing == 0 else torch.cat([first, first.new_zeros(missing, *first.shape[1:])])

    def in_order(self, gathered: Tensor) -> Tensor:
        """Tokens of all ranks in the order of the sequence."""
        return gathered.index_select(0, order_of_gathered(self.layout, gathered.device))

    def by_rank(self, whole: Tensor) -> Tensor:
        """Tokens in the order of the sequence, as all ranks hold them, padded."""
        return whole.index_select(0, order_of_sent(self.layout, whole.device))

    def of_rank(self, rank: int, to: int | None = None) -> list[tuple[slice, slice]]:
        """Where each of a rank's runs stands in the sequence, and in its memory; or what of them rank `to` needs."""
        runs = self.layout.runs[rank]
        if self.needs is None or to is None:
            return [(slice(run.start, run.start + run.count), run.here) for run in runs]
        found = []
        for run in runs:
            for first, stop in self.needs[to]:
                start, end = max(first, run.start), min(stop, run.start + run.count)
                if start < end:
                    at = run.at + start - run.start
                    found.append((slice(start, end), slice(at, at + end - start)))
        return found

    @property
    def unneeded(self) -> list[slice]:
        """What of the sequence this rank neither holds nor needs."""
        if self.needs is None:
            return []
        rank = self.ranks.rank
        here = [(run.start, run.start + run.count) for run in self.layout.runs[rank]]
        there = joined([*here, *self.needs[rank]])
        ends = [0, *(end for both in there for end in both), self.layout.length]
        return [slice(first, stop) for first, stop in zip(ends[::2], ends[1::2], strict=True) if first < stop]

    def in_turns(self) -> list[Tokens]:
        """Those that are needed first, then all others."""
        if self.needs is None or self.first is None:
            return [self]
        later = [without(all_of_it, first) for all_of_it, first in zip(self.needs, self.first, strict=True)]
        return [Tokens(self.ranks, self.layout, needs) for needs in (self.first, later)]

    def shared(self) -> list[tuple[slice, slice, list[int]]]:
        """This rank's tokens in parts, each with those other ranks that need it."""
        rank, found = self.ranks.rank, []
        theirs = {other: [there for there, _ in self.of_rank(rank, other)] for other in self.ranks.others}
        ends = {end for each in theirs.values() for there in each for end in (there.start, there.stop)}
        for there, here in self.of_rank(rank):
            cuts = sorted({there.start, there.stop, *(end for end in ends if there.start < end < there.stop)})
            for first, stop in itertools.pairwise(cuts):
                at, who = here.start + first - there.start, []
                for other, each in theirs.items():
                    if any(part.start <= first and stop <= part.stop for part in each):
                        who.append(other)
                found.append((slice(first, stop), slice(at, at + stop - first), who))
        return found

    @property
    def own(self) -> int:
        """How many tokens this rank holds."""
        return self.layout.count(self.ranks.rank)


def all_of(tokens: Tokens, dim: int, *mine: Tensor) -> list[Tensor]:
    """All tokens of each tensor, in the order of the sequence: all are under way before the first is waited for."""
    found, works = first_of(tokens, dim, *mine)
    wait(works)
    return found


def first_of(tokens: Tokens, dim: int, *mine: Tensor) -> tuple[list[Tensor], Works]:
    """The same, of which those that are needed first are there, and others after a wait for what is returned."""
    first = [t.movedim(dim, 0) for t in mine]
    if tokens.ranks.sends_directly:
        whole, works = _brought(tokens, first)
        return [t.movedim(0, dim) for t in whole], works
    gathered = [tokens.ranks.begin_gather(tokens.padded(t)) for t in first]
    return [tokens.in_order(WAIT(t)).movedim(0, dim) for t in gathered], []


def wait(works: Works) -> None:
    """What is launched from here on finds what they bring."""
    for work in works:
        work.wait()


def sums_of(tokens: Tokens, dim: int, dtypes: Sequence[torch.dtype], *of_all: Tensor) -> list[Tensor]:
    """This rank's tokens of each tensor's sum over ranks, in these dtypes."""
    first = [t.movedim(dim, 0) for t in of_all]
    if tokens.ranks.sends_directly:
        return [t.movedim(0, dim) for t in _sent_home(tokens, first, dtypes)]
    sums = [tokens.ranks.begin_sum(tokens.by_rank(t)) for t in first]
    return [WAIT(t)[: tokens.own].movedim(0, dim).to(dtype) for t, dtype in zip(sums, dtypes, strict=True)]


def _brought(tokens: Tokens, mine: Sequence[Tensor]) -> tuple[list[Tensor], Works]:
    """Tokens of tensors whose first dimension they are; zeros for those that this rank doesn't need. Its own are copied
    meanwhile; the last tensor's once what is needed first is there, so that the rest is on its way before a kernel
    takes all SMs."""
    ranks, mine, me = tokens.ranks, [t.contiguous() for t in mine], tokens.ranks.rank
    whole = [t.new_empty(tokens.layout.length, *t.shape[1:]) for t in mine]
    works = []
    for turn in tokens.in_turns():
        sends = [(t[here], rank) for rank in ranks.others for t in mine for _, here in turn.of_rank(me, rank)]
        takes = [(t[there], rank) for rank in ranks.others for t in whole for there, _ in turn.of_rank(rank, me)]
        works.append(ranks.begin_exchange(sends, takes))
    now, *later = works
    for n, (all_of_it, own) in enumerate(zip(whole, mine, strict=True)):
        if n + 1 == len(mine) and later:
            wait(now)
        for there, here in tokens.of_rank(me):
            all_of_it[there] = own[here]
        for there in tokens.unneeded:
            all_of_it[there] = 0
    if not later:
        wait(now)
    return whole, [work for each in later for work in each]


def _sent_home(tokens: Tokens, whole: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """What ranks that need this one's tokens have of them, added up in the order of `others`, and rounded once."""
    ranks, whole, me = tokens.ranks, [t.contiguous() for t in whole], tokens.ranks.rank
    came = {rank: [t.new_empty(tokens.own, *t.shape[1:]) for t in whole] for rank in ranks.others}
    sends = [(t[there], rank) for rank in ranks.others for t in whole for there, _ in tokens.of_rank(rank, me)]
    takes = [(t[here], rank) for rank in ranks.others for t in came[rank] for _, here in tokens.of_rank(me, rank)]
    wait(ranks.begin_exchange(sends, takes))
    found, shared = [], tokens.shared()
    for n, (mine, dtype) in enumerate(zip(whole, dtypes, strict=True)):
        total = mine.new_empty(tokens.own, *mine.shape[1:], dtype=dtype)
        for there, here, others in shared:
            add_up([mine[there], *(came[rank][n][here] for rank in others)], total[here])
        found.append(total)
    return found


def add_up(parts: Sequence[Tensor], into: Tensor) -> None:
    """The sum, in the dtype of `into`: each step but the last is rounded to the parts'."""
    first, *more = parts
    for part in more[:-1]:
        first = first + part
    if more:
        torch.add(first, more[-1], out=into)
    else:
        into.copy_(first)


class _Gather(torch.autograd.Function):
    """Several tensors at once: all are under way before the first is waited for, and ranks send in one order. What
    comes of each is handed out in ranges, whose gradients are added up in fp32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tokens, dim: int, ranges: Sequence[Range], *mine: Tensor) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.dim, ctx.ranges, ctx.dtypes = tokens, dim, ranges, [t.dtype for t in mine]
        whole = all_of(tokens, dim, *mine)
        return tuple(t.narrow(dim, first, stop - first) for t in whole for first, stop in ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        tokens: Tokens = ctx.tokens
        count = len(ctx.ranges)
        of_tensors = [arriving[n : n + count] for n in range(0, len(arriving), count)]
        wide = [_in_all(tokens.layout.length, ctx.dim, ctx.ranges, parts).movedim(0, ctx.dim) for parts in of_tensors]
        return None, None, None, *sums_of(tokens, ctx.dim, ctx.dtypes, *wide)


def _in_all(length: int, dim: int, ranges: Sequence[Range], parts: Sequence[Tensor]) -> Tensor:
    """The sum of what arrives at ranges of all tokens, in at least fp32; tokens come first."""
    first = parts[0].movedim(dim, 0)
    dtype = first.dtype if first.dtype is torch.float64 else torch.float32
    if list(ranges) == [(0, length)]:
        return first.to(dtype)
    total = first.new_zeros(length, *first.shape[1:], dtype=dtype)
    for (start, stop), part in zip(ranges, parts, strict=True):
        total[start:stop] += part.movedim(dim, 0)
    return total


def gather(tokens: Tokens, dim: int, *mine: Tensor) -> tuple[Tensor, ...]:
    """All tokens of each tensor, in the order of the sequence; gradients are summed over ranks."""
    return gather_ranges(tokens, dim, [(0, tokens.layout.length)], *mine)[0]


def gather_ranges(tokens: Tokens, dim: int, ranges: Sequence[Range], *mine: Tensor) -> list[tuple[Tensor, ...]]:
    """The same, of each of these ranges of the sequence: what the tensors have there."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and all(t.is_floating_point() for t in mine)):
        found = _Gather.apply(tokens, dim, ranges, *mine)  # type: ignore[no-untyped-call]
    return [found[n :: len(ranges)] for n in range(len(ranges))]
