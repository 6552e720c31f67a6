"""A program on whole rows: every score at once, on torch tensors, in at least fp32; autograd differentiates it, twice.

Tensors are (batch, heads, length, dim) here; rows are (batch, heads, queries).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_engine.ir.expr import Expr
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.program import (
    DELTA,
    KV_IDX,
    OUTPUT,
    PRODUCT,
    Q_IDX,
    SCORE,
    WEIGHT,
    WEIGHT_GRADIENT,
    B,
    Backward,
    Extreme,
    H,
    Program,
    final_gradient,
    final_variable,
    row_variable,
)
from attention_engine.reference.evaluate import DTYPES, Evaluator, add_at, lowest

Custom = Mapping[str, Tensor]


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where any tensor is; else float32."""
    return torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32


@dataclass
class _Problem:
    """q, k, v in the compute dtype with keys repeated for their query heads, and the index tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: dict[Expr, Tensor]
    dtype: torch.dtype

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, custom: Custom, dtype: torch.dtype | None = None) -> _Problem:
        dtype = dtype or compute_dtype(q, *[c for c in custom.values() if c.is_floating_point()])
        group = q.shape[1] // k.shape[1]
        k, v = (t.to(dtype).repeat_interleave(group, 1) for t in (k, v))
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        sizes = {B: (batch, 0), H: (heads, 1), Q_IDX: (queries, 2), KV_IDX: (keys, 3)}
        indices = {}
        for variable, (length, axis) in sizes.items():
            shape = [1, 1, 1, 1]
            shape[axis] = length
            indices[variable] = torch.arange(length, device=q.device, dtype=DTYPES[variable.dtype]).view(shape)
        return _Problem(q.to(dtype), k, v, indices, dtype)

    def seen(self, program: Program, custom: Custom) -> _Problem:
        """The same with 0 for keys and values that nobody sees, by a condition that reads neither query nor head."""
        condition = key_condition(program.mask)
        if condition is None:
            return self
        found = Evaluator(self.indices, custom, self.dtype, self.q.device)(condition)
        seen = found.transpose(-1, -2) if found.ndim else found  # a custom input without entries is read as a number
        zero = torch.zeros((), dtype=self.dtype, device=self.q.device)
        return replace(self, k=torch.where(seen, self.k, zero), v=torch.where(seen, self.v, zero))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    def keep(self, program: Program, custom: Custom, blocks: Tensor | None) -> Tensor:
        """Which pairs are kept, full size."""
        keep = torch.ones((), dtype=torch.bool, device=self.q.device)
        if program.mask is not None:
            keep = Evaluator(self.indices, custom, self.dtype, self.q.device)(program.mask)
        if blocks is not None:
            keep = keep & blocks
        return keep.expand(self.shape)

    def without_dropped(self, program: Program, custom: Custom, values: Tensor) -> Tensor:
        """A number of each pair, 0 for those that are dropped."""
        if program.dropped is None:
            return values
        dropped = Evaluator(self.indices, custom, self.dtype, self.q.device)(program.dropped)
        return torch.where(dropped, torch.zeros((), dtype=self.dtype, device=self.q.device), values)


def _finals(
    program: Program, problem: _Problem, custom: Custom, end: Mapping[Expr, Tensor], kept_row: Tensor
) -> list[Tensor]:
    """The returned rows, of states as they ended; of states as they began where a row keeps nothing.

    Those have a gradient too, where they read a custom input (a sink); what is infinite has none.
    """
    start = {s.variable: _full(s.initial, program, problem) for s in program.states}
    of_start = Evaluator({**problem.indices, **start}, custom, problem.dtype, problem.q.device)
    finals = []
    for _, e in program.finals:
        empty = of_start(e).detach()
        ends = kept_row | ~empty.isfinite()
        states = {v: torch.where(ends, end[v], first) for v, first in start.items()}
        row = Evaluator({**problem.indices, **states}, custom, problem.dtype, problem.q.device)(e)
        finals.append(torch.where(kept_row | empty.isfinite(), row, empty).expand(*problem.shape[:3], 1)[..., 0])
    return finals


def _full(value: float, program: Program, problem: _Problem) -> Tensor:
    least = lowest(problem.dtype, program.score)
    return torch.full((1, 1, 1, 1), max(min(value, -least), least), dtype=problem.dtype, device=problem.q.device)


def attend(
    program: Program, q: Tensor, k: Tensor, v: Tensor, custom: Custom | None = None, blocks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The output (batch, heads, queries, DV) in q's dtype, the returned rows (batch, heads, queries) in compute dtype.

    q: (batch, query heads, queries, D); k: (batch, key heads, keys, D); v: (batch, key heads, keys, DV); blocks: bool,
    broadcasts over pairs, what an outside block mask keeps; dtype: to compute in, if not in at least fp32.
    """
    custom = custom or {}
    p = _Problem.of(q, k, v, custom, dtype).seen(program, custom)
    if 0 in p.shape:
        zero = (p.q.sum() + p.k.sum() + p.v.sum()) * 0.0
        rows = {s.variable: p.q.new_ones(*p.shape[:3], 1) for s in program.states}
        finals = _finals(program, p, custom, rows, torch.zeros((), dtype=torch.bool, device=q.device))
        return (zero + q.new_zeros(*p.shape[:3], v.shape[-1], dtype=p.dtype)).to(q.dtype), finals
    indices = {**p.indices, PRODUCT: p.q @ p.k.transpose(-1, -2)}
    score = Evaluator(indices, custom, p.dtype, q.device)(program.score).expand(p.shape)
    keep = p.keep(program, custom, blocks) & (score != -torch.inf)
    kept_row = keep.any(-1, keepdim=True)
    seen = keep | ~kept_row  # an empty row computes on zeros and is then discarded, so that no NaN arises
    steady = torch.where(keep, score, -torch.inf).amax(-1, keepdim=True).detach()
    steady = torch.where(kept_row, steady, 0.0)
    score = torch.where(keep, score, steady)  # a masked pair's own score could overflow: any score of the row will do
    start = {s.variable: _full(s.initial, program, p) for s in program.states}
    least = lowest(p.dtype, program.score)
    online = Evaluator({**p.indices, **start, SCORE: score}, custom, p.dtype, q.device, seen, least)
    weights = torch.where(seen, online(program.weights), torch.zeros((), dtype=p.dtype, device=q.device))
    end = {s.variable: online(s.update) for s in program.states}
    output = p.without_dropped(program, custom, weights.expand(p.shape)) @ p.v
    epilogue = Evaluator({**p.indices, **end, OUTPUT: output}, custom, p.dtype, q.device)
    output = torch.where(kept_row, epilogue(program.output), torch.zeros((), dtype=p.dtype, device=q.device))
    if torch.is_grad_enabled() and not output.requires_grad:  # of no tensor: its gradients are 0, not missing
        linked = p.q.sum() + p.k.sum() + p.v.sum()
        output = torch.where(torch.zeros((), dtype=torch.bool, device=q.device), linked, output)
    return output.to(q.dtype), _finals(program, p, custom, end, kept_row)


