"""The torch.library ops of both engines, told apart by a key, and the autograd functions around them.

An attention (attentions.py) says what its ops take and do; all that torch asks of an op besides is here and in
transforms.py, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled as _profiles
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from attention_engine.runtime import attention_op, linear_op
from attention_engine.runtime.attentions import ATTENTIONS, Attention, Given
from attention_engine.runtime.batched import gradients_of, takes_batches
from attention_engine.runtime.program_kernels import Direct
from attention_engine.runtime.transforms import vmap_rule

LIBRARY = torch.library.Library("attention_engine", "DEF")
Apply = Callable[..., tuple[Tensor, ...]]
OPS: dict[str, Callable[..., Any]] = {}


def _define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], flops: Callable[..., int],
    custom: int, of_gradients: bool = False,
) -> Any:  # fmt: skip
    """Registers an op with all that torch asks of it. custom: which argument holds the custom inputs."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attention_engine::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.attention_engine, name)
    op = packet.default
    torch.library.register_vmap(op, vmap_rule(op, custom, of_gradients), lib=LIBRARY)
    register_flop_formula(packet)(flops)
    OPS[name] = op
    return op


FORWARD = _define(
    "forward", "(Tensor q, Tensor k, Tensor v, Tensor[] custom, str key) -> (Tensor, Tensor[])",
    attention_op.forward, attention_op.forward_fake, attention_op.forward_flops, 3,
)  # fmt: skip
BACKWARD = _define(
    "backward",
    "(Tensor q, Tensor k, Tensor v, Tensor[] custom, Tensor o, Tensor[] rows, Tensor d_o, Tensor[] d_rows, "
    "int[] given, int[] wanted, str key) -> (Tensor, Tensor, Tensor, Tensor[])",
    attention_op.backward, attention_op.backward_fake, attention_op.backward_flops, 3, True,
)  # fmt: skip
_LINEAR = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? initial, Tensor[] custom"
_define(
    "linear_forward", f"({_LINEAR}, bool ends, str key) -> (Tensor, Tensor)",
    linear_op.forward, linear_op.forward_fake, linear_op.forward_flops, 5,
)  # fmt: skip
_define(
    "linear_backward",
    f"({_LINEAR}, Tensor d_o, Tensor? d_last, bool[] wanted, str key) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])",
    linear_op.backward, linear_op.backward_fake, linear_op.backward_flops, 5, True,
)  # fmt: skip
STEP = _define(
    "linear_step", f"({_LINEAR.replace('initial', 'state')}, str key) -> (Tensor, Tensor)",
    linear_op.step, linear_op.step_fake, linear_op.forward_flops, 5,
)  # fmt: skip


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


def skips_dispatch(attention: Attention) -> bool:
    """Are kernels launched without the dispatcher?"""
    return attention.by_kernels and unwatched()


def _runs_opaque() -> bool:
    """May the reference run inside an op? Under a dispatch mode that is below autograd, by which it differentiates."""
    return is_compiling() or not _len_torch_dispatch_stack()


def _made(attention: Attention, form: bool, given: Given) -> tuple[Tensor, ...]:
    """All that the forward op returns."""
    run = attention.forward if skips_dispatch(attention) else OPS[attention.forward_op]
    first, rest = run(*attention.arguments(form, given))
    return (first, *rest) if isinstance(rest, (list, tuple)) else (first, rest)


