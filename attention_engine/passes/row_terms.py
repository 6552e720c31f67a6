"""Terms of a score that all pairs of a row share leave its tile: they are added once a row, not once a pair.

What is linear in the indices (ALiBi) is parted for it: a key is its tile's first one and a place in the tile, so that
float(kv - q) is float(first - q), the row's, and float(place), of which a thread has a constant for each register. A
maximum of pairs takes a row's terms afterwards, and an exponent with its other terms of the row. Exact while indices
stay below 2^24.
"""

from __future__ import annotations

from attention_engine.ir.expr import Axis, Expr, Op, Type, VarKind, const, topological, var
from attention_engine.ir.program import KV_IDX, PRODUCT, ROW
from attention_engine.passes.simplify import add, cast, factors, mul, split_coefficient, terms

KV_FIRST = var("kv_first", ROW, Type.INT, VarKind.PLACE)  # of a tile: known when its rows are
# kv_idx = kv_first + the two parts of its place: what differs between threads, and what between a thread's registers.
KV_PLACE = tuple(
    var(f"kv_place_of_{part}", frozenset({Axis.KEY}), Type.INT, VarKind.PLACE) for part in ("thread", "register")
)


def part_row_terms(score: Expr) -> tuple[Expr, Expr | None]:
    """What of a score the pairs need, and the terms of the row (None: there are none)."""
    of_pairs, of_rows = [], []
    for term in terms(score):
        if Axis.KEY not in term.axes:
            of_rows.append(term)
        elif (parted := _part(term)) is not None:
            of_pairs.append(parted[0])
            of_rows.append(parted[1])
        else:
            of_pairs.append(term)
    if not of_pairs or not any(Axis.QUERY in term.axes for term in of_rows):
        return score, None
    return add(*of_pairs), add(*of_rows)


def terms_beside_product(score: Expr) -> Expr | None:
    """What a score adds to its product; None where it adds nothing, or the product is no term of its own."""
    others = [term for term in terms(score) if term is not PRODUCT]
    added = len(others) == len(terms(score)) - 1 and PRODUCT not in topological(*others)
    return add(*others) if others and added else None


def reads_places_alone(expr: Expr) -> bool:
    """Are keys' places in their tile all that it reads of queries and keys?"""
    return {n for n in topological(expr) if n.op is Op.VAR and n.axes & {Axis.QUERY, Axis.KEY}} <= set(KV_PLACE)


def _part(term: Expr) -> tuple[Expr, Expr] | None:
    """A number of the block times float(sum of indices), the key's place in its tile apart."""
    number, rest = split_coefficient(term)
    if rest is None:
        return None
    distances = [f for f in factors(rest) if Axis.KEY in f.axes]
    others = [f for f in factors(rest) if Axis.KEY not in f.axes]
    if len(distances) != 1 or any(Axis.QUERY in f.axes for f in others):
        return None
    (distance,) = distances
    if distance.op is not Op.CAST or distance.dtype is not Type.FLOAT or distance.args[0].dtype is not Type.INT:
        return None
    split = [(*split_coefficient(index), index) for index in terms(distance.args[0])]
    steps = [int(times) for times, index, _ in split if index is KV_IDX]
    left = [index for _, which, index in split if which is not KV_IDX]
    if len(steps) != 1 or any(Axis.KEY in index.axes for index in left):
        return None
    times = const(steps[0], Type.INT)
    factor = mul(const(float(number)), *others)
    of_row = cast(add(mul(times, KV_FIRST), *left), Type.FLOAT)
    return add(*(mul(factor, cast(mul(times, place), Type.FLOAT)) for place in KV_PLACE)), mul(factor, of_row)
