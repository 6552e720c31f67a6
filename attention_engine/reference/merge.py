"""A merge on torch tensors: what attention to parts of each row's keys left becomes attention to all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from attention_engine.ir.expr import Axis, Expr, Op, VarKind, const, topological
from attention_engine.ir.merge import Merge, part_variable, whole_variable
from attention_engine.ir.program import OUTPUT, Q_IDX, B, H
from attention_engine.ir.reach import BOUNDED, HIGHEST, may_be_far
from attention_engine.reference.evaluate import DTYPES, Evaluator, lowest

AddWeighted: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], None]


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


def merge_into(
    merge: Merge, outputs: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], custom: Mapping[str, Tensor],
    out: Tensor, add: AddWeighted | None = None,
) -> list[Tensor]:  # fmt: skip
    """The same; the output is written to `out`, in its dtype. What a row's end multiplies its sum with joins the
    factors of its parts, so that each part is read once, and little else is. Without gradients. add: what adds the
    parts up, each times its factor, (batch, heads, queries, 1); None: `add_weighted`."""
    end = None if merge.finished else _row_factor(merge.output, tuple([row for _, row in merge.finals]))
    if end is None:
        output, rows = merge_parts(merge, outputs, states, custom)
        out.copy_(output)
        return rows
    evaluate, factors = _factors(merge, outputs, states, custom)
    of_rows = [(factor * evaluate(end).to(factor.dtype)).expand(*out.shape[:3], 1) for factor in factors]
    (add or add_weighted)(outputs, of_rows, out)
    return [evaluate(row).expand(*out.shape[:3], 1)[..., 0] for _, row in merge.finals]


def add_weighted(parts: Sequence[Tensor], factors: Sequence[Tensor], out: Tensor) -> None:
    """The sum of parts (batch, heads, queries, DV) times their factors (batch, heads, queries, 1), in the dtype of
    `out`."""
    total: Tensor | None = None
    for number, (part, factor) in enumerate(zip(parts, factors, strict=True)):
        into = out if number == len(parts) - 1 else total
        args = (part, factor) if total is None else (total, factor, part)
        total = (torch.mul if total is None else torch.addcmul)(*args, out=into)


@lru_cache(maxsize=256)
def _row_factor(output: Expr, finals: tuple[Expr, ...]) -> Expr | None:
    """What a row's sum of weights times values is multiplied with at the end, and nothing else; None: it isn't so."""
    if output is OUTPUT:
        return const(1.0)
    of_rows = [arg for arg in output.args if OUTPUT not in topological(arg)]
    asked = any(OUTPUT in topological(row) for row in finals)
    is_product = output.op is Op.MUL and OUTPUT in output.args and len(of_rows) == 1
    return of_rows[0] if is_product and not asked else None


def join_parts(
    merge: Merge, outputs: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], custom: Mapping[str, Tensor],
    add: AddWeighted | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The same parts as one: its sum of weights times values, and its states. Not where parts are finished. add: as of
    `merge_into`."""
    assert not merge.finished
    evaluate, factors = _factors(merge, outputs, states, custom)
    total, rows = torch.empty_like(outputs[0]), outputs[0].shape[:3]
    (add or add_weighted)(outputs, [factor.expand(*rows, 1) for factor in factors], total)
    found = {name: evaluate.done[whole_variable(name)] for name in merge.read}
    return total, {name: state.expand(*rows, 1)[..., 0] for name, state in found.items()}


def _joined(
    merge: Merge, outputs: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], custom: Mapping[str, Tensor]
) -> tuple[Evaluator, Tensor]:
    """What knows the states of the whole, and their OUTPUT."""
    evaluate, factors = _factors(merge, outputs, states, custom)
    total = torch.zeros_like(outputs[0])
    for factor, output in zip(factors, outputs, strict=True):
        total = torch.addcmul(total, factor, output)
    evaluate.done[OUTPUT] = total
    return evaluate, total


