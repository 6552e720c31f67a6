"""Random expressions for hypothesis: floats, ints and conditions over a few variables of different axes.

Operations keep to where they are defined (no logarithm of a negative number, no division near 0), so that two
expressions of one value can be compared by numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from attention_engine.ir.evaluate import Value
from attention_engine.ir.expr import Axis, Expr, Op, Type, const, make, topological, var

PAIR = (Axis.BATCH, Axis.HEAD, Axis.QUERY, Axis.KEY)
FLOATS = [
    var("x", PAIR),
    var("y", PAIR),
    var("column", [Axis.KEY]),
    var("row", [Axis.BATCH, Axis.HEAD, Axis.QUERY]),
    var("slope", [Axis.HEAD]),
]
INTS = [var("i", [Axis.QUERY], Type.INT), var("j", [Axis.KEY], Type.INT), var("n", [Axis.HEAD], Type.INT)]
NUMBERS = [0.0, 1.0, -1.0, 2.0, 0.5, -0.25, 3.0]

BITS = [Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT]
POWERS = [2.0, 3.0, -1.0, -2.0, 0.5, 1.5, 0.0, 1.0]


def bounded(e: Expr) -> Expr:
    """Within -1 .. 1."""
    return make(Op.TANH, e)


def positive(e: Expr) -> Expr:
    """Within 1.5 .. 3.5, smooth."""
    return make(Op.SIN, e) + 2.5


GUARDS: dict[Op, Callable[[Expr], Expr]] = {
    **dict.fromkeys([Op.EXP, Op.EXP2, Op.EXPM1], bounded),
    **dict.fromkeys([Op.RECIP, Op.LOG, Op.LOG2, Op.LOG1P, Op.SQRT, Op.RSQRT], positive),
    **dict.fromkeys([Op.TANH, Op.SIGMOID, Op.ERF, Op.SIN, Op.COS, Op.ABS, Op.DETACH], lambda e: e),
    **dict.fromkeys([Op.ATAN, Op.SOFTPLUS], lambda e: e),
}


class Builder:
    """Draws expressions from the top down, each node smaller than the last."""

    def __init__(self, draw: st.DrawFn, smooth: bool) -> None:
        self.draw, self.smooth = draw, smooth

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.draw(st.integers(0, len(choices) - 1))]

    def float(self, size: int) -> Expr:
        if size <= 1:
            return self.pick([*FLOATS, *FLOATS, *map(const, NUMBERS)])
        forms = [self.sum, self.sum, self.sum, self.unary, self.unary, self.power, self.branch]
        return self.pick(forms if self.smooth else [*forms, self.reduction, self.from_int, self.detached])(size - 1)

    def pair(self, size: int) -> tuple[Expr, Expr]:
        left = self.draw(st.integers(1, max(size - 1, 1)))
        return self.float(left), self.float(max(size - left, 1))

    def sum(self, size: int) -> Expr:
        a, b = self.pair(size)
        form = self.pick([Op.ADD, Op.ADD, Op.MUL, Op.MUL, Op.MAXIMUM, Op.MINIMUM, "-", "neg", "double"])
        if isinstance(form, Op):
            return make(form, a, b)
        return {"-": a - b, "neg": -a, "double": a * 2.0 + b}[form]

    def unary(self, size: int) -> Expr:
        op = self.pick([op for op in GUARDS if op is not Op.DETACH])
        return make(op, GUARDS[op](self.float(size)))

    def power(self, size: int) -> Expr:
        a, b = self.pair(size)
        return make(Op.POW, positive(a), self.pick([bounded(b), *map(const, POWERS)]))

    def branch(self, size: int) -> Expr:
        a, b = self.pair(size)
        return make(Op.WHERE, self.truth(max(size // 2, 1)), a, self.pick([b, const(0.0)]))

    def reduction(self, size: int) -> Expr:
        return make(Op.REDUCE, self.float(size), arg=self.pick(["sum", "max", "min"]))

    def from_int(self, size: int) -> Expr:
        return make(Op.CAST, self.int(size), arg=Type.FLOAT)

    def detached(self, size: int) -> Expr:
        return make(self.pick([Op.DETACH, Op.FLOOR, Op.ROUND]), self.float(size))

    def int(self, size: int) -> Expr:
        if size <= 1:
            return self.pick([*INTS, *INTS, *(const(n) for n in range(-2, 4))])
        op = self.pick([Op.ADD, Op.ADD, Op.MUL, Op.MAXIMUM, Op.MINIMUM, Op.FLOORDIV, Op.MOD, Op.ABS, *BITS])
        if op is Op.ABS:
            return make(op, self.int(size - 1))
        if op in (Op.FLOORDIV, Op.MOD, Op.SHIFT_LEFT, Op.SHIFT_RIGHT):
            return make(op, self.int(size - 1), const(self.draw(st.integers(1, 4))))
        left = self.draw(st.integers(1, size - 1))
        return make(op, self.int(left), self.int(size - left))

    def truth(self, size: int) -> Expr:
        if size <= 1:
            return self.pick([const(True), const(False), make(Op.LESS, self.int(1), self.int(1))])
        op = self.pick([Op.AND, Op.OR, Op.NOT, Op.LESS, Op.LESS_EQUAL, Op.EQUAL, "float"])
        left = self.draw(st.integers(1, size - 1))
        if op == "float":
            return make(self.pick([Op.LESS, Op.LESS_EQUAL]), *self.pair(size))
        if op in (Op.LESS, Op.LESS_EQUAL, Op.EQUAL):
            return make(op, self.int(left), self.int(size - left))
        return make(op, self.truth(size - 1)) if op is Op.NOT else make(op, self.truth(left), self.truth(size - left))


@st.composite
def floats(draw: st.DrawFn, size: int = 12, smooth: bool = False) -> Expr:
    """A float; a smooth one holds neither reductions nor anything whose gradient is 0 everywhere."""
    return Builder(draw, smooth).float(draw(st.integers(1, size)))


@st.composite
def ints(draw: st.DrawFn, size: int = 6) -> Expr:
    return Builder(draw, False).int(draw(st.integers(1, size)))


@st.composite
def truths(draw: st.DrawFn, size: int = 8) -> Expr:
    return Builder(draw, False).truth(draw(st.integers(1, size)))


def expressions() -> st.SearchStrategy[Expr]:
    return st.one_of(floats(), floats(), ints(), truths())


def size(expr: Expr) -> int:
    return len(topological(expr))


def sample(*roots: Expr, length: int = 5, seed: int = 0) -> dict[Expr, Value]:
    """A value for every variable: numbers of a magnitude that operations keep, rows where they depend on the key."""
    draw = random.Random(seed)
    values: dict[Expr, Value] = {}
    for node in topological(*roots):
        if node.op is Op.VAR:
            numbers = [draw.randrange(-4, 9) if node.dtype is Type.INT else draw.uniform(-2, 2) for _ in range(length)]
            values[node] = numbers if Axis.KEY in node.axes else numbers[0]
    return values


def as_row(value: Value, length: int = 5) -> list[float]:
    return value if isinstance(value, list) else [value] * length


def agree(a: Value, b: Value, tolerance: float = 1e-7) -> bool:
    """Equal up to the rounding of other orders of operations."""
    return all(
        x == y or abs(x - y) <= tolerance * max(1.0, abs(x), abs(y)) or not (math.isfinite(x) or math.isfinite(y))
        for x, y in zip(as_row(a), as_row(b), strict=True)
    )


__all__ = ["FLOATS", "INTS", "agree", "expressions", "floats", "ints", "sample", "size"]
