"""What a pair that is left out can hold, so that it has weight 0 and changes no reduction; tried on numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from attention_engine.ir.evaluate import LOWEST, evaluate
from attention_engine.ir.expr import Expr, Op, Reduction, Type, topological
from attention_engine.ir.program import SCORE, Program

NEUTRAL: dict[Reduction, float] = {"sum": 0.0, "max": LOWEST, "min": -LOWEST}


def find_fill(updates: Sequence[Expr], weights: Expr, held: Expr) -> float | None:
    """The number for `held`, of which updates and weights are made; None where there is none."""
    return next((fill for fill in (-math.inf, 0.0) if _leaves_out(updates, weights, held, fill)), None)


def absorbs_absent_pairs(program: Program) -> bool:
    """Is a pair whose score is -inf left out by the program's own formulas?"""
    return _leaves_out([s.update for s in program.states], program.weights, SCORE, -math.inf)


def _leaves_out(updates: Sequence[Expr], weights: Expr, held: Expr, fill: float) -> bool:
    reductions = [n for n in topological(*updates, weights) if n.op is Op.REDUCE]
    wanted = [(n.args[0], NEUTRAL[n.reduction]) for n in reductions] + [(weights, 0.0)]
    return all(_gives(expr, held, fill, neutral) for expr, neutral in wanted)


def _gives(expr: Expr, held: Expr, fill: float, neutral: float) -> bool:
    """Conditions of the place are drawn themselves, and half of the indices far: none of either stays out of reach."""
    for seed in range(16):
        draw, far = random.Random(seed), seed >= 8
        values: dict[Expr, float] = {}
        for node in topological(expr, closed=frozenset({Op.REDUCE})):
            if node.dtype is Type.BOOL and held not in topological(node):
                values[node] = draw.random() < 0.5
            elif node.op in (Op.VAR, Op.LOAD, Op.REDUCE):
                number = draw.gauss(0, 3) * 10 ** draw.randrange(-1, 2)
                values[node] = number if node.dtype is Type.FLOAT else draw.randrange(10**5 if far else 9)
        at = evaluate(expr, {**values, held: fill})
        left_out = {LOWEST: at <= neutral, -LOWEST: at >= neutral}.get(neutral, at == neutral)
        if not (left_out or (far and at != at)):  # NaN: a power of a distance that no tile spans
            return False
    return True
