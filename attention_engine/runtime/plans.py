"""What a launch needs that depends on shapes, strides and dtypes alone: worked out once for each, then looked up.

Host time counts where kernels are short, and most of it went into asking tensors the same questions at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_engine.compiler import Kernels
from attention_engine.runtime.tile_maps import custom_arguments

Direct = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, list[Tensor]]]

MOST_PLANS = 4096
ALIGNED = 16  # bytes: what a kernel's wide reads and TMA want of an address


def as_parameter(tensor: Tensor) -> Tensor:
    """A custom input as kernels take it."""
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.uint8)
    elif tensor.dtype is torch.float64:
        tensor = tensor.float()
    tensor = tensor.contiguous()
    return tensor.view(1) if tensor.ndim == 0 else tensor


@functools.lru_cache(maxsize=MOST_PLANS)
def stride_steps(shape: torch.Size, strides: tuple[int, ...], unit: int) -> tuple[int, ...] | None:
    """The strides in units; None where they don't fit a kernel's wide reads."""
    steps = [step if size > 1 else unit * shape[3] for size, step in zip(shape[:3], strides, strict=False)]
    if strides[3] != 1 or any(s <= 0 or s % unit for s in steps):
        return None
    return tuple(s // unit for s in steps)


def with_strides(tensor: Tensor, unit: int) -> list[int | Tensor]:
    """The strides in units and the tensor; a copy where a stride doesn't fit a kernel's wide reads."""
    steps = stride_steps(tensor.shape, tensor.stride(), unit)
    if steps is None or (unit != 1 and tensor.data_ptr() % ALIGNED):
        return with_strides(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor), unit)
    return [*steps, tensor]


@functools.lru_cache(maxsize=64)
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)


@functools.lru_cache(maxsize=MOST_PLANS)
def template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element seen as a tensor of this shape. torch.empty_like of it is contiguous, and the quickest allocation."""
    return _one(dtype, device).expand(*shape)


@dataclass(frozen=True)
class LaunchPlan:
    """The kernels for tensors of one signature, their strides in order, and what the forward pass allocates."""

    kernels: Kernels
    steps: tuple[tuple[int, ...] | None, ...]  # of q, k, v
    output: Tensor
    rows: tuple[Tensor, ...]
    unit: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", self.kernels.problem.stride_unit)

    @staticmethod
    def make(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, rows: int) -> LaunchPlan:
        """For tensors like these; rows: how many the forward pass writes."""
        batch, queries, heads, _ = q.shape
        unit = kernels.problem.stride_unit
        return LaunchPlan(
            kernels,
            tuple(stride_steps(t.shape, t.stride(), unit) for t in (q, k, v)),
            template((batch, queries, heads, v.shape[3]), q.dtype, q.device),
            (template((batch, heads, queries), torch.float32, q.device),) * rows,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The forward pass where no tile map is needed: the output, contiguous, and the rows."""
        custom = [as_parameter(c) for c in custom] if custom else custom
        output, rows = self.results()
        self.kernels.forward.run(*self.inputs(q, k, v, custom), output, *rows)
        return output, rows

    def direct(self) -> Direct:
        """`forward`, with all that it looks up bound beforehand: a twentieth of a call's host time."""
        of_q, of_k, of_v = self.steps
        if of_q is None or of_k is None or of_v is None or self.kernels.problem.staged:
            return self.forward
        run, output, rows, empty_like = self.kernels.forward.run, self.output, self.rows, torch.empty_like
        misaligned = 0 if self.unit == 1 else ALIGNED - 1

        def launch(q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & misaligned:
                return self.forward(q, k, v, custom)
            found = empty_like(output), [empty_like(row) for row in rows]
            run(*of_q, q, *of_k, k, *of_v, v, *map(as_parameter, custom), found[0], *found[1])
            return found

        return launch

    def results(self) -> tuple[Tensor, list[Tensor]]:
        """Memory for the output and the rows of the forward pass."""
        return torch.empty_like(self.output), [torch.empty_like(row) for row in self.rows]

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[int | Tensor]) -> list[int | Tensor]:
        """The first arguments of every kernel; copies of tensors whose strides or addresses don't fit."""
        if self.kernels.problem.staged:
            custom = custom_arguments(self.kernels.problem, custom)
        of_q, of_k, of_v = self.steps
        aligned = self.unit == 1 or not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED
        if aligned and of_q is not None and of_k is not None and of_v is not None:
            return [*of_q, q, *of_k, k, *of_v, v, *custom]
        unit = self.unit
        return [*with_strides(q, unit), *with_strides(k, unit), *with_strides(v, unit), *custom]
