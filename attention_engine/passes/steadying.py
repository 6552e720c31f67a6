"""Which extremes of a row only steady numbers: shifting them changes nothing, and they have no gradient."""

from __future__ import annotations

import math
import random
from typing import assert_never

from attention_engine.ir.evaluate import Value, evaluate
from attention_engine.ir.expr import Axis, Expr, Number, Op, Type, topological
from attention_engine.passes.row_values import near

KEYS, SEEDS = 7, 8  # of a row; rows that are tried at the least
FARTHEST = 10**5  # an index that is tried: beyond it a score in float64 loses the digits that are compared


def is_steadying(reduction: Expr, *roots: Expr) -> bool:
    """Does shifting this reduction leave the roots as they are? Tried on random rows, large, small, positive.

    And at indices on both sides of every number that they may be compared with: each index takes each such place. What
    is compared otherwise, or far away, is held true and false: each condition of indices and integers in turn.
    """
    nodes = topological(reduction, *roots)
    places = sorted({*range(5)}.union(*(_about(n) for n in nodes if n.op is Op.CONST)))
    trials: list[tuple[int, dict[Expr, Value]]] = [(seed, {}) for seed in range(max(SEEDS, 2 * len(places)))]
    trials += [(seed, {n: truth}) for n in nodes if _is_of_places(n) for truth in (True, False) for seed in range(4)]
    seen = 0
    for seed, held in trials:
        values = {**_row_of_values(nodes, seed, places), **held}
        at = evaluate(reduction, values, KEYS)
        for root in roots:
            plain = _row(evaluate(root, values, KEYS))
            shifted = _row(evaluate(root, {**values, reduction: at + 0.37}, KEYS))
            if not all(near(a, b) for a, b in zip(plain, shifted, strict=True)):
                return False
            seen += sum(map(math.isfinite, plain))
    return seen > 0  # a row of NaNs shows nothing


def _is_of_places(node: Expr) -> bool:
    """Is it a condition that no score and no row decides?"""
    if node.dtype is not Type.BOOL or node.op is Op.CONST:
        return False
    leaves = [n for n in topological(node) if n.op in (Op.VAR, Op.LOAD, Op.REDUCE)]
    return all(n.op is not Op.REDUCE and n.dtype is not Type.FLOAT for n in leaves)


def _row_of_values(nodes: list[Expr], seed: int, places: list[int]) -> dict[Expr, Value]:
    """A row's numbers: of scores and entries random ones, of indices some of the places."""
    center, spread = [(0.0, 1.0), (0.0, 4.0), (0.0, 0.1), (3.0, 0.5)][seed % 4]
    draw = random.Random(seed)
    variables = [n for n in nodes if n.op in (Op.VAR, Op.LOAD)]
    offset = draw.randrange(len(places)) if seed >= len(places) else 0
    values = {}
    for k, n in enumerate(variables):
        turn = [places[(seed + k * offset + m) % len(places)] for m in range(KEYS)]
        values[n] = _sample(n, draw, center, spread, turn)
    return values


def _about(node: Expr) -> set[int]:
    """The indices beside a constant."""
    number = node.arg
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= FARTHEST:
        return set()
    return {n for n in (math.floor(number) - 1, math.floor(number), math.floor(number) + 1) if n >= 0}


def _sample(node: Expr, draw: random.Random, center: float, spread: float, places: list[int]) -> Value:
    def number(place: int) -> Number:
        match node.dtype:
            case Type.FLOAT:
                return draw.gauss(center, spread)
            case Type.INT | Type.LONG:
                return place
            case Type.BOOL:
                return True
            case _:
                assert_never(node.dtype)

    return [number(p) for p in places] if Axis.KEY in node.axes else number(places[0])


def _row(value: Value) -> list[float]:
    return value if isinstance(value, list) else [value]
