"""Binds the arguments of a call to a tile program's parameters, lengths and strides, and checks that they fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attention_engine.codegen.tiles.buffers import BufferCompiler
from attention_engine.codegen.tiles.scalar_ops import STORAGE, cast, is_float
from attention_engine.codegen.tiles.tir_nodes import handle_of, is_variable
from attention_engine.codegen.tiles.windows import BufferInfo, Frame, Run
from attention_engine.codegen.tir_types import Buffer, Function

Binding = Callable[[Frame, Sequence[Any]], None]


class Arguments:
    """The parameters of one program, in order."""

    def __init__(self, compiler: BufferCompiler, prim_func: Function) -> None:
        buffers = {handle_of(parameter): buffer for parameter, buffer in prim_func.buffer_map.items()}
        self._count = len(prim_func.params)
        self._values: list[Binding] = []
        self._lengths: list[Binding] = []
        self._checks: list[Binding] = []
        self._views: list[Binding] = []
        declared = []
        for position, parameter in enumerate(prim_func.params):
            buffer = buffers.get(handle_of(parameter))
            if buffer is None:
                self._values.append(_scalar(compiler.variable(parameter), position, str(parameter.dtype)))
            else:
                self._bind_variables(compiler, buffer, position)
                declared.append((position, buffer))
        for position, buffer in declared:  # after all lengths have slots: one buffer's may stand in another's shape
            info = compiler.declare(buffer)
            self._values.append(_tensor(info, position, len(buffer.shape)))
            self._views.append(_views(compiler, info.slot))
            shape = [compiler.value(length) for length in buffer.shape]
            strides = [compiler.value(stride) for stride in buffer.strides]
            self._checks.append(_layout_check(position, info.name, shape, strides))

    def _bind_variables(self, compiler: BufferCompiler, buffer: Buffer, position: int) -> None:
        for axis, length in enumerate(buffer.shape):
            if is_variable(length) and not compiler.is_known(length):
                self._lengths.append(_length(compiler.variable(length), position, axis))
        for axis, stride in enumerate(buffer.strides):
            if is_variable(stride) and not compiler.is_known(stride):
                self._lengths.append(_stride(compiler.variable(stride), position, axis))

    def bind(self, frame: Frame, arguments: Sequence[Any]) -> None:
        """Put the arguments of a call into its frame; raises ValueError for those which do not fit."""
        if len(arguments) != self._count:
            raise ValueError(f"the kernel takes {self._count} arguments, {len(arguments)} were given")
        for binding in (*self._values, *self._lengths, *self._checks, *self._views):
            binding(frame, arguments)


def _scalar(slot: int, position: int, dtype: str) -> Binding:
    def bind(frame: Frame, arguments: Sequence[Any]) -> None:
        value = arguments[position]
        if isinstance(value, torch.Tensor):
            value = value.item()
        frame[slot] = torch.tensor(value, dtype=STORAGE[dtype]) if is_float(dtype) else cast(value, dtype)

    return bind


def _tensor(info: BufferInfo, position: int, rank: int) -> Binding:
    slot, dtype = info.slot, STORAGE[info.dtype]
    who = f"argument {position} (`{info.name}`)"

    def bind(frame: Frame, arguments: Sequence[Any]) -> None:
        tensor = arguments[position]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{who} is a {type(tensor).__name__}; the kernel takes a tensor")
        if tensor.ndim != rank:
            raise ValueError(f"{who} has {tensor.ndim} dimensions; the kernel takes {rank}")
        if tensor.dtype != dtype or tensor.device.type != "cpu":
            raise ValueError(f"{who} is {tensor.dtype} on {tensor.device}; the interpreter takes {dtype} on cpu")
        frame[slot] = tensor.detach()

    return bind


def _views(compiler: BufferCompiler, slot: int) -> Binding:
    def bind(frame: Frame, arguments: Sequence[Any]) -> None:
        compiler.make_views(frame, slot)

    return bind


def _length(slot: int, position: int, axis: int) -> Binding:
    def bind(frame: Frame, arguments: Sequence[Any]) -> None:
        frame[slot] = arguments[position].shape[axis]

    return bind


def _stride(slot: int, position: int, axis: int) -> Binding:
    def bind(frame: Frame, arguments: Sequence[Any]) -> None:
        frame[slot] = arguments[position].stride(axis)

    return bind


def _layout_check(position: int, name: str, shape: list[Run], strides: list[Run]) -> Binding:
    """A tensor must have the declared shape, and the declared strides where it has more than one element."""
    who = f"argument {position} (`{name}`)"

    def check(frame: Frame, arguments: Sequence[Any]) -> None:
        tensor = arguments[position]
        expected = tuple(length(frame) for length in shape)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{who} has shape {tuple(tensor.shape)}; the kernel takes {expected}")
        if not strides or tensor.numel() == 0:
            return
        steps = tuple(stride(frame) for stride in strides)
        if any(length > 1 and step != actual for length, step, actual in zip(expected, steps, tensor.stride())):
            raise ValueError(f"{who} has strides {tensor.stride()}; the kernel takes {steps}")

    return check
