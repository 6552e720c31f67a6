"""The engines behind flash-attn's functions: one for each set of options, for all heads, dims and dtypes."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from attention_engine import library
from attention_engine.errors import UnknownOption, as_given
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.signatures import DeclaredAxis
from attention_engine.runtime.inputs import known_number
from attention_engine.runtime.module import AttentionEngine

Window = tuple[int, int]
KEPT = 256
Axes = tuple[DeclaredAxis, ...] | None
Reach = tuple[int | None, int | None]  # keys to the left and to the right; None is any number


def reach_of(window: Window, causal: bool) -> Reach:
    """flash-attn's window_size and causal. Raises UnknownOption."""
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(isinstance(n, int) for n in window):
        raise UnknownOption(
            f"window_size is {as_given(window)}. Give two numbers of keys, (left, right); -1 is any number."
        )
    left, right = (None if n < 0 else len(range(n)) if is_compiling() else n for n in window)
    return left, 0 if causal else right


ENGINES: dict[str, AttentionEngine] = {}  # by a name, as a compiler takes texts, not engines, for constants


def axes_of(slopes: Tensor | None) -> Axes:
    """The axes of ALiBi's slopes, where there are some."""
    if slopes is None:
        return None
    return ("heads",) if slopes.ndim == 1 else ("batch", "heads")


def scale_of(softmax_scale: float | None, q: Tensor) -> float:
    """flash-attn's softmax_scale, dim ** -0.5 for None."""
    if softmax_scale is not None:
        return known_number(float(softmax_scale))
    dim = len(range(q.shape[-1])) if is_compiling() else q.shape[-1]  # a compiler knows how long a range is
    return float(dim**-0.5)


def engine_of(
    scale: float, reach: Reach, softcap: float, slopes: Axes, dropout_p: float = 0.0,
    deterministic: bool = False,
) -> AttentionEngine:  # fmt: skip
    """The engine of these options. slopes: the axes of ALiBi's slopes, where there are some."""
    return ENGINES[_name_of(scale, reach, known_number(softcap), slopes, known_number(dropout_p), deterministic)]


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
