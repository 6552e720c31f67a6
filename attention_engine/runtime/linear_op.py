"""What the ops of a linear attention do: kernels or the recurrence, forward, backward and one token, and their fakes.

Tensors are (batch, length, heads, dim) here, decay (batch, length, heads); states are (batch, heads, dim, dim_v), fp32
(float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.expr import topological
from attention_engine.ir.linear import LinearProgram
from attention_engine.ir.program import B
from attention_engine.reference.dense import compute_dtype
from attention_engine.reference.linear import recur
from attention_engine.runtime.attentions import Attention, Given, find, outside_autocast
from attention_engine.runtime.batched import gradients_of
from attention_engine.runtime.linear_program_kernels import LinearGradients, LinearProgramKernels

Backward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What the reference computes these tensors' states in."""
    return compute_dtype(*[t for t in tensors if t is not None and t.is_floating_point()])


@outside_autocast
def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], ends: bool,
    key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output and, where it ends with one, the last state."""
    attention = find(key, LinearAttention)
    if attention.launches(q, k, v):
        assert attention.program_kernels is not None
        return attention.program_kernels.forward(q, k, v, decay, initial, custom, ends)
    output, last = attention.recur(q, k, v, decay, initial, custom)
    return output.contiguous(), last.clone() if ends else last.new_empty(0)


def forward_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], ends: bool,
    key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Results of the shapes and dtypes that forward returns."""
    by_kernels = find(key, LinearAttention).program_kernels is not None
    dtype = torch.float32 if by_kernels else state_dtype(q, decay, initial, *custom)
    shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if ends else (0,)
    output = v.new_empty(v.shape, dtype=dtype if dtype is torch.float64 else v.dtype)
    return output, v.new_empty(shape, dtype=dtype)


@outside_autocast
def backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], d_o: Tensor,
    d_last: Tensor | None, wanted: list[bool], key: str,
) -> Backward:  # fmt: skip
    """wanted: the gradients of decay and of each custom input; a tensor that isn't there has an empty one."""
    attention = find(key, LinearAttention)
    if attention.launches(q, k, v):
        assert attention.program_kernels is not None
        names = attention.names_of(wanted)
        found = attention.program_kernels.backward(q, k, v, decay, initial, custom, d_o, d_last, names)
        return as_given(attention, found, decay, initial, custom)
    return recurred(attention, (q, k, v, decay, initial, *custom), d_o, d_last)


def as_given(
    attention: LinearAttention, found: LinearGradients, decay: Tensor | None, initial: Tensor | None,
    custom: Sequence[Tensor],
) -> Backward:  # fmt: skip
    """Gradients by kernels in the dtypes and shapes of what they are of."""
    d_custom = [
        found.custom[s.name].to(c.dtype).view(c.shape) if s.name in found.custom else torch.zeros_like(c)
        for s, c in zip(attention.specs, custom, strict=True)
    ]
    d_initial = found.q.new_empty(0) if found.initial is None or initial is None else found.initial.to(initial.dtype)
    if decay is None:
        d_decay = found.q.new_empty(0)
    else:
        d_decay = torch.zeros_like(decay) if found.decay is None else found.decay.to(decay.dtype)
    return found.q, found.k, found.v, d_decay, d_initial, d_custom


def recurred(
    attention: LinearAttention, given: Sequence[Tensor | None], d_o: Tensor, d_last: Tensor | None
) -> Backward:  # fmt: skip
    """Gradients of q, k, v, decay, the initial state and the custom inputs by the reference."""
    with torch.no_grad():
        gradients = differentiable_gradients(attention, given, d_o, d_last)
    made = []
    for gradient, tensor in zip(gradients, given, strict=True):
        if gradient is None:
            gradient = d_o.new_empty(0) if tensor is None else torch.zeros_like(tensor)
        made.append(gradient.contiguous())
    return made[0], made[1], made[2], made[3], made[4], made[5:]


def backward_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], d_o: Tensor,
    d_last: Tensor | None, wanted: list[bool], key: str,
) -> Backward:  # fmt: skip
    """Gradients of the shapes and dtypes that backward returns."""
    given = (q, k, v, decay, initial)
    dq, dk, dv, d_decay, d_initial = (q.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)
    return dq, dk, dv, d_decay, d_initial, [c.new_empty(c.shape) for c in custom]


@outside_autocast
def step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: list[Tensor], key: str
) -> tuple[Tensor, Tensor]:
    """One token: the output and the next state."""
    attention = find(key, LinearAttention)
    if attention.launches(q, k, v):
        assert attention.program_kernels is not None
        return attention.program_kernels.step(q, k, v, decay, state, custom)
    output, last = attention.recur(q, k, v, decay, state, custom)
    return output.contiguous(), last.clone()


