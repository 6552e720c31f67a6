"""A call with a cache, held against what the engine was built for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_engine.errors import (
    CacheNotDifferentiable,
    DevicesDiffer,
    DtypesDiffer,
    NotATensor,
    NotFloating,
    UnknownOption,
    WrongCache,
    WrongDtype,
    WrongRank,
    as_given,
)
from attention_engine.frontend.meta import DTYPES, Meta
from attention_engine.plan.cached import MOST_PARTS
from attention_engine.runtime.inputs import check_lengths, refuse_dtensor
from attention_engine.runtime.packed import check_numbers

PAGE = 16  # keys, of which a page has a multiple
ORDERS = {
    "bshd": ("(batch, keys, heads, dim)", "(pages, keys of a page, heads, dim)"),
    "bhsd": ("(batch, heads, keys, dim)", "(pages, heads, keys of a page, dim)"),
}


@dataclass(frozen=True)
class CachedCall:
    """What a call with a cache is made of; tensors are (batch, length, heads, dim), pages (pages, keys, heads, dim).

    v: None where values are the first dim_v columns of the keys. table: of pages; None: a request's keys lie one after
    the other. starts: where queries start; None: the last is the last key. parts: of each row, as asked for. cu: where
    each request's queries begin in q, which then has one batch; None: each request has a batch of its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    dim_v: int
    lengths: Tensor
    table: Tensor | None
    starts: Tensor | None
    parts: int | None
    custom: Sequence[Tensor]
    cu: Tensor | None = None

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return self.q.shape[0] if self.cu is None else self.cu.shape[0] - 1

    @property
    def capacity(self) -> int:
        """The most keys that a request may have."""
        return self.k.shape[1] if self.table is None else self.table.shape[1] * self.k.shape[1]

    def keys(self) -> Tensor:
        """A tensor of no memory whose shape is that of keys one after the other."""
        if self.table is None:
            return self.k
        return self.k.new_empty(1).expand(self.requests, self.capacity, *self.k.shape[2:])


def check_tensors(layout: str, q: Tensor, k: Tensor, v: Tensor | None, paged: bool, packed: bool) -> None:
    """BadInput unless q and the caches are tensors of four dimensions (packed queries: three), of one floating dtype on
    one device."""
    cache = ORDERS[layout][paged]
    queries = "(rows, heads, dim) with cu_seqlens_q" if packed else ORDERS[layout][0].replace("keys", "queries")
    orders = {"q": queries, "k_cache": cache, "v_cache": cache}
    for name, tensor in (("q", q), ("k_cache", k), ("v_cache", v)):
        if tensor is None and name == "v_cache":
            continue
        refuse_dtensor(name, tensor)
        if not isinstance(tensor, Tensor):
            raise NotATensor(f"{name} is {type(tensor).__name__}. Give a tensor {orders[name]}.")
        if tensor.ndim != (3 if packed and name == "q" else 4):
            raise WrongRank(f"{name} has {tensor.ndim} dimensions, {tuple(tensor.shape)}. Give {orders[name]}.")
        if tensor.device != q.device:
            raise DevicesDiffer(
                f"q is on '{q.device}' and {name} on '{tensor.device}'. Put them on one device: {name}.to(q.device)."
            )
        if tensor.dtype != q.dtype:
            raise DtypesDiffer(f"q is {q.dtype} and {name} is {tensor.dtype}. Give one dtype: {name}.to(q.dtype).")
    if not q.is_floating_point():
        raise NotFloating(f"q and the caches are {q.dtype}. Give floating tensors.")


def check_gradients(tensors: Sequence[Tensor | None]) -> None:
    """CacheNotDifferentiable where a gradient is asked for."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise CacheNotDifferentiable(
            "a tensor requires a gradient, and attention to a cache has none. Call it under torch.no_grad(), or train\n"
            "  on packed sequences: engine(q, k, v, cu_seqlens_q=...)."
        )


def check_parts(parts: object) -> None:
    """UnknownOption unless rows may be cut into so many parts."""
    whole = isinstance(parts, int) and not isinstance(parts, bool)
    if parts is None or (whole and 1 <= parts <= MOST_PARTS):  # type: ignore[operator] # whole says that it is a number
        return
    raise UnknownOption(
        f"num_splits is {as_given(parts)}. Give 1 to {MOST_PARTS}, or None: chosen from the shapes. "
        "With a number a request's bits don't depend on its neighbours."
    )


def check_caches(metas: Sequence[Meta] | None, kernels: bool, call: CachedCall) -> None:
    """BadInput unless heads, dims, batches and pages fit each other, and the engine's metas."""
    q, k, v = call.q, call.k, call.v
    _check_heads(metas, call)
    if v is not None and (v.shape[:3] != k.shape[:3]):
        raise WrongCache(
            f"k_cache has shape {tuple(k.shape)} and v_cache {tuple(v.shape)}. All but the last dim must be equal."
        )
    if call.table is None and k.shape[0] != call.requests:
        raise WrongCache(
            f"q has batch {call.requests} and k_cache {k.shape[0]}. They must be equal, or give page_table with a "
            "cache of pages."
        )
    if call.table is not None and (k.shape[1] % PAGE or k.shape[1] == 0):
        raise WrongCache(f"a page has {k.shape[1]} keys. Give pages of 16, 32, ... 256: a multiple of {PAGE}.")
    dtype = str(q.dtype).removeprefix("torch.")
    if kernels and dtype not in DTYPES:
        raise WrongDtype(
            f"q and the caches are {q.dtype}, and kernels take float16, bfloat16 or float32.\n"
            '  Convert them, or use backend="reference".'
        )
    _check_integers("kv_lengths", call.lengths, "(batch,)", call)
    for name, tensor, shape in (("page_table", call.table, "(batch, pages)"), ("q_starts", call.starts, "(batch,)")):
        if tensor is not None:
            _check_integers(name, tensor, shape, call)
    if kernels:
        check_lengths(q.shape[1], call.capacity)
    if call.lengths.device.type == "cpu":
        check_places(call)
        if call.cu is not None:
            check_numbers("cu_seqlens_q", call.cu.tolist(), q.shape[1])


