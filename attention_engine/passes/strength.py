"""Cheaper operations of the same value: exp becomes exp2 with the factor moved to where it costs once a row."""

from __future__ import annotations

import math

from attention_engine.ir.expr import Axis, Expr, Number, Op, Type, VarKind, const, make, transform, var
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.passes.simplify import (
    CONSTRUCTORS,
    add,
    cast,
    construct,
    factors,
    group_of,
    mul,
    recip,
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


def _exp2_of_difference(node: Expr) -> Expr:
    if node.op is Op.EXP and Axis.KEY in node.axes:
        return CONSTRUCTORS[Op.EXP2](mul(const(LOG2_E), node.args[0]))
    return construct(node)


def use_exp2(*roots: Expr, differences: bool = False) -> tuple[Expr, ...]:
    """The roots with exp of pairs as exp2, the factor spread over the exponent's terms; in normal form.

    differences: not spread, for terms so large that they lose their difference as products (one operation more a pair).
    """
    return tuple(transform(roots, _exp2_of_difference if differences else _exp2))


def _open(node: Expr) -> Expr:
    if Axis.KEY not in node.axes:
        return construct(node)
    match node.op:
        case Op.SIGMOID:
            return recip(add(CONSTRUCTORS[Op.EXP2](spread(-LOG2_E, node.args[0])), const(1.0)))
        case Op.CAST if node.dtype is Type.FLOAT and node.args[0].op in (Op.ABS, Op.MAXIMUM, Op.MINIMUM):
            inner = node.args[0]
            return CONSTRUCTORS[inner.op](*(_open(cast(a, Type.FLOAT)) for a in inner.args))
        case _:
            return construct(node)


def open_pairs(*roots: Expr) -> tuple[Expr, ...]:
    """The roots with what is cheaper in pairs when it is spelled out; in normal form.

    A sigmoid is 1 / (1 + exp2(...)), whose factor joins others. The absolute value (free of charge on floats), maximum
    and minimum of integers that become floats are taken of floats, which leaves sums of indices to `split_casts`.
    """
    return tuple(transform(roots, _open))


# An index is the sum of its parts: what differs between threads, and what between the registers of a thread.
PARTS = {
    index: tuple(var(f"{index.name}_of_{part}", index.axes, Type.INT, VarKind.PLACE) for part in ("thread", "register"))
    for index in (Q_IDX, KV_IDX)
}


def _split(node: Expr) -> Expr:
    if node.op is not Op.CAST or node.dtype is not Type.FLOAT or node.args[0].dtype is not Type.INT:
        return node
    split = [(*split_coefficient(term), term) for term in terms(node.args[0])]
    numbers = {rest: number for number, rest, _ in split if rest in PARTS}
    if not numbers:
        return node
    of_thread, of_register = (
        add(*(mul(const(number, Type.INT), PARTS[index][part]) for index, number in numbers.items())) for part in (0, 1)
    )
    others = [term for _, rest, term in split if rest not in PARTS]
    return make(Op.ADD, cast(add(of_thread, *others), Type.FLOAT), cast(of_register, Type.FLOAT))


def split_casts(*roots: Expr) -> tuple[Expr, ...]:
    """The roots with float(sum of indices) as float(their parts of the thread) + float(their parts of the register).

    The latter is a constant, so that a thread converts once a tile, and pairs of one distance are one value to the
    compiler. Exact while the numbers stay below 2^24, as then both parts and their sum are; beyond, both round.
    """
    return tuple(transform(roots, _split))


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
