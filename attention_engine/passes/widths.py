"""Which integers need 64 bits: those that 32 may not hold become LONG, and what is made of them is computed in 64.

The ranges of index_ranges.py say so, for all indices and all numbers that the custom inputs' dtypes have room for.
What comes back into 32 bits (a remainder, a clamped index) is INT again, and so is index arithmetic throughout.
"""

from __future__ import annotations

from collections.abc import Collection

from attention_engine.ir.evaluate import WIDEST
from attention_engine.ir.expr import INTEGERS, Axis, Expr, Op, Type, const, make, rebuild, topological
from attention_engine.passes.index_ranges import MOST_ENTRIES, NARROW, WIDE, Range, Ranges, fits
from attention_engine.passes.simplify import add, cast, construct, terms

COMPARISONS = frozenset({Op.LESS, Op.LESS_EQUAL, Op.EQUAL})
SHIFTS = frozenset({Op.SHIFT_LEFT, Op.SHIFT_RIGHT})
SHIFTS_OF_32 = (0, 31)
SHIFTS_OF_64 = (0, WIDEST - 1)
ENTRIES: Range = (0, MOST_ENTRIES - 1)


def widen(*roots: Expr, wide: Collection[str] = ()) -> tuple[Expr, ...]:
    """The roots, in normal form, with LONG where 32 bits may not do; wide: the custom inputs that hold int64.

    Those in which every integer fits 32 bits are left as they are.
    """
    widening = _Widening(wide)
    return tuple(widening(root) for root in roots)


class _Widening:
    def __init__(self, wide: Collection[str]) -> None:
        self.ranges, self.wide = Ranges(wide), wide
        self.done: dict[Expr, Expr] = {}

    def __call__(self, root: Expr) -> Expr:
        for node in topological(root):
            if node not in self.done:
                self.done[node] = self._change(node, tuple(self.done[a] for a in node.args))
        return self.done[root]

    def _change(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        match node.op:
            case Op.CONST | Op.VAR:
                return node if node.dtype is not Type.INT or self._is_narrow(node) else const(node.value, Type.LONG)
            case Op.LOAD:
                wide = node.dtype is Type.INT and node.name in self.wide
                places = (self._place(*both) for both in zip(node.args, args, strict=True))
                return make(Op.LOAD, *places, arg=node.arg, dtype=Type.LONG if wide else node.dtype)
            case Op.CAST:
                narrow = node.dtype is not Type.INT or self._is_narrow(node)
                return rebuild(node, args) if narrow else cast(args[0], Type.LONG)
            case op if op in COMPARISONS and args[0].dtype in INTEGERS:
                return self._compare(node, args)
            case op if node.dtype is Type.INT:
                return self._compute(node, args)
            case _:
                return node if args == node.args else construct(rebuild(node, args))

    def _is_narrow(self, node: Expr) -> bool:
        return fits(self.ranges(node), NARROW)

    def _range(self, node: Expr) -> Range:
        found = self.ranges(node)
        assert found is not None
        return found

    def _compute(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        """An integer of integers (and of a condition)."""
        numbers = [a for a in args if a.dtype in INTEGERS]
        fits_counts = node.op not in SHIFTS or fits(self.ranges(node.args[1]), SHIFTS_OF_32)
        if self._is_narrow(node) and fits_counts and all(a.dtype is Type.INT for a in numbers):
            return node if args == node.args else construct(rebuild(node, args))
        wide = tuple(_as(a, Type.LONG) if a.dtype in INTEGERS else a for a in args)
        found = self._shift(node, *wide) if node.op in SHIFTS else construct(rebuild(node, wide))
        return _as(found, Type.INT) if self._is_narrow(node) else found

    def _shift(self, node: Expr, number: Expr, count: Expr) -> Expr:
        """A shift in 64 bits: by a count that is negative, or more than there are bits, all of them leave."""
        if fits(self.ranges(node.args[1]), SHIFTS_OF_64):
            return construct(make(node.op, number, count))
        most = const(WIDEST - 1, Type.LONG)
        none, within = const(0, Type.LONG), construct(make(Op.BIT_AND, count, most))
        inside = construct(make(Op.EQUAL, count, within))
        all_gone = none if node.op is Op.SHIFT_LEFT else construct(make(Op.SHIFT_RIGHT, number, most))
        return construct(make(Op.WHERE, inside, construct(make(node.op, number, within)), all_gone))

    def _compare(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        if all(a.dtype is Type.INT for a in args):
            return node if args == node.args else construct(rebuild(node, args))
        for side in (0, 1):
            if args[side].dtype is Type.LONG and args[1 - side].dtype is Type.INT:
                bounded = self._bound_data(node.args[side], self._range(node.args[1 - side]))
                if bounded is not None:
                    return construct(rebuild(node, (bounded, args[1]) if side == 0 else (args[0], bounded)))
        return construct(rebuild(node, tuple(_as(a, Type.LONG) for a in args)))

    def _place(self, index: Expr, changed: Expr) -> Expr:
        """An index of a read: data that shift it are cut to where every entry is outside still.

        In table[q_idx - kv_idx + offset[b]] the index has 32 bits then, and its distances are seen (read_places.py).
        """
        if changed.dtype is not Type.LONG or len(terms(index)) < 2:
            return changed
        bounded = self._bound_data(index, ENTRIES, may_wrap=True)
        return changed if bounded is None else bounded

    def _bound_data(self, side: Expr, other: Range, may_wrap: bool = False) -> Expr | None:
        """A side of a comparison in 32 bits, what no pair's indices can make up for cut off its data; other: the range
        of the other side; may_wrap: what wraps at 64 bits comes out far from it.

        kv_idx < lengths[b] is kv_idx < min(lengths[b], the most keys), and in q_idx + shift[b] >= kv_idx a shift is cut
        likewise. None where data differ from key to key, which would cost each pair more than 64 bits do.
        """
        data, rest = ([term for term in terms(side) if _has_data(term) is truth] for truth in (True, False))
        if len(data) != 1 or Axis.KEY in data[0].axes:
            return None
        offset = self._range(add(*rest)) if rest else (0, 0)
        whole, (low, high) = self._range(data[0]), (other[0] - offset[1] - 1, other[1] - offset[0] + 1)
        kept = all(fits(found, NARROW) for found in (offset, (low + offset[0], high + offset[1]), (low, high)))
        if not kept or not (may_wrap or fits((whole[0] + offset[0], whole[1] + offset[1]), WIDE)):
            return None
        kind = self.done[data[0]].dtype
        above = construct(make(Op.MAXIMUM, self.done[data[0]], const(int(low), kind)))
        bounded = _as(construct(make(Op.MINIMUM, above, const(int(high), kind))), Type.INT)
        return add(bounded, *(self.done[term] for term in rest))


def _has_data(expr: Expr) -> bool:
    return any(node.op is Op.LOAD for node in topological(expr))


def _as(expr: Expr, to: Type) -> Expr:
    """An integer in another width."""
    if expr.op is Op.CAST and expr.dtype is not to and expr.args[0].dtype is to:
        return expr.args[0]
    return cast(expr, to)