def _factors(
    merge: Merge, outputs: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]], custom: Mapping[str, Tensor]
) -> tuple[Evaluator, list[Tensor]]:
    """What knows the states of the whole, and what each part's sum is multiplied with."""
    first = outputs[0]
    held = {name: torch.stack(list(each), -1) for name, each in states.items()}
    nothing, empty = _rows_of_nothing(merge, held) if _strains(merge) else (torch.zeros(()), {})
    known = _indices(first) | {part_variable(name): empty.get(name, each) for name, each in held.items()}
    parts = torch.ones(1, 1, 1, len(outputs), dtype=torch.bool, device=first.device)
    least = lowest(first.dtype, merge.program.score)
    evaluate = Evaluator(known, custom, first.dtype, first.device, parts, least)
    for name, state in merge.states:
        evaluate.done[whole_variable(name)] = evaluate(state)
    factor, by_part = evaluate(merge.factor).to(first.dtype), Axis.KEY in merge.factor.axes
    if empty:  # what tells rows that keep nothing is again what it was
        done = evaluate.done
        evaluate = Evaluator(_indices(first), custom, first.dtype, first.device, parts, least)
        for name, _ in merge.states:
            variable = whole_variable(name)
            began = torch.where(nothing, held[name][..., :1], done[variable]) if name in empty else done[variable]
            evaluate.done[variable] = began
    return evaluate, [factor[..., number : number + 1] if by_part else factor for number in range(len(outputs))]


@lru_cache(maxsize=256)
def _strains(merge: Merge) -> bool:
    """May an extreme that stands for no score, the lowest number that there is, leave a dtype's range: by a factor, or
    by another such extreme?"""
    if not may_be_far(merge.program.score):
        return False
    extremes = {s.name for s in merge.program.states if math.isinf(s.initial)}
    bare: dict[Expr, bool] = {}  # is it as large as an extreme?
    for node in topological(merge.factor, *(e for _, e in merge.states)):
        of_args = [bare[a] for a in node.args]
        if node.op is Op.VAR:
            bare[node] = node.kind in (VarKind.PART, VarKind.WHOLE) and node.bare_name in extremes
        else:
            bare[node] = node.op not in (*BOUNDED, Op.EXP, Op.EXP2) and any(of_args)
        grows = node.op is Op.MUL and any(a.op is Op.CONST and abs(a.value) > 1 for a in node.args)
        if any(of_args) and (grows or node.op is Op.POW or (node.op is Op.MUL and sum(of_args) > 1)):
            return True
    return False


def _rows_of_nothing(merge: Merge, held: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Which rows keep nothing (batch, heads, queries, 1), and the extremes of parts, where a part that has kept none of
    a row's pairs has those of the others, or 0 where none has one: its sums are 0, whatever they are multiplied with.
    """
    empty = torch.ones((), dtype=torch.bool)
    for state in merge.program.states:
        if state.name in held:
            x = held[state.name]
            began = x.abs() >= HIGHEST if math.isinf(state.initial) else x == state.initial
            empty = empty.to(x.device) & began
    nothing, found = empty.all(-1, keepdim=True), {}
    for state in merge.program.states:
        if state.name in held and math.isinf(state.initial):
            x, lowest_first = held[state.name], state.initial < 0
            others = x.amax(-1, keepdim=True) if lowest_first else x.amin(-1, keepdim=True)
            others = torch.where(nothing, 0.0, others)
            found[state.name] = torch.where(empty, others, x)
    return nothing, found


def _indices(output: Tensor) -> dict[Expr, Tensor]:
    """The indices of rows, as they broadcast."""
    found = {}
    for axis, variable in enumerate((B, H, Q_IDX)):
        shape = [-1 if n == axis else 1 for n in range(4)]
        places = torch.arange(output.shape[axis], device=output.device, dtype=DTYPES[variable.dtype])
        found[variable] = places.view(shape)
    return found
