"""What may watch a call: where nothing does, kernels are launched without torch's dispatcher."""

from __future__ import annotations

from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled as _profiles
from torch.autograd import forward_ad
from torch.compiler import is_compiling


def unwatched() -> bool:
    """May kernels be launched without the dispatcher (a third of a call's host time)? Not where something watches ops:
    a compiler, a dispatch mode, a functorch transform, a profiler."""
    return not (is_compiling() or watched() or _are_functorch_transforms_active())


def watched() -> bool:
    """Does a dispatch mode, a profiler or forward-mode autograd watch? Guards see what else may: it changes keys."""
    return bool(_len_torch_dispatch_stack() or _profiles() or forward_ad._current_level >= 0)


def in_forward_mode(*tensors: Tensor | None) -> bool:
    """Does forward-mode autograd follow these tensors? Kernels have no derivative of that kind: the reference has."""
    if forward_ad._current_level < 0:
        return False
    if _are_functorch_transforms_active():  # whose wrapped tensors don't tell
        return True
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)
