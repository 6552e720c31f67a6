"""Calls that passed every check once, and need none again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_engine.runtime.program_kernels import Direct

try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:  # torch's own, and not public: without them a call is looked up by its signature
    TensorGuards: Any = None
else:
    TensorGuards = _TensorGuards


class Again(NamedTuple):
    """A seen call of tensors of which some, or none, ask for gradients.

    fits: torch's guards, which look at dtype, device, shape, strides, requires_grad and dispatch keys of all tensors in
    a fifth of the time that it takes Python; not at whether autograd is on. size: how many tensors.
    """

    form: object
    fits: Callable[..., bool]
    size: int
    key: str
    direct: Direct
    requires_grad: bool


@dataclass(frozen=True)
class Seen:
    """What a call of a known signature runs: the key of its op, and the launch where nothing else need be asked."""

    key: str
    device: str
    direct: Direct | None
    kinds: dict[tuple[bool, ...], Again] = field(default_factory=dict, compare=False)

    def again(self, form: object, *tensors: Tensor) -> Again | None:
        """The call of tensors like these, which nothing watches."""
        if self.direct is None or TensorGuards is None:
            return None
        required = [t.requires_grad for t in tensors]
        kind = (torch.is_inference_mode_enabled(), *required)
        if kind not in self.kinds:
            fits = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            self.kinds[kind] = Again(form, fits, len(tensors), self.key, self.direct, any(required))
        return self.kinds[kind]
