"""What a mask can be in a whole tile, by interval arithmetic in a kernel: no pair kept, all pairs, or it must be asked.

A subexpression of queries alone, or of keys alone (a read of document ids, q_idx // 64), is a *cut*: its least and
greatest value in a tile are found entry by entry. What joins the two sides is bounded by rules. Bounds are int64, so
that sums of int32 values can't wrap; where int64 values may, a bound that does says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import INTEGERS, Axis, Expr, Op, Type, VarKind, substitute, topological, var
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.kernels.splice import DTYPES, WRAPPING, Reader, name_value, wrapping
from attention_engine.passes.index_ranges import NARROW, WIDE, Ranges
from attention_engine.passes.row_values import largest

Range = tuple[Any, Any]  # of numbers: least and greatest; of truths: must it hold, may it hold


def cut(mask: Expr) -> tuple[Expr, dict[Expr, Expr]]:
    """The mask with its cuts as variables, and what these stand for: integers or truths of one side."""

    def is_cut(node: Expr) -> bool:
        sides = node.axes & {Axis.QUERY, Axis.KEY}
        return node.op not in (Op.VAR, Op.CONST) and node.dtype is not Type.FLOAT and len(sides) == 1

    cuts = {node: var(f"cut{n}", node.axes, node.dtype, VarKind.CUT) for n, node in enumerate(largest([mask], is_cut))}
    return substitute(mask, cuts), {variable: node for node, variable in cuts.items()}


class MaskRanges:
    """Bounds of a mask's nodes in one tile."""

    def __init__(self, ranges: Mapping[Expr, Range], read: Reader) -> None:
        """ranges: those of all variables, the cuts' too."""
        self.done: dict[Expr, Range | None] = dict(ranges)
        self.read, self.may_be = read, Ranges()

    def __call__(self, mask: Expr) -> Range:
        """(must every pair be kept, may any pair be kept)"""
        for node in topological(mask):
            if node not in self.done:
                self.done[node] = self._named(self._bound(node))
        found = self.done[mask]
        assert found is not None
        return found

    def _named(self, found: Range | None) -> Range | None:
        if found is None:
            return None
        least, most = found
        return (_name(least), _name(most) if most is not least else least)

    def _bound(self, node: Expr) -> Range | None:
        """None: a float, which is not bounded."""
        if node.dtype is Type.FLOAT:
            return None
        ranges = [self.done[a] for a in node.args]
        if node.op is Op.CONST:
            value = T.bool(bool(node.value)) if node.dtype is Type.BOOL else T.int64(int(node.value))
            return value, value
        if node.op is Op.LOAD:
            return self._load(node, ranges)
        rule = RULES.get(node.op)
        known = [r for r in ranges if r is not None]
        if rule is None or len(known) < len(ranges):
            return _anything(node)
        wraps = node.op in WRAPPING and self.may_be.wraps(node)
        return _wrapped(node, known) if wraps else rule(node, known)

    def _load(self, node: Expr, ranges: Sequence[Range | None]) -> Range:
        """The value, where all pairs of the tile read the same entry; else anything."""
        least, most = _anything(node)
        same: Any = None
        for found in ranges:
            if found is None:
                return least, most
            one = found[0] == found[1]
            same = one if same is None else T.And(same, one)
        indices = [T.cast(r[0], DTYPES[a.dtype]) for r, a in zip(ranges, node.args, strict=True) if r is not None]
        value = name_value(self.read(node.name, indices, node.dtype))
        value = value if node.dtype is Type.BOOL else T.cast(value, "int64")
        if same is None:
            return value, value
        return T.if_then_else(same, value, least), T.if_then_else(same, value, most)


def _name(value: Any) -> Any:
    return value if isinstance(value, (bool, int)) or not hasattr(value, "dtype") else name_value(value)


def _anything(node: Expr) -> Range:
    if node.dtype is Type.BOOL:
        return T.bool(False), T.bool(True)
    least, most = WIDE if node.dtype is Type.LONG else NARROW
    return T.int64(least), T.int64(most)


def _wrapped(node: Expr, ranges: Sequence[Range]) -> Range:
    """The range where 64 bits may be left: anything, unless it is one number, or a sum whose ends stay."""
    known = reduce(T.And, [low == high for low, high in ranges])
    low, high = ends = [wrapping(node.op, *(r[end] for r in ranges)) for end in (0, 1)]
    if node.op is Op.ADD:
        a, b = ranges
        left = (_overflows(a[end], b[end], ends[end]) for end in (0, 1))
        known = T.Or(known, T.Not(T.Or(*left)))
    least, most = _anything(node)
    return T.if_then_else(known, low, least), T.if_then_else(known, high, most)


def _overflows(a: Any, b: Any, total: Any) -> Any:
    """Has a sum of 64 bits another sign than both its terms?"""
    return T.bitwise_and(T.bitwise_xor(a, total), T.bitwise_xor(b, total)) < 0


def _add(node: Expr, ranges: Sequence[Range]) -> Range:
    (a, b), (c, d) = ranges
    return a + c, b + d