def _check_heads(metas: Sequence[Meta] | None, call: CachedCall) -> None:
    heads, dim = call.q.shape[2:]
    kv_heads, dim_k = call.k.shape[2:]
    if dim_k != dim:
        raise WrongCache(f"q has head dim {dim} and k_cache {dim_k}. They must be equal.")
    if kv_heads == 0 or heads % kv_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        keys = call.k.shape[1]
        swapped = " Heads and keys look swapped: is the cache in the engine's layout?" * (
            keys > 0 and heads % keys == 0
        )
        raise WrongCache(
            f"{heads} query heads cannot share {kv_heads} key heads evenly. Key heads can be {divisors}.{swapped}"
        )
    if call.v is None and call.dim_v > dim:
        raise WrongCache(f"values are the first {call.dim_v} columns of keys, which have {dim}.")
    if metas is None:
        return
    found = (("q", heads, dim), ("k_cache", kv_heads, dim), ("v_cache", kv_heads, call.dim_v))
    for (name, number, of), meta in zip(found, metas, strict=True):
        if (number, of) != (meta.heads, meta.dim):
            raise WrongCache(
                f"{name} has {number} heads of dim {of}, and the engine was built for {meta.heads} of {meta.dim}."
            )


def check_packing(cu: Tensor | None) -> None:
    """BadInput unless cu_seqlens_q is one row of int32."""
    if cu is None:
        return
    if not isinstance(cu, Tensor):
        raise NotATensor(f"cu_seqlens_q is {type(cu).__name__}. Give a tensor (requests + 1,), int32.")
    if cu.ndim != 1 or cu.shape[0] < 1 or cu.dtype is not torch.int32:
        raise WrongCache(f"cu_seqlens_q is {cu.dtype} of shape {tuple(cu.shape)}. Give (requests + 1,), int32.")


def _check_integers(name: str, tensor: Tensor, shape: str, call: CachedCall) -> None:
    if not isinstance(tensor, Tensor):
        raise NotATensor(f"{name} is {type(tensor).__name__}. Give a tensor {shape}, int32.")
    if tensor.ndim != shape.count(",") + (not shape.endswith(",)")) or tensor.shape[0] != call.requests:
        raise WrongCache(f"{name} has shape {tuple(tensor.shape)}. Give {shape}; the batch is {call.requests}.")
    if tensor.dtype is not torch.int32:
        raise WrongCache(f"{name} is {tensor.dtype}. Give int32: {name}.to(torch.int32).")
    if tensor.device != call.q.device:
        raise DevicesDiffer(f"{name} is on '{tensor.device}' and q on '{call.q.device}'. Put them on one device.")


def check_places(call: CachedCall) -> None:
    """WrongCache where a request has keys that its cache has no place for. On a GPU nobody waits to look: no such key
    is read there."""
    lengths, page = call.lengths, call.k.shape[1]
    for number in ((lengths < 0) | (lengths > call.capacity)).nonzero()[:1].flatten().tolist():
        raise WrongCache(
            f"kv_lengths[{number}] is {int(lengths[number])}, and the cache has places for 0 to {call.capacity} keys "
            "of a request."
        )
    if call.table is None:
        return
    needed = torch.arange(call.table.shape[1]) * page < lengths[:, None]
    for place in (needed & ((call.table < 0) | (call.table >= call.k.shape[0]))).nonzero()[:1].tolist():
        raise WrongCache(
            f"page_table{place} is {int(call.table[tuple(place)])}, and request {place[0]} has "
            f"{int(lengths[place[0]])} keys in pages of {page}. The cache has pages 0 to {call.k.shape[0] - 1}."
        )


def check_out(layout: str, out: Tensor | None, call: CachedCall) -> Tensor | None:
    """BadInput unless the output fits the tensor that is given for it."""
    if out is None:
        return None
    batch, queries, heads = call.q.shape[:3]
    shape: tuple[int, ...] = (batch, queries, heads, call.dim_v)
    if call.cu is not None:
        shape = (queries, heads, call.dim_v)
    elif layout == "bhsd":
        shape = (batch, heads, queries, call.dim_v)
    if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != call.q.dtype:
        found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise WrongCache(f"out is {found}. Give a tensor of the output: {call.q.dtype} {shape}.")
    if out.device != call.q.device:
        raise DevicesDiffer(f"out is on '{out.device}' and q on '{call.q.device}'. Put them on one device.")
    return out
