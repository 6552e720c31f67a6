"""Who stands beside our calls with a cache: FlashInfer, FlashAttention-3 and FlashMLA.

FlashInfer compiles a module when it is first asked for. Modules that were compiled on another machine, which needs no
GPU, stand in its package's folder `data/aot`. FlashAttention-3 and FlashMLA are libraries of vllm's wheel for this
version of PyTorch: VLLM_LIBRARIES names the folder where `_vllm_fa3_C.abi3.so` and `_flashmla_C.abi3.so` lie.

FlashInfer's calls are planned once, and FlashAttention-3's and FlashMLA's shares are made once, outside of what is
timed; ours need no plan.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Unavailable, need

Call = Callable[[], Tensor]
Calls = dict[str, Call]
WORKSPACE = 256 << 20  # bytes for parts of rows
BACKENDS = ("fa2", "fa3")
# What FlashInfer and torch's operations raise for a module, a name or a shape that there is not.
REFUSALS = (RuntimeError, ValueError, KeyError, OSError, NotImplementedError, AttributeError, TypeError)
MOST_OFF = 2e-2  # of two outputs in bf16, as a relative L2 norm: one that is further off computes another thing


def decoding(backend: str, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Call:
    """One call with pages.

    q: (requests, queries, heads, head dim), the last queries of each request. k and v: (pages, keys of a page, key
    heads, head dim). table: (requests, pages of a request), int32. lengths: (requests,), int32.
    Unavailable where FlashInfer isn't there.
    """
    need("flashinfer")
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    batch, queries, heads, dim = q.shape
    page = k.shape[1]
    indptr, pages, last = _pages(table, lengths, page)
    call = BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    kinds = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * queries
    call.plan(starts, indptr, pages, last, heads, k.shape[2], dim, page, causal=queries > 1, **kinds)
    of_q = q.flatten(0, 1)
    return _checked(lambda: call.run(of_q, (k, v)).view(q.shape))


def decoding_tiles(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Call:
    """As `decoding`, for one query a request, by FlashInfer's wrapper for that: it takes tensor cores for groups."""
    need("flashinfer")
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    if q.shape[1] > 1:
        raise Unavailable("one query a request")
    indptr, pages, last = _pages(table, lengths, k.shape[1])
    call = BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
    kinds = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    call.plan(indptr, pages, last, q.shape[2], k.shape[2], q.shape[3], k.shape[1], **kinds)
    of_q = q[:, 0]
    return _checked(lambda: call.run(of_q, (k, v))[:, None])


def latent(backend: str, q: Tensor, k: Tensor, table: Tensor, lengths: Tensor, dim_v: int) -> Call:
    """Latent attention: one key head, whose first dim_v columns are values. Shapes as in `decoding`."""
    need("flashinfer")
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    batch, queries, heads, dim = q.shape
    indptr, pages, _ = _pages(table, lengths, k.shape[1])
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * queries
    call = BatchMLAPagedAttentionWrapper(_workspace(), backend=backend)
    call.plan(
        starts, indptr, pages, lengths, heads, dim_v, dim - dim_v, k.shape[1], queries > 1, dim**-0.5, q.dtype, k.dtype
    )
    of_q, of_k = q.flatten(0, 1), k[:, :, 0]
    parts = [t.contiguous() for t in (of_q[..., :dim_v], of_q[..., dim_v:], of_k[..., :dim_v], of_k[..., dim_v:])]
    return _checked(lambda: call.run(*parts).view(batch, queries, heads, dim_v))


@functools.cache
def _library(name: str) -> None:
    """Loads a library of torch's operations; Unavailable where it isn't there or is of another PyTorch."""
    path = Path(os.environ.get("VLLM_LIBRARIES", ".")) / f"{name}.abi3.so"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise Unavailable(str(error)[:120]) from error


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Tensor) -> Call:
    """FlashAttention-3, from pages, or without a table from a dense cache: (requests, keys, key heads, head dim)."""
    _library("_vllm_fa3_C")
    batch, queries, heads, dim = q.shape
    keys, page = (k.shape[1], None) if table is None else (table.shape[1] * k.shape[1], k.shape[1])
    causal, operations = queries > 1, torch.ops._vllm_fa3_C
    shares = operations.get_scheduler_metadata(
        batch, queries, keys, heads, k.shape[2], dim, dim, q.dtype, lengths, *(None,) * 5, page, 0, causal, -1, -1,
        False, 0, None, 0,
    )  # fmt: skip
    given: list[object] = [q, k, v, None, None, None, torch.empty_like(q)]  # no new keys, no values of queries
    given += [None, None, None, None, lengths, queries, keys, table, *(None,) * 8]
    given += [dim**-0.5, causal, -1, -1, 0.0, True, shares, 0, None, 0, None, 1, 0, None]
    return _checked(lambda: operations.fwd(*given)[0])


def flash_mla(q: Tensor, k: Tensor, table: Tensor, lengths: Tensor, dim_v: int) -> Call:
    """FlashMLA, from pages of 64 keys."""
    _library("_flashmla_C")
    shares: list[Tensor | None] = [None, None]

    def call() -> Tensor:
        o, _, *shares[:] = torch.ops._flashmla_C.dense_decode_fwd(
            q, k, dim_v, lengths, table, q.shape[3] ** -0.5, q.shape[1] > 1, *shares, None
        )
        return o

    return _checked(call)


def peers(ours: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Tensor) -> Calls:
    """All that run here and give our output, by their names; others say why not. Shapes as in `decoding`."""
    made: dict[str, Callable[[], Call]] = {"FlashAttention-3": lambda: flash_attention_3(q, k, v, table, lengths)}
    if table is not None:
        made |= {f"FlashInfer {n}": lambda n=n: decoding(n, q, k, v, table, lengths) for n in BACKENDS}
        made["FlashInfer decode"] = lambda: decoding_tiles(q, k, v, table, lengths)
    return available(ours, made)


def latent_peers(ours: Tensor, q: Tensor, k: Tensor, table: Tensor | None, lengths: Tensor, dim_v: int) -> Calls:
    """As `peers`, for latent attention."""
    if table is None:
        return {}
    made = {f"FlashInfer {n}": lambda n=n: latent(n, q, k, table, lengths, dim_v) for n in BACKENDS}
    return available(ours, made | {"FlashMLA": lambda: flash_mla(q, k, table, lengths, dim_v)})


def available(ours: Tensor, made: dict[str, Callable[[], Call]]) -> Calls:
    """The calls that could be made and are right beside our output, by name."""
    found: Calls = {}
    for name, make in made.items():
        try:
            found[name] = make()
            off = float((found[name]() - ours).norm() / ours.norm())
            print(f"  {name}: {off:.1e} off ours", flush=True)
            if not off < MOST_OFF:
                del found[name]
        except (Unavailable, *REFUSALS) as reason:
            print(f"  {name}: {str(reason)[:120]}", flush=True)
    return found


def _pages(table: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's form of a table: where each request's pages start, all pages, and keys of each last page."""
    counts = (lengths + page - 1) // page
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return indptr, table[used].int(), (lengths - (counts - 1) * page).int()


def _workspace() -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")


def _checked(call: Callable[[], Any]) -> Call:
    """The call, which ran once."""
    call()
    torch.cuda.synchronize()
    return call
