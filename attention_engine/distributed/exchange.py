"""What ranks send one another, differentiable: tokens gathered, and tokens exchanged for heads.

Gradients that several ranks add to are added in at least fp32. By torch's functional collectives, which compilers can
follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.distributed.layout import Layout, order_of_gathered, order_of_sent

COLLECTIVES: Any = torch.ops._c10d_functional
WAIT: Any = COLLECTIVES.wait_tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence, and which of them this one is."""

    group: dist.ProcessGroup
    size: int
    rank: int

    def begin_gather(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of one shape, one after another along the first dimension; there after WAIT."""
        found: Tensor = COLLECTIVES.all_gather_into_tensor(mine.contiguous(), self.size, self.group.group_name)
        return found

    def begin_sum(self, all_of_them: Tensor) -> Tensor:
        """This rank's part, along the first dimension, of the sum of all ranks' tensors; there after WAIT."""
        mine = all_of_them.contiguous()
        found: Tensor = COLLECTIVES.reduce_scatter_tensor(mine, "sum", self.size, self.group.group_name)
        return found

    def exchange(self, parts: Tensor) -> Tensor:
        """parts[r] goes to rank r; from each rank the part that it has for this one, in their order."""
        ones = [1] * self.size
        found: Tensor = WAIT(COLLECTIVES.all_to_all_single(parts.contiguous(), ones, ones, self.group.group_name))
        return found


@dataclass(frozen=True)
class Tokens:
    """How a dimension of a tensor is shared: by which ranks, in which layout."""

    ranks: Ranks
    layout: Layout

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

    @property
    def own(self) -> int:
        """How many tokens this rank holds."""
        return self.layout.count(self.ranks.rank)


class _Gather(torch.autograd.Function):
    """Several tensors at once: all are under way before the first is waited for, and ranks send in one order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tokens, dim: int, *mine: Tensor) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.dim, ctx.dtypes = tokens, dim, [t.dtype for t in mine]
        ranks = tokens.ranks
        gathered = [ranks.begin_gather(tokens.padded(t.movedim(dim, 0))) for t in mine]
        return tuple(tokens.in_order(WAIT(t)).movedim(0, dim) for t in gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        tokens: Tokens = ctx.tokens
        wide = [t if t.dtype is torch.float64 else t.float() for t in arriving]
        sums = [tokens.ranks.begin_sum(tokens.by_rank(t.movedim(ctx.dim, 0))) for t in wide]
        found = [WAIT(t)[: tokens.own].movedim(0, ctx.dim) for t in sums]
        return None, None, *(t.to(dtype) for t, dtype in zip(found, ctx.dtypes, strict=True))


def _to_heads(mine: Tensor, tokens: Tokens) -> Tensor:
    size = tokens.ranks.size
    first = tokens.padded(mine.movedim(1, 0))  # (most, batch, heads, dim)
    parts = first.unflatten(2, (size, -1)).movedim(2, 0)
    return tokens.in_order(tokens.ranks.exchange(parts).flatten(0, 1)).movedim(0, 1)


def _to_tokens(of_heads: Tensor, tokens: Tokens) -> Tensor:
    size = tokens.ranks.size
    parts = tokens.by_rank(of_heads.movedim(1, 0)).unflatten(0, (size, -1))
    found = tokens.ranks.exchange(parts)[:, : tokens.own]  # (ranks, own, batch, their heads, dim)
    return found.movedim(0, 2).flatten(2, 3).movedim(0, 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tokens: Tokens, for_heads: bool) -> Tensor:
        ctx.tokens, ctx.for_heads = tokens, for_heads
        return (_to_heads if for_heads else _to_tokens)(tensor, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, None, None]:
        return (_to_tokens if ctx.for_heads else _to_heads)(arriving, ctx.tokens), None, None


def gather(tokens: Tokens, dim: int, *mine: Tensor) -> tuple[Tensor, ...]:
    """All tokens of each tensor, in the order of the sequence; gradients are summed over ranks."""
    if all(t.is_floating_point() for t in mine):
        return _Gather.apply(tokens, dim, *mine)  # type: ignore[no-any-return, no-untyped-call]
    with torch.no_grad():
        return _Gather.apply(tokens, dim, *mine)  # type: ignore[no-any-return, no-untyped-call]


def to_heads(mine: Tensor, tokens: Tokens) -> Tensor:
    """(batch, own tokens, heads, dim) becomes (batch, all tokens, own heads, dim)."""
    return _Exchange.apply(mine, tokens, True)  # type: ignore[no-any-return, no-untyped-call]


def to_tokens(of_heads: Tensor, tokens: Tokens) -> Tensor:
    """The other way round."""
    return _Exchange.apply(of_heads, tokens, False)  # type: ignore[no-any-return, no-untyped-call]
