"""Rectangles of buffers as strided views: outside a tensor, reads give a fixed value and stores are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention_engine.codegen.tiles.scalar_ops import STORAGE, Value, is_float
from attention_engine.errors import NotInterpretable

Frame = list[Any]  # the values of one run, by slot
Run = Callable[[Frame], Value]
Crop = tuple[slice, ...]


class Jump(Exception):
    """The end of a loop, of one of its steps, or of a block."""


ON_CHIP_PREFIXES = ("shared", "local")


@dataclass(frozen=True)
class BufferInfo:
    """A buffer of the program: where its tensor lies in the frame, and what is known of it before the run."""

    slot: int
    name: str
    scope: str
    dtype: str
    shape: tuple[int, ...] | None  # None where a length is known at run time only
    outside: Run  # what a load out of range gives

    @property
    def on_chip(self) -> bool:
        """Shared memory and registers, where an access out of range is a fault rather than a guarded one."""
        return self.scope.startswith(ON_CHIP_PREFIXES)

    @property
    def private(self) -> bool:
        """Variables that each thread has for itself: within a parallel nest, one value for each lane."""
        return self.scope in ("local", "local.var")


@dataclass(frozen=True)
class Span:
    """The part of one buffer dimension that a window covers; `axis` is the tile's axis, None for a single index."""

    start: Run
    extent: int | Run
    axis: int | None
    const: int | None = None  # the start, where it is known before the run


class Window:
    """A tile of a buffer whose place is known at run time."""

    __slots__ = ("buffer", "rank", "spans")

    def __init__(self, buffer: BufferInfo, spans: Sequence[Span], rank: int) -> None:
        self.buffer = buffer
        self.spans = tuple(spans)
        self.rank = rank

    def locate(self, frame: Frame) -> tuple[torch.Tensor, list[int], Crop | None]:
        """The view of what exists, the tile's whole size, and where the view lies in the tile (None: it is all)."""
        tensor = frame[self.buffer.slot]
        limits, strides = tensor.shape, tensor.stride()
        offset = tensor.storage_offset()
        size, step = [1] * self.rank, [0] * self.rank
        bounds: dict[int, slice] = {}
        for span, limit, stride in zip(self.spans, limits, strides):
            first = span.start(frame)
            axis = span.axis
            if axis is None:
                if not 0 <= first < limit:
                    bounds[0] = slice(0, 0)
                    continue
            else:
                extent = span.extent if isinstance(span.extent, int) else span.extent(frame)
                size[axis], step[axis] = extent, stride
                if first < 0 or first + extent > limit:
                    begin = min(max(-first, 0), extent)
                    bounds.setdefault(axis, slice(begin, max(begin, min(extent, limit - first))))
                    first += begin
            offset += first * stride
        if not bounds:
            return tensor.as_strided(size, step, offset), size, None
        crop = tuple(bounds.get(axis, slice(0, extent)) for axis, extent in enumerate(size))
        inside = [part.stop - part.start for part in crop]
        return tensor.as_strided(inside, step, 0 if 0 in inside else offset), size, crop

    def read(self, frame: Frame) -> torch.Tensor:
        """The tile; a view where all of it exists."""
        view, size, crop = self.locate(frame)
        if crop is None:
            return view
        tile = torch.full(size, self.buffer.outside(frame), dtype=view.dtype)
        tile[crop] = view
        return tile

    def write(self, frame: Frame, value: Value) -> None:
        """Store a tile or one number; what lies outside a global tensor is dropped."""
        view, size, crop = self.locate(frame)
        if crop is not None:
            self.refuse_on_chip()
            value = cropped(value, size, crop)
        if isinstance(value, torch.Tensor):
            view.copy_(value)
        else:
            view.fill_(value)

    def write_where(self, frame: Frame, mask: torch.Tensor, value: Value) -> None:
        """Store the lanes that the mask names."""
        view, size, crop = self.locate(frame)
        if crop is not None:
            active = int(mask.expand(size).sum())
            mask = mask.expand(size)[crop]
            if self.buffer.on_chip and active != int(mask.sum()):
                self.refuse_on_chip()
            value = cropped(value, size, crop)
        view.copy_(torch.where(mask, value, view))

    def refuse_on_chip(self) -> None:
        """Raise for an access that no guard protects on a GPU."""
        if self.buffer.on_chip:
            raise store_outside(self.buffer)


