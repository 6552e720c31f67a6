"""What constructors take by name: the nearest names of one that is unknown, and options that have two names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from attention_engine.errors import OptionsClash, UnknownArgument, UnknownOption, as_given, did_you_mean
from attention_engine.frontend.custom_io import CustomIO

Self = TypeVar("Self")
Given = ParamSpec("Given")
Value = TypeVar("Value")

SEED = ("custom_fwd_inputs", "tune_filename")  # names of before that are still taken, and not shown
ELSEWHERE = {  # what other libraries call it
    **dict.fromkeys(("is_causal", "causal"), "Write mask_mod=attention_engine.library.causal."),
    "attn_mask": "A mask is a function of indices: mask_mod=..., or block_mask=... for blocks.",
    "window_size": "Write mask_mod=attention_engine.library.sliding_window(left, right).",
    **dict.fromkeys(("softmax_scale", "sm_scale"), "Write scale=..."),
    "softcap": "Write score_mod=attention_engine.library.softcap(cap, factor).",
    "alibi_slopes": "Write score_mod=attention_engine.library.alibi(factor), which reads the custom input 'slopes'.",
    **dict.fromkeys(("sinks", "s_aux"), "Write online_func=attention_engine.library.OnlineSoftmaxSink(), which reads "
                    "the custom input 'sinks'."),
    "dropout": "Write dropout_p=...",
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"),
                    "An engine's call takes it: AttentionEngine(...)(q, k, v, cu_seqlens_q=...)."),
    **dict.fromkeys(("return_lse", "return_aux", "need_weights"),
                    "A call returns rows with return_rowscales=True: o, {'lse': ...}."),
    "enable_gqa": "Leave it out: query heads share key heads wherever there are more of them.",
}  # fmt: skip

OF_LINEAR = {  # what a linear attention has none of
    **dict.fromkeys(("mask_mod", "block_mask", "is_causal", "causal", "attn_mask"),
                    "A linear attention is causal by itself, and has no other mask."),
    **dict.fromkeys(("scale", "softmax_scale", "sm_scale"), "Write q_mod=lambda x, custom: x * dim**-0.5."),
    **dict.fromkeys(("score_mod", "online_func"),
                    "A linear attention has no scores of pairs: q_mod, k_mod, v_mod and decay_mod change its tensors."),
    "dropout_p": "Linear attention makes no weights of pairs, so it has none to drop.",
    "enable_gqa": "Leave it out: heads of q and k may be fewer than those of v.",
}  # fmt: skip


# What other libraries give with a call, and where it is said here.
OF_THE_ENGINE = "Say it when the engine is built: {}=..."
IN_A_MASK = (
    "A mask belongs to the engine: mask_mod=library.causal, or a function (b, h, q_idx, kv_idx) that reads yours."
)
HABITS = {
    **dict.fromkeys(("attn_mask", "mask", "attention_mask", "key_padding_mask", "window_size"), IN_A_MASK),
    **dict.fromkeys(("is_causal", "causal"), "Say it when the engine is built: mask_mod=library.causal."),
    **dict.fromkeys(("dropout_p", "dropout"), OF_THE_ENGINE.format("dropout_p")),
    **dict.fromkeys(("softmax_scale", "sm_scale"), OF_THE_ENGINE.format("scale")),
    **dict.fromkeys(("softcap", "alibi_slopes"), "Say it when the engine is built: score_mod=library.softcap(50.0), "
                    "library.alibi(scale), or one of your own."),
    **dict.fromkeys(("return_lse", "return_aux", "need_weights"), "Write return_rowscales=True: o, {'lse': ...}."),
    "cu_seqlens": "AttentionEngine calls it cu_seqlens_q, and cu_seqlens_k where keys have other lengths.",
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "LinearAttentionEngine calls it cu_seqlens."),
    "enable_gqa": "Leave it out: query heads share key heads wherever there are more of them.",
    "block_table": "with_cache calls it page_table.",
    "cache_seqlens": "with_cache calls it kv_lengths.",
    "kernel_options": "Tiles are chosen for you: tune=True measures them.",
    **{name: OF_THE_ENGINE.format(name) for name in (
        "scale", "score_mod", "mask_mod", "online_func", "backend", "layout", "deterministic", "tune", "block_size",
        "custom_io", "decay_mod", "q_mod", "k_mod", "v_mod")},
}  # fmt: skip


def explains_names(init: Callable[Concatenate[Self, Given], None]) -> Callable[Concatenate[Self, Given], None]:
    """Decorates a constructor: a name that it doesn't take is an UnknownArgument that tells the nearest."""
    known = [n for n in inspect.signature(init).parameters if n != "self" and n not in SEED]
    taken = {*known, *SEED}

    @functools.wraps(init)
    def explained(self: Self, /, *args: Given.args, **named: Given.kwargs) -> None:
        for name in named:
            if name not in taken:
                raise UnknownArgument(f"{type(self).__name__} has no argument {name!r}. {nearest(name, known)}")
        init(self, *args, **named)

    return explained


def nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name, as a sentence."""
    known = list(known)
    advice = OF_LINEAR if "decay_mod" in known else ELSEWHERE
    return advice.get(name) or did_you_mean(name, known).strip() or f"It takes {', '.join(known)}."


def either(name: str, value: Value | None, old_name: str, old: Value | None) -> Value | None:
    """The value of an option that has two names; OptionsClash where both are given."""
    if value is not None and old is not None:
        raise OptionsClash(f"{name} and {old_name} are one option by two names. Give {name} alone.")
    return value if value is not None else old


def declared(custom_io: Any, functions: Iterable[str]) -> CustomIO:
    """The custom inputs that a constructor was given, none for None. functions: the names of its arguments for
    functions. Raises UnknownOption for anything else."""
    if custom_io is None:
        return CustomIO()
    if isinstance(custom_io, CustomIO):
        return custom_io
    if isinstance(custom_io, type):
        raise UnknownOption(
            f"custom_io is {as_given(custom_io)}. Give an instance of CustomIO (is it missing brackets: "
            f"{custom_io.__name__}()?)."
        )
    if callable(custom_io):
        shown, places = getattr(custom_io, "__qualname__", repr(custom_io)), ", ".join(f"{n}=..." for n in functions)
        raise UnknownOption(f"custom_io is {shown}, a function. Give functions by name: {places}")
    way_out = f"Write CustomIO({custom_io!r})." if isinstance(custom_io, dict) else "Give an instance of CustomIO."
    raise UnknownOption(f"custom_io is {as_given(custom_io)}. {way_out}")
