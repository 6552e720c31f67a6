"""Outputs that an epilogue bends (passes/bent_output.py): torch makes them, and the gradients that reach the kernels.

Tensors are (batch, length, heads, dim) here; rows are (batch, heads, queries), by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_engine.ir.expr import Expr, Op
from attention_engine.ir.program import KV_IDX, OUTPUT, Q_IDX, B, H, final_variable
from attention_engine.passes.bent_output import OUTPUT_GRADIENT, Bend
from attention_engine.reference.evaluate import Evaluator, add_at

Rows = Mapping[str, Tensor]


@dataclass(frozen=True)
class BentGradients:
    """Gradients of the inner output, in its dtype, of its rows and of the custom inputs that the epilogue reads."""

    output: Tensor
    rows: dict[str, Tensor]
    custom: dict[str, Tensor]


def bend_output(bend: Bend, inner: Tensor, rows: Rows, custom: Mapping[str, Tensor]) -> Tensor:
    """The output of the whole program, contiguous, in the dtype of the inner one."""
    heads_first = inner.transpose(1, 2)
    made = _evaluator(bend, heads_first, rows, custom)(bend.output).expand(heads_first.shape)
    return _kept(bend, made, rows).transpose(1, 2).to(inner.dtype).contiguous()


def bent_gradients(
    bend: Bend, inner: Tensor, rows: Rows, custom: Mapping[str, Tensor], d_output: Tensor
) -> BentGradients:
    """Where d_output arrives at the output of the whole program."""
    heads_first = inner.transpose(1, 2)
    evaluate = _evaluator(bend, heads_first, rows, custom, d_output.transpose(1, 2))
    found = BentGradients(torch.zeros_like(inner), {}, {})
    for target, gradient in bend.gradients:
        value = _kept(bend, evaluate(gradient).expand(heads_first.shape), rows)
        if target is OUTPUT:
            found.output.copy_(value.transpose(1, 2))
            continue
        total = value.sum(-1, keepdim=True)
        if target.op is Op.LOAD:
            before = found.custom.get(target.name)
            before = torch.zeros_like(custom[target.name], dtype=torch.float32) if before is None else before
            found.custom[target.name] = add_at(before, target, total, evaluate)
        else:
            found.rows[target.bare_name] = total[..., 0]
    return found


def _kept(bend: Bend, values: Tensor, rows: Rows) -> Tensor:
    """The values, 0 in rows that keep no pair."""
    return values if bend.kept is None else torch.where(rows[bend.kept][..., None] > 0, values, 0.0)


def _evaluator(
    bend: Bend, inner: Tensor, rows: Rows, custom: Mapping[str, Tensor], d_output: Tensor | None = None
) -> Evaluator:
    values: dict[Expr, Tensor] = {OUTPUT: inner.float()}
    values.update({final_variable(name): row[..., None] for name, row in rows.items()})
    if d_output is not None:
        values[OUTPUT_GRADIENT] = d_output.float()
    for axis, variable in enumerate((B, H, Q_IDX)):
        shape = [-1 if n == axis else 1 for n in range(4)]
        values[variable] = torch.arange(inner.shape[axis], device=inner.device).view(shape)
    values[KV_IDX] = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=inner.device)  # no row reads one
    return Evaluator(values, custom, torch.float32, inner.device)
