"""A formula of a row's numbers and a key's as a sum of products: (factor of the row) times (factor of the key)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set

from attention_engine.ir.expr import Axis, Expr, Op, const, is_const, make, topological
from attention_engine.passes.derive_backward import is_positive
from attention_engine.passes.simplify import add, factors, mul, simplify, split_coefficient, where

ONE, ZERO = const(1.0), const(0.0)
Term = tuple[Expr, Expr]  # a factor of the row's numbers, and one of the key
MOST_TERMS = 24  # of one formula


class Inseparable(Exception):
    """No such sum was found; the formula, or a part of it, that stands in the way."""

    def __init__(self, node: Expr) -> None:
        super().__init__(node)
        self.node = node


def reads(node: Expr, variables: Set[Expr]) -> bool:
    """Does one of these stand in it?"""
    return any(n in variables for n in topological(node))


def separate(node: Expr, rows: Set[Expr]) -> list[Term]:
    """The terms of `node`, rows being the row's numbers. What reads none of them belongs to the key. Raises
    Inseparable."""
    if not reads(node, rows):
        return [(ONE, node)]
    if Axis.KEY not in node.axes:
        return [(node, ONE)]
    match node.op:
        case Op.ADD:
            return _collect(itertools.chain.from_iterable(separate(a, rows) for a in node.args))
        case Op.MUL:
            left, right = (separate(a, rows) for a in node.args)
            return _collect((mul(a, c), mul(b, d)) for (a, b), (c, d) in itertools.product(left, right))
        case Op.DETACH | Op.CAST:
            return separate(node.args[0], rows)
        case Op.EXP | Op.EXP2:
            row, key = _of_row_and_key(node, rows)
            return [(make(node.op, row), make(node.op, key))]
        case Op.SIN | Op.COS:
            return _turned(node, *_of_row_and_key(node, rows))
        case Op.WHERE:
            return _chosen(node, rows)
        case Op.POW if is_const(node.args[1]):
            return _raised(node, rows)
        case Op.MAXIMUM | Op.MINIMUM:
            for inner, bound in (node.args, node.args[::-1]):
                if is_const(bound, 0):
                    d, key = _one_term(node, inner, rows)
                    if is_positive(d):
                        return [(d, simplify(make(node.op, key, ZERO))[0])]
        case Op.RECIP | Op.ABS:
            d, key = _one_term(node, node.args[0], rows)
            return [_each(node.op, d, key)]
        case Op.SQRT | Op.RSQRT | Op.LOG | Op.LOG2:
            d, key = _one_term(node, node.args[0], rows)
            if is_positive(d):
                of_row, of_key = _each(node.op, d, key)
                return [(of_row, of_key)] if node.op in (Op.SQRT, Op.RSQRT) else [(of_row, ONE), (ONE, of_key)]
        case _:
            pass
    raise Inseparable(node)


def _each(op: Op, row: Expr, key: Expr) -> Term:
    of_row, of_key = simplify(make(op, row), make(op, key))
    return of_row, of_key


def _one_term(node: Expr, inner: Expr, rows: Set[Expr]) -> Term:
    found = separate(inner, rows)
    if len(found) != 1:
        raise Inseparable(node)
    return found[0]


def _of_row_and_key(node: Expr, rows: Set[Expr]) -> Term:
    """The operand as a row's number plus a key's."""
    of_row: list[Expr] = []
    of_key: list[Expr] = []
    for d, key in separate(node.args[0], rows):
        if Axis.KEY in key.axes and reads(d, rows):
            raise Inseparable(node)
        (of_key if Axis.KEY in key.axes else of_row).append(mul(d, key))
    return add(ZERO, *of_row), add(ZERO, *of_key)


def _turned(node: Expr, row: Expr, key: Expr) -> list[Term]:
    """The sine or cosine of a sum."""
    (sin_row, cos_row), (sin_key, cos_key) = ((make(Op.SIN, e), make(Op.COS, e)) for e in (row, key))
    if node.op is Op.SIN:
        return [(cos_row, sin_key), (sin_row, cos_key)]
    return [(cos_row, cos_key), (mul(const(-1.0), sin_row), sin_key)]


def _chosen(node: Expr, rows: Set[Expr]) -> list[Term]:
    """A choice of the row alone chooses factors of the row; one of the key alone, those of the key."""
    condition, *branches = node.args
    this, other = (separate(branch, rows) for branch in branches)
    if Axis.KEY not in condition.axes:
        return _collect(
            [*((where(condition, d, ZERO), k) for d, k in this), *((where(condition, ZERO, d), k) for d, k in other)]
        )
    if reads(condition, rows):
        raise Inseparable(node)
    return _collect(
        [*((d, where(condition, k, ZERO)) for d, k in this), *((d, where(condition, ZERO, k)) for d, k in other)]
    )


def _raised(node: Expr, rows: Set[Expr]) -> list[Term]:
    """A power by a number."""
    power = float(node.args[1].value)
    found = separate(node.args[0], rows)
    if len(found) == 1 and (power.is_integer() or is_positive(found[0][0])):
        of_row, of_key = simplify(*(make(Op.POW, e, node.args[1]) for e in found[0]))
        return [(of_row, of_key)]
    if power in (2.0, 3.0, 4.0):
        return separate(mul(*[node.args[0]] * int(power)), rows)
    raise Inseparable(node)


def _collect(found: Iterable[Term]) -> list[Term]:
    """Terms with the same key factor joined. Numbers, and what all keys share, belong to the row."""
    table: dict[Expr, Expr] = {}
    for d, key in found:
        number, rest = split_coefficient(key)
        shared = [f for f in factors(rest) if Axis.KEY not in f.axes] if rest is not None else []
        own = [f for f in factors(rest) if Axis.KEY in f.axes] if rest is not None else []
        key = mul(ONE, *own)
        table[key] = add(table.get(key, ZERO), mul(const(float(number)), d, *shared))
    terms = [(d, key) for key, d in table.items() if not is_const(d, 0)]
    if len(terms) > MOST_TERMS:
        raise Inseparable(terms[0][0])
    return terms
