"""The engines that flex_attention runs: one for functions that are alike in code and captured shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from attention_engine.errors import WrongArity
from attention_engine.flex.options import Options
from attention_engine.frontend.custom_io import counted
from attention_engine.frontend.online_func import OnlineFunc, Rows, SymbolScalar, Var
from attention_engine.frontend.signatures import Backend
from attention_engine.frontend.symbols import Symbol, where
from attention_engine.frontend.tracing import call, place_of
from attention_engine.library import OnlineSoftmax
from attention_engine.runtime.finding import Finder
from attention_engine.runtime.module import AttentionEngine

ARGUMENTS = "score, b, h, q_idx, kv_idx"


class FlexScore:
    """A score_mod of (score, b, h, q_idx, kv_idx) as engines call theirs. Messages name the user's function."""

    def __init__(self, score_mod: Callable[..., Any]) -> None:
        self.score_mod = score_mod
        self.__qualname__ = getattr(score_mod, "__qualname__", repr(score_mod))
        self.__name__ = self.__qualname__.rpartition(".")[2]
        self.__code__ = getattr(score_mod, "__code__", None)  # where messages point to

    def __call__(self, score: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        code = self.__code__
        if code is not None and code.co_argcount == 6 and code.co_varnames[1].startswith("custom"):
            raise WrongArity(
                f"{place_of(self.score_mod)} takes {counted(6, 'argument')}, as score_mods of AttentionEngine do. "
                f"flex_attention calls it with ({ARGUMENTS}).\n  Capture tensors in place of custom, or call "
                "attention_engine.attention."
            )
        return call(self.score_mod, ARGUMENTS, [score, b, h, q_idx, kv_idx], None)


class SoftmaxWithMaxima(OnlineSoftmax):
    """Softmax that returns each row's largest score beside the logarithm of its sum, and no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.final_rowscales = {**self.final_rowscales, "max_scores": SymbolScalar("max_scores", Var("0.0"))}

    @staticmethod
    def online_fwd_epilogue(
        o: Symbol, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any]]:
        m, r = online_rowscales["m"], online_rowscales["r"]
        return o / r, {"lse": r.log() + m, "max_scores": where(r > 0.0, m, -math.inf).detach()}


def build(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, online_func: OnlineFunc | None,
    scale: float, maxima: bool, options: Options,
) -> AttentionEngine:  # fmt: skip
    """The engine of (batch, heads, length, dim) tensors. maxima: does it return each row's largest score?"""
    if maxima and online_func is None:
        online_func = SoftmaxWithMaxima()
    return AttentionEngine(
        None, None, None if score_mod is None else FlexScore(score_mod), mask_mod, online_func, scale=scale,
        layout="bhsd", backend=cast(Backend, options.backend), deterministic=options.deterministic,
        dropout_p=options.dropout_p,
    )  # fmt: skip


FINDER = Finder(lambda functions, options: build(*functions, *options))


def find(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, online_func: OnlineFunc | None,
    scale: float, maxima: bool, options: Options,
) -> tuple[AttentionEngine, Sequence[Tensor]]:  # fmt: skip
    """The engine, and the tensors that these functions captured."""
    return FINDER.find((score_mod, mask_mod, online_func), (scale, maxima, options))
