"""Which engine a call of `attention` has: kept for functions that are alike in code and numbers, made once.

Functions that hold plain things alone (numbers, tensors, functions of the same kind) are told apart in a few
microseconds; for all others their recipe is written down.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from attention_engine.frontend.captured import Captured, Computed, Fixed, Source, each_source
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.module import AttentionEngine
from attention_engine.runtime.recipes import FIXED, Recipe, is_fixed, names_of

KEPT = 64  # engines, the least recently used of which goes
DEEPEST = 8  # functions inside functions that are read plainly
Functions = tuple[Any, ...]
Found = tuple[AttentionEngine, Sequence[Tensor]]


class _Plain(NamedTuple):
    """An engine, where its captured tensors stand among those that were read, and what keeps the key's ids alive."""

    engine: AttentionEngine
    places: tuple[tuple[int, bool], ...]  # the place, and whether the tensor is read as one number
    held: tuple[object, ...]

    def captured(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those that the engine captured, among these."""
        return [tensors[n].reshape(()) if alone else tensors[n] for n, alone in self.places] if self.places else ()


_FIXED: dict[int, object] = {}  # modules and functions of packages that hold nothing that changes, by id
_NAMES: dict[int, tuple[CodeType, tuple[str, ...]]] = {}  # of globals, by the id of the code, which has a slow hash
MOST_CODES = 1024


class _Reading:
    """What was read of functions so far: the parts of a key, and the tensors in the order met."""

    __slots__ = ("held", "parts", "tensors")

    def __init__(self) -> None:
        self.parts: list[object] = []
        self.tensors: list[Tensor] = []
        self.held: list[object] = []  # what has its id among the parts

    def read(self, value: Any, depth: int = 0) -> bool:
        """Was there nothing but plain things in it?"""
        kind, parts = type(value), self.parts
        if kind is FunctionType:
            return self._function(value, depth)
        if kind is Tensor or kind is Parameter:
            for n, met in enumerate(self.tensors):
                if met is value:
                    parts.append(n)
                    return True
            parts += (value.shape, value.dtype)
            self.tensors.append(value)
        elif kind is int or kind is bool or kind is str or value is None:
            parts += (kind, value)
        elif kind is float:
            parts += (kind, value if value == value and value else repr(value))  # 0.0 equals -0.0, and nan nothing
        elif kind is tuple:
            parts += (kind, len(value))
            return all([self.read(each, depth) for each in value])
        elif id(value) in _FIXED:
            parts.append(id(value))
        elif kind is BuiltinFunctionType or (kind is ModuleType and is_fixed(value)):
            _FIXED[id(value)] = value
            parts.append(id(value))
        else:
            return False
        return True

    def _function(self, function: Any, depth: int) -> bool:
        if id(function) in _FIXED:
            self.parts.append(id(function))
            return True
        code, closure = function.__code__, function.__closure__
        self.parts.append(id(code))
        self.held.append(code)
        if depth > DEEPEST or function.__defaults__ is not None or function.__kwdefaults__ is not None:
            return False
        if closure is not None:
            for cell in closure:
                try:
                    held = cell.cell_contents
                except ValueError:  # nothing is in it yet
                    return False
                if not self.read(held, depth + 1):
                    return False
        elif _of_package(function.__module__):
            _FIXED[id(function)] = function
            return True
        scope = function.__globals__
        for name in globals_of(code):
            if name in scope:
                self.parts.append(name)
                if not self.read(scope[name], depth + 1):
                    return False
        return True


@functools.lru_cache(maxsize=MOST_CODES)
def _of_package(module: str | None) -> bool:
    """Do functions of the module hold nothing that changes?"""
    return module is not None and module.partition(".")[0] in FIXED


def stays(value: object) -> bool:
    """Was it read, and found to hold nothing that changes?"""
    return id(value) in _FIXED


def globals_of(code: CodeType) -> tuple[str, ...]:
    """The names that the code reads of its module, or of builtins."""
    known = _NAMES.get(id(code))
    if known is None:
        if len(_NAMES) >= MOST_CODES:
            _NAMES.clear()
        known = _NAMES[id(code)] = code, names_of(code)[1]
    return known[1]


class Finder:
    """The engines of one kind of call. build: makes the engine of (functions, options)."""

    def __init__(self, build: Callable[[Functions, Functions], AttentionEngine]) -> None:
        self._plain: dict[tuple[object, ...], _Plain] = {}
        self._built = functools.lru_cache(maxsize=KEPT)(self._build)
        self._make = build

    def find(self, functions: Functions, options: Functions) -> Found:
        """The engine of these functions and options, and the tensors that the functions captured."""
        reading = _Reading()
        if all([reading.read(function) for function in functions]):
            key = (*options, *map(type, options), *reading.parts)
            try:
                found = self._plain.get(key)
            except TypeError:  # an option without a hash: the engine says what is wrong
                return self._by_recipe(Recipe(*functions, *options), len(functions))
            if found is not None:
                return found.engine, found.captured(reading.tensors)
            self._learn(key, reading, functions, options)
        return self._by_recipe(Recipe(*functions, *options), len(functions))

    def _build(self, recipe: Recipe, count: int, values: object = None) -> tuple[AttentionEngine, list[Tensor]]:
        """The engine of all recipes that equal this one, and the tensors of the first. values: if those matter too."""
        return self._make(recipe.values[:count], recipe.values[count:]), recipe.tensors

    def _by_recipe(self, recipe: Recipe, count: int) -> Found:
        engine, first = self._built(recipe, count)
        if engine._reads_numbers:  # as t.item(), which is in the program
            engine, first = self._built(recipe, count, recipe.exact())
        captured = engine._captured
        if not captured:
            return engine, ()
        if any([a is not b for a, b in zip(recipe.tensors, first)]):
            new = {id(old): tensor for old, tensor in zip(first, recipe.tensors, strict=True)}
            captured = tuple([_replaced(one, new) for one in captured])
        return engine, tensors_now(captured)

    def _learn(self, key: tuple[object, ...], reading: _Reading, functions: Functions, options: Functions) -> None:
        """Notes the engine of a plain key, where it captured plain tensors alone."""
        recipe = Recipe(*functions, *options)
        engine, first = self._built(recipe, len(functions))
        if engine._reads_numbers:
            return
        standing = {id(old): n for n, old in enumerate(first)}
        places = []
        for one in engine._captured:
            n = standing.get(id(one.source.tensor)) if type(one.source) is Fixed else None
            if n is None or recipe.tensors[n] is not reading.tensors[n]:
                return
            places.append((n, one.rank == 0 and reading.tensors[n].ndim > 0))
        while len(self._plain) >= KEPT:
            del self._plain[next(iter(self._plain))]
        self._plain[key] = _Plain(engine, tuple(places), tuple(reading.held))


def _replaced(one: Captured, new: Mapping[int, Tensor]) -> Captured:
    """A captured tensor of other functions of the same recipe. new: their tensors, by the ids of the first ones'."""
    other = copy.copy(one)
    other.source = Fixed(_now(one.source, new), one.name)
    return other


def _now(source: Source, new: Mapping[int, Tensor]) -> Any:
    if isinstance(source, Fixed):
        return new.get(id(source.tensor), source.tensor)
    if not isinstance(source, Computed):
        return source.now()
    again = copy.copy(source)
    again.args, again.named = (
        each_source(held, lambda inner: Fixed(_now(inner, new), inner.name)) for held in (source.args, source.named)
    )
    return again.now()
