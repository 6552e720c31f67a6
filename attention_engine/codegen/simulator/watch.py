"""Tells the lanes of a simulated role which shared memory its statements read and store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attention_engine.codegen.simulator.lanes import READ, STORED
from attention_engine.codegen.simulator.roles import Role
from attention_engine.codegen.tiles.buffers import ROLE
from attention_engine.codegen.tiles.ops import TILE_OPS, Compiler
from attention_engine.codegen.tiles.windows import BufferInfo, Frame, Run, Window
from attention_engine.codegen.tir_types import Call


def watch_tile(window: Window, kind: int, run: Run) -> Run:
    """The same of what reads a tile, or stores it: if in shared memory, by all lanes that run together."""
    if not window.buffer.scope.startswith("shared"):
        return run

    def watching(frame: Frame) -> Any:
        role: Role | None = frame[ROLE]
        if role is not None and role.lanes is not None:
            tile = window.locate(frame)[0]
            role.lanes.access(kind, window.buffer.name, tile)
            if kind == STORED:
                role.change(tile)
        return run(frame)

    return watching


def watch_elements(buffer: BufferInfo, indices: Sequence[Run], kind: int, run: Run, *, one: bool) -> Run:
    """The same of one element, or of elements at any indices: of all that differ in those alone that are no numbers."""
    if not buffer.scope.startswith("shared"):
        return run

    def watching(frame: Frame) -> Any:
        role: Role | None = frame[ROLE]
        if role is None or role.lanes is None:
            return run(frame)
        tensor, where = frame[buffer.slot], [index(frame) for index in indices]
        tile = tuple(slice(None) if isinstance(index, torch.Tensor) else index for index in where)
        numbers = ((n, limit) for n, limit in zip(tile, tensor.shape, strict=True) if not isinstance(n, slice))
        if not all(0 <= number < limit for number, limit in numbers):
            return run(frame)  # outside
        if not one:
            role.lanes.access(kind, buffer.name, tensor[tile])
            if kind == STORED:
                role.change(tensor[tile])
            return run(frame)
        held = tensor[tuple(where)].item() if kind == STORED else None
        value = run(frame)
        role.lanes.access_one(kind, buffer.name, tensor, where, kind == STORED and held == tensor[tuple(where)].item())
        return value

    return watching


def watch_variable(buffer: BufferInfo, place: Run, kind: int, run: Run) -> Run:
    """The same of a variable that each thread has for itself."""
    slot = buffer.slot

    def watching(frame: Frame) -> Any:
        role: Role | None = frame[ROLE]
        lanes = None if role is None else role.lanes
        if lanes is not None and lanes.own and kind == READ:
            lanes.read_variable((slot, place(frame)), buffer.name)
        value = run(frame)
        if lanes is not None and kind == STORED and (lanes.own or lanes.alone):
            lanes.set_variable((slot, place(frame)))
        return value

    return watching


def watch_counter(value: Run) -> Run:
    """A number that other blocks change meanwhile: a lane has to read it, and tell it, or lanes would part."""

    def run(frame: Frame) -> Any:
        role: Role | None = frame[ROLE]
        if role is not None and role.lanes is not None:
            role.lanes.read_counter()
        return value(frame)

    return run


def watch_count(count: Run) -> Run:
    """The same of an addition to a counter."""

    def run(frame: Frame) -> Any:
        role: Role | None = frame[ROLE]
        if role is not None and role.lanes is not None:
            role.lanes.count()
        return count(frame)

    return run


def tell(value: Run) -> Run:
    """A shuffle by which lanes get what lane 0 has; here no lane has a value of its own."""

    def run(frame: Frame) -> Any:
        role: Role | None = frame[ROLE]
        if role is None or role.lanes is None:
            return value(frame)
        outer, role.lanes.telling = role.lanes.telling, True
        told = value(frame)
        role.lanes.telling = outer
        role.meet_in_warps("a shuffle")
        return told

    return run


def vote(value: Run) -> Run:
    """Is it so for any of the threads that run together, more than a warp: where one asks, all do?"""

    def run(frame: Frame) -> int:
        result = int(torch.as_tensor(value(frame)).any())
        role: Role | None = frame[ROLE]
        if role is not None:
            role.meet_in_warps("a vote")
        return result

    return run


def watched(name: str, reads: int | None, stores: int) -> Callable[[Compiler, Call], Run]:
    """A tile operation, and which of its arguments it reads and stores."""

    def build(compiler: Compiler, call: Call) -> Run:
        run = watch_tile(compiler.region(call.args[stores]), STORED, TILE_OPS[name](compiler, call))
        return run if reads is None else watch_tile(compiler.region(call.args[reads]), READ, run)

    return build
