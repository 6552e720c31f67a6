"""What a function whose engine is known looks like: quicker to compare than to read.

`finding` reads what functions hold into a key, shapes of tensors among it. A pattern is that reading turned round: a
function fits it where its code is the very same, each number that it holds equals the one that was read, and tensors
stand where tensors stood. Of which shapes and dtypes they are is for torch's guards to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from attention_engine.runtime.finding import DEEPEST, globals_of, stays

MISSING = object()  # in place of a global that isn't there: a builtin has its name
TENSOR = object()  # in place of a tensor


class Pattern:
    """A function's code, and what stands in its cells and under the names of its globals."""

    __slots__ = ("cells", "code", "named", "plain")

    def __init__(self, function: Any, depth: int) -> None:
        self.code = function.__code__
        self.cells = [_pattern(cell.cell_contents, depth + 1) for cell in function.__closure__ or ()]
        scope = function.__globals__
        self.named = [(n, _pattern(scope.get(n, MISSING), depth + 1)) for n in globals_of(self.code)]
        self.plain = not self.cells and not self.named

    def read(self, function: Any, tensors: list[Tensor]) -> bool:
        """Does the function fit? Its tensors are added."""
        if type(function) is not FunctionType or function.__code__ is not self.code:
            return False
        if function.__defaults__ is not None or function.__kwdefaults__ is not None:
            return False
        if self.plain:
            return True
        if self.cells:
            for cell, want in zip(function.__closure__ or (), self.cells):
                held = cell.cell_contents  # ValueError where nothing is in it yet
                if want is TENSOR and type(held) is Tensor:
                    tensors.append(held)
                elif held is not want and not fits(held, want, tensors):
                    return False
        if self.named:
            scope = function.__globals__
            for name, want in self.named:
                held = scope.get(name, MISSING)
                if held is not want and not fits(held, want, tensors):
                    return False
        return True


class _Tuple:
    """A tuple of so many things."""

    __slots__ = ("each",)

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = each


def pattern_of(function: Any) -> Any:
    """The pattern of a function or of None; ValueError where it holds what no pattern tells apart."""
    return _pattern(function, 0)


def _pattern(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is MISSING or value is None or stays(value) or kind in (int, bool, str):
        return value
    if kind is float and value and value == value:  # 0.0 equals -0.0, and nan nothing
        return value
    if kind is Tensor or kind is Parameter:
        return TENSOR
    if depth <= DEEPEST:
        if kind is tuple:
            return _Tuple([_pattern(each, depth + 1) for each in value])
        if kind is FunctionType:
            return Pattern(value, depth)
    raise ValueError(f"{kind.__name__} is not told apart by a pattern")


def fits(value: Any, want: Any, tensors: list[Tensor]) -> bool:
    """Is it what the pattern says? Its tensors are added."""
    if value is want:
        return True
    if want is TENSOR:
        if type(value) is not Tensor and type(value) is not Parameter:
            return False
        tensors.append(value)
        return True
    if isinstance(want, Pattern):
        return want.read(value, tensors)
    if isinstance(want, _Tuple):
        if type(value) is not tuple or len(value) != len(want.each):
            return False
        return all([fits(one, each, tensors) for one, each in zip(value, want.each)])
    kind = type(want)
    return kind in (int, float, str) and type(value) is kind and bool(value == want)
