"""The meaning of an expression on plain Python numbers: constant folding, and numeric proofs on small rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attention_engine.ir.chance import chance
from attention_engine.ir.expr import INTEGERS, LEAVES, Expr, Number, Op, Reduction, Type, in_64_bits, topological

LOWEST = -1e30  # stands for -inf where a row starts: below every score, yet finite, so that x - LOWEST is never NaN
WIDEST = 64  # bits of an integer
Row = list[Any]
Value = Any  # a number, or a row of numbers


def _guard(function: Callable[..., float], overflow: float = math.inf) -> Callable[..., float]:
    """IEEE answers where Python raises."""

    def guarded(*args: float) -> float:
        try:
            return function(*args)
        except OverflowError:
            return overflow
        except (ValueError, ZeroDivisionError):
            return math.nan

    return guarded


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.log(x)


def _recip(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1.0 / x


def _floor(x: float) -> float:
    return float(math.floor(x)) if math.isfinite(x) else x


def _maximum(a: Number, b: Number) -> Number:
    return a if a != a or a >= b else b


def _minimum(a: Number, b: Number) -> Number:
    return a if a != a or a <= b else b


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _round(x: float) -> float:
    return float(round(x)) if math.isfinite(x) else x


PYTHON: dict[Op, Callable[..., Number]] = {
    Op.ADD: lambda a, b: a + b,
    Op.MUL: lambda a, b: a * b,
    Op.RECIP: _recip,
    Op.FLOORDIV: lambda a, b: a // b if b else 0,
    Op.MOD: lambda a, b: a % b if b else 0,
    Op.POW: _guard(lambda a, b: math.pow(a, b)),
    Op.MAXIMUM: _maximum,
    Op.MINIMUM: _minimum,
    Op.EXP: _guard(math.exp),
    Op.EXP2: _guard(lambda x: math.pow(2.0, x)),
    Op.EXPM1: _guard(math.expm1),
    Op.LOG: _guard(_log),
    Op.LOG2: _guard(lambda x: -math.inf if x == 0 else math.log2(x)),
    Op.LOG1P: _guard(lambda x: -math.inf if x == -1 else math.log1p(x)),
    Op.SOFTPLUS: _softplus,
    Op.SQRT: _guard(math.sqrt),
    Op.RSQRT: _guard(lambda x: math.inf if x == 0 else 1.0 / math.sqrt(x)),
    Op.TANH: math.tanh,
    Op.SIGMOID: _sigmoid,
    Op.ERF: math.erf,
    Op.SIN: _guard(math.sin),
    Op.COS: _guard(math.cos),
    Op.ATAN: math.atan,
    Op.ABS: abs,
    Op.FLOOR: _floor,
    Op.ROUND: _round,
    Op.LESS: lambda a, b: a < b,
    Op.LESS_EQUAL: lambda a, b: a <= b,
    Op.EQUAL: lambda a, b: a == b,
    Op.AND: lambda a, b: a and b,
    Op.OR: lambda a, b: a or b,
    Op.NOT: lambda a: not a,
    Op.BIT_AND: lambda a, b: a & b,
    Op.BIT_OR: lambda a, b: a | b,
    Op.BIT_XOR: lambda a, b: a ^ b,
    Op.SHIFT_LEFT: lambda a, b: a << b if 0 <= b < WIDEST else 0,
    Op.SHIFT_RIGHT: lambda a, b: a >> (b if 0 <= b < WIDEST else WIDEST - 1),
    Op.CHANCE: chance,
    Op.WHERE: lambda c, a, b: a if c else b,
    Op.DETACH: lambda a: a,
}


def _whole(x: Number) -> int:
    return in_64_bits(int(x)) if math.isfinite(x) else 0


CASTS: dict[Type, Callable[[Number], Number]] = {
    Type.BOOL: bool,
    Type.INT: _whole,
    Type.LONG: _whole,
    Type.FLOAT: float,
}
MAY_WRAP = frozenset({Op.ADD, Op.MUL, Op.FLOORDIV, Op.ABS, Op.SHIFT_LEFT})  # of integers
FOLDS: dict[Reduction, Callable[[Sequence[float]], float]] = {
    "sum": _guard(math.fsum),
    "max": lambda row: max([LOWEST, *row]),
    "min": lambda row: min([-LOWEST, *row]),
}


def function_of(expr: Expr) -> Callable[..., Number]:
    """What the node does to its operands' values."""
    if expr.op is Op.CAST:
        assert isinstance(expr.arg, Type)
        return CASTS[expr.arg]
    function = PYTHON[expr.op]
    if expr.dtype in INTEGERS and expr.op in MAY_WRAP:
        return lambda *args: in_64_bits(int(function(*args)))
    return function


def evaluate(expr: Expr, values: Mapping[Expr, Value], length: int = 1) -> Value:
    """The expression's value, given those of its variables: numbers, or rows (lists of `length` numbers, one a key).

    `values` may also hold inner nodes (a row reduction, say): what it gives is then taken in their place.
    """
    (value,) = evaluate_all([expr], values, length)
    return value


def evaluate_all(roots: Sequence[Expr], values: Mapping[Expr, Value], length: int = 1) -> list[Value]:
    """The values of several expressions, what they share computed once."""
    done: dict[Expr, Value] = {}
    for node, function in _steps(tuple(roots)):
        if node in values:
            done[node] = values[node]
        elif node.op is Op.CONST:
            done[node] = node.value
        elif node.op in (Op.VAR, Op.LOAD) or any(a not in done for a in node.args):
            continue  # without a value; so is what needs it, unless `values` holds that
        elif function is None:
            row = done[node.args[0]]
            done[node] = FOLDS[node.reduction](row if isinstance(row, list) else [row] * length)
        else:
            done[node] = _apply(function, [done[a] for a in node.args])
    if missing := [r for r in roots if r not in done]:
        raise KeyError(f"no value for a variable of {missing[0]}")
    return [done[r] for r in roots]


@functools.lru_cache(maxsize=16)  # what tries a law evaluates the same expressions for hundreds of rows
def _steps(roots: tuple[Expr, ...]) -> list[tuple[Expr, Callable[..., Number] | None]]:
    """The nodes in order, and what each operation but a reduction does to its operands' values."""
    bare = LEAVES | {Op.LOAD, Op.REDUCE}
    return [(node, None if node.op in bare else function_of(node)) for node in topological(*roots)]


def _apply(function: Callable[..., Number], operands: list[Value]) -> Value:
    lengths = {len(o) for o in operands if isinstance(o, list)}
    if not lengths:
        return function(*operands)
    (n,) = lengths
    columns = [o if isinstance(o, list) else [o] * n for o in operands]
    return [function(*entry) for entry in zip(*columns, strict=True)]
