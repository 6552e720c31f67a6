"""Proofs by sympy: what numbers alone would only make likely."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mpmath
import sympy

from attention_engine.ir.evaluate import PYTHON
from attention_engine.ir.expr import Expr, Op, Type, topological

DRAWS, DIGITS = 12, 30
STEP, ROUNDING = 1e-6, 1e-18

# known by their numbers alone
OPAQUE = (Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT, Op.CHANCE)

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
    Op.EXPM1: lambda a: sympy.exp(a) - 1,
    Op.LOG: sympy.log,
    Op.LOG2: lambda a: sympy.log(a) / sympy.log(2),
    Op.LOG1P: lambda a: sympy.log(1 + a),
    Op.SOFTPLUS: lambda a: sympy.log(1 + sympy.exp(a)),
    Op.SQRT: sympy.sqrt,
    Op.RSQRT: lambda a: 1 / sympy.sqrt(a),
    Op.TANH: sympy.tanh,
    Op.SIGMOID: lambda a: 1 / (1 + sympy.exp(-a)),
    Op.ERF: sympy.erf,
    Op.SIN: sympy.sin,
    Op.COS: sympy.cos,
    Op.ATAN: sympy.atan,
    Op.ABS: sympy.Abs,
    Op.FLOOR: sympy.floor,
    Op.ROUND: lambda a: sympy.floor(a + sympy.Rational(1, 2)),
    Op.LESS: sympy.Lt,
    Op.LESS_EQUAL: sympy.Le,
    Op.EQUAL: sympy.Eq,
    Op.AND: sympy.And,
    Op.OR: sympy.Or,
    Op.NOT: sympy.Not,
    **{op: sympy.Function(op.value) for op in OPAQUE},
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


def _of_integers(function: Callable[..., Any]) -> Callable[..., int]:
    return lambda *numbers: function(*map(int, numbers))


def _changes(formula: Any, place: Any, others: list[Any]) -> bool:
    """Do numbers show it: two that lie close together, of which 30 digits are known?"""
    draw = random.Random(0)
    bits = {op.value: _of_integers(PYTHON[op]) for op in OPAQUE}
    run = sympy.lambdify([place, *others], formula, [bits, "mpmath"])
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
