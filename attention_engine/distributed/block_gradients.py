"""Gradients of some queries and some keys, once the queries' rows are final: pair by pair they need nothing else.

What a row adds by itself (a sink's gradient) is made once a row, whatever blocks its keys come in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention_engine.distributed.layout import Run
from attention_engine.ir.program import DELTA, Q_IDX, B, Backward, H, final_gradient, final_variable
from attention_engine.passes.maths import Maths
from attention_engine.passes.row_sums import plan_row_sums
from attention_engine.reference.dense import attend_backward, compute_dtype
from attention_engine.reference.evaluate import Evaluator, add_at
from attention_engine.runtime.arguments import placed
from attention_engine.runtime.attention_op import PairAttention
from attention_engine.runtime.program_kernels import ProgramKernels


@dataclass(frozen=True)
class Found:
    """Gradients of a block: of q, k, v, and of custom inputs by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    custom: Mapping[str, Tensor]


@dataclass(frozen=True)
class BlockGradients:
    """How an attention's gradients are made in blocks. backward: what pairs add; of_rows: what rows add, apart."""

    attention: PairAttention
    wanted: Sequence[str]
    backward: Backward
    of_rows: Backward
    program_kernels: ProgramKernels | None  # None: the reference

    @staticmethod
    def of(
        attention: PairAttention, wanted: Sequence[str], device: Any, deterministic: bool, whole_rows: bool = False
    ) -> BlockGradients:  # fmt: skip
        """Of an attention whose backward pass was derived. wanted: the custom inputs that want gradients; whole_rows:
        has each block all keys of its queries, whose gradients are then rounded?"""
        of_rows = attention.maths.wanting(wanted).backward
        assert of_rows is not None and attention.maths.backward is not None
        backward, program_kernels = replace(attention.maths.backward, row_gradients=()), None
        known = attention.program_kernels
        if known is not None:
            maths = replace(attention.maths, backward=backward, in_blocks=True, whole_rows=whole_rows)
            program_kernels = ProgramKernels(maths, attention.specs, known.interpret, device, deterministic)
        return BlockGradients(attention, wanted, backward, of_rows, program_kernels)

    def of_run(self, run: Run, made: Sequence[Tensor], d_o: Tensor, d_rows: Mapping[str, Tensor]) -> OfRun:
        """Of a run of queries. made: the output and all rows of this rank's queries; d_o, d_rows: what arrives."""
        output, *rows = made
        return OfRun(
            self,
            output[:, run.here],
            [row[:, :, run.here] for row in rows],
            d_o[:, run.here],
            {name: d[:, :, run.here] for name, d in d_rows.items()},
        )