class Whole(Window):
    """A tile of a buffer on chip whose place never changes: its view is made once, when the buffer is."""

    __slots__ = ("slot",)

    def __init__(self, buffer: BufferInfo, slot: int, rank: int) -> None:
        super().__init__(buffer, (), rank)
        self.slot = slot

    def locate(self, frame: Frame) -> tuple[torch.Tensor, list[int], Crop | None]:
        """The view itself."""
        view: torch.Tensor = frame[self.slot]
        return view, list(view.shape), None

    def read(self, frame: Frame) -> torch.Tensor:
        """The view itself."""
        view: torch.Tensor = frame[self.slot]
        return view


def store_outside(buffer: BufferInfo) -> NotInterpretable:
    """The error for a store that no guard protects on a GPU."""
    return NotInterpretable(
        f"a store outside the {buffer.scope} buffer `{buffer.name}`", "Guard it: a GPU would write over other memory."
    )


def cropped(value: Value, size: Sequence[int], crop: Crop) -> Value:
    """The part of a tile-shaped (or broadcast) value that lies in the crop."""
    return value.expand(size)[crop] if isinstance(value, torch.Tensor) and value.ndim else value


def gather(tensor: torch.Tensor, indices: Sequence[Value], outside: float | int) -> torch.Tensor:
    """Elements at any indices, numbers or lanes; those out of range give `outside`."""
    valid: Any = None
    safe: list[Value] = []
    for index, limit in zip(indices, tensor.shape):
        if isinstance(index, torch.Tensor):
            if index.numel() and limit:
                lowest, highest = index.aminmax()
                if lowest >= 0 and highest < limit:
                    safe.append(index)
                    continue
            good = (index >= 0) & (index < limit)
            index = index.clamp(0, max(limit - 1, 0))
        else:
            good = torch.tensor(0 <= index < limit)
            if good:
                safe.append(index)
                continue
            index = 0
        valid = good if valid is None else valid & good
        safe.append(index)
    if valid is None:
        return tensor[tuple(safe)]
    if tensor.numel() == 0:
        shape = torch.broadcast_shapes(*(index.shape for index in indices if isinstance(index, torch.Tensor)))
        return torch.full(shape, outside, dtype=tensor.dtype)
    return torch.where(valid, tensor[tuple(safe)], torch.tensor(outside, dtype=tensor.dtype))


def scatter(
    buffer: BufferInfo,
    tensor: torch.Tensor,
    indices: Sequence[Value],
    value: Value,
    mask: torch.Tensor | None,
    lanes: Sequence[int],
    *,
    accumulate: bool = False,
) -> None:
    """Store, or add, lanes at any indices; lanes out of a global tensor's range are dropped."""
    columns = [torch.as_tensor(index).expand(lanes) for index in indices]
    inside: torch.Tensor = torch.ones((), dtype=torch.bool)
    for column, limit in zip(columns, tensor.shape):
        inside = inside & (column >= 0) & (column < limit)
    active = torch.ones(list(lanes), dtype=torch.bool) if mask is None else mask.expand(lanes)
    chosen = active & inside
    if buffer.on_chip and not torch.equal(chosen, active):
        raise store_outside(buffer)
    values = torch.as_tensor(value).to(tensor.dtype).expand(lanes)[chosen]
    tensor.index_put_(tuple(column[chosen] for column in columns), values, accumulate=accumulate)


def fresh_tensor(shape: Sequence[int], dtype: str, value: float | int | bool) -> torch.Tensor:
    """A tensor full of one value (8-bit floats cannot be filled directly)."""
    storage = STORAGE[dtype]
    if is_float(dtype) and storage.itemsize == 1:
        return torch.full(list(shape), value, dtype=torch.float32).to(storage)
    return torch.full(list(shape), value, dtype=storage)
