"""The torch.library ops of linear attention, told apart by a key, and the autograd function around them.

Tensors are (batch, length, heads, dim) here, decay (batch, length, heads); states are (batch, heads, dim, dim_v), fp32
(float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.linear import LinearProgram
from attention_engine.reference.dense import compute_dtype
from attention_engine.reference.linear import recur
from attention_engine.runtime.batched import gradients_of, takes_batches
from attention_engine.runtime.linear_launch import LinearLauncher
from attention_engine.runtime.op import LIBRARY, runs_opaque
from attention_engine.runtime.op import _outside_autocast as outside_autocast
from attention_engine.runtime.watching import in_forward_mode


@dataclass
class LinearAttention:
    """One traced program with the way it runs: what a key of the ops stands for."""

    program: LinearProgram
    specs: Sequence[CustomSpec]
    launcher: LinearLauncher | None  # None: the reference

    def named(self, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        """Custom inputs by name."""
        return {s.name: c for s, c in zip(self.specs, custom, strict=True)}

    def launches(self, *tensors: Tensor) -> bool:
        """Do kernels run this call? Nothing is launched for empty tensors."""
        return self.launcher is not None and all(t.numel() for t in tensors)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The reference."""
        return recur(self.program, q, k, v, decay, self.named(custom), initial)


LINEAR_ATTENTIONS: dict[str, LinearAttention] = {}
LIBRARY.define(
    "linear_forward(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? initial, Tensor[] custom, bool ends, str key) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define(
    "linear_backward(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? initial, Tensor[] custom, Tensor d_o, "
    "Tensor? d_last, bool[] wanted, str key) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
)
LIBRARY.define(
    "linear_step(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? state, Tensor[] custom, str key) "
    "-> (Tensor, Tensor)"
)


def _state_dtype(*tensors: Tensor | None) -> torch.dtype:
    return compute_dtype(*[t for t in tensors if t is not None and t.is_floating_point()])


@outside_autocast
def _forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], ends: bool,
    key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    attention = LINEAR_ATTENTIONS[key]
    if attention.launches(q, k, v):
        assert attention.launcher is not None
        return attention.launcher.forward(q, k, v, decay, initial, custom, ends)
    output, last = attention.recur(q, k, v, decay, initial, custom)
    return output.contiguous(), last.clone() if ends else last.new_empty(0)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], ends: bool,
    key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    by_kernels = LINEAR_ATTENTIONS[key].launcher is not None
    dtype = torch.float32 if by_kernels else _state_dtype(q, decay, initial, *custom)
    shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if ends else (0,)
    output = v.new_empty(v.shape, dtype=dtype if dtype is torch.float64 else v.dtype)
    return output, v.new_empty(shape, dtype=dtype)


@outside_autocast
def _backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], d_o: Tensor,
    d_last: Tensor | None, wanted: list[bool], key: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    attention = LINEAR_ATTENTIONS[key]
    if attention.launches(q, k, v):
        assert attention.launcher is not None
        asked = {s.name for s, w in zip(attention.specs, wanted[1:], strict=True) if w}
        names = frozenset(asked | ({"decay"} if wanted[0] else set()))
        found = attention.launcher.backward(q, k, v, decay, initial, custom, d_o, d_last, names)
        d_custom = [
            found.custom[s.name].to(c.dtype).view(c.shape) if s.name in found.custom else torch.zeros_like(c)
            for s, c in zip(attention.specs, custom, strict=True)
        ]
        d_initial = q.new_empty(0) if found.initial is None or initial is None else found.initial.to(initial.dtype)
        if decay is None:
            d_decay = q.new_empty(0)
        else:
            d_decay = torch.zeros_like(decay) if found.decay is None else found.decay.to(decay.dtype)
        return found.q, found.k, found.v, d_decay, d_initial, d_custom
    given = (q, k, v, decay, initial, *custom)
    with torch.no_grad():
        gradients = differentiable_gradients(attention, given, d_o, d_last)
    made = [
        q.new_empty(0) if t is None else torch.zeros_like(t) if g is None else g.contiguous()
        for g, t in zip(gradients, given, strict=True)
    ]
    return made[0], made[1], made[2], made[3], made[4], made[5:]


def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: list[Tensor], d_o: Tensor,
    d_last: Tensor | None, wanted: list[bool], key: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    given = (q, k, v, decay, initial)
    dq, dk, dv, d_decay, d_initial = (q.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)
    return dq, dk, dv, d_decay, d_initial, [c.new_empty(c.shape) for c in custom]


