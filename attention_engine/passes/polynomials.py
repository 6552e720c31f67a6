"""Polynomials over expressions, and linear equations with such coefficients: what a merge asks of algebra.

Sums, products and numbers are opened; all else is an atom. So equality is told for certain, at once, and nothing is
rewritten that would cost digits: an exponential or a quotient stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from attention_engine.ir.expr import Expr, Op, const, make
from attention_engine.passes.simplify import add, factor_out, factors, mul, recip, terms

Monomial = tuple[Expr, ...]  # atoms in the order of their digests, each as often as it is a factor
ROUNDING = 1e-12  # of coefficients: below it, relative to what was added, a sum is 0
MOST_UNKNOWNS = 4  # of equations whose coefficients are no numbers


class Polynomial:
    """A sum of numbers times products of atoms."""

    def __init__(self, coefficients: dict[Monomial, float]) -> None:
        self.coefficients = coefficients

    @staticmethod
    def number(value: float) -> Polynomial:
        return Polynomial({(): value} if value else {})

    @staticmethod
    def of(expr: Expr, atom: Callable[[Expr], Polynomial] | None = None) -> Polynomial:
        """The expression, opened. atom: what stands for an atom, if not itself."""
        total = Polynomial({})
        for term in terms(expr):
            product = Polynomial.number(1.0)
            for factor in factors(term):
                if factor.op is Op.CONST:
                    product = product * Polynomial.number(float(factor.value))
                elif factor.op is Op.ADD:
                    product = product * Polynomial.of(factor, atom)
                else:
                    product = product * (Polynomial({(factor,): 1.0}) if atom is None else atom(factor))
            total = total + product
        return total

    def __add__(self, other: Polynomial) -> Polynomial:
        found = dict(self.coefficients)
        for monomial, value in other.coefficients.items():
            before = found.pop(monomial, 0.0)
            if abs(before + value) > ROUNDING * max(abs(before), abs(value)):
                found[monomial] = before + value
        return Polynomial(found)

    def __mul__(self, other: Polynomial) -> Polynomial:
        total = Polynomial({})
        for (a, x), (b, y) in itertools.product(self.coefficients.items(), other.coefficients.items()):
            total = total + _of_squared_sines(tuple(sorted((*a, *b), key=lambda e: e.digest)), x * y)
        return total

    def __neg__(self) -> Polynomial:
        return Polynomial({m: -x for m, x in self.coefficients.items()})

    @property
    def is_zero(self) -> bool:
        return not self.coefficients

    @property
    def value(self) -> float | None:
        """The number that it is; None where it is none."""
        return self.coefficients.get((), 0.0) if set(self.coefficients) <= {()} else None

    def expr(self) -> Expr:
        """As an expression, with what all terms share in front."""
        return factor_out(add(const(0.0), *(mul(const(x), *m) for m, x in self.coefficients.items())))


def _of_squared_sines(monomial: Monomial, value: float) -> Polynomial:
    """value * monomial with sin(a)^2 as 1 - cos(a)^2, so that a turn's determinant is 1."""
    for n, (a, b) in enumerate(itertools.pairwise(monomial)):
        if a is b and a.op is Op.SIN:
            rest = (*monomial[:n], *monomial[n + 2 :])
            cosine = make(Op.COS, a.args[0])
            squared = tuple(sorted((*rest, cosine, cosine), key=lambda e: e.digest))
            return _of_squared_sines(rest, value) + _of_squared_sines(squared, -value)
    return Polynomial({monomial: value} if value else {})


Row = list[Polynomial]  # the coefficients of the unknowns, then the other side


def solve(equations: Sequence[Row]) -> list[Expr] | None:
    """The unknowns, where these equations have a solution; 0 for those that they leave open.

    Unknowns with a number for a coefficient are eliminated one by one. Others are quotients of determinants, whose
    zeros are nobody's but the system's.
    """
    rows = [list(row) for row in equations]
    count = len(rows[0]) - 1
    solved: list[tuple[int, Row]] = []
    while (place := _number_in(rows, count, {n for n, _ in solved})) is not None:
        row_number, column = place
        pivot = rows.pop(row_number)
        scale = Polynomial.number(-1.0 / (pivot[column].value or 1.0))
        rows = [[a + b * scale * row[column] for a, b in zip(row, pivot, strict=True)] for row in rows]
        solved.append((column, pivot))
    left = [n for n in range(count) if n not in {c for c, _ in solved} and any(not row[n].is_zero for row in rows)]
    found = _by_determinants(rows, left)
    if found is None:
        return None
    zero = const(0.0)
    values = [zero] * count
    for n, value in zip(left, found, strict=True):
        values[n] = value
    for column, pivot in reversed(solved):
        others = (mul(const(-1.0), p.expr(), values[n]) for n, p in enumerate(pivot[:-1]) if n != column)
        values[column] = _divided(add(pivot[-1].expr(), *others), pivot[column])
    return values


def _divided(expr: Expr, number: Polynomial) -> Expr:
    opened = Polynomial.of(expr) * Polynomial.number(1.0 / (number.value or 1.0))
    return opened.expr()


def _number_in(rows: list[Row], count: int, done: set[int]) -> tuple[int, int] | None:
    """An equation and an unknown in it whose coefficient is a number."""
    for (n, row), column in itertools.product(enumerate(rows), range(count)):
        if column not in done and row[column].value:
            return n, column
    return None


def _by_determinants(rows: list[Row], unknowns: list[int]) -> list[Expr] | None:
    """The unknowns by as many of the equations as there are, where the solution is one of all."""
    if len(unknowns) > MOST_UNKNOWNS:
        return None
    for chosen in itertools.combinations(rows, len(unknowns)):
        of_all = _determinant([[row[n] for n in unknowns] for row in chosen])
        if of_all.is_zero:
            continue
        tops = [_determinant([[row[-1 if m == n else m] for m in unknowns] for row in chosen]) for n in unknowns]
        for row in rows:  # sum of coefficient * top = other side * determinant
            total = -(row[-1] * of_all)
            for n, top in zip(unknowns, tops, strict=True):
                total = total + row[n] * top
            if not total.is_zero:
                return None
        below = const(1.0 / of_all.value) if of_all.value else recip(of_all.expr())
        return [mul(top.expr(), below) for top in tops]
    return None


def _determinant(matrix: list[Row]) -> Polynomial:
    if not matrix:
        return Polynomial.number(1.0)
    total = Polynomial({})
    for n, entry in enumerate(matrix[0]):
        minor = _determinant([[*row[:n], *row[n + 1 :]] for row in matrix[1:]])
        total = total + (entry * minor if n % 2 == 0 else -(entry * minor))
    return total
