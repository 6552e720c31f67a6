"""The engines behind flash-attn's functions: one for each set of options, for all heads, dims and dtypes."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine import library
from attention_engine.errors import NotATensor, UnknownOption, WrongCache, WrongCustomShape, as_given
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.signatures import DeclaredAxis
from attention_engine.runtime.dropout import check_probability
from attention_engine.runtime.inputs import check_flag, known_number
from attention_engine.runtime.module import AttentionEngine

Window = tuple[int, int]
KEPT = 256
Axes = tuple[DeclaredAxis, ...] | None
Reach = tuple[int | None, int | None]  # keys to the left and to the right; None is any number


def reach_of(window: Window, causal: bool) -> Reach:
    """flash-attn's window_size and causal. Raises UnknownOption."""
    check_flag("causal", causal)
    pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not pair or not all([isinstance(n, int) or hasattr(n, "__index__") for n in window]):
        raise UnknownOption(
            f"window_size is {as_given(window)}. Give two numbers of keys, (left, right); -1 is any number."
        )
    if not is_compiling():
        window = operator.index(window[0]), operator.index(window[1])
    left, right = (None if n < 0 else len(range(n)) if is_compiling() else n for n in window)
    return left, 0 if causal else right


def check_int32(name: str, tensor: object) -> None:
    """Tables and lengths under flash-attn's names. Raises NotATensor, WrongCache."""
    if not isinstance(tensor, Tensor):
        raise NotATensor(f"{name} is {type(tensor).__name__}. Give an int32 tensor.")
    if tensor.dtype is not torch.int32:
        raise WrongCache(f"{name} is {tensor.dtype}. Give int32: {name}.to(torch.int32).")


ENGINES: dict[str, AttentionEngine] = {}  # by a name, as a compiler takes texts, not engines, for constants


def axes_of(slopes: Tensor | None) -> Axes:
    """The axes of ALiBi's slopes, where there are some. Raises WrongCustomShape."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor) or slopes.ndim not in (1, 2):
        raise WrongCustomShape(f"alibi_slopes is {as_given(slopes)}. Give fp32 (heads,) or (sequences, heads).")
    return ("heads",) if slopes.ndim == 1 else ("batch", "heads")


def scale_of(softmax_scale: float | None, q: Tensor) -> float:
    """flash-attn's softmax_scale, dim ** -0.5 for None. Raises UnknownOption."""
    if not isinstance(q, Tensor):
        raise NotATensor(f"q is {type(q).__name__}. Give a tensor.")
    if softmax_scale is not None:
        if not is_compiling() and (isinstance(softmax_scale, (str, Tensor)) or not _is_finite(softmax_scale)):
            raise UnknownOption(
                f"softmax_scale is {as_given(softmax_scale)}. Give a finite number, or None: dim ** -0.5.\n"
                "  A learned scale belongs to the queries: q * scale, and softmax_scale=1.0."
            )
        return known_number(softmax_scale)
    dim = len(range(q.shape[-1])) if is_compiling() else q.shape[-1]  # a compiler knows how long a range is
    return float(dim**-0.5)


def softcap_of(softcap: float) -> float:
    """flash-attn's softcap. Raises UnknownOption."""
    if not is_compiling() and (not _is_finite(softcap) or softcap < 0):
        raise UnknownOption(f"softcap is {as_given(softcap)}. Give a finite number above 0, or 0.0: scores stay.")
    return known_number(softcap)


def _is_finite(number: object) -> bool:
    return isinstance(number, numbers.Real) and not isinstance(number, bool) and math.isfinite(number)


def engine_of(
    scale: float, reach: Reach, softcap: float, slopes: Axes, dropout_p: float = 0.0,
    deterministic: bool = False,
) -> AttentionEngine:  # fmt: skip
    """The engine of these options. slopes: the axes of ALiBi's slopes, where there are some."""
    check_flag("deterministic", deterministic)
    dropout_p = known_number(check_probability(dropout_p))
    return ENGINES[_name_of(scale, reach, softcap_of(softcap), slopes, dropout_p, deterministic)]


def _name_of(*options: Any) -> str:
    name = repr(options)
    if name not in ENGINES:
        while len(ENGINES) >= KEPT:
            del ENGINES[next(iter(ENGINES))]
        ENGINES[name] = _build(*options)
    return name


_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined] # as Engine._key is


def _build(
    scale: float, reach: Reach, softcap: float, slopes: Axes, dropout_p: float,
    deterministic: bool,
) -> AttentionEngine:  # fmt: skip
    score = functools.partial(_score, scale, softcap, slopes is not None)

    def score_mod(value: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score(value, custom, q_idx, kv_idx)

    io = CustomIO({} if slopes is None else {"slopes": slopes})
    return AttentionEngine(
        custom_io=io, score_mod=score_mod, mask_mod=_mask(*reach), dropout_p=dropout_p, deterministic=deterministic
    )


def _score(scale: float, softcap: float, sloped: bool, value: Any, custom: Any, q_idx: Any, kv_idx: Any) -> Any:
    value = softcap * (value * (scale / softcap)).tanh() if softcap else value * scale
    return value - custom["slopes"] * (q_idx - kv_idx).abs() if sloped else value


def _mask(left: int | None, right: int | None) -> Any:
    if left is None and right is None:
        return None
    if left is None:
        return library.causal if right == 0 else lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= right
    if right is None:
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= left
    return library.sliding_window(left, right)