@outside_autocast
def _step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: list[Tensor], key: str
) -> tuple[Tensor, Tensor]:
    attention = LINEAR_ATTENTIONS[key]
    if attention.launches(q, k, v):
        assert attention.launcher is not None
        return attention.launcher.step(q, k, v, decay, state, custom)
    output, last = attention.recur(q, k, v, decay, state, custom)
    return output.contiguous(), last.clone()


def _step_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: list[Tensor], key: str
) -> tuple[Tensor, Tensor]:
    return _forward_fake(q, k, v, decay, state, custom, True, key)


_OPS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("linear_forward", _forward, _forward_fake),
    ("linear_backward", _backward, _backward_fake),
    ("linear_step", _step, _step_fake),
)
for _name, _run, _fake in _OPS:
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attention_engine::{_name}", _fake, lib=LIBRARY)
FORWARD = torch.ops.attention_engine.linear_forward.default
BACKWARD = torch.ops.attention_engine.linear_backward.default
STEP = torch.ops.attention_engine.linear_step.default


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


class LinearFunction(torch.autograd.Function):
    """(key, ends, q, k, v, decay, initial state, custom inputs...) -> (o, last state)."""

    @staticmethod
    def forward(
        ctx: Any, key: str, ends: bool, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None,
        *custom: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        output, last = FORWARD(q, k, v, decay, initial, list(custom), ends, key)
        ctx.save_for_backward(q, k, v, decay, initial, *custom)
        ctx.key, ctx.ends = key, ends
        ctx.set_materialize_grads(False)
        if not ends:
            ctx.mark_non_differentiable(last)
        return output, last

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        d_o, d_last = arriving
        q, k, v, decay, initial, *custom = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        wanted = (bool(needs[3]), *(bool(n) for n in needs[5:]))
        if d_o is None:
            d_o = torch.zeros_like(v)
        given = (q, k, v, decay, initial, d_o, d_last if ctx.ends else None, *custom)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            found = LinearGradientFunction.apply(ctx.key, wanted, *given)
        else:
            found = _gradients(ctx.key, wanted, *given)
        return (None, None, *(g if n else None for g, n in zip(found, needs, strict=True)))


class TransformableLinearFunction(LinearFunction):
    """The same under torch.func's transforms, which want contexts set up apart."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        key: str, ends: bool, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None,
        *custom: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return FORWARD(q, k, v, decay, initial, list(custom), ends, key)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.key, ctx.ends, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if not ctx.ends:
            ctx.mark_non_differentiable(output[1])


class LinearGradientFunction(torch.autograd.Function):
    """(key, wanted, q, k, v, decay, initial state, d_o, d_last, custom...) -> (dq, dk, dv, d_decay, d_initial,
    d_custom...).

    wanted: the gradients of decay and of each custom input. Its own gradient is the reference's, differentiable as
    often as is asked for.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, wanted: tuple[bool, ...], *given: Tensor) -> tuple[Tensor, ...]:
        return _gradients(key, wanted, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.key, _, *given = inputs
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        attention = LINEAR_ATTENTIONS[ctx.key]
        given, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]

        def make(*given: Tensor | None) -> list[Tensor | None]:
            return differentiable_gradients(attention, (*given[:5], *given[7:]), *given[5:7])

        with torch.autocast(given[0].device.type, enabled=False):
            return (None, None, *gradients_of(make, given, wanted, arriving))


def _gradients(
    key: str, wanted: Sequence[bool], q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None,
    d_o: Tensor, d_last: Tensor | None, *custom: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    opaque = LINEAR_ATTENTIONS[key].launcher is not None or runs_opaque()
    run_backward = BACKWARD if opaque else _backward
    *first, d_custom = run_backward(q, k, v, decay, initial, list(custom), d_o, d_last, list(wanted), key)
    return (*first, *d_custom)


def _transformed() -> bool:
    return not torch.compiler.is_compiling() and _are_functorch_transforms_active()


def follows(*tensors: Tensor | None) -> bool:
    """Does autograd follow a call with these tensors? Those that a transform has wrapped don't tell."""
    return torch.is_grad_enabled() and (_transformed() or any(t is not None and t.requires_grad for t in tensors))


def run(
    key: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
    ends: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output and, where asked for, the last state; differentiable."""
    if in_forward_mode(q, k, v, decay, initial, *custom):
        return outside_autocast(LINEAR_ATTENTIONS[key].recur)(q, k, v, decay, initial, custom)  # type: ignore[no-any-return]
    if follows(q, k, v, decay, initial, *custom):
        function = TransformableLinearFunction if _transformed() else LinearFunction
        return function.apply(key, ends, q, k, v, decay, initial, *custom)  # type: ignore[no-any-return]
    return FORWARD(q, k, v, decay, initial, list(custom), ends, key)  # type: ignore[no-any-return]
