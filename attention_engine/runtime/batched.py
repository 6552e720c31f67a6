"""What the autograd functions of both engines share: gradients that arrive many at a time, and gradients of gradients.

`is_grads_batched=True` and `jacobian(vectorize=True)` batch gradients by torch's first vmap, for which an op can give
no rule. They are unwrapped here, and go through torch.func.vmap, for which transforms.py has the ops' rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.compiler import is_compiling

DEEPEST = 64  # levels that torch lets nest
Backward = Callable[..., tuple[Tensor | None, ...]]


def _is_batched(tensor: Tensor | None) -> bool:
    return tensor is not None and is_legacy_batchedtensor(tensor)


def _unwrapped(tensor: Tensor, level: int, count: int) -> Tensor:
    """The tensor with this level's entries as its first dim; so many of one that all entries share."""
    return torch._remove_batch_dim(tensor, level, count, 0)


def _innermost(tensors: list[Tensor]) -> tuple[int, int]:
    """(the highest level that any of the tensors is batched at, its entries)."""
    for level in range(DEEPEST, 0, -1):
        for tensor in filter(is_legacy_batchedtensor, tensors):
            entries = torch._remove_batch_dim(tensor, level, 0, 0).shape[0]  # 0 where it isn't batched at this level
            if entries:
                return level, entries
    return 0, 0


def takes_batches(backward: Backward) -> Backward:
    """The backward of an autograd.Function, for gradients that torch's first vmap has batched too."""

    @functools.wraps(backward)
    def backward_of_any(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        if is_compiling() or not any(map(_is_batched, arriving)):
            return backward(ctx, *arriving)
        level, count = _innermost([d for d in arriving if d is not None])
        if not level:  # no entries
            return backward(ctx, *arriving)
        places = [n for n, d in enumerate(arriving) if d is not None]
        missing: list[bool] = []

        def of_an_entry(*given: Tensor) -> tuple[Tensor, ...]:
            every: list[Tensor | None] = [None] * len(arriving)
            for place, tensor in zip(places, given, strict=True):
                every[place] = tensor
            found = backward_of_any(ctx, *every)
            missing[:] = [d is None for d in found]
            return tuple(d for d in found if d is not None)

        unwrapped = [_unwrapped(d, level, count) for d in arriving if d is not None]
        found = iter(torch.func.vmap(of_an_entry)(*unwrapped))
        return tuple(None if none else torch._add_batch_dim(next(found), 0, level) for none in missing)

    return backward_of_any


def gradients_of(
    make: Callable[..., Sequence[Tensor | None]], inputs: Sequence[Tensor | None], wanted: Sequence[bool],
    arriving: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of the wanted inputs, from those that arrive at what make(*inputs) returns; differentiable.

    By torch.func, whose wrapped tensors don't tell whether autograd below a vmap follows them, and which counts no path
    twice where one input was made of another.
    """
    asked = [t for t, w in zip(inputs, wanted, strict=True) if t is not None and w]
    if not asked or all(a is None for a in arriving):
        return [None] * len(inputs)

    def made_of(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        made = make(*(next(rest) if t is not None and w else t for t, w in zip(inputs, wanted, strict=True)))
        pairs = [(m, a) for m, a in zip(made, arriving, strict=True) if a is not None]
        return tuple(torch.zeros_like(a) if m is None else m for m, a in pairs)

    outputs, pull = torch.func.vjp(made_of, *asked)[:2]
    found = iter(pull(tuple(
        a.to(o.dtype) for o, a in zip(outputs, [a for a in arriving if a is not None], strict=True)
    )))  # fmt: skip
    return [next(found) if t is not None and w else None for t, w in zip(inputs, wanted, strict=True)]
