"""The variables and buffers of a tile program under compilation: their slots in the frame, and windows into them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from attention_engine.codegen.tiles.scalar_ops import STORAGE, poison
from attention_engine.codegen.tiles.tir_nodes import handle_of, is_call, is_variable, kind_of
from attention_engine.codegen.tiles.windows import BufferInfo, Frame, Run, Span, Whole, Window, fresh_tensor
from attention_engine.codegen.tir_types import Annotations, Buffer, Expression, Load, Pair, Region, Variable
from attention_engine.errors import NotInterpretable

MASK = 0  # the slot of the lanes that the enclosing conditions leave active; None: all
ROLE = 1  # the slot of the threads that run together (simulator/roles.py)


class Code(NamedTuple):
    """A compiled expression."""

    run: Run
    dtype: str
    lanes: frozenset[int] = frozenset()  # the lane axes it varies along; none: one value for the whole block
    const: Any = None
    may_be_view: bool = False  # its tensor may be memory that a later store changes


class Place(NamedTuple):
    """An index of the form lane + start (axis None: start alone)."""

    axis: int | None
    start: Run
    const: int | None  # the start, where it is known before the run


def constant(value: float | bool) -> Run:
    """Code that gives one value."""
    return lambda frame: value


@functools.lru_cache(maxsize=512)
def _lane_index(start: int, extent: int, axis: int, rank: int) -> torch.Tensor:
    shape = [1] * rank
    shape[axis] = extent
    return torch.arange(start, start + extent, dtype=torch.int32).view(shape)


class Lanes:
    """One open loop of a parallel nest."""

    def __init__(self, axis: int, extent: int | Run) -> None:
        self.axis = axis
        self.extent = extent
        self.length: Run = constant(extent) if isinstance(extent, int) else extent

    def index(self, start: int, extent: int, rank: int) -> torch.Tensor:
        """The loop variable's values along its axis."""
        return _lane_index(start, extent, self.axis, rank)