def step_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: list[Tensor], key: str
) -> tuple[Tensor, Tensor]:
    """Results of the shapes and dtypes that step returns."""
    return forward_fake(q, k, v, decay, state, custom, True, key)


def differentiable_gradients(
    attention: LinearAttention, leaves: Sequence[Tensor | None], d_o: Tensor | None, d_last: Tensor | None
) -> list[Tensor | None]:
    """Gradients of q, k, v, decay, the initial state and the custom inputs by the reference, differentiable too."""

    def make(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, *custom: Tensor
    ) -> tuple[Tensor, Tensor]:
        return attention.recur(q, k, v, decay, initial, custom)

    floats = [t is not None and t.is_floating_point() for t in leaves]
    return gradients_of(make, leaves, floats, (d_o, d_last))


def _state_products(q: Sequence[int], v: Sequence[int], products: int) -> int:
    return products * 2 * v[0] * v[1] * v[2] * q[3] * v[3]


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products of a token with the state: k^T v and q h; not the pairs by which kernels make some of them."""
    return _state_products(q, v, 2)


def backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Five: the state and its gradient, k^T v and q^T dO, and of those dQ, dK and dV."""
    return _state_products(q, v, 5)


@dataclass
class LinearAttention(Attention):
    """A linear attention; a call is made of q, k, v, the decay, the initial state (or None) and the custom inputs.

    form: is the last state returned?
    """

    engine: ClassVar[str] = "LinearAttentionEngine"
    forward_op: ClassVar[str] = "linear_forward"
    backward_op: ClassVar[str] = "linear_backward"
    forward: ClassVar[Callable[..., Any]] = staticmethod(forward)
    backward: ClassVar[Callable[..., Any]] = staticmethod(backward)
    keeps: ClassVar[bool] = False
    key: str
    program: LinearProgram
    specs: Sequence[CustomSpec]
    program_kernels: LinearProgramKernels | None  # None: the reference

    def __post_init__(self) -> None:
        self.by_kernels = self.program_kernels is not None
        self.counts = 1, 2

    @property
    def reads_batch(self) -> bool:
        return B in topological(*(e for _, e in self.program.named()))

    def names_of(self, wanted: Sequence[bool]) -> frozenset[str]:
        """Which of decay and each custom input want a gradient, by name."""
        asked = {s.name for s, w in zip(self.specs, wanted[1:], strict=True) if w}
        return frozenset(asked | ({"decay"} if wanted[0] else set()))

    def launches(self, *tensors: Tensor) -> bool:
        """Do kernels run this call? Nothing is launched for empty tensors."""
        return self.program_kernels is not None and all(t.numel() for t in tensors)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The reference."""
        return recur(self.program, q, k, v, decay, self.named(custom), initial)

    # ---- what the op adapter asks

    def arguments(self, form: bool, given: Given) -> tuple[Any, ...]:
        q, k, v, decay, initial, *custom = given
        return q, k, v, decay, initial, custom, form, self.key

    def densely(self, form: bool, given: Given) -> tuple[Tensor, ...]:
        (q, k, v), (decay, initial) = [t for t in given[:3] if t is not None], given[3:5]
        custom = [t for t in given[5:] if t is not None]
        output, last = outside_autocast(self.recur)(q, k, v, decay, initial, custom)
        return (output, last) if form else (output,)

    def arrived(self, given: Given, kept: Sequence[Tensor], arriving: Given) -> list[Tensor | None]:
        d_o, d_last = (*arriving, None)[:2]
        v = given[2]
        assert v is not None
        return [torch.zeros_like(v) if d_o is None else d_o, d_last]

    def backward_arguments(
        self, given: Given, kept: Sequence[Tensor], arriving: Given, wanted: Sequence[bool]
    ) -> tuple[Any, ...]:
        q, k, v, decay, initial, *custom = given
        return q, k, v, decay, initial, custom, *arriving, [bool(wanted[3]), *map(bool, wanted[5:])], self.key

    def begin_backward(self, given: Given) -> None:
        q, k, v, decay, _, *custom = given
        if self.program_kernels is None or q is None or k is None or v is None:
            return
        tensors = [t for t in custom if t is not None]
        wanted = {s.name for s, t in zip(self.specs, tensors, strict=True) if t.requires_grad}
        wanted |= {"decay"} if decay is not None and decay.requires_grad else set()
        self.program_kernels.begin_backward(q, k, v, decay, tensors, frozenset(wanted))

    def differentiable(self, given: Given, arriving: Given) -> list[Tensor | None]:
        return differentiable_gradients(self, given, *arriving)