@dataclass
class Gradients:
    """Gradients of q, k, v and of each custom input (None where it has none)."""

    q: Tensor
    k: Tensor
    v: Tensor
    custom: dict[str, Tensor]


def saved_rows(
    program: Program, backward: Backward, q: Tensor, k: Tensor, custom: Custom, blocks: Tensor | None = None
) -> list[Tensor]:
    """The rows (batch, heads, queries) that the forward pass keeps for this backward pass."""
    return attend(program.returning(backward.saved), q, k, k, custom, blocks)[1]


def attend_backward(
    program: Program, backward: Backward, q: Tensor, k: Tensor, v: Tensor, custom: Custom, saved: list[Tensor],
    delta: Tensor, d_output: Tensor, d_finals: Mapping[str, Tensor], blocks: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The derived (or hand-written) backward pass, dense: the formulas that the kernels run.

    delta: (batch, heads, queries), the row sum of o * d_output; d_finals: gradients of returned rows, by name.
    """
    p = _Problem.of(q, k, v, custom).seen(program, custom)
    products = p.q @ p.k.transpose(-1, -2)
    score = Evaluator({**p.indices, PRODUCT: products}, custom, p.dtype, q.device)(program.score)
    keep = p.keep(program, custom, blocks) & (score != -torch.inf)
    zero = torch.zeros((), dtype=p.dtype, device=q.device)
    rows = {final_variable(n): r[..., None].to(p.dtype) for (n, _), r in zip(backward.saved, saved, strict=True)}
    values = {**p.indices, PRODUCT: products}
    for extreme in backward.extremes:
        of_pair = Evaluator({**p.indices, PRODUCT: products}, custom, p.dtype, q.device)(extreme.value).expand(p.shape)
        rows |= _extreme_rows(extreme, of_pair, keep)
        values[extreme.of_pair] = of_pair
    rows[DELTA] = delta[..., None].to(p.dtype)
    for name, _ in program.finals:
        given = d_finals.get(name)
        rows[final_gradient(name)] = torch.zeros_like(rows[DELTA]) if given is None else given[..., None].to(p.dtype)
    of_row = Evaluator({**p.indices, **rows}, custom, p.dtype, q.device)
    read = {row_variable(name): of_row(e) for name, e in backward.rows}
    do = d_output.to(p.dtype)
    arriving = p.without_dropped(program, custom, do @ p.v.transpose(-1, -2))
    values |= {**read, SCORE: score, WEIGHT_GRADIENT: arriving}
    weights = torch.where(keep, Evaluator(values, custom, p.dtype, q.device)(backward.weights), zero).expand(p.shape)
    pair = Evaluator({**values, WEIGHT: weights}, custom, p.dtype, q.device)
    ds = torch.where(keep, pair(backward.product_gradient), zero).expand(p.shape)
    found: dict[str, Tensor] = {}
    for load, expr in backward.pair_gradients:
        _scatter(found, load, torch.where(keep, pair(expr), zero).expand(p.shape), p, custom)
    kept_row = keep.any(-1, keepdim=True)
    for load, expr in backward.row_gradients:
        value = of_row(expr)  # of a row that keeps nothing what its returned rows add, unless they are infinite
        _scatter(found, load, torch.where(kept_row | value.isfinite(), value, zero).expand(*p.shape[:3], 1), p, custom)
    group = q.shape[1] // k.shape[1]
    dk = (ds.transpose(-1, -2) @ p.q).unflatten(1, (-1, group)).sum(2)
    weights = p.without_dropped(program, custom, weights)
    dv = (weights.transpose(-1, -2) @ do).unflatten(1, (-1, group)).sum(2)
    return Gradients((ds @ p.k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), found)


def _extreme_rows(extreme: Extreme, values: Tensor, keep: Tensor) -> dict[Expr, Tensor]:
    """The extreme of each row's kept pairs, and how many of them reach it."""
    sign = 1.0 if extreme.kind == "max" else -1.0
    row = sign * torch.where(keep, sign * values, -torch.inf).amax(-1, keepdim=True)
    count = ((values == row) & keep).sum(-1, keepdim=True).clamp(min=1).to(values.dtype)
    return {extreme.row: row, extreme.count: count}


def _scatter(found: dict[str, Tensor], load: Expr, gradient: Tensor, p: _Problem, custom: Custom) -> None:
    """Adds the gradient of a read to the entries that it read."""
    total = found.get(load.name)
    if total is None:
        total = torch.zeros_like(custom[load.name], dtype=p.dtype)
    found[load.name] = add_at(total, load, gradient, Evaluator(p.indices, custom, p.dtype, gradient.device))
