"""flash_attn_with_kvcache: a few queries against a cache, to which their keys and values may be added first."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from attention_engine.errors import NotYetSupported, WrongCache, as_given
from attention_engine.serving.engines import Window, axes_of, check_int32, engine_of, reach_of, scale_of

NOT_SERVED = {
    "rotary_cos": "Turn q and k before the call.",
    "rotary_sin": "Turn q and k before the call.",
    "cache_batch_idx": "Give the caches of these requests alone: k_cache[cache_batch_idx], or pages with block_table.",
    "cache_leftpad": "Say it as a mask: AttentionEngine(mask_mod=...).with_cache, with kv_idx >= custom['pad'][b].",
}

NO_PAGE = 2**31 - 1  # what -1 becomes: an index that no cache has


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = True,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """flash-attn's function of this name, for caches of any request lengths. Inference alone.

    Args:
        q: (batch, queries, heads, dim).
        k_cache, v_cache: (batch, most keys, key heads, dim), or with block_table (pages, keys of a page, key heads,
            dim), pages of a multiple of 16.
        k, v: (batch, new keys, key heads, dim): written to the caches in place, behind cache_seqlens.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad: not served; NotYetSupported says what to do instead.
        cache_seqlens: a number or int32 (batch,): keys of each request before k is added. None: all there is room for.
        block_table: int32 (batch, most pages).
        softmax_scale: None is dim ** -0.5.
        causal: the last query stands at the last key.
        window_size: keys to the left and to the right of a query's place; -1 is any number.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        rotary_interleaved: of rotary_cos, which is not served.
        alibi_slopes: fp32 (heads,) or (batch, heads): slope * |distance| is taken from scores.
        num_splits: parts that each row is cut into; 0 chooses.
        return_softmax_lse: return the log of each row's sum of exponentials too, fp32 (batch, heads, queries).

    >>> q, cache = torch.randn(2, 1, 4, 32), torch.randn(2, 64, 2, 32)
    >>> flash_attn_with_kvcache(q, cache, cache, cache_seqlens=20, causal=True).shape
    torch.Size([2, 1, 4, 32])
    """
    given = {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
    }  # fmt: skip
    for name, tensor in given.items():
        if tensor is not None:
            raise NotYetSupported(f"flash_attn_with_kvcache doesn't serve {name}. {NOT_SERVED[name]}")
    if rotary_interleaved is not True:
        raise NotYetSupported(f"flash_attn_with_kvcache doesn't serve rotary_interleaved. {NOT_SERVED['rotary_cos']}")
    lengths = _lengths(cache_seqlens, q, k_cache, block_table)
    if (k is None) != (v is None):
        raise WrongCache("k and v are added to the caches together. Give both, or none.")
    if k is not None and v is not None:
        if k_cache is v_cache and k is not v:
            raise WrongCache("k_cache and v_cache are one tensor, in which v would be written over k. Give two.")
        for cache, new in ((k_cache, k), (v_cache, v)):
            append(cache, new, lengths, block_table)
        lengths = lengths + k.shape[1]
    scale = scale_of(softmax_scale, q)
    slopes = () if alibi_slopes is None else (alibi_slopes,)
    engine = engine_of(scale, reach_of(window_size, causal), softcap, axes_of(alibi_slopes))
    output, rows = engine.with_cache(
        q, k_cache, v_cache, *slopes, kv_lengths=lengths, page_table=block_table, num_splits=num_splits or None,
        return_rowscales=True,
    )  # fmt: skip
    return (output, rows["lse"]) if return_softmax_lse else output


def _lengths(given: int | Tensor | None, q: Tensor, cache: Tensor, table: Tensor | None) -> Tensor:
    if table is not None:
        check_int32("block_table", table)
    if isinstance(given, Tensor):
        check_int32("cache_seqlens", given)
        return given
    if given is not None and (isinstance(given, bool) or not hasattr(given, "__index__")):
        raise WrongCache(f"cache_seqlens is {as_given(given)}. Give an integer, or int32 (batch,).")
    room = cache.shape[1] if table is None else table.shape[1] * cache.shape[1]
    return torch.full((q.shape[0],), room if given is None else given, dtype=torch.int32, device=q.device)


def append(cache: Tensor, new: Tensor, lengths: Tensor, table: Tensor | None = None) -> None:
    """Writes the newest keys (or values) of each request behind those that it has. Nothing waits for the GPU.

    Each place needs room in the cache, and its page in the table. A CPU looks and raises WrongCache. On a GPU a page
    that is not there (-1) is an index out of bounds, which PyTorch's next call that waits for the GPU raises.

    Args:
        cache: (batch, most keys, heads, dim), or with a table (pages, keys of a page, heads, dim); written in place.
        new: (batch, new keys, heads, dim).
        lengths: int32 (batch,), the keys that each request has before.
        table: int32 (batch, most pages).
    """
    if new.ndim != 4 or new.shape[0] != lengths.shape[0] or new.shape[2:] != cache.shape[2:]:
        raise WrongCache(
            f"new keys or values have shape {tuple(new.shape)}. Give ({lengths.shape[0]}, new keys, "
            f"{', '.join(str(n) for n in cache.shape[2:])}), as the cache has."
        )
    places = lengths.long()[:, None] + torch.arange(new.shape[1], device=new.device)
    if lengths.device.type == "cpu":
        _check_room(cache, places, table)
    if table is None:
        requests = torch.arange(len(lengths), device=new.device)[:, None].expand_as(places)
        cache[requests, places] = new.to(cache.dtype)
    else:
        page = cache.shape[1]
        pages = table.gather(1, torch.div(places, page, rounding_mode="floor")).long() & NO_PAGE
        cache[pages, places % page] = new.to(cache.dtype)


def _check_room(cache: Tensor, places: Tensor, table: Tensor | None) -> None:
    page = cache.shape[1]
    room = page if table is None else table.shape[1] * page
    for request, _ in ((places < 0) | (places >= room)).nonzero()[:1].tolist():
        raise WrongCache(
            f"request {request} gets keys at the places {int(places[request, 0])} to {int(places[request, -1])}, and "
            f"has room for 0 to {room - 1}. Make the cache longer, or let the request end."
        )
    if table is None:
        return
    pages = table.long().gather(1, torch.div(places, page, rounding_mode="floor"))
    for request, n in ((pages < 0) | (pages >= cache.shape[0])).nonzero()[:1].tolist():
        raise WrongCache(
            f"request {request} gets a key at the place {int(places[request, n])}, for which its table names the page "
            f"{int(pages[request, n])} of {cache.shape[0]}. Give the request a page before."
        )