def _multiply(node: Expr, ranges: Sequence[Range]) -> Range:
    for number, other in ((node.args[0], ranges[1]), (node.args[1], ranges[0])):
        if number.op is Op.CONST:
            factor = int(number.value)
            least, most = (T.int64(factor) * bound for bound in other)
            return (least, most) if factor >= 0 else (most, least)
    return _anything(node)


def _positive_divisor(node: Expr) -> int | None:
    divisor = node.args[1]
    return int(divisor.value) if divisor.op is Op.CONST and divisor.value > 0 else None


def _floor_divide(node: Expr, ranges: Sequence[Range]) -> Range:
    divisor = _positive_divisor(node)
    if divisor is None:
        return _anything(node)
    least, most = (T.floordiv(bound, T.int64(divisor)) for bound in ranges[0])
    return least, most


def _remainder(node: Expr, ranges: Sequence[Range]) -> Range:
    divisor = _positive_divisor(node)
    if divisor is None:
        return _anything(node)
    (low, high), number = ranges[0], T.int64(divisor)
    whole = T.floordiv(low, number) == T.floordiv(high, number)
    least = T.if_then_else(whole, T.floormod(low, number), T.int64(0))
    return least, T.if_then_else(whole, T.floormod(high, number), T.int64(divisor - 1))


def _absolute(node: Expr, ranges: Sequence[Range]) -> Range:
    ((low, high),) = ranges
    return T.max(T.max(low, -high), T.int64(0)), T.max(high, -low)


def _less(node: Expr, ranges: Sequence[Range]) -> Range:
    (a, b), (c, d) = ranges
    return b < c, a < d


def _less_equal(node: Expr, ranges: Sequence[Range]) -> Range:
    (a, b), (c, d) = ranges
    return b <= c, a <= d


def _equal(node: Expr, ranges: Sequence[Range]) -> Range:
    if node.args[0].dtype not in INTEGERS:
        return _anything(node)
    (a, b), (c, d) = ranges
    return T.And(a == d, b == c), T.And(a <= d, c <= b)


def _choose(node: Expr, ranges: Sequence[Range]) -> Range:
    (must, may), (a, b), (c, d) = ranges
    if node.dtype is Type.BOOL:
        least = T.Or(T.And(must, a), T.Or(T.And(T.Not(may), c), T.And(a, c)))
        return least, T.Or(T.And(may, b), T.And(T.Not(must), d))
    least = T.if_then_else(must, a, T.if_then_else(may, T.min(a, c), c))
    return least, T.if_then_else(must, b, T.if_then_else(may, T.max(b, d), d))


def _convert(node: Expr, ranges: Sequence[Range]) -> Range:
    kind = node.args[0].dtype
    if kind is node.dtype or {kind, node.dtype} <= INTEGERS:
        return ranges[0]
    if kind is Type.BOOL and node.dtype in INTEGERS:
        least, most = (T.if_then_else(bound, T.int64(1), T.int64(0)) for bound in ranges[0])
        return least, most
    return _anything(node)


RULES: dict[Op, Callable[[Expr, Sequence[Range]], Range]] = {
    Op.ADD: _add,
    Op.MUL: _multiply,
    Op.FLOORDIV: _floor_divide,
    Op.MOD: _remainder,
    Op.ABS: _absolute,
    Op.MAXIMUM: lambda node, r: (T.max(r[0][0], r[1][0]), T.max(r[0][1], r[1][1])),
    Op.MINIMUM: lambda node, r: (T.min(r[0][0], r[1][0]), T.min(r[0][1], r[1][1])),
    Op.LESS: _less,
    Op.LESS_EQUAL: _less_equal,
    Op.EQUAL: _equal,
    Op.AND: lambda node, r: (T.And(r[0][0], r[1][0]), T.And(r[0][1], r[1][1])),
    Op.OR: lambda node, r: (T.Or(r[0][0], r[1][0]), T.Or(r[0][1], r[1][1])),
    Op.NOT: lambda node, r: (T.Not(r[0][1]), T.Not(r[0][0])),
    Op.WHERE: _choose,
    Op.CAST: _convert,
}


def range_of(node: Expr, least: Any, most: Any) -> Range:
    """A cut's range from its least and greatest value, as they are held."""
    if node.dtype is Type.BOOL:
        return T.cast(least, "bool"), T.cast(most, "bool")
    return T.cast(least, "int64"), T.cast(most, "int64")


def held_as(node: Expr) -> str:
    """The dtype that a cut's values are held in: truths are integers there."""
    return "int64" if node.dtype is Type.LONG else "int32"


def value(node: Expr, held: Any) -> Any:
    """A cut's value, as it is held."""
    return T.cast(held, "bool") if node.dtype is Type.BOOL else held


def index_ranges(batch: Any, head: Any, q: Range, kv: Range) -> dict[Expr, Range]:
    """The ranges of the index variables."""
    ends = {B: (batch, batch), H: (head, head), Q_IDX: q, KV_IDX: kv}
    return {v: (T.cast(least, "int64"), T.cast(most, "int64")) for v, (least, most) in ends.items()}
