"""flex_attention, with torch's signature and meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from attention_engine.errors import (
    AttentionEngineError,
    HeadsDoNotGroup,
    OptionsClash,
    UnknownOption,
    WrongBlockMask,
    as_given,
)
from attention_engine.flex import compiled, foreign
from attention_engine.flex.again import Form, again, form_of, note
from attention_engine.flex.engines import build, find
from attention_engine.flex.masks import BlockMask, noop_mask
from attention_engine.flex.options import USUAL, Options, read_options
from attention_engine.frontend.frames import brief
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.runtime.dropout import check_probability, seed_tensor
from attention_engine.runtime.inputs import check_ranks


class AuxRequest(NamedTuple):
    """Which rows flex_attention returns beside its output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Rows (batch, heads, queries), fp32; None where one wasn't asked for.

    lse: the natural logarithm of a row's sum of exponentials, differentiable; -inf where the row keeps no pair.
    max_scores: a row's largest score, after score_mod and the mask, without a gradient.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None, *, return_aux: Any = None,
    online_func: OnlineFunc | None = None, dropout_p: float = 0.0,
) -> Any:  # fmt: skip
    """Attention with a score_mod and a mask, as torch.nn.attention.flex_attention has it.

    Gradients reach query, key, value and every floating tensor that the functions captured, on a CPU too. Nothing is
    compiled again for other lengths, other tensors of the same dtype and rank, or functions made anew of the same code.

    Args:
        query, key, value: (batch, heads, length, dim), of any strides.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, of the scaled score.
        block_mask: a BlockMask of this package or of torch.
        scale: a number; None is dim ** -0.5.
        enable_gqa: may several query heads share a key head?
        return_lse: return (output, lse).
        kernel_options: "backend" and "deterministic", as AttentionEngine has them. FlexAttention's own that hold anyway
            are taken; those that choose something of its Triton kernels are refused.
        return_aux: an AuxRequest: return (output, AuxOutput).
        dropout_p: with this probability a weight is dropped, in each call; the others are divided by 1 - dropout_p.
        online_func: a normaliser in place of softmax. It returns an lse where its epilogue makes a row of that name.

    Raises:
        WrongBlockMask: the mask was made for other lengths.
        HeadsDoNotGroup: heads differ, and enable_gqa is False.
        UnknownOption: an option has a value that means nothing.

    Example:
        >>> import torch
        >>> from attention_engine.flex import create_block_mask, flex_attention
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
        >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 16, 16)
        >>> flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx - kv_idx), mask).shape
        torch.Size([1, 2, 16, 8])
    """
    try:
        form = None
        if return_aux is None and online_func is None and dropout_p == 0.0 and not is_compiling():
            options = USUAL if kernel_options is None else read_options(kernel_options)
            form = form_of(query, key, score_mod, block_mask, scale, enable_gqa, return_lse, options)
            if form is not None:
                mask_mod = None if block_mask is None else block_mask.mask_mod
                found = again(form, query, key, value, score_mod, mask_mod, return_lse, block_mask)
                if found is not None:
                    return found
        return _attend(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux,
            online_func, dropout_p, form,
        )  # fmt: skip
    except AttentionEngineError as error:
        if is_compiling():  # the compiler follows what is raised, but no traceback
            raise
        raise brief(error) from error.__cause__


def _attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None, enable_gqa: bool,
    return_lse: bool, kernel_options: Any, return_aux: Any, online_func: OnlineFunc | None, dropout_p: float,
    form: Form | None,
) -> Any:  # fmt: skip
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        check_ranks("bhsd", query, key, value)
    options = USUAL if kernel_options is None else read_options(kernel_options)
    if dropout_p != 0.0:
        options = options._replace(dropout_p=check_probability(dropout_p))
    rows = False if return_aux is None and not return_lse else _rows(return_lse, return_aux)
    of_q, of_k = query.shape, key.shape
    if of_q[1] != of_k[1] and not enable_gqa:
        raise HeadsDoNotGroup(
            f"query has {of_q[1]} heads and key {of_k[1]}. Say enable_gqa=True, where query heads share key heads."
        )
    mask = None if block_mask is None else _mask_of(block_mask, of_q, of_k[2])
    mask_mod = None if mask is None or mask.mask_mod is noop_mask else mask.mask_mod
    if scale is None:  # a compiler knows how long a range is
        scale = (len(range(of_q[3])) if is_compiling() else of_q[3]) ** -0.5
    maxima = rows and return_aux is not None and bool(return_aux.max_scores)
    found = call(query, key, value, score_mod, mask_mod, online_func, scale, maxima, options, rows, form, mask)
    if rows:
        return _returned(found, return_aux)
    return found if return_aux is None else (found, AuxOutput())


