"""Functions that a factory made: they print and pickle as the call that made them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from attention_engine.errors import AttentionEngineError, UnknownOption
from attention_engine.frontend.frames import brief

Given = ParamSpec("Given")
Mod = TypeVar("Mod", bound=Callable[..., Any])


class Made:
    """What a factory returned: `scale(0.125)` in print, in pickles and in error messages."""

    def __init__(self, factory: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.factory = factory
        self.args = tuple([settled(a) for a in args])
        self.named = {name: settled(a) for name, a in named.items()}
        self.__wrapped__ = factory.__wrapped__(*self.args, **self.named)  # type: ignore[attr-defined] # its own signature
        self.__code__ = getattr(self.__wrapped__, "__code__", None)
        self.__qualname__ = repr(self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__wrapped__(*args, **named)

    def __repr__(self) -> str:
        given = [_spell(a) for a in self.args] + [f"{name}={_spell(a)}" for name, a in self.named.items()]
        return f"{self.factory.__name__}({', '.join(given)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.factory, self.args, self.named)


def settled(value: Any) -> Any:
    """A number that a compiler left open (an argument of the compiled function) as the one of this call, for which the
    compiler compiles anew; anything else as it is."""
    if type(value) is float:
        return float.fromhex(value.hex())
    if type(value) is int and abs(value) < 2**62:
        return len(range(value)) - len(range(-value))
    return value


def _spell(argument: Any) -> str:
    """A function by its name, a tensor by its class: its numbers may change."""
    if hasattr(type(argument), "requires_grad"):
        return f"{type(argument).__name__}{tuple(argument.shape)}"
    return str(getattr(argument, "__qualname__", repr(argument)))


def _make(factory: Callable[..., Made], args: tuple[Any, ...], named: dict[str, Any]) -> Made:
    return factory(*args, **named)


def made_by(factory: Callable[Given, Mod]) -> Callable[Given, Mod]:
    """Decorates a factory of mods, so that what it returns remembers the call: plain closures can't be pickled."""

    @functools.wraps(factory)
    def make(*args: Given.args, **named: Given.kwargs) -> Mod:
        try:
            return cast(Mod, Made(make, args, named))  # called as the mod is
        except AttentionEngineError as error:
            raise brief(error) from None

    make.makes_mods = True  # type: ignore[attr-defined]
    return make


def positive(number: Any, what: str) -> Any:
    """The number, of which a factory counts or divides; UnknownOption where it is a number of 0 or less."""
    refuse(f"a {what} of {number}: give 1 or more.", isinstance(number, int) and number < 1)
    return number


def refuse(says: str, *wrong: object) -> None:
    """UnknownOption where one of these comparisons is True; those of tensors and of symbols are not asked."""
    if any(each is True for each in wrong):
        raise UnknownOption(says)
