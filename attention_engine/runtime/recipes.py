"""What users' functions are made of: those alike in code and numbers are one attention, whichever tensors they hold.

A recipe is read off the functions in each call of `attention`, which takes some microseconds: their code, what they
captured, defaults, the globals that they name, and the attributes that they name of objects. Tensors stand in it by
shape and dtype alone, in the order met.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from attention_engine.frontend.made import Made
from attention_engine.frontend.online_func import OnlineFunc, SymbolScalar, Var

PLAIN = (int, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
METHODS = ("online_fwd", "online_fwd_epilogue", "forward", "backward", "combine")  # of an OnlineFunc
# What these hold doesn't change. Functions of attention_engine.library are read: a factory's have numbers in them.
FIXED = ("torch", "math", "numpy", "builtins", "functools", "attention_engine")
MOST_PARTS = 4096  # of what is read: the rest of a larger thing is taken by identity


class Same:
    """An object that nothing but itself is equal to; it lives as long as this."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class Recipe:
    """The parts of functions and options, by which recipes are compared, and the tensors met in them."""

    def __init__(self, *values: object) -> None:
        self.values = values
        self.parts: list[object] = []
        self.tensors: list[Tensor] = []
        self._met: dict[int, int] = {}
        self._named: dict[int, set[str]] = {}  # the attributes of objects that were read
        self._held: list[object] = []  # what has a number in _met lives as long
        for value in values:
            self._read(value, frozenset())
        self.key = tuple(self.parts)
        self._hash = hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._hash == other._hash and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    def exact(self) -> tuple[object, ...]:
        """The very tensors, as they are now: equal for as long as nothing is written in them."""
        versions = [None if t.is_inference() else t._version for t in self.tensors]
        return (*map(Same, self.tensors), *versions)

    def _read(self, value: Any, names: frozenset[str]) -> None:
        """names: those that the code which holds the value names."""
        kind, parts = type(value), self.parts
        if kind in PLAIN:
            parts += (kind, value)
        elif kind is float:
            parts += [kind, value if value == value and value else repr(value)]  # 0.0 equals -0.0, and nan nothing
        elif kind is FunctionType:
            self._read_function(value)
        elif isinstance(value, Tensor):
            if not self._is_met(value):
                parts += (Tensor, value.shape, value.dtype)
                self.tensors.append(value)
        elif kind is BuiltinFunctionType or len(parts) > MOST_PARTS:
            parts.append(Same(value))
        elif kind in (tuple, list, dict, set, frozenset):
            self._read_container(value, names)
        else:
            self._read_object(value, names)

    def _is_met(self, value: object) -> bool:
        """Was it read before? Then where stands in its place."""
        place = self._met.setdefault(id(value), len(self._met))
        self.parts.append(place)
        if place < len(self._held):
            return True
        self._held.append(value)
        return False

    def _read_function(self, function: Any) -> None:
        if is_fixed(function) and function.__closure__ is None:
            self.parts.append(function)
            return
        if self._is_met(function):
            return
        code = function.__code__
        names, top = names_of(code)
        self.parts.append(code)
        for cell in function.__closure__ or ():
            try:
                self._read(cell.cell_contents, names)
            except ValueError:  # nothing is in it yet
                self.parts.append("empty")
        if function.__defaults__ or function.__kwdefaults__:
            self._read((function.__defaults__, function.__kwdefaults__), names)
        scope = function.__globals__
        for name in top:
            if name in scope:
                self.parts.append(name)
                self._read(scope[name], names)

    def _read_container(self, value: Any, names: frozenset[str]) -> None:
        if isinstance(value, (set, frozenset)):
            self.parts += (type(value), frozenset(value))
            return
        self.parts += [type(value), len(value)]
        for each in value.items() if isinstance(value, dict) else value:
            self._read(each, names)

    def _read_object(self, value: Any, names: frozenset[str]) -> None:
        """An object by identity, and what its attributes hold that the code names."""
        if isinstance(value, Made):
            self._read(value.__wrapped__, names)
            return
        if isinstance(value, MethodType):
            self._read_function(value.__func__)
            self._read(value.__self__, names_of(value.__func__.__code__)[0])
            return
        if isinstance(value, functools.partial):
            self._read((value.func, value.args, value.keywords), names)
            return
        if isinstance(value, OnlineFunc):
            self._read_online(value)
            return
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self.parts += [type(value), getattr(value, "shape", ()), value.tobytes()]
            return
        if not self._is_met(value):
            self.parts.append(Same(value))
        if not is_fixed(value):
            names |= {"__call__"}
            self._read_attributes(value, _named_by_methods(type(value), names) if _has_methods(value) else names)

    def _read_attributes(self, value: Any, names: frozenset[str]) -> None:
        """Of an object, a class or a module: those of these names that were not read yet."""
        done = self._named.setdefault(id(value), set())
        new = sorted(names - done)
        done.update(new)
        for name, held in _attributes(value, new):
            self.parts.append(name)
            self._read(held, names)

    def _read_online(self, online: OnlineFunc) -> None:
        kind, names = type(online), frozenset[str]()
        self.parts.append(Same(kind))
        if kind.__module__ != "attention_engine.library":
            names = _named_by_methods(kind, frozenset(METHODS))
            self._read_attributes(kind, names)
        for name, held in vars(online).items():
            self.parts.append(name)
            if name.endswith("_rowscales") and isinstance(held, dict):
                self._read_rows(held)
            else:
                self._read(held, names)

    def _read_rows(self, rows: dict[str, Any]) -> None:
        for name, scalar in rows.items():
            value = scalar.value if isinstance(scalar, SymbolScalar) else scalar
            self.parts.append(name)
            self._read(value.value if isinstance(value, Var) else value, frozenset())


def is_fixed(value: Any) -> bool:
    """Is it of a package that holds nothing that changes?"""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(module, str) or isinstance(value, torch.nn.Module):
        return False
    return module.partition(".")[0] in FIXED


def _has_methods(value: object) -> bool:
    return not isinstance(value, (type, ModuleType))


def _attributes(value: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, a class or a module that are among these names."""
    places = [getattr(value, "__dict__", {})]
    if isinstance(value, torch.nn.Module):
        places += [value._parameters, value._buffers, value._modules]
    of_class: type | None = None
    if not isinstance(value, ModuleType):
        of_class = value if isinstance(value, type) else type(value)
    for name in names:
        place = next((p for p in places if name in p), None)
        if place is not None:
            yield name, _plain(place[name])
        elif of_class is not None and (held := _of_class(of_class, name)) is not None:
            yield name, held


def _plain(held: Any) -> Any:
    """The function in what a class holds as a method or a property."""
    return held.__func__ if isinstance(held, (staticmethod, classmethod)) else getattr(held, "fget", held)


def _of_class(kind: type, name: str) -> Any:
    """What instances find in their class, but for what packages that don't change put there."""
    owner = next((each for each in kind.__mro__ if name in each.__dict__), None)
    return None if owner is None or is_fixed(owner) else _plain(owner.__dict__[name])


def _named_by_methods(kind: type, names: frozenset[str]) -> frozenset[str]:
    """These names, and those in the methods and properties of a class that they name."""
    found, new = set[str](), set(names)
    while new:
        found |= new
        methods = [_of_class(kind, name) for name in new]
        new = {n for m in methods if isinstance(m, FunctionType) for n in names_of(m.__code__)[0]} - found
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def names_of(code: CodeType) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of globals and attributes in a function and in those inside it, as a set and in order."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(names_of(constant)[1])
    return frozenset(found), tuple(found)
