"""Captured tensors at run time: torch is watched while a user's functions are traced, and calls find the tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attention_engine.errors import (
    DevicesDiffer,
    NotATensor,
    UnsupportedOperation,
    WrongCustomDtype,
    WrongCustomShape,
)
from attention_engine.frontend.advice import CHANCE
from attention_engine.frontend.captured import DRAWS, Capture, Captured
from attention_engine.frontend.custom_io import AxisSpec, CustomSpec
from attention_engine.frontend.frames import where_from
from attention_engine.frontend.symbols import CAPTURE, Symbol, lift, wrap
from attention_engine.ir.expr import Type
from attention_engine.runtime.program_kernels import CUSTOM_NAMES

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {  # by the names that torch's own functions for them have
    "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor, "__pow__": operator.pow,
    "__floordiv__": operator.floordiv, "__mod__": operator.mod, "__lshift__": operator.lshift,
    "__rshift__": operator.rshift, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
}  # fmt: skip
NUMBERS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})
Axes = tuple[tuple[AxisSpec, ...], ...]  # of each captured tensor


@contextmanager
def capturing(declared: Sequence[str], types: Mapping[str, Type]) -> Iterator[Capture]:
    """While a user's functions are traced: tensors that they meet are captured. declared: names that are taken."""
    capture = Capture(declared, types)
    token = CAPTURE.set(capture)
    try:
        with _Watch(capture):
            yield capture
    finally:
        CAPTURE.reset(token)


class _Watch(TorchFunctionMode):
    """Sees `tensor[symbol]`, which Python hands to the tensor alone, and what torch makes of captured tensors."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if _holds(Symbol, (args, kwargs)):
            if name == "__getitem__" and isinstance(args[0], Tensor):
                with self:  # what stands at known indices is torch's to read, and noted
                    return self.capture.at(args[0], args[1])
            if name in OPERATORS:
                return OPERATORS[name](wrap(lift(args[0])), args[1])
            return function(*args, **kwargs)
        if name in DRAWS and not _holds(Tensor, (args, kwargs)):
            raise UnsupportedOperation(f"{where_from()}torch.{name} in a mod draws once, when it is traced. {CHANCE}")
        self.capture.reads_numbers |= name in NUMBERS
        with torch.no_grad():  # here alone: torch.export notes each change of it
            result = function(*args, **kwargs)
        if _holds(Tensor, (args, kwargs)) and _holds(Tensor, result) and not _in_place(name):
            self.capture.compute(function, args, kwargs, result)
        return result


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _holds(kind: type, value: Any) -> bool:
    """Is one of this class in the value, or in its tuples, lists, slices and dicts?"""
    if isinstance(value, (tuple, list)):
        return any(_holds(kind, v) for v in value)
    if isinstance(value, slice):
        return isinstance(value.start, kind) or isinstance(value.stop, kind) or isinstance(value.step, kind)
    return any(_holds(kind, v) for v in value.values()) if isinstance(value, dict) else isinstance(value, kind)


def tensors_now(captured: Sequence[Captured]) -> list[Tensor]:
    """The captured tensors of this call; NotATensor, WrongCustomShape where something else took a tensor's place."""
    found = []
    for one in captured:
        tensor = one.source.now()
        if not isinstance(tensor, Tensor):
            raise NotATensor(
                f"captured tensor {one.name!r} has become {type(tensor).__name__} since the engine was built. "
                "Give it a tensor again, or build another engine."
            )
        if one.rank == 0 and tensor.numel() == 1:
            tensor = tensor.reshape(())
        if tensor.ndim != one.rank:
            raise WrongCustomShape(
                f"captured tensor {one.name!r} has become one of shape {tuple(tensor.shape)} since the engine was "
                f"built, and is read with {one.rank} indices. Keep its dimensions, or build another engine."
            )
        found.append(tensor)
    return found


def check_captured(captured: Sequence[Captured], tensors: Sequence[Tensor], q: Tensor) -> None:
    """BadInput unless the captured tensors are on q's device, of a dtype that kernels read."""
    for one, tensor in zip(captured, tensors, strict=True):
        if tensor.device != q.device:
            raise DevicesDiffer(
                f"captured tensor {one.name!r} is on '{tensor.device}' and q on '{q.device}'.\n"
                "  An engine doesn't move what its functions capture: make it a Parameter or a buffer of the module "
                "that moves, or move it yourself."
            )
        if tensor.dtype not in CUSTOM_NAMES and tensor.dtype not in (torch.bool, torch.float64):
            raise WrongCustomDtype(
                f"captured tensor {one.name!r} is {tensor.dtype}. Give a floating, integer or bool tensor."
            )


def axes_now(captured: Sequence[Captured], tensors: Sequence[Tensor], sizes: Mapping[str, int | None]) -> Axes:
    """The axes of each captured tensor in a call of these sizes ("batch", "heads", "seq_len", "seq_len_kv")."""
    return tuple([one.axes(t.shape, sizes) for one, t in zip(captured, tensors, strict=True)])


def sizes_of(q: Tensor, k: Tensor) -> dict[str, int | None]:
    """The sizes of a call, of (batch, length, heads, dim)."""
    return {"batch": q.shape[0], "heads": q.shape[2], "seq_len": q.shape[1], "seq_len_kv": k.shape[1]}


def specs_of(captured: Sequence[Captured], axes: Axes) -> list[CustomSpec]:
    """Captured tensors as custom inputs."""
    return [CustomSpec(one.name, of) for one, of in zip(captured, axes, strict=True)]