class BufferCompiler:
    """Names to slots, and index expressions to windows."""

    def __init__(self) -> None:
        self.slots = 2  # MASK, ROLE
        self.axes: list[Lanes] = []  # the open loops of the parallel nest
        self.rank = 0  # the lane axes of the whole nest
        self.masked = False  # within a condition that differs between lanes
        self.views: dict[int, list[tuple[int, Callable[[Frame, torch.Tensor], torch.Tensor]]]] = {}
        self._view_slots: dict[tuple[object, ...], int] = {}
        self._variables: dict[int, Code] = {}
        self._places: dict[int, Place] = {}
        self._deferred: dict[int, Expression] = {}
        self._buffers: dict[int, BufferInfo] = {}
        self._owners: dict[int, BufferInfo] = {}  # by the variable of a buffer's memory
        self._safe_values: dict[int, Run] = {}
        self.barriers: dict[int, int] = {}  # the slots of barriers, by their memory

    def new_slot(self) -> int:
        """A fresh slot of the frame."""
        self.slots += 1
        return self.slots - 1

    def value(self, node: Expression) -> Run:
        """The code of an expression; defined with the expressions."""
        raise NotImplementedError

    def expression(self, node: Expression | float) -> Code:
        """A compiled expression; defined with the expressions."""
        raise NotImplementedError

    # Variables

    def variable(self, node: Variable) -> int:
        """A slot for a variable that holds one number."""
        slot = self.new_slot()
        self._variables[handle_of(node)] = Code(slot_reader(slot), str(node.dtype))
        return slot

    def bind(self, node: Variable, value: Code) -> int:
        """A slot for a variable that holds an expression's value."""
        slot = self.new_slot()
        self._variables[handle_of(node)] = Code(slot_reader(slot), str(node.dtype), value.lanes)
        return slot

    def bind_place(self, node: Variable, place: Place) -> int:
        """A slot for the offset of a variable that is a lane and an offset: buffers indexed by it are read as views."""
        slot = self.new_slot()
        self._places[handle_of(node)] = Place(place.axis, slot_reader(slot), place.const)
        return slot

    def defer(self, node: Variable, value: Expression) -> None:
        """Let a name stand for an expression of variables that get their values later, as T.Persistent has them."""
        self._deferred[handle_of(node)] = value

    def resolved(self, node: Expression) -> Expression:
        """The expression that a deferred name stands for."""
        while is_variable(node) and handle_of(node) in self._deferred:
            node = self._deferred[handle_of(node)]
        return node

    def lane_variable(self, node: Variable, lanes: Lanes, start: Code) -> int:
        """A slot for the variable of a parallel loop."""
        slot = self.new_slot()
        code = Code(slot_reader(slot), str(node.dtype), frozenset({lanes.axis}))
        self._variables[handle_of(node)] = code
        self._places[handle_of(node)] = Place(lanes.axis, start.run, start.const)
        return slot

    def lookup(self, node: Variable) -> Code:
        """The code that reads a variable."""
        code = self._variables.get(handle_of(node))
        if code is None:
            raise NotInterpretable(f"the variable `{node.name}`, which no shape and no statement gives a value")
        return code

    def is_known(self, node: Variable) -> bool:
        """Whether a variable has a slot."""
        return handle_of(node) in self._variables

    def place(self, node: Expression) -> Place | None:
        """An index as lane + start, or None where it has another form."""
        node = self.resolved(node)
        kind = kind_of(node)
        if is_variable(node) and handle_of(node) in self._places:
            return self._places[handle_of(node)]
        if kind in ("Add", "Sub") and self.expression(node).lanes:
            pair = cast(Pair, node)
            left, right = self.place(pair.a), self.place(pair.b)
            if left is None or right is None or (left.axis is not None and right.axis is not None):
                return None
            if kind == "Sub" and right.axis is not None:
                return None
            axis = right.axis if left.axis is None else left.axis
            a, b, sign = left.start, right.start, 1 if kind == "Add" else -1
            if left.const is not None and right.const is not None:
                total = left.const + sign * right.const
                return Place(axis, constant(total), total)
            return Place(axis, (lambda frame: a(frame) + b(frame)) if sign == 1 else (lambda f: a(f) - b(f)), None)
        code = self.expression(node)
        return None if code.lanes else Place(None, code.run, code.const)

    # Buffers

    def declare(self, node: Buffer) -> BufferInfo:
        """A slot for a buffer with memory of its own."""
        dtype, scope = str(node.dtype), str(node.scope())
        if dtype not in STORAGE:
            raise NotInterpretable(f"the data type {dtype} of buffer `{node.name}`")
        lengths = [self.expression(length).const for length in node.shape]
        shape = None if None in lengths else tuple(lengths)
        outside = self._outside(handle_of(node.data), 0 if scope == "global" else poison(dtype))
        info = BufferInfo(self.new_slot(), str(node.name), scope, dtype, shape, outside)
        self._buffers[handle_of(node)] = info
        self._owners[handle_of(node.data)] = info
        return info

    def _outside(self, memory: int, value: float | int) -> Run:
        """What loads out of range give; the annotation that may change it is met after the parameters."""

        def outside(frame: Frame) -> Any:
            safe = self._safe_values.get(memory)
            return value if safe is None else safe(frame)

        return outside

    def buffer(self, node: Buffer) -> BufferInfo:
        """What is known of a buffer; one that shares another's memory is a view of it."""
        info = self._buffers.get(handle_of(node))
        if info is not None:
            return info
        owner = self._owners.get(handle_of(node.data))
        dtype = str(node.dtype)
        if owner is None or owner.private or dtype not in STORAGE:
            raise NotInterpretable(f"the buffer `{node.name}`, which is no parameter and is not allocated")
        known = [self.expression(length).const for length in node.shape]
        lengths = [self.value(length) for length in node.shape]
        known_shape = None if None in known else tuple(known)
        info = BufferInfo(self.new_slot(), str(node.name), owner.scope, dtype, known_shape, owner.outside)

        def make(frame: Frame, tensor: torch.Tensor) -> torch.Tensor:
            shape = tuple(length(frame) for length in lengths)
            return tensor.view(-1).view(STORAGE[dtype])[: math.prod(shape)].view(shape)

        self.views.setdefault(owner.slot, []).append((info.slot, make))
        self._buffers[handle_of(node)] = info
        return info

    def allocation(self, buffer: Buffer) -> Run:
        """Code that fills a buffer with poison; the tensor itself is made once a run."""
        if str(buffer.scope()) == "shared.barrier":
            return lambda frame: None  # made with the block, where their counts stand
        info = self.declare(buffer)
        slot, bad = info.slot, poison(info.dtype)
        lengths = [self.value(length) for length in buffer.shape]
        if info.private:
            count = self.private_length(info)

            def reset(frame: Frame) -> None:
                frame[slot] = [bad] * count

            return reset

        def allocate(frame: Frame) -> None:
            shape = [length(frame) for length in lengths] if info.shape is None else info.shape
            tensor = frame[slot]
            if tensor is None or tuple(tensor.shape) != tuple(shape):
                frame[slot] = fresh_tensor(shape, info.dtype, bad)
                self.make_views(frame, slot)
            else:
                tensor.fill_(bad)

        return allocate

    def make_views(self, frame: Frame, slot: int) -> None:
        """Make, at run time, the views of a buffer whose tensor is new; all lengths are bound."""
        for view_slot, make in self.views.get(slot, ()):
            frame[view_slot] = make(frame, frame[slot])
            self.make_views(frame, view_slot)

    def note_safe_values(self, annotations: Annotations) -> None:
        """Take over `T.annotate_safe_value`: what loads out of range give."""
        for name, values in annotations.items():
            if str(name) == "safe_value_map":
                for data, value in cast(Mapping[Variable, Expression], values).items():
                    self._safe_values[handle_of(data)] = self.value(value)

    # Windows

    def spans(self, indices: Sequence[Expression]) -> list[Span] | None:
        """The window that the indices of an element access cover, or None where they need a gather."""
        spans: list[Span] = []
        extents = {lanes.axis: lanes.extent for lanes in self.axes}
        for index in indices:
            place = self.place(index)
            if place is None or any(place.axis is not None and place.axis == span.axis for span in spans):
                return None
            extent = 1 if place.axis is None else extents[place.axis]
            spans.append(Span(place.start, extent, place.axis, place.const))
        return spans

    def region(self, node: Expression, *, keep_ones: bool = False) -> Window:
        """The window of a tile operation's argument; axes of extent 1 are dropped unless kept."""
        if is_call(node) and str(node.op.name) == "tl.region":
            first_entry = cast(Load, node.args[0])
            buffer, starts, extents = first_entry.buffer, list(first_entry.indices), list(node.args[2:])
        elif kind_of(node) == "BufferRegion":
            buffer, ranges = cast(Region, node).buffer, list(cast(Region, node).region)
            starts, extents = [r.min for r in ranges], [r.extent for r in ranges]
        else:
            raise NotInterpretable(f"a tile operation on {kind_of(node)}")
        info = self.buffer(buffer)
        if info.private:
            raise NotInterpretable(f"a tile operation on the {info.scope} buffer `{info.name}`")
        codes = [self.expression(extent) for extent in extents]
        kept = [keep_ones or code.const != 1 for code in codes]
        if not any(kept):
            kept[-1] = True
        spans, rank = [], 0
        for start, extent, keep in zip(starts[len(starts) - len(codes) :], codes, kept):
            first = self.expression(start)
            length = extent.run if extent.const is None else extent.const
            spans.append(Span(first.run, length, rank if keep else None, first.const))
            rank += keep
        lead = [self.expression(start) for start in starts[: len(starts) - len(codes)]]
        return self.window(info, [*(Span(code.run, 1, None, code.const) for code in lead), *spans], rank)

    def window(self, info: BufferInfo, spans: Sequence[Span], rank: int) -> Window:
        """A window; made once with its buffer where the buffer lies on chip and the place is known beforehand."""
        if not info.on_chip or info.shape is None or not all(_is_fixed(*pair) for pair in zip(spans, info.shape)):
            return Window(info, spans, rank)
        layout = tuple((span.const, span.extent, span.axis) for span in spans)
        if layout == tuple((0, limit, axis) for axis, limit in enumerate(info.shape)) and rank == len(spans):
            return Whole(info, info.slot, rank)
        slot = self._view_slots.get((info.slot, rank, layout))
        if slot is None:
            slot = self._view_slots[info.slot, rank, layout] = self.new_slot()
            steady = Window(BufferInfo(0, info.name, info.scope, info.dtype, info.shape, info.outside), spans, rank)
            self.views.setdefault(info.slot, []).append((slot, lambda _, tensor: steady.locate([tensor])[0]))
        return Whole(info, slot, rank)

    def private_length(self, info: BufferInfo) -> int:
        """How many elements a private buffer has."""
        if info.shape is None:
            raise NotInterpretable(f"the {info.scope} buffer `{info.name}` of variable length")
        return math.prod(info.shape)


def slot_reader(slot: int) -> Run:
    """Code that reads a slot."""

    def read(frame: Frame) -> Any:
        return frame[slot]

    return read


def _is_fixed(span: Span, limit: int) -> bool:
    """Whether a span is known before the run, and within the buffer."""
    if span.const is None or not isinstance(span.extent, int):
        return False
    return span.const >= 0 and span.const + span.extent <= limit
