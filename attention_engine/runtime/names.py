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
    "is_causal": "Write mask_mod=attention_engine.library.causal.",
    "causal": "Write mask_mod=attention_engine.library.causal.",
    "attn_mask": "A mask is a function of indices: mask_mod=..., or block_mask=... for blocks.",
    "softmax_scale": "Write scale=...",
    "sm_scale": "Write scale=...",
    "enable_gqa": "Leave it out: query heads share key heads wherever there are more of them.",
}

OF_LINEAR = {  # what a linear attention has none of
    **dict.fromkeys(("mask_mod", "block_mask", "is_causal", "causal", "attn_mask"),
                    "A linear attention is causal by itself, and has no other mask."),
    **dict.fromkeys(("scale", "softmax_scale", "sm_scale"), "Write q_mod=lambda x, custom: x * dim**-0.5."),
    **dict.fromkeys(("score_mod", "online_func"),
                    "A linear attention has no scores of pairs: q_mod, k_mod, v_mod and decay_mod change its tensors."),
    "dropout_p": "Linear attention makes no weights of pairs, so it has none to drop.",
    "enable_gqa": "Leave it out: heads of q and k may be fewer than those of v.",
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
