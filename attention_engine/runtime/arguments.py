"""Tensors as kernels take them: dtypes, strides, addresses; and memory for results.

Host time counts where kernels are short, and most of it went into asking tensors the same questions at every call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

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


def goes_straight(into: Tensor | None) -> bool:
    """Can a kernel write a result there?"""
    return into is not None and into.is_contiguous() and not into.data_ptr() % ALIGNED


def placed(found: Tensor, into: Tensor | None) -> Tensor:
    """A result where it was asked to go: copied there, unless a kernel wrote it there."""
    return found if into is None or found is into else into.copy_(found)


@functools.lru_cache(maxsize=64)
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)


@functools.lru_cache(maxsize=MOST_PLANS)
def template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element seen as a tensor of this shape. torch.empty_like of it is contiguous, and the quickest allocation."""
    return _one(dtype, device).expand(*shape)
