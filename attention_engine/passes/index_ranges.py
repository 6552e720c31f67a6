"""Comparisons of integers that no index can change: a window of sys.maxsize keeps all, and needs no 64-bit number."""

from __future__ import annotations

from attention_engine.ir.expr import Expr, Op, Type, const, transform
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H

INDICES = frozenset({B, H, Q_IDX, KV_IDX})
LAST = 2**31 - 1  # the largest index that there may be
Range = tuple[int, int]  # least and greatest


def settle_comparisons(condition: Expr) -> Expr:
    """The condition, its comparisons as truths where the ranges of both sides decide them."""
    found: dict[Expr, Range | None] = {}

    def change(node: Expr) -> Expr:
        if node.dtype is Type.INT:
            found[node] = _range(node, [found.get(a) for a in node.args])
            return node
        sides = [found.get(a) for a in node.args]
        if node.op not in (Op.LESS, Op.LESS_EQUAL, Op.EQUAL) or None in sides:
            return node
        (a, b), (c, d) = (s for s in sides if s is not None)
        if b < c or a > d or (node.op is Op.LESS and a == d):
            return const(node.op is not Op.EQUAL and b < c)
        return const(True) if node.op is Op.LESS_EQUAL and b == c else node

    return transform([condition], change)[0]


def _range(node: Expr, operands: list[Range | None]) -> Range | None:
    """What a node may be; None: not known."""
    if node.op is Op.CONST:
        return int(node.value), int(node.value)
    if node in INDICES:
        return 0, LAST
    known = [r for r in operands if r is not None]
    if not known or len(known) < len(operands):
        return None
    match node.op:
        case Op.ADD:
            return sum(r[0] for r in known), sum(r[1] for r in known)
        case Op.MUL if len(known) == 2:
            products = [x * y for x in known[0] for y in known[1]]
            return min(products), max(products)
        case Op.ABS:
            ((low, high),) = known
            return max(low, -high, 0), max(high, -low)
        case _:
            return None
