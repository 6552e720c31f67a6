"""What the ops of an attention over pairs do: kernels or the reference, forward and backward, and what fakes show.

Tensors are (batch, length, heads, dim) here; rows are (batch, heads, queries), fp32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention_engine.errors import RowNotDifferentiable
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.expr import topological
from attention_engine.ir.program import B, Program
from attention_engine.passes.bent_output import Bend
from attention_engine.passes.maths import Maths
from attention_engine.reference.dense import attend, attend_backward, compute_dtype
from attention_engine.runtime.arguments import placed
from attention_engine.runtime.attentions import Attention, Given, find, outside_autocast
from attention_engine.runtime.batched import gradients_of
from attention_engine.runtime.bent import bend_output, bent_gradients
from attention_engine.runtime.program_kernels import ProgramKernels

Forward = tuple[Tensor, list[Tensor]]
Backward = tuple[Tensor, Tensor, Tensor, list[Tensor]]


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def forward(q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], key: str, into: Tensor | None = None) -> Forward:
    """The output, and the rows that the program returns or the backward pass asks for. into: where the output goes, of
    an attention that bends none; None: new memory."""
    attention = find(key, PairAttention)
    if attention.program_kernels is None or not (q.numel() and k.numel() and v.numel()):
        output, rows = _forward_dense(q, k, v, custom, attention)
        return placed(output, into), rows
    if attention.bend is None:
        return attention.program_kernels.forward(q, k, v, custom, into)
    inner, rows = attention.program_kernels.forward_in_range(q, k, v, custom)
    output = bend_output(attention.bend, inner, attention.named_rows(rows), attention.named(custom))
    return output.to(q.dtype), [*rows, inner]


@outside_autocast
def _forward_dense(q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], attention: PairAttention) -> Forward:
    every = attention.maths.program.returning(attention.maths.forward_schedule.rows)
    heads = (*_heads_first(q, k, v), attention.named(custom))
    output, rows = attend(every, *heads)
    output, rows = output.transpose(1, 2).contiguous(), [r.contiguous() for r in rows]
    return output, rows if attention.bend is None else [*rows, torch.zeros_like(output, dtype=attention.inner_dtype(q))]


def forward_fake(q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], key: str) -> Forward:
    """Results of the shapes and dtypes that forward returns."""
    attention = find(key, PairAttention)
    rows = (
        compute_dtype(q, *[c for c in custom if c.is_floating_point()])
        if attention.program_kernels is None
        else torch.float32
    )
    output = q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    made = [q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=rows) for _ in attention.row_names]
    return output, made if attention.bend is None else [*made, torch.empty_like(output, dtype=attention.inner_dtype(q))]


def backward(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], o: Tensor, rows: list[Tensor], d_o: Tensor,
    d_rows: list[Tensor], given: list[int], wanted: list[int], key: str,
) -> Backward:  # fmt: skip
    """given: which rows d_rows are of; wanted: the custom inputs that want a gradient (others get an empty tensor)."""
    attention = find(key, PairAttention)
    d_finals = {attention.row_names[n]: d for n, d in zip(given, d_rows, strict=True)} if given else {}
    if attention.program_kernels is not None and q.numel() and k.numel() and v.numel():
        names = [attention.specs[n].name for n in wanted]
        if attention.bend is not None:
            *rows, o = rows
            bent = bent_gradients(attention.bend, o, attention.named_rows(rows), attention.named(custom), d_o)
            d_o, d_finals = bent.output, d_finals | {n: d + d_finals.get(n, 0.0) for n, d in bent.rows.items()}
        dq, dk, dv, found = attention.program_kernels.backward(q, k, v, custom, o, rows, d_o, d_finals, names)
        if attention.bend is not None:
            found |= {n: d + found.get(n, 0.0) for n, d in bent.custom.items()}
        d_custom = [
            found[s.name].to(c.dtype) if s.name in found else torch.zeros_like(c)
            for s, c in zip(attention.specs, custom, strict=True)
            if s.name in names
        ]
        return dq, dk, dv, _spread([d.contiguous() for d in d_custom], custom, wanted)
    return _backward_dense(q, k, v, custom, d_o, d_finals, wanted, attention)


@outside_autocast
def _backward_dense(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], d_o: Tensor, d_finals: Mapping[str, Tensor],
    wanted: list[int], attention: PairAttention,
) -> Backward:  # fmt: skip
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


def backward_fake(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], o: Tensor, rows: list[Tensor], d_o: Tensor,
    d_rows: list[Tensor], given: list[int], wanted: list[int], key: str,
) -> Backward:  # fmt: skip
    """Gradients of the shapes and dtypes that backward returns."""
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, _spread([custom[n].new_empty(custom[n].shape) for n in wanted], custom, wanted)


def differentiable_gradients(
    attention: PairAttention, leaves: Sequence[Tensor], d_o: Tensor, d_finals: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """Gradients of q, k, v and the custom inputs by the reference, which can be differentiated too."""
    q, k, v, *custom = leaves
    program, named, (heads_q, heads_k, heads_v) = attention.program, attention.named(custom), _heads_first(q, k, v)
    if program.backward is not None and attention.maths.backward is not None:
        backward = attention.maths.backward
        output, saved = attend(program.returning(backward.saved), heads_q, heads_k, heads_v, named)
        delta = (output.to(saved[0].dtype if saved else output.dtype) * d_o.transpose(1, 2)).sum(-1)
        given = (heads_q, heads_k, heads_v, named, saved, delta, d_o.transpose(1, 2), d_finals)
        found = attend_backward(program, backward, *given)
        return [*_heads_first(found.q, found.k, found.v), *(found.custom.get(s.name) for s in attention.specs)]
    finals = [n for n, _ in program.finals]

    def make(q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> list[Tensor]:
        given = (*_heads_first(q, k, v), attention.named(custom))
        output, rows = attend(program, *given)
        return [output, *rows]

    arriving = [d_o.transpose(1, 2), *(d_finals.get(n) for n in finals)]
    return gradients_of(make, leaves, [t.is_floating_point() for t in leaves], arriving)


def _refuse_rows(attention: PairAttention, given: Sequence[int]) -> None:
    by_torch = attention.program_kernels is None and attention.program.backward is None  # autograd knows every gradient
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


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products over all pairs, masked or not, as torch counts scaled_dot_product_attention."""
    return 2 * q[0] * q[2] * q[1] * k[1] * (q[3] + v[3])


def backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Five products over all pairs: scores again, dO . v, dV, dQ and dK."""
    return 2 * q[0] * q[2] * q[1] * k[1] * (3 * q[3] + 2 * v[3])


@dataclass
class PairAttention(Attention):
    """An attention over all pairs of queries and keys; a call is made of q, k, v and the custom inputs.

    form: are the program's rows returned? bend: what is made, where gradients are wanted, of the output of kernels,
    which the forward op returns behind all rows.
    """

    engine: ClassVar[str] = "AttentionEngine"
    forward_op: ClassVar[str] = "forward"
    backward_op: ClassVar[str] = "backward"
    forward: ClassVar[Callable[..., Any]] = staticmethod(forward)
    backward: ClassVar[Callable[..., Any]] = staticmethod(backward)
    keeps: ClassVar[bool] = True
    key: str
    maths: Maths
    specs: Sequence[CustomSpec]
    program_kernels: ProgramKernels | None  # None: the reference
    trained: str | None = None
    bend: Bend | None = None
    row_names: list[str] = field(init=False)  # that the forward op returns: the program's, then what is kept for later
    returned: int = field(init=False)  # how many of them are the program's own

    def __post_init__(self) -> None:  # attributes, not cached properties: a compiler can't follow their locks
        self.row_names = [n for n, _ in self.maths.forward_schedule.rows]
        self.returned = len(self.program.finals)
        self.by_kernels = self.program_kernels is not None
        self.counts = 1, 1 + self.returned

    @property
    def program(self) -> Program:
        return self.maths.program if self.bend is None else self.bend.whole

    @property
    def reads_batch(self) -> bool:
        return B in topological(*(e for _, e in self.program.named()))

    def named_rows(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Rows of the forward op by name."""
        return dict(zip(self.row_names, rows, strict=True))

    def inner_dtype(self, q: Tensor) -> torch.dtype:
        """Of the output that `bend` takes, for such queries."""
        wide = self.program_kernels is not None and self.program_kernels.leaves_range(q)
        return torch.float32 if wide else q.dtype

    # ---- what the op adapter asks

    def arguments(self, form: bool, given: Given) -> tuple[Any, ...]:
        q, k, v, *custom = given
        return q, k, v, custom, self.key

    def densely(self, form: bool, given: Given) -> tuple[Tensor, ...]:
        q, k, v, *custom = [t for t in given if t is not None]
        output, rows = _forward_dense(q, k, v, custom, self)
        return (output, *rows[: self.returned])

    def arrived(self, given: Given, kept: Sequence[Tensor], arriving: Given) -> list[Tensor | None]:
        d_o, *d_rows = arriving
        if self.maths.backward is None and self.program_kernels is not None:
            assert self.maths.refusal is not None
            raise self.maths.refusal
        if given_rows := [n for n, d in enumerate(d_rows) if d is not None]:
            _refuse_rows(self, given_rows)
        return [torch.zeros_like(kept[0]) if d_o is None else d_o, *d_rows]

    def backward_arguments(
        self, given: Given, kept: Sequence[Tensor], arriving: Given, wanted: Sequence[bool]
    ) -> tuple[Any, ...]:
        q, k, v, *custom = given
        output, *rows = kept
        d_o, *d_rows = arriving
        numbers = [n for n, d in enumerate(d_rows) if d is not None]
        asked = [n for n, want in enumerate(wanted[3:]) if want]
        return q, k, v, custom, output, rows, d_o, [d_rows[n] for n in numbers], numbers, asked, self.key

    def begin_backward(self, given: Given) -> None:
        q, k, v, *custom = [t for t in given if t is not None]
        if self.program_kernels is not None:
            wanted = [s.name for s, t in zip(self.specs, custom, strict=True) if t.requires_grad]
            self.program_kernels.begin_backward(q, k, v, custom, wanted)

    def differentiable(self, given: Given, arriving: Given) -> list[Tensor | None]:
        d_o, *d_rows = arriving
        assert d_o is not None
        d_finals = {n: d for n, d in zip(self.row_names, d_rows, strict=False) if d is not None}
        return differentiable_gradients(self, [t for t in given if t is not None], d_o, d_finals)
