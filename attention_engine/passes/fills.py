"""What a pair that is left out can hold, so that it has weight 0 and changes no reduction; tried on numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from attention_engine.ir.evaluate import LOWEST, evaluate
from attention_engine.ir.expr import Expr, Op, Reduction, Type, topological
from attention_engine.ir.program import SCORE, Program

LOW = -1e38  # below LOWEST, yet finite: times a weight of 0 it is 0, which -inf is not
LOW_OF_DOUBLE = -5e307  # as far from the largest number of float64 as LOW is from fp32's
NEUTRAL: dict[Reduction, float] = {"sum": 0.0, "max": LOWEST, "min": -LOWEST}


def find_fill(updates: Sequence[Expr], weights: Expr, held: Expr) -> float | None:
    """The number for `held`, of which updates and weights are made; None where there is none."""
    return next((fill for fill in (-math.inf, 0.0) if _leaves_out(updates, weights, held, fill)), None)


def is_low_enough(updates: Sequence[Expr], weights: Expr, held: Expr, starts: Mapping[Expr, float]) -> bool:
    """Does LOW leave a pair out, in rows that have kept none yet too?

    starts: the states as they begin. What overflows in fp32, of which a product with 0 would be NaN, is found by
    numbers of float64 as near to its end.
    """
    fits = _leaves_out(updates, weights, held, LOW_OF_DOUBLE) and _leaves_out(updates, weights, held, LOW)
    return fits and _leaves_out(updates, weights, held, LOW, starts)


def absorbs_absent_pairs(program: Program) -> bool:
    """Is a pair whose score is -inf left out by the program's own formulas?"""
    return _leaves_out([s.update for s in program.states], program.weights, SCORE, -math.inf)


def _leaves_out(
    updates: Sequence[Expr], weights: Expr, held: Expr, fill: float, starts: Mapping[Expr, float] | None = None
) -> bool:  # fmt: skip
    """starts: tried on these states, and on reductions that met no pair; None: on any numbers."""
    reductions = [n for n in topological(*updates, weights) if n.op is Op.REDUCE]
    wanted = [(n.args[0], NEUTRAL[n.reduction]) for n in reductions] + [(weights, 0.0)]
    known = {} if starts is None else {**starts, **{n: NEUTRAL[n.reduction] for n in reductions}}
    return all(_gives(expr, {**known, held: fill}, neutral) for expr, neutral in wanted)


def _gives(expr: Expr, known: Mapping[Expr, float], neutral: float) -> bool:
    """Conditions of the place are drawn themselves, and half of the indices far: none of either stays out of reach."""
    for seed in range(16):
        draw, far = random.Random(seed), seed >= 8
        values: dict[Expr, float] = {}
        for node in topological(expr, closed=frozenset({Op.REDUCE})):
            if node.dtype is Type.BOOL and not known.keys() & set(topological(node)):
                values[node] = draw.random() < 0.5
            elif node.op in (Op.VAR, Op.LOAD, Op.REDUCE):
                number = draw.gauss(0, 3) * 10 ** draw.randrange(-1, 2)
                values[node] = number if node.dtype is Type.FLOAT else draw.randrange(10**5 if far else 9)
        at = evaluate(expr, {**values, **known})
        left_out = {LOWEST: at <= neutral, -LOWEST: at >= neutral}.get(neutral, at == neutral)
        if not (left_out or (far and at != at)):  # NaN: a power of a distance that no tile spans
            return False
    return True
