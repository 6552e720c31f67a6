"""cudnn.flex_attention of nvidia-cudnn-frontend as a peer of `flex.py`: masks alone, as intervals of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gallery import Mods
from benchmarks.peers import Unavailable, need


def runs_of(mask: Callable[..., Any], device: str, length: int) -> tuple[Tensor, Tensor]:
    """Where the one run of keys that each query keeps begins and ends, int32 (length,). Raises Unavailable where some
    query keeps several.

    >>> [each.tolist() for each in runs_of(lambda b, h, q, k: (q >= k) & (q - k < 2), "cpu", 4)]
    [[0, 0, 1, 2], [1, 2, 3, 4]]
    """
    index, zero = torch.arange(length, device=device), torch.zeros((), dtype=torch.int64, device=device)
    kept = mask(zero, zero, index[:, None], index)
    first, count = kept.int().argmax(-1), kept.sum(-1)
    if not torch.equal(kept, (index >= first[:, None]) & (index < (first + count)[:, None])):
        raise Unavailable("some query keeps several runs of keys")
    return first.int(), (first + count).int()


def intervals(mask: Callable[..., Any], device: str, length: int) -> Tensor:
    """The same as `create_mask_plan` takes it, (1, numbers, length): keys [0, n0) and [n1, n2) of each query."""
    first, last = runs_of(mask, device, length)
    return torch.stack([torch.zeros_like(first), first, last] if first.any() else [last])[None]


class Planned:
    """A call on q, k and v (batch, heads, length, dim), of one shape. Its plans are kept, as other peers' masks are."""

    def __init__(self, mask: Callable[..., Any], device: str) -> None:
        self.mask, self.device = mask, device
        self._rows: Tensor | None = None
        self._plans: dict[bool, Any] = {}

    def plan(self, q: Tensor, k: Tensor, v: Tensor, trained: bool) -> Any:
        """A new plan, of intervals that are kept. trained: with what a backward pass reads."""
        from cudnn.flex_attention import create_mask_plan

        if self._rows is None:
            self._rows = intervals(self.mask, self.device, q.shape[2]).repeat(1, 1, q.shape[0])
        return create_mask_plan(self._rows, *(t.transpose(1, 2) for t in (q, k, v)), build_backward=trained)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from cudnn.flex_attention import flex_attn_func

        trained = torch.is_grad_enabled()
        if trained not in self._plans:
            self._plans[trained] = self.plan(q, k, v, trained)
        found: Tensor = flex_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), mask_plan=self._plans[trained])
        return found.transpose(1, 2)


def cudnn(mods: Mods, device: str) -> Planned:
    """The call of these mods. Raises Unavailable where the package is missing, or the mods are no mask alone."""
    need("cudnn.flex_attention", "cutlass")
    score, mask = mods
    if score is not None or mask is None:
        raise Unavailable("it takes masks alone")
    return Planned(mask, device)
