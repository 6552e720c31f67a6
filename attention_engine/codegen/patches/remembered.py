"""TileLang's rewriting of a macro, done once for each piece of code.

Kernels define their macros where they are built, around what is known of the problem, and so does TileLang those of its
products, when it lowers one. TileLang 0.1.15 parses, rewrites and compiles a macro's source each time it is defined,
most of the time that tracing a kernel takes; but the result is a function of the names that the macro finds around it,
and only their values differ from one kernel to the next. Other processes find it on disk (kept_macros.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any, Protocol

from attention_engine.codegen.patches import kept_macros
from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace

WHOSE = "attention_engine.kernels", "tilelang."  # modules
Names = tuple[str, ...]
_rewritten: dict[tuple[int, Names], tuple[CodeType, Callable[..., Any], str]] = {}  # by identity: the code is kept


class Rewritten(Protocol):
    """What TileLang makes of a macro: its IRGenerator."""

    source: str
    extra_type_hints: Mapping[str, object]


class _Kept(threading.local):
    """What is compiled in this thread while one of our macros is rewritten."""

    closures: list[Callable[..., Any]] | None = None


Rewrite = Callable[[FunctionType], Rewritten]
_kept = _Kept()


def put() -> Undo:
    """Macros and functions of kernels/, and of TileLang itself, are rewritten once."""
    from tilelang.language.eager import builder, utils

    rewrite, compile_source = builder.mutate, utils.get_compiled_object

    def remembered(func: FunctionType) -> Rewritten:
        ours = inside() and func.__module__.startswith(WHOSE)
        return _remembered(func, rewrite) if ours else rewrite(func)

    def kept(*args: Any, **named: Any) -> Any:
        made = compile_source(*args, **named)
        if _kept.closures is not None:
            _kept.closures.append(made)
        return made

    return replace((builder, "mutate", remembered), (utils, "get_compiled_object", kept))


def _remembered(func: FunctionType, rewrite: Rewrite) -> Rewritten:
    """What TileLang makes of a function; from the memory, where annotations say nothing of values."""
    from tilelang.language.eager.ast import IRGenerator
    from tilelang.language.eager.utils import get_func_nonlocals

    around = get_func_nonlocals(func)
    key = id(func.__code__), tuple(around)
    if key not in _rewritten:
        known = kept_macros.find(func, tuple(around))
        if known is None:
            made, closures = _rewrite_keeping(func, rewrite)
            if made.extra_type_hints or len(closures) != 1:
                return made
            known = closures[0], made.source
            kept_macros.add(func, tuple(around), *known)
        _rewritten[key] = func.__code__, *known
    _, make_closure, source = _rewritten[key]
    again: Rewritten = IRGenerator(gen=make_closure(**around), source=source)
    return again


def _rewrite_keeping(func: FunctionType, rewrite: Rewrite) -> tuple[Rewritten, list[Callable[..., Any]]]:
    """The rewritten function, and what made it of the names around it."""
    closures: list[Callable[..., Any]] = []
    before, _kept.closures = _kept.closures, closures
    try:
        return rewrite(func), closures
    finally:
        _kept.closures = before


PATCH = Patch(
    defect="a macro's source is parsed, rewritten and compiled each time that it is defined",
    version="0.1.15",
    proof="test_tilelang_rewrites_a_macro_each_time_that_it_is_defined",
    put=put,
)
