"""What of a GPU is asked in every call: the stream, the current GPU, whether a graph is captured, an allocation.

torch's own functions for these are private. Where one is gone, or torch has no CUDA, its public name takes a
microsecond more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["EMPTY", "captures", "current_gpu", "is_capturing", "maker", "raw_stream", "stream_of"]

try:
    from torch._C import _cuda_getCurrentRawStream as raw_stream
except ImportError:

    def raw_stream(device: int) -> int:
        """The stream on which kernels run now, of the GPU with this number."""
        return int(torch.cuda.current_stream(device).cuda_stream)


try:
    from torch._C import _cuda_getDevice as current_gpu
    from torch._C import _cuda_isCurrentStreamCapturing as captures
except ImportError:
    current_gpu, captures = torch.cuda.current_device, torch.cuda.is_current_stream_capturing

EMPTY: dict[str, Any] = {}  # by a device's kind: what torch's compiled code allocates by
try:
    from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]
except ImportError:
    pass
else:
    EMPTY |= {"cpu": _empty_strided_cpu, "cuda": _empty_strided_cuda}


def stream_of(device: torch.device) -> int:
    """The stream on which kernels run now; 0 of a CPU. What is made there is there for whoever comes later."""
    if device.type != "cuda":
        return 0
    if device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return int(raw_stream(device.index))


def is_capturing(device: torch.device) -> bool:
    """Is a graph captured? It owns what it was captured on."""
    return device.type == "cuda" and bool(captures())


def maker(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, order: Sequence[int] | None = None
) -> Callable[[], Tensor]:  # fmt: skip
    """Allocates such tensors; on the current GPU, or a CPU, in half the time that torch's public functions take.

    order: of the dims in memory, the last is contiguous; None: as in the shape.
    """
    places = [*(range(len(shape)) if order is None else order)]
    inner = torch.empty([shape[n] for n in places], device="meta")
    like = inner.permute(*[places.index(n) for n in range(len(places))])
    of_any = functools.partial(torch.empty_strided, tuple(shape), like.stride(), dtype=dtype, device=device)
    empty = EMPTY.get(device.type)
    if empty is None:
        return of_any
    here = functools.partial(empty, tuple(shape), like.stride(), dtype)
    if device.type == "cpu":
        return here
    place = device.index or 0

    def make() -> Tensor:
        made: Tensor = here() if current_gpu() == place else of_any()
        return made

    return make
