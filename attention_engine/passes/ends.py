"""What pairs hold in tiles so far from the diagonal that a clamped index is at its end in all of the tile."""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.ir.expr import Axis, Expr, Op, Type, substitute, topological
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.passes.simplify import simplify, split_coefficient, terms

PAIR_AXES = frozenset({Axis.QUERY, Axis.KEY})


@dataclass(frozen=True)
class Ends:
    """An expression in tiles where `index`, an integer sum with Q_IDX and KV_IDX in it, is nowhere above `least`: it is
    `below`; and where it is nowhere under `most`: `above`."""

    index: Expr
    least: int
    most: int
    below: Expr
    above: Expr

    def factors(self) -> tuple[int, int]:
        """What Q_IDX and KV_IDX are multiplied with in the index."""
        found = {rest: int(number) for number, rest in map(split_coefficient, terms(self.index)) if rest is not None}
        return found.get(Q_IDX, 0), found.get(KV_IDX, 0)


def find_ends(expr: Expr) -> Ends | None:
    """The ends of an expression in which one index is cut at both ends, as a relative bias does; else None."""
    found = [(node, cut) for node in topological(expr) if (cut := _as_cut(node)) is not None]
    if len(found) != 1:
        return None
    ((node, (index, least, most)),) = found
    (below, above) = (simplify(substitute(expr, {node: end}))[0] for end in (least, most))
    return Ends(index, int(least.value), int(most.value), below, above)


def _as_cut(node: Expr) -> tuple[Expr, Expr, Expr] | None:
    """(index, least, most) of min(max(index, least), most), or of the two the other way round."""
    inner = {Op.MINIMUM: Op.MAXIMUM, Op.MAXIMUM: Op.MINIMUM}.get(node.op)
    if inner is None or node.dtype is not Type.INT or node.args[0].op is not inner:
        return None
    (index, one), other = node.args[0].args, node.args[1]
    if one.op is not Op.CONST or other.op is not Op.CONST or not _is_linear(index):
        return None
    least, most = (one, other) if node.op is Op.MINIMUM else (other, one)
    return (index, least, most) if least.value <= most.value else None


def _is_linear(index: Expr) -> bool:
    rest = [r for _, r in map(split_coefficient, terms(index)) if r is not None and r not in (Q_IDX, KV_IDX)]
    return index.axes >= PAIR_AXES and not any(PAIR_AXES & r.axes for r in rest)