@dataclass(frozen=True)
class OfRun:
    """Those of a run of queries, whose output and rows are final."""

    of: BlockGradients
    output: Tensor
    rows: Sequence[Tensor]
    d_output: Tensor
    d_rows: Mapping[str, Tensor]

    def of_block(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], with_rows: bool, into: Tensor | None = None
    ) -> Found:  # fmt: skip
        """Of these keys. custom: all inputs of the block; with_rows: are the rows' own added? into: where the queries'
        go; None: new memory."""
        if self.of.program_kernels is None:
            found = self._densely(q, k, v, custom)
            found = replace(found, q=placed(found.q, into))
        else:
            given = custom, self.output, self.rows, self.d_output, self.d_rows, self.of.wanted
            found = Found(*self.of.program_kernels.backward(q, k, v, *given, into))
        if with_rows and self.of.of_rows.row_gradients:
            return replace(found, custom=self._with_rows(found.custom, q, custom))
        return found

    @property
    def _saved(self) -> list[Tensor]:
        named = self.of.attention.named_rows(self.rows)
        return [named[name] for name, _ in self.of.backward.saved]

    @property
    def _delta(self) -> Tensor:
        """The row sums of o * dO, (batch, heads, queries)."""
        wide = compute_dtype(self.output)
        return (self.output.to(wide) * self.d_output.to(wide)).sum(-1).transpose(1, 2)

    def _densely(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Found:
        wide, attention = compute_dtype(q), self.of.attention
        q, k, v = (t.to(wide).transpose(1, 2) for t in (q, k, v))
        found = attend_backward(
            attention.program, self.of.backward, q, k, v, attention.named(custom), self._saved, self._delta,
            self.d_output.transpose(1, 2), self.d_rows,
        )  # fmt: skip
        made = {n: g for n, g in found.custom.items() if n in self.of.wanted}
        return Found(found.q.transpose(1, 2), found.k.transpose(1, 2), found.v.transpose(1, 2), made)

    def _with_rows(self, found: Mapping[str, Tensor], q: Tensor, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        """With what rows add."""
        backward, named, delta = self.of.of_rows, self.of.attention.named(custom), self._delta[..., None]
        values = {final_variable(n): r[..., None] for (n, _), r in zip(backward.saved, self._saved, strict=True)}
        silent = delta == 0
        for name, _ in self.of.attention.program.finals:
            arriving = self.d_rows.get(name)
            given = torch.zeros_like(delta) if arriving is None else arriving[..., None].to(delta.dtype)
            values[final_gradient(name)], silent = given, silent & (given == 0)
        places = {}
        for axis, (index, size) in enumerate(((B, q.shape[0]), (H, q.shape[2]), (Q_IDX, q.shape[1]))):
            shape = [-1 if n == axis else 1 for n in range(4)]
            places[index] = torch.arange(size, device=q.device).view(shape)
        evaluate = Evaluator({**places, **values, DELTA: delta}, named, delta.dtype, q.device)
        total = dict(found)
        for load, expr in backward.row_gradients:
            value = torch.where(silent, 0.0, evaluate(expr).expand(delta.shape))  # an empty row adds nothing
            before = total.get(load.name)
            into = torch.zeros_like(named[load.name], dtype=delta.dtype) if before is None else before.to(delta.dtype)
            at = Evaluator(places, named, delta.dtype, q.device)
            total[load.name] = add_at(into.view(named[load.name].shape), load, value, at)
        return total


def arrived(
    attention: PairAttention, made: Sequence[Tensor], arriving: Sequence[Tensor | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient that arrives at the output, and those at rows that are returned, by name, where one does. made: the
    output and all rows; arriving: at each of them."""
    d_o, *d_rows = attention.arrived([], made, arriving[: 1 + attention.returned])
    assert d_o is not None
    return d_o, {n: d for n, d in zip(attention.row_names, d_rows, strict=False) if d is not None}


def goes_block_by_block(maths: Maths, wanted: Sequence[str], by_kernels: bool) -> bool:
    """Do the gradients of a block of keys need nothing of other blocks but final rows and delta?

    Not where a row's extreme is met anew, nor where delta is a sum over all keys: where outputs may be far off after
    rounding, or a row's sum is corrected for it.
    """
    backward, schedule = maths.wanting(wanted).backward, maths.wanting(wanted).backward_schedule
    if backward is None or schedule is None or backward.extremes:
        return False
    corrected = any(gradient.corrections for gradient in plan_row_sums(schedule, backward, False).gradients)
    return not by_kernels or not (backward.exact_delta or corrected)


def wanted_of(names: Sequence[str], tensors: Sequence[Tensor]) -> list[str]:
    """Which of these custom inputs want gradients."""
    return [name for name, t in zip(names, tensors, strict=True) if t.requires_grad]


def without(of: Collection[str], names: Sequence[str], tensors: Sequence[Tensor], wide: torch.dtype) -> list[Tensor]:
    """Zeros to add gradients of these inputs to; nothing is added to others', which take no memory."""
    zero = [torch.zeros((), dtype=wide, device=t.device) for t in tensors[:1]]
    return [
        torch.zeros_like(t, dtype=wide, memory_format=torch.contiguous_format)
        if name in of
        else zero[0].expand(t.shape)
        for name, t in zip(names, tensors, strict=True)
    ]


def one_after_another(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Them all; nothing is copied where there is one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
