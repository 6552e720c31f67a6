"""The torch.library ops: one pair for all programs, told apart by a key, and the autograd function around them.

Tensors are (batch, length, heads, dim) here; rows are (batch, heads, queries), fp32 (float64 for float64 inputs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._functorch import unwrap_if_dead
from torch.compiler import is_compiling

from attention_engine.errors import RowNotDifferentiable
from attention_engine.reference.dense import attend, attend_backward, compute_dtype
from attention_engine.runtime.attentions import ATTENTIONS, Attention, find
from attention_engine.runtime.batched import gradients_of, takes_batches
from attention_engine.runtime.bent import bend_output, bent_gradients
from attention_engine.runtime.inputs import is_cast
from attention_engine.runtime.launch import Direct
from attention_engine.runtime.watching import in_forward_mode, unwatched

LIBRARY = torch.library.Library("attention_engine", "DEF")
LIBRARY.define("forward(Tensor q, Tensor k, Tensor v, Tensor[] custom, str key) -> (Tensor, Tensor[])")
LIBRARY.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor[] custom, Tensor o, Tensor[] rows, Tensor d_o, Tensor[] d_rows, "
    "int[] given, int[] wanted, str key) -> (Tensor, Tensor, Tensor, Tensor[])"
)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def _outside_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """q, k, v were cast where the engine was called; the reference's own products keep their dtype."""

    @functools.wraps(run)
    def plain(q: Tensor, *rest: Any) -> Any:
        if not is_cast(q):
            return run(q, *rest)
        with torch.autocast(q.device.type, enabled=False):
            return run(q, *rest)

    return plain


def _forward(q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], key: str) -> tuple[Tensor, list[Tensor]]:
    attention = find(key)
    if attention.launcher is None or not (q.numel() and k.numel() and v.numel()):
        return _forward_dense(q, k, v, custom, attention)
    if attention.bend is None:
        return attention.launcher.forward(q, k, v, custom)
    inner, rows = attention.launcher.forward_in_range(q, k, v, custom)
    output = bend_output(attention.bend, inner, attention.named_rows(rows), attention.named(custom))
    return output.to(q.dtype), [*rows, inner]


@_outside_autocast
def _forward_dense(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], attention: Attention
) -> tuple[Tensor, list[Tensor]]:
    every = attention.maths.program.returning(attention.maths.forward_schedule.rows)
    output, rows = attend(every, *_heads_first(q, k, v), attention.named(custom))
    output, rows = output.transpose(1, 2).contiguous(), [r.contiguous() for r in rows]
    return output, rows if attention.bend is None else [*rows, torch.zeros_like(output, dtype=attention.inner_dtype(q))]


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], key: str) -> tuple[Tensor, list[Tensor]]:
    attention = find(key)
    rows = (
        compute_dtype(q, *[c for c in custom if c.is_floating_point()]) if attention.launcher is None else torch.float32
    )
    output = q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    made = [q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=rows) for _ in attention.row_names]
    return output, made if attention.bend is None else [*made, torch.empty_like(output, dtype=attention.inner_dtype(q))]


def _backward(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], o: Tensor, rows: list[Tensor], d_o: Tensor,
    d_rows: list[Tensor], given: list[int], wanted: list[int], key: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """given: which rows d_rows are of; wanted: the custom inputs that want a gradient (others get an empty tensor)."""
    attention = find(key)
    d_finals = {attention.row_names[n]: d for n, d in zip(given, d_rows, strict=True)} if given else {}
    if attention.launcher is not None and q.numel() and k.numel() and v.numel():
        names = [attention.specs[n].name for n in wanted]
        if attention.bend is not None:
            *rows, o = rows
            bent = bent_gradients(attention.bend, o, attention.named_rows(rows), attention.named(custom), d_o)
            d_o, d_finals = bent.output, d_finals | {n: d + d_finals.get(n, 0.0) for n, d in bent.rows.items()}
        dq, dk, dv, found = attention.launcher.backward(q, k, v, custom, o, rows, d_o, d_finals, names)
        if attention.bend is not None:
            found |= {n: d + found.get(n, 0.0) for n, d in bent.custom.items()}
        d_custom = [
            found[s.name].to(c.dtype) if s.name in found else torch.zeros_like(c)
            for s, c in zip(attention.specs, custom, strict=True)
            if s.name in names
        ]
        return dq, dk, dv, _spread([d.contiguous() for d in d_custom], custom, wanted)
    return _backward_dense(q, k, v, custom, d_o, d_finals, wanted, attention)


@_outside_autocast
def _backward_dense(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], d_o: Tensor, d_finals: Mapping[str, Tensor],
    wanted: list[int], attention: Attention,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    leaves = (q, k, v, *custom)
    with torch.no_grad():
        gradients = differentiable_gradients(attention, leaves, d_o, d_finals)
    dq, dk, dv, *d_custom = (torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves, strict=True))
    asked = [d_custom[n].contiguous() for n in wanted]
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), _spread(asked, custom, wanted)


