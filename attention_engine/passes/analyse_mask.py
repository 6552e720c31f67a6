"""Loop bounds from a mask: comparisons of affine expressions say which tiles hold a kept pair, and which are whole."""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.ir.expr import Expr, Op, Type, const
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.passes.simplify import add, mul, split_coefficient, terms


@dataclass(frozen=True)
class Bound:
    """Kept pairs have q * q_idx + kv * kv_idx + offset >= 0."""

    q: int
    kv: int
    offset: int


@dataclass(frozen=True)
class MaskPlan:
    """What is known of a mask without looking at pairs: each kept pair meets all bounds; `exact`: and they suffice."""

    bounds: tuple[Bound, ...]
    exact: bool


def analyse_mask(mask: Expr | None) -> MaskPlan:
    """The bounds of a mask in normal form."""
    if mask is None:
        return MaskPlan((), True)
    bounds: list[Bound] = []
    exact = True
    for part in _conjuncts(mask):
        found = _bounds(part)
        exact = exact and found is not None
        bounds += found or []
    return MaskPlan(tuple(bounds), exact)


def _conjuncts(mask: Expr) -> list[Expr]:
    if mask.op is Op.AND:
        return [c for a in mask.args for c in _conjuncts(a)]
    return [mask]


def _bounds(condition: Expr) -> list[Bound] | None:
    negated = condition.op is Op.NOT
    inner = condition.args[0] if negated else condition
    if inner.op not in (Op.LESS, Op.LESS_EQUAL, Op.EQUAL) or inner.args[0].dtype is not Type.INT:
        return None
    a, b = inner.args
    if inner.op is Op.EQUAL:
        pair = [_affine(_minus(b, a), 0), _affine(_minus(a, b), 0)]
        found = [p for p in pair if p is not None]
        return None if negated or len(found) < 2 else found
    strict = inner.op is Op.LESS
    one = _affine(_minus(a, b), 0 if strict else -1) if negated else _affine(_minus(b, a), -1 if strict else 0)
    return None if one is None else [one]


def _minus(a: Expr, b: Expr) -> Expr:
    return add(a, mul(const(-1), b))


def _affine(expr: Expr, offset: int) -> Bound | None:
    """expr + offset >= 0 as a bound, where expr is affine in q_idx and kv_idx."""
    q = kv = 0
    for term in terms(expr):
        number, rest = split_coefficient(term)
        if rest is None:
            offset += int(number)
        elif rest is Q_IDX:
            q += int(number)
        elif rest is KV_IDX:
            kv += int(number)
        else:
            return None
    return Bound(q, kv, offset)
