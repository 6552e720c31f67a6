"""What a valid plan is."""

from __future__ import annotations

from collections.abc import Sequence

from attention_engine.ir.verify import refuse
from attention_engine.plan.buffers import Buffer, Role, buffers_of
from attention_engine.plan.launches import Launch, Step


def verify_steps(steps: Sequence[Step]) -> None:
    """Every place is filled before it is read, a launch writes only what it is given, and a place has one shape."""
    filled: set[str] = set()
    shapes: dict[str, tuple[object, ...]] = {}
    for step in steps:
        if not isinstance(step, Launch):
            if step.source not in filled:
                raise refuse(f"the step {type(step).__name__}", f"{step.source!r} is read before it is filled")
            filled.add(step.target.place)
            _agree(step.target, shapes, type(step).__name__)
            continue
        names = [argument.name for argument in step.arguments]
        if len({*names}) != len(names):
            raise refuse(f"the launch {step.name!r}", f"two arguments have one name: {sorted(names)}")
        places = {argument.place for argument in step.arguments}
        if not step.writes <= places:
            raise refuse(f"the launch {step.name!r}", f"it writes what it isn't given: {sorted(step.writes - places)}")
        for buffer in buffers_of(step.arguments):
            if buffer.role is Role.MADE and buffer.place not in filled | step.writes:
                raise refuse(f"the launch {step.name!r}", f"{buffer.place!r} is read before it is filled")
            _agree(buffer, shapes, step.name)
        filled |= step.writes


def _agree(buffer: Buffer, shapes: dict[str, tuple[object, ...]], name: str) -> None:
    """Has this place the shape and dtype that an earlier step gave it?"""
    known = shapes.setdefault(buffer.place, (buffer.shape, buffer.dtype))
    if known != (buffer.shape, buffer.dtype):
        found = (buffer.shape, buffer.dtype)
        raise refuse(f"the launch {name!r}", f"{buffer.place!r} is {found} here, and was {known} before")
