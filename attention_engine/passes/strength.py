"""Cheaper operations of the same value: exp becomes exp2 with the factor moved to where it costs once a row."""

from __future__ import annotations

import math

from attention_engine.ir.expr import Axis, Expr, Number, Op, const, make, transform
from attention_engine.passes.simplify import (
    CONSTRUCTORS,
    add,
    construct,
    factors,
    group_of,
    mul,
    split_coefficient,
    terms,
)

LOG2_E = 1.0 / math.log(2.0)


def spread(number: Number, expr: Expr) -> Expr:
    """number * expr, the number taken into every term of a sum (and of the sums inside it)."""
    parts = []
    for term in terms(expr):
        inner, rest = split_coefficient(term)
        nested = rest is not None and rest.op is Op.ADD
        parts.append(spread(number * inner, rest) if nested and rest is not None else mul(const(float(number)), term))
    return add(*parts)


def _exp2(node: Expr) -> Expr:
    if node.op in (Op.EXP, Op.EXP2) and Axis.KEY in node.axes:
        return CONSTRUCTORS[Op.EXP2](spread(LOG2_E if node.op is Op.EXP else 1.0, node.args[0]))
    return construct(node)


def use_exp2(*roots: Expr) -> tuple[Expr, ...]:
    """The roots with exp of pairs as exp2, the factor spread over the exponent's terms; in normal form."""
    return tuple(transform(roots, _exp2))


def _lighten(node: Expr) -> Expr:
    number, rest = split_coefficient(node)
    if node.op is not Op.MUL or rest is None or number == 1 or rest.op is not Op.MUL:
        return node
    parts = factors(rest)
    light = max(group_of(p) for p in parts)
    heavy = [p for p in parts if group_of(p) != light]
    if not heavy:
        return node
    return make(Op.MUL, mul(*heavy), mul(const(float(number)), *[p for p in parts if group_of(p) == light]))


def lighten(*roots: Expr) -> tuple[Expr, ...]:
    """number * (pair * row) as pair * (number * row), multiplied once a row; the last pass: this is no normal form."""
    return tuple(transform(roots, _lighten))