def _gradients(
    attention: Attention, given: Given, kept: Sequence[Tensor], arriving: Given, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Gradients of `given`; what isn't there, or isn't wanted, may have an empty one."""
    opaque = attention.by_kernels or _runs_opaque()
    run = OPS[attention.backward_op] if opaque and not skips_dispatch(attention) else attention.backward
    *first, d_custom = run(*attention.backward_arguments(given, kept, arriving, wanted))
    return (*first, *d_custom)


class AttentionFunction(torch.autograd.Function):
    """(key, form, the launch or None, what the call is made of...) -> the results that it returns."""

    @staticmethod
    def forward(ctx: Any, key: str, form: bool, direct: Direct | None, *given: Tensor | None) -> tuple[Tensor, ...]:
        attention = ATTENTIONS[key]
        made = _made(attention, form, given) if direct is None else direct(*given)
        ctx.key, ctx.count = key, len(given)
        if attention.keeps:
            ctx.save_for_backward(*given, *made)
        else:
            ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return made[: attention.counts[int(form)]]

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward_of(ctx, ctx.saved_tensors, arriving)


def _backward_of(ctx: Any, saved: Sequence[Any], arriving: Given) -> tuple[Tensor | None, ...]:
    """The gradients of a call's arguments. saved: what it is made of, then what was kept."""
    attention, given, kept, wanted = (
        ATTENTIONS[ctx.key],
        saved[: ctx.count],
        saved[ctx.count :],
        ctx.needs_input_grad[3:],
    )
    arrived = attention.arrived(given, kept, arriving)
    if torch.is_grad_enabled() and not is_compiling():  # create_graph=True
        counts = len(given), len(arrived)
        apply: Apply = GradientFunction.apply
        found = apply(ctx.key, tuple(wanted), counts, *given, *arrived, *kept)
    else:
        found = _gradients(attention, given, kept, arrived, wanted)
    return (None, None, None, *[d if w else None for d, w in zip(found, wanted, strict=True)])


class HeadsFirstFunction(AttentionFunction):
    """The same of q, k, v and an output whose heads stand before their lengths, by a launch that takes them so."""

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        o = ctx.count - 3
        rest[o] = rest[o].transpose(1, 2)
        saved = [q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *rest]
        d_o = None if arriving[0] is None else arriving[0].transpose(1, 2)
        found = _backward_of(ctx, saved, (d_o, *arriving[1:]))
        return (None, None, None, *[d if d is None else d.transpose(1, 2) for d in found[3:6]], *found[6:])


class TransformableFunction(torch.autograd.Function):
    """The same under torch.func's transforms, which want what is kept for the backward pass among the outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, form: bool, direct: None, *given: Tensor | None) -> tuple[Tensor, ...]:
        return _made(ATTENTIONS[key], form, given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        key, form, _, *given = inputs
        attention = ATTENTIONS[key]
        ctx.save_for_backward(*given, *(output if attention.keeps else ()))
        ctx.key, ctx.count = key, len(given)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[attention.counts[int(form)] :])

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        return AttentionFunction.backward(ctx, *arriving)


class GradientFunction(torch.autograd.Function):
    """(key, which gradients are wanted, how many are given and arrive, given..., arriving..., kept...) -> gradients.

    Its own gradient is the reference's: dense, and differentiable as often as is asked for.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, wanted: tuple[bool, ...], counts: tuple[int, int], *tensors: Any) -> tuple[Tensor, ...]:
        given, rest = tensors[: counts[0]], tensors[counts[0] :]
        return _gradients(ATTENTIONS[key], given, rest[counts[1] :], rest[: counts[1]], wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        key, _, counts, *tensors = inputs
        ctx.save_for_backward(*tensors[: sum(counts)])
        ctx.key, ctx.given, ctx.kept = key, counts[0], len(tensors) - sum(counts)
        ctx.set_materialize_grads(False)

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        attention, saved = ATTENTIONS[ctx.key], ctx.saved_tensors
        wanted = ctx.needs_input_grad[3 : 3 + len(saved)]

        def make(*tensors: Tensor | None) -> list[Tensor | None]:
            return attention.differentiable(tensors[: ctx.given], tensors[ctx.given :])

        with torch.autocast(saved[0].device.type, enabled=False):
            found = gradients_of(make, saved, wanted, arriving)
        return (None, None, None, *found, *[None] * ctx.kept)


def _transformed() -> bool:
    return not is_compiling() and _are_functorch_transforms_active()


def follows(given: Given) -> bool:
    """Does autograd follow a call with these tensors? Those that a transform has wrapped don't tell."""
    if not torch.is_grad_enabled():
        return False
    return _transformed() or any([t is not None and t.requires_grad for t in given])


def run(key: str, form: bool, given: Given, direct: Direct | None = None) -> tuple[Tensor, ...]:
    """The results of a call, differentiable. direct: the launch, where it is known."""
    transformed = _transformed()
    wanted = torch.is_grad_enabled() and (transformed or any([t is not None and t.requires_grad for t in given]))
    trained = ATTENTIONS[key].trained if wanted else None
    if direct is not None and trained is None and unwatched():
        if wanted:
            given = [t if t is None else unwrap_if_dead(t) for t in given]
        return run_unwatched(key, form, given, direct, wanted)
    attention = ATTENTIONS[key]
    if in_forward_mode(*given):
        return attention.densely(form, given)
    if trained is not None:
        key, attention = trained, ATTENTIONS[trained]
    if wanted:
        apply: Apply = TransformableFunction.apply if transformed else AttentionFunction.apply
        if is_compiling():
            given = _apart(given)
        return apply(key, form, None, *given)[: attention.counts[int(form)]]
    return _made(attention, form, given)[: attention.counts[int(form)]]


def _apart(given: Given) -> Given:
    """The same without a tensor that stands there twice (keys that are values): Dynamo follows no function of such."""
    found: list[Tensor | None] = []
    for tensor in given:
        twice = tensor is not None and any([tensor is other for other in found])
        found.append(tensor.view_as(tensor) if tensor is not None and twice else tensor)
    return found


def run_unwatched(key: str, form: bool, given: Given, direct: Direct, with_gradients: bool) -> tuple[Tensor, ...]:
    """The same by a launch that is known, of tensors that no transform has wrapped, where nothing watches."""
    if with_gradients:
        if ATTENTIONS[key].trained is not None:
            return run(key, form, given)
        return _apply_once(key, form, direct, *given)
    return direct(*given)[: ATTENTIONS[key].counts[form]]


def run_heads_first(
    key: str, form: bool, given: Sequence[Tensor], direct: Direct, with_gradients: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same of heads before lengths; no output of this attention is made of another."""
    found = _apply_heads_first(key, form, direct, *given) if with_gradients else direct(*given)
    return found[: ATTENTIONS[key].counts[form]]


# apply without the look for functorch's transforms, of which there are none: 4 of its 13 us
_apply_once: Apply = super(torch.autograd.Function, AttentionFunction).apply
_apply_heads_first: Apply = super(torch.autograd.Function, HeadsFirstFunction).apply
