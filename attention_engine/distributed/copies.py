"""Copies of tensors whose rows stand apart in memory, as those of some of the heads do.

torch copies such a tensor an element at a time. With 2 bytes an element the memory waits for instructions, so the same
bytes are copied as elements of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = torch.complex128
BYTES = 16  # of an element of WIDE


def copy(what: Tensor, into: Tensor) -> None:
    """Copies between tensors of one shape and dtype, by wide elements where both allow it."""
    wide = _wide(what), _wide(into)
    if wide[0] is None or wide[1] is None:
        into.copy_(what)
    else:
        wide[1].copy_(wide[0])


def packed(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous, else a contiguous copy."""
    if tensor.is_contiguous():
        return tensor
    found = tensor.new_empty(tensor.shape)
    copy(tensor, found)
    return found


def _wide(tensor: Tensor) -> Tensor | None:
    """The same memory as wide elements. None where the last dimension isn't contiguous, or where a wide element doesn't
    divide it, another stride, or the start."""
    count = BYTES // tensor.element_size()
    *strides, last = tensor.stride()
    divided = [tensor.shape[-1], tensor.storage_offset(), *strides]
    if last != 1 or any(n % count for n in divided) or tensor.data_ptr() % BYTES:
        return None
    return tensor.view(WIDE)
