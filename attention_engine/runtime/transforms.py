"""What torch's transforms ask of the ops: how vmap batches them, and how many FLOPs they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attention_engine.ir.expr import topological
from attention_engine.ir.program import B
from attention_engine.runtime import linear_op
from attention_engine.runtime.linear_op import LINEAR_ATTENTIONS
from attention_engine.runtime.op import ATTENTIONS, BACKWARD, FORWARD, LIBRARY

Dims = Any  # for each argument a dim, None, or a list of those, as torch.library.register_vmap gives them


def _folds(key: str, custom_dims: Sequence[int | None]) -> bool:
    """May entries become more batches of one call? Not where a batch is told from another, or has its own inputs."""
    attention = LINEAR_ATTENTIONS.get(key) or ATTENTIONS[key]
    if any(d is not None for d in custom_dims) or any("batch" in spec.axes for spec in attention.specs):
        return False
    return B not in topological(*(e for _, e in attention.program.named()))


def _fold(count: int, tensor: Tensor, dim: int | None) -> Tensor:
    """(entries, batch, ...) as (entries * batch, ...); what all entries share is repeated."""
    entries = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
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


def _vmap_forward(info: Any, dims: Dims, q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], key: str) -> Any:
    count = info.batch_size
    if _folds(key, dims[3]):
        q, k, v = (_fold(count, t, d) for t, d in zip((q, k, v), dims[:3], strict=True))
        found = _apart(count, FORWARD(q, k, v, custom, key))
    else:
        found = _stack([FORWARD(*each) for each in _entries(count, dims, (q, k, v, custom, key))])
    return found, _zeros(found)


def _vmap_backward(info: Any, dims: Dims, *given: Any) -> Any:
    count = info.batch_size
    q, k, v, custom, o, rows, d_o, d_rows, returned, wanted, key = given
    if not custom and _folds(key, ()):
        q, k, v, o, d_o = (_fold(count, t, dims[n]) for n, t in ((0, q), (1, k), (2, v), (4, o), (6, d_o)))
        rows, d_rows = ([_fold(count, t, d) for t, d in zip(ts, dims[n], strict=True)]
                        for n, ts in ((5, rows), (7, d_rows)))  # fmt: skip
        found = _apart(count, BACKWARD(q, k, v, custom, o, rows, d_o, d_rows, returned, wanted, key))
    else:
        found = _stack([BACKWARD(*each) for each in _entries(count, dims, given)])
    return found, _zeros(found)


def _vmap_linear(run: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an op of linear attention, whose sixth argument are the custom inputs, and the last the key."""

    def rule(info: Any, dims: Dims, *given: Any) -> Any:
        count, custom = info.batch_size, given[5]
        apart = custom and run is linear_op.BACKWARD  # each entry has its own gradients of them
        if not apart and _folds(given[-1], dims[5]):
            folded = [_fold(count, t, d) if isinstance(t, Tensor) else t for t, d in zip(given, dims, strict=True)]
            found = _apart(count, run(*folded))
        else:
            found = _stack([run(*each) for each in _entries(count, dims, given)])
        return found, _zeros(found)

    return rule


for _op, _rule in (
    (FORWARD, _vmap_forward),
    (BACKWARD, _vmap_backward),
    (linear_op.FORWARD, _vmap_linear(linear_op.FORWARD)),
    (linear_op.BACKWARD, _vmap_linear(linear_op.BACKWARD)),
    (linear_op.STEP, _vmap_linear(linear_op.STEP)),
):
    torch.library.register_vmap(_op, _rule, lib=LIBRARY)


@register_flop_formula(torch.ops.attention_engine.forward)
def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products over all pairs, masked or not, as torch counts scaled_dot_product_attention."""
    return 2 * q[0] * q[2] * q[1] * k[1] * (q[3] + v[3])


@register_flop_formula(torch.ops.attention_engine.backward)
def backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Five products over all pairs: scores again, dO . v, dV, dQ and dK."""
    return 2 * q[0] * q[2] * q[1] * k[1] * (3 * q[3] + 2 * v[3])


def _state_products(q: Sequence[int], v: Sequence[int], products: int) -> int:
    return products * 2 * v[0] * v[1] * v[2] * q[3] * v[3]


@register_flop_formula(torch.ops.attention_engine.linear_forward)
def linear_forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products of a token with the state: k^T v and q h; not the pairs by which kernels make some of them."""
    return _state_products(q, v, 2)


@register_flop_formula(torch.ops.attention_engine.linear_backward)
def linear_backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Five: the state and its gradient, k^T v and q^T dO, and of those dQ, dK and dV."""
    return _state_products(q, v, 5)


@register_flop_formula(torch.ops.attention_engine.linear_step)
def linear_step_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """As many as the forward pass of a token."""
    return _state_products(q, v, 2)
