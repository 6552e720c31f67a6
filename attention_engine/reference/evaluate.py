"""The meaning of an expression on torch tensors. Kernels are right when they agree with this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

import torch
from torch import Tensor

from attention_engine.ir.chance import chance
from attention_engine.ir.evaluate import LOWEST
from attention_engine.ir.expr import Axis, Expr, Op, Reduction, Type, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.ir.reach import may_be_far

DTYPES = {Type.BOOL: torch.bool, Type.INT: torch.int64, Type.LONG: torch.int64}


def _power(a: Tensor, b: Tensor) -> Tensor:
    """a ** b, whose exponent has the gradient 0 where the base is 0, in all orders (torch: in the first alone)."""
    if not b.requires_grad:
        return torch.pow(a, b)
    zero = a == 0
    one = torch.ones((), dtype=a.dtype, device=a.device)
    of_zero = torch.pow(torch.where(zero, a, one), b.detach())
    return torch.where(zero, of_zero, torch.pow(torch.where(zero, one, a), b))


TORCH: dict[Op, Callable[..., Tensor]] = {
    Op.ADD: torch.add,
    Op.MUL: torch.mul,
    Op.RECIP: torch.reciprocal,
    Op.FLOORDIV: lambda a, b: torch.div(a, b, rounding_mode="floor"),
    Op.MOD: torch.remainder,
    Op.POW: _power,
    Op.MAXIMUM: torch.maximum,
    Op.MINIMUM: torch.minimum,
    Op.EXP: torch.exp,
    Op.EXP2: torch.exp2,
    Op.EXPM1: torch.expm1,
    Op.LOG: torch.log,
    Op.LOG2: torch.log2,
    Op.LOG1P: torch.log1p,
    Op.SOFTPLUS: lambda a: -torch.nn.functional.logsigmoid(-a),
    Op.SQRT: torch.sqrt,
    Op.RSQRT: torch.rsqrt,
    Op.TANH: torch.tanh,
    Op.SIGMOID: torch.sigmoid,
    Op.ERF: torch.erf,
    Op.SIN: torch.sin,
    Op.COS: torch.cos,
    Op.ATAN: torch.atan,
    Op.ABS: torch.abs,
    Op.FLOOR: torch.floor,
    Op.ROUND: torch.round,
    Op.LESS: torch.lt,
    Op.LESS_EQUAL: torch.le,
    Op.EQUAL: torch.eq,
    Op.AND: torch.logical_and,
    Op.OR: torch.logical_or,
    Op.NOT: torch.logical_not,
    Op.BIT_AND: torch.bitwise_and,
    Op.BIT_OR: torch.bitwise_or,
    Op.BIT_XOR: torch.bitwise_xor,
    Op.SHIFT_LEFT: torch.bitwise_left_shift,
    Op.SHIFT_RIGHT: torch.bitwise_right_shift,
    Op.CHANCE: chance,
    Op.WHERE: torch.where,
    Op.DETACH: torch.detach,
}


def lowest(dtype: torch.dtype, score: Expr) -> float:
    """The finite number that stands for -inf in this dtype, where rows of such scores start."""
    return torch.finfo(dtype).min if may_be_far(score) else max(LOWEST, torch.finfo(dtype).min)


class Evaluator:
    """Evaluates expressions on tensors that broadcast as (batch, heads, queries, keys).

    values: what the variables are; custom: the custom inputs; dtype: what floats are computed in; keep: which pairs
    take part in row reductions (None: all); least: what a maximum of none of them is. An expression is computed once,
    however often it is asked for.
    """

    def __init__(
        self, values: Mapping[Expr, Tensor], custom: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device,
        keep: Tensor | None = None, least: float = LOWEST,
    ) -> None:  # fmt: skip
        self.done: dict[Expr, Tensor] = dict(values)
        self.custom, self.dtype, self.device, self.keep = custom, dtype, device, keep
        self.lowest = least

    def __call__(self, expr: Expr) -> Tensor:
        """The value of the expression."""
        for node in topological(expr):
            if node not in self.done:
                missing = [a for a in node.args if a not in self.done]
                if not missing and node.op is not Op.VAR:
                    self.done[node] = self._compute(node)
        if expr not in self.done:
            raise KeyError(f"no value for a variable of {expr}")
        return self.done[expr]

    def _compute(self, node: Expr) -> Tensor:
        operands = [self.done[a] for a in node.args]
        match node.op:
            case Op.CONST:
                widest = DTYPES.get(node.dtype, torch.float64)  # a float beyond a narrower dtype is infinite in it
                value = torch.full((), node.value, dtype=widest, device=self.device)
                return value.to(self.dtype) if node.dtype is Type.FLOAT else value
            case Op.CAST:
                return operands[0].to(DTYPES.get(node.dtype, self.dtype))
            case Op.LOAD:
                return self._load(node, operands)
            case Op.REDUCE:
                return self._reduce(node.reduction, operands[0])
            case Op.MAXIMUM | Op.MINIMUM if node.arg is not None:  # a tie's gradient goes to one of the two
                a, b = operands
                wins = {Op.MAXIMUM: (torch.gt, torch.ge), Op.MINIMUM: (torch.lt, torch.le)}[node.op][node.arg == 1.0]
                return torch.where(torch.isnan(a) | wins(a, b), a, b)
            case _:
                return TORCH[node.op](*operands)

    def _load(self, node: Expr, indices: list[Tensor]) -> Tensor:
        tensor = self.custom[node.name]
        tensor = tensor.reshape(1) if tensor.ndim == 0 and indices else tensor  # one number serves an axis of length 1
        indices = list(torch.broadcast_tensors(*indices)) if indices else indices
        inside = torch.ones((), dtype=torch.bool, device=self.device)
        clamped = []
        for index, length in zip(indices, tensor.shape, strict=True):
            inside = inside & (index >= 0) & (index < length)
            clamped.append(index.clamp(0, max(length - 1, 0)))
        if tensor.numel() == 0:
            return torch.zeros((), dtype=DTYPES.get(node.dtype, self.dtype), device=self.device)
        value = tensor[tuple(clamped)].to(DTYPES.get(node.dtype, self.dtype))
        return torch.where(inside, value, torch.zeros((), dtype=value.dtype, device=self.device))

    def _reduce(self, kind: Reduction, a: Tensor) -> Tensor:
        full = a if self.keep is None else torch.broadcast_tensors(a, self.keep)[0]
        neutrals: dict[Reduction, float] = {"sum": 0.0, "max": self.lowest, "min": -self.lowest}
        neutral = neutrals[kind]
        if self.keep is not None:
            full = torch.where(self.keep, full, torch.full((), neutral, dtype=a.dtype, device=a.device))
        if full.shape[-1] == 0:
            return torch.full((*full.shape[:-1], 1), neutral, dtype=a.dtype, device=a.device)
        match kind:
            case "sum":
                return full.sum(-1, keepdim=True)
            case "max":
                return full.amax(-1, keepdim=True).clamp(min=self.lowest)
            case "min":
                return full.amin(-1, keepdim=True).clamp(max=-self.lowest)
            case _:
                assert_never(kind)


def _in_place(load: Expr, gradient: Tensor, shape: torch.Size) -> Tensor | None:
    """The gradient as the read tensor lies, where the read is at its own indices throughout; else None."""
    variables = (B, H, Q_IDX, KV_IDX)
    if len(set(load.args)) != len(load.args) or not set(load.args) <= set(variables):
        return None
    order = [variables.index(i) for i in load.args]
    spread = gradient.permute(*order, *(n for n in range(4) if n not in order))
    return spread.reshape(shape) if spread.shape[: len(order)] == shape else None


def add_at(total: Tensor, load: Expr, gradient: Tensor, evaluate: Evaluator) -> Tensor:
    """total + what each pair (or row) of `gradient` (batch, heads, queries, keys or 1) adds to the entry that it read.

    Sums over what the read doesn't depend on come first; a read out of range adds nothing.
    """
    if total.ndim == 0 and load.args:
        return add_at(total.reshape(1), load, gradient, evaluate).reshape(())
    for position, axis in enumerate((Axis.BATCH, Axis.HEAD, Axis.QUERY, Axis.KEY)):
        if axis not in load.axes:
            gradient = gradient.sum(position, keepdim=True)
    if not load.args:
        return total + gradient.sum()
    if total.numel() == 0:
        return total
    plain = _in_place(load, gradient, total.shape)
    if plain is not None:
        return total + plain
    indices = [evaluate(i).expand(gradient.shape) for i in load.args]
    inside = torch.ones_like(gradient, dtype=torch.bool)
    for index, length in zip(indices, total.shape, strict=True):
        inside = inside & (index >= 0) & (index < length)
    place = torch.zeros_like(indices[0])
    for index, length in zip(indices, total.shape, strict=True):
        place = place * length + index.clamp(0, length - 1)
    return _scatter(total, place, torch.where(inside, gradient, 0.0).to(total.dtype))


RUN = 64  # neighbours that are summed before they are scattered, if all go to one entry


def _scatter(total: Tensor, place: Tensor, values: Tensor) -> Tensor:
    """total + the values at their places in its memory's order, in the same order in every run.

    torch adds what goes to one entry one by one: of a table that clamps a distance, nearly all. Whole runs of
    neighbours become one value; the others of a run go to places of their own behind the end.
    """
    count = place.shape[-1] // RUN * RUN
    rest = place[..., count:].reshape(-1), values[..., count:].reshape(-1)
    runs, parts = place[..., :count].reshape(-1, RUN), values[..., :count].reshape(-1, RUN)
    alike = (runs == runs[:, :1]).all(1, keepdim=True)
    behind = total.numel() + torch.arange(runs.numel(), device=runs.device).view(-1, RUN)
    runs = torch.cat([runs[:, :1], torch.where(alike, behind, runs)[:, 1:]], 1)
    parts = torch.cat([torch.where(alike, parts.sum(1, keepdim=True), parts[:, :1]), parts[:, 1:]], 1)
    places, added = torch.cat([runs.reshape(-1), rest[0]]), torch.cat([parts.reshape(-1), rest[1]])
    found = total.new_zeros(total.numel() + runs.numel()).index_put((places,), added, accumulate=True)
    return total + found[: total.numel()].view(total.shape)
