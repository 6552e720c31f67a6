"""The torch.library ops: one pair for all programs, told apart by a key, and the autograd function around them.

Tensors are (batch, length, heads, dim) here; rows are (batch, heads, queries), fp32 (float64 for float64 inputs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_engine.compiler import Maths
from attention_engine.errors import RowNotDifferentiable
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.program import Program
from attention_engine.reference.dense import attend, attend_backward, compute_dtype
from attention_engine.runtime.launch import Launcher


@dataclass
class Attention:
    """One traced program with the way it runs: what a key of the ops stands for."""

    maths: Maths
    specs: Sequence[CustomSpec]
    launcher: Launcher | None  # None: the reference

    @property
    def program(self) -> Program:
        return self.maths.program

    @property
    def row_names(self) -> list[str]:
        """The rows that the forward op returns: the program's own, then what the backward pass keeps."""
        return [n for n, _ in self.maths.forward_schedule.rows]

    def named(self, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        """Custom inputs by name."""
        return {s.name: c for s, c in zip(self.specs, custom, strict=True)}


ATTENTIONS: dict[str, Attention] = {}
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
        if q.device.type not in ("cuda", "cpu") or not torch.is_autocast_enabled(q.device.type):
            return run(q, *rest)
        with torch.autocast(q.device.type, enabled=False):
            return run(q, *rest)

    return plain


@_outside_autocast
def _forward(q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], key: str) -> tuple[Tensor, list[Tensor]]:
    attention = ATTENTIONS[key]
    if attention.launcher is not None and 0 not in (*q.shape, *k.shape, *v.shape):
        return attention.launcher.forward(q, k, v, custom)
    every = attention.program.returning(attention.maths.forward_schedule.rows)
    output, rows = attend(every, *_heads_first(q, k, v), attention.named(custom))
    return output.transpose(1, 2).contiguous(), [r.contiguous() for r in rows]


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], key: str) -> tuple[Tensor, list[Tensor]]:
    attention = ATTENTIONS[key]
    rows = (
        compute_dtype(q, *[c for c in custom if c.is_floating_point()]) if attention.launcher is None else torch.float32
    )
    return (
        q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3]),
        [q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=rows) for _ in attention.row_names],
    )


@_outside_autocast
def _backward(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], o: Tensor, rows: list[Tensor], d_o: Tensor,
    d_rows: list[Tensor], given: list[int], wanted: list[int], key: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """given: which rows d_rows are of; wanted: the custom inputs that want a gradient (others get an empty tensor)."""
    attention = ATTENTIONS[key]
    d_finals = {attention.row_names[n]: d for n, d in zip(given, d_rows, strict=True)}
    if attention.launcher is not None and 0 not in (*q.shape, *k.shape, *v.shape):
        names = [attention.specs[n].name for n in wanted]
        dq, dk, dv, found = attention.launcher.backward(q, k, v, custom, o, rows, d_o, d_finals, names)
        d_custom = [
            found[s.name].to(c.dtype) if s.name in found else torch.zeros_like(c)
            for s, c in zip(attention.specs, custom, strict=True)
            if s.name in names
        ]
        return dq, dk, dv, _spread([d.contiguous() for d in d_custom], custom, wanted)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in (q, k, v, *custom)]
        gradients = differentiable_gradients(attention, leaves, d_o, d_finals, again=False)
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


def differentiable_gradients(
    attention: Attention, leaves: Sequence[Tensor], d_o: Tensor, d_finals: Mapping[str, Tensor], again: bool
) -> list[Tensor | None]:
    """Gradients of q, k, v and the custom inputs by the reference; `again`: so that they can be differentiated too."""
    q, k, v, *custom = leaves
    program, named = attention.program, attention.named(custom)
    heads = _heads_first(q, k, v)
    if program.backward is not None and attention.maths.backward is not None:
        backward = attention.maths.backward
        output, saved = attend(program.returning(backward.saved), *heads, named)
        delta = (output.to(saved[0].dtype if saved else output.dtype) * d_o.transpose(1, 2)).sum(-1)
        found = attend_backward(program, backward, *heads, named, saved, delta, d_o.transpose(1, 2), d_finals)
        return [*_heads_first(found.q, found.k, found.v), *(found.custom.get(s.name) for s in attention.specs)]
    output, rows = attend(program, *heads, named)
    outputs, arriving = [output], [d_o.transpose(1, 2)]
    for (name, _), row in zip(program.finals, rows, strict=True):
        if name in d_finals and row.requires_grad:
            outputs.append(row)
            arriving.append(d_finals[name].to(row.dtype))
    wanted = [t for t in leaves if t.requires_grad]
    found_all = iter(torch.autograd.grad(outputs, wanted, arriving, create_graph=again, allow_unused=True))
    return [next(found_all) if t.requires_grad else None for t in leaves]


class AttentionFunction(torch.autograd.Function):
    """(key, q, k, v, custom inputs...) -> (o, rows...)."""

    @staticmethod
    def forward(ctx: Any, key: str, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> tuple[Tensor, ...]:
        output, rows = FORWARD(q, k, v, list(custom), key)
        ctx.save_for_backward(q, k, v, *custom, output, *rows)
        ctx.key, ctx.customs = key, len(custom)
        ctx.set_materialize_grads(False)
        returned = len(ATTENTIONS[key].program.finals)
        ctx.mark_non_differentiable(*rows[returned:])
        return (output, *rows)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        attention = ATTENTIONS[ctx.key]
        q, k, v, *rest = ctx.saved_tensors
        custom, (output, *rows) = rest[: ctx.customs], rest[ctx.customs :]
        d_o, *d_rows = arriving
        given = [n for n, (d, _) in enumerate(zip(d_rows, attention.program.finals, strict=False)) if d is not None]
        if attention.maths.backward is None and attention.launcher is not None:
            assert attention.maths.refusal is not None
            raise attention.maths.refusal
        wanted = ctx.needs_input_grad[4:]
        numbers = [n for n, want in enumerate(wanted) if want]
        _refuse_rows(attention, given)
        if d_o is None:
            d_o = torch.zeros_like(output)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: the reference can
            d_finals = {attention.row_names[n]: d_rows[n] for n in given}
            with torch.autocast(q.device.type, enabled=False):
                return (None, *differentiable_gradients(attention, (q, k, v, *custom), d_o, d_finals, again=True))
        # under a dispatch mode an op is below autograd, by which the reference differentiates
        opaque = attention.launcher is not None or torch.compiler.is_compiling()
        run_backward = BACKWARD if opaque else _backward
        dq, dk, dv, d_custom = run_backward(
            q, k, v, custom, output, rows, d_o, [d_rows[n] for n in given], given, numbers, ctx.key
        )
        return (None, dq, dk, dv, *(d if w else None for d, w in zip(d_custom, wanted, strict=True)))


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


def run(key: str, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output and the program's rows; differentiable."""
    attention = ATTENTIONS[key]
    returned = len(attention.program.finals)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *custom)):
        output, *rows = AttentionFunction.apply(key, q, k, v, *custom)
    else:
        output, rows = FORWARD(q, k, v, list(custom), key)
    return output, list(rows[:returned])
