"""How torch.func.vmap batches the ops: more batches of one call where it can, else an entry at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_engine.runtime.attentions import ATTENTIONS

Dims = Any  # for each argument a dim, None, or a list of those, as torch.library.register_vmap gives them
Rule = Callable[..., tuple[Any, Any]]


def vmap_rule(run: Callable[..., Any], custom: int, of_gradients: bool) -> Rule:
    """The rule of an op whose last argument is the key. custom: which argument holds the custom inputs, of which each
    entry has its own gradients."""

    def rule(info: Any, dims: Dims, *given: Any) -> tuple[Any, Any]:
        count = info.batch_size
        if not (of_gradients and given[custom]) and _folds(given[-1], dims[custom]):
            folded = [t if n == custom else _fold(count, t, dims[n]) for n, t in enumerate(given)]
            found = _apart(count, run(*folded))
        else:
            found = _stack([run(*each) for each in _entries(count, dims, given)])
        return found, _zeros(found)

    return rule


def _folds(key: str, custom_dims: Sequence[int | None]) -> bool:
    """May entries become more batches of one call? Not where a batch is told from another, or has its own inputs."""
    attention = ATTENTIONS[key]
    if any(d is not None for d in custom_dims) or any("batch" in spec.axes for spec in attention.specs):
        return False
    return not attention.reads_batch


def _fold(count: int, value: Any, dim: Any) -> Any:
    """(entries, batch, ...) as (entries * batch, ...); what all entries share is repeated."""
    if isinstance(value, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
        return [_fold(count, v, d) for v, d in zip(value, dims, strict=True)]
    if not isinstance(value, Tensor):
        return value
    entries = value.expand(count, *value.shape) if dim is None else value.movedim(dim, 0)
    return entries.flatten(0, 1)


def _entries(count: int, dims: Dims, values: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of each entry."""

    def pick(value: Any, dim: Any, n: int) -> Any:
        if isinstance(value, Tensor):
            return value if dim is None else value.select(dim, n)
        if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [pick(v, d, n) for v, d in zip(value, dim, strict=True)]
        return value

    for n in range(count):
        yield [pick(v, d, n) for v, d in zip(values, dims, strict=True)]


def _stack(results: Sequence[Any]) -> Any:
    """Results of the entries, each tensor with the entries as its first dim."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.stack(list(results))
    return type(first)(_stack([r[n] for r in results]) for n in range(len(first)))


def _apart(count: int, tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.unflatten(0, (count, tensors.shape[0] // max(count, 1)))
    return type(tensors)(_apart(count, t) for t in tensors)


def _zeros(value: Any) -> Any:
    """vmap's dims for a result: every tensor has its entries first."""
    return 0 if isinstance(value, Tensor) else type(value)(_zeros(v) for v in value)