def call(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, online_func: OnlineFunc | None,
    scale: float, maxima: bool, options: Options, rows: bool, form: Form | None = None, mask: BlockMask | None = None,
) -> Any:  # fmt: skip
    """The output of an engine of these functions, or (output, rows by name). form: under which it is noted. mask: whose
    function mask_mod is."""
    seed = seed_tensor(None, query.device) if options.dropout_p else None
    if not is_compiling():
        engine, captured = find(score_mod, mask_mod, online_func, scale, maxima, options)
        if mask is not None:
            mask.hold(captured)
        made = engine._call(query, key, value, (), captured, None, rows, {}, seed)
        if form is not None:
            note(form, (query, key, value), score_mod, mask_mod, engine, captured)
        return made
    if is_dynamo_compiling():
        return compiled.run(query, key, value, score_mod, mask_mod, online_func, scale, maxima, options, rows, seed)
    # torch runs this very code on fake tensors, which nothing may keep
    engine = build(score_mod, mask_mod, online_func, scale, maxima, options)
    return engine(query, key, value, return_rowscales=rows, dropout_seed=seed)


def _rows(return_lse: bool, return_aux: Any) -> bool:
    """Are rows returned?"""
    if return_aux is not None and not all(hasattr(return_aux, name) for name in AuxRequest._fields):
        raise UnknownOption(f"return_aux is {as_given(return_aux)}. Give AuxRequest(lse=True), or return_lse=True.")
    if return_lse and return_aux is not None:
        raise OptionsClash("return_lse and return_aux are both given. Say return_aux=AuxRequest(lse=True) alone.")
    return return_lse or bool(return_aux.lse or return_aux.max_scores)


def _returned(found: tuple[Tensor, dict[str, Tensor]], return_aux: Any) -> Any:
    output, rows = found
    if return_aux is None:
        return output, _row(rows, "lse")
    return output, AuxOutput(*[_row(rows, n) if getattr(return_aux, n) else None for n in AuxOutput._fields])


def _row(rows: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in rows:
        known = ", ".join(map(repr, rows)) or "none"
        raise OptionsClash(
            f"{name} is asked for, and online_func returns no row of that name. It returns: {known}.\n"
            f"  Return it from online_fwd_epilogue: o, {{{name!r}: ...}}."
        )
    return rows[name]


def _mask_of(block_mask: Any, of_q: Any, keys: int) -> BlockMask:
    """A block mask, of this package; WrongBlockMask where it was made for another call."""
    mask = block_mask if isinstance(block_mask, BlockMask) else foreign.taken(block_mask)
    batch, heads, queries, mask_keys = mask.shape
    if queries != of_q[2] or mask_keys != keys:
        raise WrongBlockMask(
            f"block_mask was made for {queries} queries and {mask_keys} keys, and this call has {of_q[2]} queries and "
            f"{keys} keys.\n  Make one for these lengths, which costs nothing: create_block_mask(mask_mod, B, H, "
            f"{of_q[2]}, {keys})."
        )
    if batch not in (1, of_q[0]) or heads not in (1, of_q[1]):
        raise WrongBlockMask(
            f"block_mask was made for batch {batch} and {heads} heads, and this call has batch {of_q[0]} and {of_q[1]} "
            "heads. Give 1 (or None) where the mask doesn't depend on it."
        )
    return mask
