"""Gradients of custom inputs that a row sums up, corrected for the rounding of the output.

delta = dO . o is taken from an output already rounded to 16 bits. In dQ and dK that error averages out; in the gradient
of a slope or a bias it does not, as every key of a row shares it. But delta is also the row sum of weight * dweight,
and what a pair adds is affine in the rows that hold delta, so with exact sums D of weight * dweight and C_k of
d pair / d row_k

    gradient of the row = sum of pairs + (D - delta) * sum over k of C_k * d row_k / d delta.

D is no better than the weights, whose exponents lose what fp32 rounds off a score and off the row's lse. Beside 16 bits
that is nothing. But an fp32 output made of full fp32 products is as exact, and where a pair multiplies its product (a
learned scale of the scores), C_k is as large as the scores and shows each bit: there delta is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.ir.expr import Axis, Expr, is_const, topological
from attention_engine.ir.program import DELTA, PRODUCT, WEIGHT, WEIGHT_GRADIENT, Backward, row_variable
from attention_engine.ir.reach import BOUNDED
from attention_engine.passes.differentiate import differentiate
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.simplify import mul


@dataclass(frozen=True)
class Correction:
    """(D - delta) * sums[index] * slope, slope = d row / d delta, of saved rows and of gradients that arrive at
    returned ones."""

    index: int
    slope: Expr


@dataclass(frozen=True)
class RowGradient:
    """The gradient of a read: sums[index], and its corrections."""

    load: Expr
    index: int
    corrections: tuple[Correction, ...]


@dataclass(frozen=True)
class RowSums:
    """sums: what a kernel sums over each row's kept pairs; delta: which of them is D (None: nothing needs it)."""

    sums: tuple[Expr, ...]
    delta: int | None
    gradients: tuple[RowGradient, ...]


def plan_row_sums(schedule: BackwardSchedule, backward: Backward, full_fp32: bool) -> RowSums:
    """The sums for every read whose place doesn't depend on the key; full_fp32: o has no 16-bit or tf32 rounding."""
    sums: dict[Expr, int] = {}

    def index(expr: Expr) -> int:
        return sums.setdefault(expr, len(sums))

    gradients = []
    for load, pair in schedule.pair_gradients:
        if Axis.KEY in load.axes:
            continue
        main = index(pair)
        corrections = []
        exact = backward.exact_delta or (full_fp32 and _grows_with_product(pair))
        for name, row in () if exact else backward.rows:
            if DELTA not in topological(row) or row_variable(name) not in topological(pair):
                continue
            (slope,) = differentiate(row, [DELTA])
            (by_row,) = differentiate(pair, [row_variable(name)])
            if not is_const(by_row, 0) and not is_const(slope, 0):
                corrections.append(Correction(index(by_row), slope))
        gradients.append(RowGradient(load, main, tuple(corrections)))
    corrected = any(g.corrections for g in gradients)
    delta = index(mul(WEIGHT, WEIGHT_GRADIENT)) if corrected else None
    return RowSums(tuple(sums), delta, tuple(gradients))


def _grows_with_product(expr: Expr) -> bool:
    """Does it read the product, but for what keeps it within bounds?"""
    return expr is PRODUCT or (expr.op not in BOUNDED and any(map(_grows_with_product, expr.args)))
