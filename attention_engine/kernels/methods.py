"""Macros as methods: TileLang's own `T.macro` makes one of a function, and leaves out the object that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import tilelang.language as T


class macro_method:  # noqa: N801 - read as a decorator
    """Decorates a method whose body is TileLang, as `T.macro` decorates a function.

    A subclass may write the method anew. TileLang names the numbers that a macro is handed by its parameters; what
    comes by fields of the object keeps its name, and nothing is printed for it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.macro, self.__doc__ = T.macro(function), function.__doc__

    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., Any]:
        return self.macro if owner is None else bind(self.macro, owner)
