"""scaled_dot_product_attention, with torch's signature and meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.errors import (
    AttentionEngineError,
    HeadsDoNotGroup,
    OptionsClash,
    WrongCustomDtype,
    WrongCustomShape,
    WrongRank,
)
from attention_engine.flex.again import again
from attention_engine.flex.attention import call
from attention_engine.flex.options import USUAL, Options
from attention_engine.frontend.frames import brief
from attention_engine.library import causal
from attention_engine.runtime.dropout import check_probability

Mod = Callable[..., Any]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Softmax attention, as torch.nn.functional.scaled_dot_product_attention has it.

    Args:
        query, key, value: (..., heads, length, dim), of any strides; the dimensions before the length broadcast.
        attn_mask: of a shape that broadcasts to (..., heads, queries, keys). bool: True keeps a pair. Floating: added
            to the scaled score, with a gradient; -inf leaves a pair out. A row that keeps no pair is 0.
        dropout_p: with this probability a weight is dropped, in each call; the others are divided by 1 - dropout_p.
        is_causal: keep keys up to the query, counted from the first of each, also where there are unlike many.
        scale: a number; None is dim ** -0.5.
        enable_gqa: may several query heads share a key head?

    Raises:
        OptionsClash: attn_mask and is_causal are both given.
        HeadsDoNotGroup: heads differ, and enable_gqa is False.
        UnknownOption: dropout_p isn't from 0 up to, but not, 1.

    Example:
        >>> from attention_engine import scaled_dot_product_attention
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 16, 8])
    """
    try:
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, USUAL)
    except AttentionEngineError as error:
        if is_compiling():  # the compiler follows what is raised, but no traceback
            raise
        raise brief(error) from error.__cause__


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, options: Options,
) -> Tensor:  # fmt: skip
    if dropout_p != 0.0:
        options = options._replace(dropout_p=check_probability(dropout_p))
    if is_causal and attn_mask is not None:
        raise OptionsClash("attn_mask and is_causal=True are both given. Give one: a mask may be causal itself.")
    before, (query, key, value) = query.shape[:-2], _of_four(query, key, value)
    batch, heads, queries, dim = query.shape
    if key.shape[1] not in (1, heads) and not enable_gqa:
        raise HeadsDoNotGroup(
            f"query has {heads} heads and key {key.shape[1]}. Say enable_gqa=True, where query heads share key heads."
        )
    score_mod, mask_mod = None, causal if is_causal else None
    if attn_mask is not None:
        sizes = (batch, heads, queries, key.shape[2])
        score_mod, mask_mod = _of_mask(_mask_of_four(attn_mask, before, sizes), query)
    if scale is None:
        scale = (len(range(dim)) if is_compiling() else dim) ** -0.5
    form, found = None, None
    if dropout_p == 0.0 and attn_mask is None and not is_compiling():
        form = "sdpa", query.shape, key.shape, is_causal, scale, enable_gqa, options
        found = again(form, query, key, value, score_mod, mask_mod, False)
    if found is None:
        found = call(query, key, value, score_mod, mask_mod, None, scale, False, options, False, form)
    output: Tensor = found
    return output if len(before) == 2 else output.reshape(*before, queries, value.shape[3])


def _of_four(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as (batch, heads, length, dim): further dimensions before the heads are of the batch."""
    ranks = query.ndim, key.ndim, value.ndim
    if ranks == (4, 4, 4):
        if key.shape[0] == query.shape[0] or 1 in (key.shape[0], value.shape[0]):
            return query, key, value
    elif min(ranks) < 2 or len(set(ranks)) != 1:
        raise WrongRank(
            f"query, key and value have {ranks[0]}, {ranks[1]} and {ranks[2]} dimensions. Give as many: (..., heads, "
            "length, dim)."
        )
    wide = query.shape[:-3]

    def turned(t: Tensor) -> Tensor:
        t = t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t.expand(*wide, *t.shape[-3:])
        return t.flatten(0, -4)

    return turned(query), turned(key), turned(value)


def _mask_of_four(mask: Tensor, before: torch.Size, sizes: tuple[int, int, int, int]) -> Tensor:
    """A mask as (batch or 1, heads or 1, queries or 1, keys or 1); WrongCustomShape where it doesn't broadcast."""
    mask = mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask
    given, wide = mask.shape[:-3], before[:-1]
    fits = len(given) <= len(wide) and all(n in (1, size) for n, size in zip(given[::-1], wide[::-1], strict=False))
    if fits and (len(given) > 1 or given[0] != 1):
        mask = mask.expand(*wide, *mask.shape[-3:]).flatten(0, -4)
    if mask.ndim != 4 or any(n not in (1, size) for n, size in zip(mask.shape, sizes, strict=True)):
        raise WrongCustomShape(
            f"attn_mask has shape {tuple(mask.shape)}. It broadcasts to {(*before, *sizes[2:])}, (..., heads, queries, "
            "keys): give 1 or that length in each dimension."
        )
    return mask


def _of_mask(mask: Tensor, query: Tensor) -> tuple[Mod | None, Mod | None]:
    """What a mask over pairs asks of the score, or of the pair: score_mod and mask_mod."""
    of_batch, of_head, of_query, of_key = (n != 1 for n in mask.shape)

    def at(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask[b if of_batch else 0, h if of_head else 0, q_idx if of_query else 0, kv_idx if of_key else 0]

    if mask.dtype == torch.bool:
        return None, at
    if mask.dtype not in (query.dtype, torch.float32):
        raise WrongCustomDtype(f"attn_mask is {mask.dtype}. Give bool, True where a pair is kept, or {query.dtype}.")
    return (lambda score, b, h, q_idx, kv_idx: score + at(b, h, q_idx, kv_idx)), None
