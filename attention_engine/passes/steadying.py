"""Which extremes of a row only steady numbers: shifting them changes nothing, and they have no gradient."""

from __future__ import annotations

import math
import random

from attention_engine.ir.evaluate import Value, evaluate
from attention_engine.ir.expr import Axis, Expr, Number, Op, Type, topological
from attention_engine.passes.row_values import near

FARTHEST = 10**5  # an index that is tried: beyond it a score in float64 loses the digits that are compared


def is_steadying(reduction: Expr, *roots: Expr) -> bool:
    """Does shifting this reduction leave the roots as they are? Tried on random rows, large, small, positive.

    And at indices on both sides of every number that they may be compared with: each index takes each such place.
    """
    length, seen, nodes = 7, 0, topological(reduction, *roots)
    places = sorted({*range(5)}.union(*(_about(n) for n in nodes if n.op is Op.CONST)))
    for seed in range(max(8, 2 * len(places))):
        center, spread = [(0.0, 1.0), (0.0, 4.0), (0.0, 0.1), (3.0, 0.5)][seed % 4]
        draw = random.Random(seed)
        variables = [n for n in nodes if n.op in (Op.VAR, Op.LOAD)]
        offset = draw.randrange(len(places)) if seed >= len(places) else 0
        values = {}
        for k, n in enumerate(variables):
            turn = [places[(seed + k * offset + m) % len(places)] for m in range(length)]
            values[n] = _sample(n, draw, center, spread, turn)
        at = evaluate(reduction, values, length)
        for root in roots:
            plain = _row(evaluate(root, values, length))
            shifted = _row(evaluate(root, {**values, reduction: at + 0.37}, length))
            if not all(near(a, b) for a, b in zip(plain, shifted, strict=True)):
                return False
            seen += sum(map(math.isfinite, plain))
    return seen > 0  # a row of NaNs shows nothing


def _about(node: Expr) -> set[int]:
    """The indices beside a constant."""
    number = node.arg
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= FARTHEST:
        return set()
    return {n for n in (math.floor(number) - 1, math.floor(number), math.floor(number) + 1) if n >= 0}


def _sample(node: Expr, draw: random.Random, center: float, spread: float, places: list[int]) -> object:
    def number(place: int) -> Number:
        match node.dtype:
            case Type.FLOAT:
                return draw.gauss(center, spread)
            case Type.INT | Type.LONG:
                return place
            case Type.BOOL:
                return True

    return [number(p) for p in places] if Axis.KEY in node.axes else number(places[0])


def _row(value: Value) -> list[float]:
    return value if isinstance(value, list) else [value]
