"""Proofs by sympy: what numbers alone would only make likely."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mpmath
import sympy

from attention_engine.ir.expr import Expr, Op, Type, topological

DRAWS, DIGITS = 12, 30
STEP, ROUNDING = 1e-6, 1e-18

SYMPY: dict[Op, Callable[..., Any]] = {
    Op.ADD: lambda a, b: a + b,
    Op.MUL: lambda a, b: a * b,
    Op.RECIP: lambda a: 1 / a,
    Op.FLOORDIV: lambda a, b: sympy.floor(a / b),
    Op.MOD: lambda a, b: sympy.Mod(a, b),
    Op.POW: lambda a, b: a**b,
    Op.MAXIMUM: sympy.Max,
    Op.MINIMUM: sympy.Min,
    Op.EXP: sympy.exp,
    Op.EXP2: lambda a: 2**a,
    Op.LOG: sympy.log,
    Op.LOG2: lambda a: sympy.log(a) / sympy.log(2),
    Op.LOG1P: lambda a: sympy.log(1 + a),
    Op.SQRT: sympy.sqrt,
    Op.RSQRT: lambda a: 1 / sympy.sqrt(a),
    Op.TANH: sympy.tanh,
    Op.SIGMOID: lambda a: 1 / (1 + sympy.exp(-a)),
    Op.ERF: sympy.erf,
    Op.SIN: sympy.sin,
    Op.COS: sympy.cos,
    Op.ABS: sympy.Abs,
    Op.FLOOR: sympy.floor,
    Op.LESS: sympy.Lt,
    Op.LESS_EQUAL: sympy.Le,
    Op.EQUAL: sympy.Eq,
    Op.AND: sympy.And,
    Op.OR: sympy.Or,
    Op.NOT: sympy.Not,
    Op.WHERE: lambda c, a, b: sympy.Piecewise((a, c), (b, True)),
    Op.CAST: lambda a: a,
    Op.DETACH: lambda a: a,
}


def to_sympy(expr: Expr) -> tuple[Any, dict[Expr, Any]]:
    """The expression in sympy, and the symbol that stands for each variable, load and reduction."""
    symbols: dict[Expr, Any] = {}
    done: dict[Expr, Any] = {}
    for node in topological(expr):
        match node.op:
            case Op.CONST:
                number = node.value
                done[node] = sympy.nsimplify(number) if node.dtype is not Type.BOOL else sympy.sympify(number)
            case Op.VAR | Op.LOAD | Op.REDUCE:
                symbols[node] = sympy.Symbol(f"s{len(symbols)}", real=True)
                done[node] = symbols[node]
            case _:
                done[node] = SYMPY[node.op](*(done[a] for a in node.args))
    return done[expr], symbols


def is_independent(expr: Expr, over: Expr) -> bool:
    """Does the value not change with `over`, a variable? True only where sympy shows the derivative to be 0."""
    formula, symbols = to_sympy(expr)
    if over not in symbols:
        return True
    place = symbols.pop(over)
    if _changes(formula, place, list(symbols.values())):
        return False  # what simplify may need seconds for
    return bool(sympy.simplify(sympy.diff(formula, place)) == 0)


def _changes(formula: Any, place: Any, others: list[Any]) -> bool:
    """Do numbers show it: two that lie close together, of which 30 digits are known?"""
    draw = random.Random(0)
    run = sympy.lambdify([place, *others], formula, "mpmath")
    with mpmath.workdps(DIGITS):
        for _ in range(DRAWS):
            at, *rest = (draw.choice((-1, 1)) * draw.uniform(0.2, 3) for _ in range(1 + len(others)))
            try:
                value, beside = run(mpmath.mpf(at), *rest), run(mpmath.mpf(at) + STEP, *rest)
                if mpmath.im(value) == mpmath.im(beside) == 0 and abs(value - beside) > ROUNDING * abs(value):
                    return True
            except (ArithmeticError, TypeError, ValueError):  # outside the formula's domain
                continue
    return False