def _spread(gradients: Sequence[Tensor], custom: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """One tensor for each custom input: an empty one where no gradient is wanted."""
    asked = dict(zip(wanted, gradients, strict=True))
    return [asked[n] if n in asked else c.new_empty(0) for n, c in enumerate(custom)]


def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], o: Tensor, rows: list[Tensor], d_o: Tensor,
    d_rows: list[Tensor], given: list[int], wanted: list[int], key: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, _spread([custom[n].new_empty(custom[n].shape) for n in wanted], custom, wanted)


for _name, _run, _fake in (("forward", _forward, _forward_fake), ("backward", _backward, _backward_fake)):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attention_engine::{_name}", _fake, lib=LIBRARY)
FORWARD = torch.ops.attention_engine.forward.default
BACKWARD = torch.ops.attention_engine.backward.default


def skips_dispatch(attention: Attention) -> bool:
    """Are kernels launched without the dispatcher?"""
    return attention.launcher is not None and unwatched()


def runs_opaque() -> bool:
    """May the reference run inside an op? Under a dispatch mode that is below autograd, by which it differentiates."""
    return is_compiling() or not _len_torch_dispatch_stack()


def differentiable_gradients(
    attention: Attention, leaves: Sequence[Tensor], d_o: Tensor, d_finals: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """Gradients of q, k, v and the custom inputs by the reference, which can be differentiated too."""
    q, k, v, *custom = leaves
    program, named, heads = attention.program, attention.named(custom), _heads_first(q, k, v)
    if program.backward is not None and attention.maths.backward is not None:
        backward = attention.maths.backward
        output, saved = attend(program.returning(backward.saved), *heads, named)
        delta = (output.to(saved[0].dtype if saved else output.dtype) * d_o.transpose(1, 2)).sum(-1)
        found = attend_backward(program, backward, *heads, named, saved, delta, d_o.transpose(1, 2), d_finals)
        return [*_heads_first(found.q, found.k, found.v), *(found.custom.get(s.name) for s in attention.specs)]
    finals = [n for n, _ in program.finals]

    def make(q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> list[Tensor]:
        output, rows = attend(program, *_heads_first(q, k, v), attention.named(custom))
        return [output, *rows]

    arriving = [d_o.transpose(1, 2), *(d_finals.get(n) for n in finals)]
    return gradients_of(make, leaves, [t.is_floating_point() for t in leaves], arriving)


class AttentionFunction(torch.autograd.Function):
    """(key, with the program's rows?, the launch or None, q, k, v, custom inputs...) -> (o, rows...)."""

    @staticmethod
    def forward(
        ctx: Any, key: str, with_rows: bool, direct: Direct | None, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor
    ) -> tuple[Tensor, ...]:
        attention = ATTENTIONS[key]
        if direct is not None:
            output, rows = direct(q, k, v, custom)
        else:
            run_forward = _forward if skips_dispatch(attention) else FORWARD
            output, rows = run_forward(q, k, v, list(custom), key)
        ctx.save_for_backward(q, k, v, *custom, output, *rows)
        ctx.key, ctx.customs = key, len(custom)
        ctx.set_materialize_grads(False)
        return (output, *rows[: attention.returned]) if with_rows else (output,)

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        attention = ATTENTIONS[ctx.key]
        q, k, v, *rest = ctx.saved_tensors
        custom, output, rows = rest[: ctx.customs], rest[ctx.customs], rest[ctx.customs + 1 :]
        d_o, *d_rows = arriving
        given = [n for n, d in enumerate(d_rows) if d is not None]
        if attention.maths.backward is None and attention.launcher is not None:
            assert attention.maths.refusal is not None
            raise attention.maths.refusal
        wanted = ctx.needs_input_grad[6:]
        numbers = [n for n, want in enumerate(wanted) if want]
        if given:
            _refuse_rows(attention, given)
        if d_o is None:
            d_o = torch.zeros_like(output)
        arrived = [d_rows[n] for n in given]
        if torch.is_grad_enabled() and not is_compiling():  # create_graph=True
            dq, dk, dv, *d_custom = GradientFunction.apply(
                ctx.key, tuple(given), tuple(numbers), q, k, v, d_o, output, *custom, *arrived, *rows
            )
        else:
            dq, dk, dv, d_custom = _gradients(
                attention, q, k, v, custom, output, rows, d_o, arrived, given, numbers, ctx.key
            )
        return (None, None, None, dq, dk, dv, *[d if w else None for d, w in zip(d_custom, wanted, strict=True)])


class TransformableFunction(torch.autograd.Function):
    """The same under torch.func's transforms, which want what is kept for the backward pass among the outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        key: str, with_rows: bool, direct: None, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor
    ) -> tuple[Tensor, ...]:
        output, rows = FORWARD(q, k, v, list(custom), key)
        return (output, *rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        key, _, _, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.key, ctx.customs = key, len(tensors) - 3
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1 + ATTENTIONS[key].returned :])

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        return AttentionFunction.backward(ctx, *arriving)


class GradientFunction(torch.autograd.Function):
    """(key, given, wanted, q, k, v, d_o, o, custom..., d_rows..., rows...) -> (dq, dk, dv, d_custom...).

    given: which rows have gradients; wanted: the custom inputs that want one. Its own gradient is the reference's:
    dense, and differentiable as often as is asked for.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, given: tuple[int, ...], wanted: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, d_o: Tensor,
                output: Tensor, *others: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
        attention = ATTENTIONS[key]
        custom, d_rows, rows = _parted(others, len(attention.specs), len(given))
        dq, dk, dv, d_custom = _gradients(
            attention, q, k, v, custom, output, rows, d_o, d_rows, list(given), list(wanted), key
        )
        return (dq, dk, dv, *d_custom)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        key, given, _, q, k, v, d_o, _, *others = inputs
        custom, d_rows, rows = _parted(others, len(ATTENTIONS[key].specs), len(given))
        ctx.save_for_backward(q, k, v, d_o, *custom, *d_rows)
        ctx.key, ctx.given, ctx.rows = key, given, len(rows)
        ctx.set_materialize_grads(False)

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        attention = ATTENTIONS[ctx.key]
        saved = ctx.saved_tensors
        wanted = (*ctx.needs_input_grad[3:7], *ctx.needs_input_grad[8 : 4 + len(saved)])

        def make(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, *others: Tensor) -> list[Tensor | None]:
            custom, d_rows, _ = _parted(others, len(attention.specs), len(ctx.given))
            d_finals = {attention.row_names[n]: d for n, d in zip(ctx.given, d_rows, strict=True)}
            return differentiable_gradients(attention, (q, k, v, *custom), d_o, d_finals)

        with torch.autocast(saved[0].device.type, enabled=False):
            gradients = gradients_of(make, saved, wanted, arriving)
        return (None, None, None, *gradients[:4], None, *gradients[4:], *[None] * ctx.rows)


def _parted(others: Sequence[Tensor], customs: int, given: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Custom inputs, gradients of rows, rows."""
    return list(others[:customs]), list(others[customs : customs + given]), list(others[customs + given :])


def _gradients(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], output: Tensor, rows: list[Tensor],
    d_o: Tensor, d_rows: list[Tensor], given: list[int], wanted: list[int], key: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    opaque = attention.launcher is not None or runs_opaque()
    run_backward = BACKWARD if opaque and not skips_dispatch(attention) else _backward
    return run_backward(q, k, v, custom, output, rows, d_o, d_rows, given, wanted, key)  # type: ignore[no-any-return]


def _refuse_rows(attention: Attention, given: Sequence[int]) -> None:
    by_torch = attention.launcher is None and attention.program.backward is None  # autograd knows every gradient
    if attention.maths.backward is None or by_torch:
        return
    reasons = dict(attention.maths.backward.undifferentiated)
    for number in given:
        name = attention.row_names[number]
        if name in reasons:
            raise RowNotDifferentiable(
                f"a gradient arrived at the returned row '{name}', which has none: {reasons[name]}.\n"
                "  Detach the row before it joins the loss."
            )


def run(
    key: str, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], with_rows: bool = True,
    direct: Direct | None = None,
) -> tuple[Tensor, Sequence[Tensor]]:  # fmt: skip
    """The output and, where asked for, the program's rows; differentiable. direct: the launch, where it is known."""
    transformed = not is_compiling() and _are_functorch_transforms_active()  # whose wrapped tensors don't tell
    wanted = transformed or q.requires_grad or k.requires_grad or v.requires_grad
    wanted = (wanted or any([t.requires_grad for t in custom])) and torch.is_grad_enabled()
    trained = ATTENTIONS[key].trained if wanted else None
    if direct is not None and trained is None and unwatched():
        if wanted:
            q, k, v, *custom = map(unwrap_if_dead, (q, k, v, *custom))
        return run_unwatched(key, q, k, v, custom, with_rows, direct, wanted)
    attention = ATTENTIONS[key]
    if in_forward_mode(q, k, v, *custom):
        output, rows = _forward_dense(q, k, v, list(custom), attention)
        return output, rows[: attention.returned]
    if trained is not None:
        key, attention = trained, ATTENTIONS[trained]
    if wanted:
        function = TransformableFunction if transformed else AttentionFunction
        output, *rows = function.apply(key, with_rows, None, q, k, v, *custom)
        return output, rows[: attention.returned]
    run_forward = _forward if skips_dispatch(attention) else FORWARD
    output, rows = run_forward(q, k, v, list(custom), key)
    return output, rows[: attention.returned]


def run_unwatched(
    key: str, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], with_rows: bool, direct: Direct,
    with_gradients: bool,
) -> tuple[Tensor, Sequence[Tensor]]:  # fmt: skip
    """The same by a launch that is known, of tensors that no transform has wrapped, where nothing watches."""
    if with_gradients:
        if ATTENTIONS[key].trained is not None:
            return run(key, q, k, v, custom, with_rows)
        output, *rows = _apply_once(key, with_rows, direct, q, k, v, *custom)
        return output, rows
    output, rows = direct(q, k, v, custom)
    return output, rows[: ATTENTIONS[key].returned]


# apply without the look for functorch's transforms, of which there are none: 4 of its 13 us
_apply_once = super(torch.autograd.Function, AttentionFunction).apply
