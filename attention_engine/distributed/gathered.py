"""Keys gathered on each rank, with gradients of their own: those of keys leave kernels in fp32, are added up over runs
and over ranks, and are rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.distributed.block_gradients import (
    BlockGradients,
    arrived,
    goes_block_by_block,
    one_after_another,
    without,
)
from attention_engine.distributed.exchange import Tokens, Works, first_of, sums_of, wait
from attention_engine.distributed.layout import Run
from attention_engine.distributed.needs import Range
from attention_engine.distributed.placements import Placement, of_block
from attention_engine.reference.dense import compute_dtype
from attention_engine.runtime.attention_op import PairAttention
from attention_engine.runtime.attentions import find
from attention_engine.runtime.moved import beside_sends


def gradients_of(key: str, wanted: Sequence[str], device: Any, deterministic: bool) -> BlockGradients | None:
    """How an attention's gradients are made run by run. None where autograd makes them, rounded once a run."""
    attention = find(key, PairAttention)
    if attention.trained is not None or attention.bend is not None or attention.maths.backward is None:
        return None
    if not goes_block_by_block(attention.maths, wanted, attention.program_kernels is not None):
        return None
    return BlockGradients.of(attention, wanted, device, deterministic, whole_rows=True)


@dataclass(frozen=True)
class Gathered:
    """One call. runs: this rank's queries; seen: the range of keys that each may see. names: of the custom inputs, the
    declared ones first. prepare(first query, first key, q, k, v, custom): what comes behind q, k, v."""

    keys: Tokens
    runs: Sequence[Run]
    seen: Mapping[Run, Range]
    placed: Sequence[Placement]
    gradients: BlockGradients
    names: Sequence[str]
    prepare: Callable[..., list[Tensor]]

    def own(self, tensors: Sequence[Tensor], run: Run) -> list[Tensor]:
        """Custom inputs of a run and its keys, or of what has their shapes."""
        first, stop = self.seen[run]
        return of_block(tensors, self.placed, run, first, stop - first)

    def given(
        self, run: Run, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """q, k, v of a run, and what comes behind them. k, v: all keys."""
        first, stop = self.seen[run]
        q, k, v = q[:, run.here], k[:, first:stop], v[:, first:stop]
        return q, k, v, self.prepare(run.start, first, q, k, v, self.own(custom, run))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], coming: Works
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The output and all rows of this rank's queries. coming: what brings the keys that the first run doesn't see,
        beside it."""
        attention, found = self.gradients.attention, []
        output = q.new_empty(*q.shape[:3], v.shape[3])
        for n, run in enumerate(self.runs):
            key = beside_sends(attention.key) if n == 0 and coming else attention.key
            found.append(attention.forward(*self.given(run, q, k, v, custom), key, output[:, run.here])[1])
            if n == 0:
                wait(coming)
        return output, [one_after_another(each, 2) for each in zip(*found, strict=True)]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], made: Sequence[Tensor], d_o: Tensor,
        d_rows: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of this rank's q and of all keys, those of k and v in at least fp32; of custom inputs, by name."""
        wanted, dq = self.gradients.wanted, q.new_empty(q.shape)
        total = without(wanted, self.names, custom, compute_dtype(q))
        found = []
        for run in self.runs:
            of_run = self.gradients.of_run(run, made, d_o, d_rows)
            found.append(of_run.of_block(*self.given(run, q, k, v, custom), True, dq[:, run.here]))
            for name, into in zip(self.names, self.own(total, run), strict=True):
                if name in found[-1].custom:
                    into += found[-1].custom[name].view(into.shape)
        ranges, length = [self.seen[run] for run in self.runs], self.keys.layout.length
        dk, dv = in_all(length, ranges, [each.k for each in found]), in_all(length, ranges, [each.v for each in found])
        return dq, dk, dv, {n: t for n, t in zip(self.names, total, strict=True) if n in wanted}


def in_all(length: int, ranges: Sequence[Range], parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts, each of a range of all keys. One that has all of them is added to, and returned."""
    total = next((part for each, part in zip(ranges, parts, strict=True) if each == (0, length)), None)
    if total is None:
        total = parts[0].new_zeros(parts[0].shape[0], length, *parts[0].shape[2:])
    for (first, stop), part in zip(ranges, parts, strict=True):
        if part is not total:
            total[:, first:stop] += part
    return total


class GatheredFunction(torch.autograd.Function):
    """(what is gathered, q, k, v, custom inputs with what functions capture...) -> the output and all rows."""

    @staticmethod
    def forward(ctx: Any, call: Gathered, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = k.dtype, v.dtype
        (k, v), coming = first_of(call.keys, 1, k, v)
        output, rows = call.forward(q, k, v, custom, coming)
        ctx.call, ctx.count = call, len(custom)
        ctx.save_for_backward(q, k, v, *custom, output, *rows)
        ctx.set_materialize_grads(False)
        return (output, *rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Gathered = ctx.call
        q, k, v, *rest = ctx.saved_tensors
        custom, made, attention = rest[: ctx.count], rest[ctx.count :], call.gradients.attention
        dq, of_all_k, of_all_v, found = call.backward(q, k, v, custom, made, *arrived(attention, made, arriving))
        dk, dv = sums_of(call.keys, 1, ctx.dtypes, of_all_k, of_all_v)
        of_custom = [found[n].to(t.dtype) if n in found else None for n, t in zip(call.names, custom, strict=True)]
        return None, dq, dk, dv, *of_custom
