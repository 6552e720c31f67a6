"""TileLang's rewriting of a macro, done once for each piece of code.

Kernels define their macros where they are built, around what is known of the problem. TileLang 0.1.15 parses, rewrites
and compiles a macro's source each time it is defined, most of the time that tracing a kernel takes; but the result is a
function of the names that the macro finds around it, and only their values differ from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from tilelang.language.eager import builder, utils
from tilelang.language.eager.ast import IRGenerator

OURS = "attention_engine.kernels"
Names = tuple[str, ...]
_rewritten: dict[tuple[int, Names], tuple[CodeType, Callable[..., Any], str]] = {}  # by identity: the code is kept
_rewrite = builder.mutate


def _remembered(func: Callable[..., Any]) -> Any:
    """What TileLang makes of a function; of ours from the memory, where annotations say nothing of values."""
    if not func.__module__.startswith(OURS):
        return _rewrite(func)
    around = utils.get_func_nonlocals(func)
    key = id(func.__code__), tuple(around)
    if key not in _rewritten:
        made, closures = _rewrite_keeping(func)
        if made.extra_type_hints or len(closures) != 1:
            return made
        _rewritten[key] = func.__code__, closures[0], made.source
    _, make_closure, source = _rewritten[key]
    return IRGenerator(gen=make_closure(**around), source=source)


def _rewrite_keeping(func: Callable[..., Any]) -> tuple[Any, list[Callable[..., Any]]]:
    """The rewritten function, and what made it of the names around it."""
    closures: list[Callable[..., Any]] = []
    compiled_object = utils.get_compiled_object

    def keep(*args: Any, **named: Any) -> Any:
        closures.append(compiled_object(*args, **named))
        return closures[-1]

    utils.get_compiled_object = keep
    try:
        return _rewrite(func), closures
    finally:
        utils.get_compiled_object = compiled_object


def install() -> None:
    """From now on, in this process."""
    builder.mutate = _remembered
