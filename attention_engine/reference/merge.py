"""A merge on torch tensors: what attention to parts of each row's keys left becomes attention to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.merge import Merge, part_variable, whole_variable
from attention_engine.ir.program import OUTPUT, Q_IDX, B, H
from attention_engine.reference.evaluate import DTYPES, Evaluator, lowest


def merge_parts(
    merge: Merge, outputs: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], custom: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The output (batch, heads, queries, DV) and the returned rows (batch, heads, queries), in the parts' dtype.

    outputs: of each part, the sum of weights times values; states: by name, of each part, (batch, heads, queries).
    """
    evaluate, _ = _joined(merge, outputs, states, custom)
    shape = outputs[0].shape
    rows = [evaluate(row).expand(*shape[:3], 1)[..., 0] for _, row in merge.finals]
    return evaluate(merge.output).expand(shape), rows


def join_parts(
    merge: Merge, outputs: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], custom: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same parts as one: its sum of weights times values, and its states. Not where parts are finished."""
    assert not merge.finished
    evaluate, total = _joined(merge, outputs, states, custom)
    rows = total.shape[:3]
    found = {name: evaluate.done[whole_variable(name)] for name in merge.read}
    return total, {name: state.expand(*rows, 1)[..., 0] for name, state in found.items()}


def _joined(
    merge: Merge, outputs: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], custom: Mapping[str, Tensor]
) -> tuple[Evaluator, Tensor]:
    """What knows the states of the whole, and their OUTPUT."""
    first = outputs[0]
    known = _indices(first)
    known |= {part_variable(name): torch.stack(list(each), -1) for name, each in states.items()}
    parts = torch.ones(1, 1, 1, len(outputs), dtype=torch.bool, device=first.device)
    least = lowest(first.dtype, merge.program.score)
    evaluate = Evaluator(known, custom, first.dtype, first.device, parts, least)
    for name, state in merge.states:
        evaluate.done[whole_variable(name)] = evaluate(state)
    factor, total = evaluate(merge.factor), torch.zeros_like(first)
    for number, output in enumerate(outputs):
        here = factor[..., number : number + 1] if Axis.KEY in merge.factor.axes else factor
        total = torch.addcmul(total, here.to(total.dtype), output)
    evaluate.done[OUTPUT] = total
    return evaluate, total


def _indices(output: Tensor) -> dict[Expr, Tensor]:
    """The indices of rows, as they broadcast."""
    found = {}
    for axis, variable in enumerate((B, H, Q_IDX)):
        shape = [-1 if n == axis else 1 for n in range(4)]
        places = torch.arange(output.shape[axis], device=output.device, dtype=DTYPES[variable.dtype])
        found[variable] = places.view(shape)
    return found
