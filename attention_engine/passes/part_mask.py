"""A mask in parts: from which key on a query sees, up to which, and the rest, of what its query or its key says alone.

A tile has 64 times as many pairs as rows and columns. So what is read from memory by the query alone, or by the key
alone, becomes a variable. A comparison of the key with numbers of its query becomes a number of the row, of which a
tile that lies within all of them asks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

from attention_engine.ir.expr import INTEGERS, Axis, Expr, Op, Type, VarKind, const, make, substitute, topological, var
from attention_engine.ir.program import KV_IDX
from attention_engine.passes.analyse_mask import conjuncts_of, difference
from attention_engine.passes.index_ranges import LONGEST, Range, Ranges, fits
from attention_engine.passes.row_values import SIDES, largest
from attention_engine.passes.simplify import add, cast, mul, split_coefficient, terms

SMALL: Range = (-(2**30), 2**30)  # of which sums of two fit 32 bits


@dataclass(frozen=True)
class PartedMask:
    """A query keeps the keys from all of `first` to all of `last` for which `rest` holds (None: all of them).

    parts: the variables of one side each that these read, and what they stand for.
    """

    first: tuple[Expr, ...]
    last: tuple[Expr, ...]
    rest: Expr | None
    parts: tuple[tuple[Expr, Expr], ...]

    @cached_property
    def of_queries(self) -> tuple[tuple[Expr, Expr], ...]:
        """Those that the query says."""
        return tuple((v, e) for v, e in self.parts if Axis.QUERY in e.axes)

    @cached_property
    def of_keys(self) -> tuple[tuple[Expr, Expr], ...]:
        """Those that the key says."""
        return tuple((v, e) for v, e in self.parts if Axis.KEY in e.axes)


def part_mask(mask: Expr | None) -> PartedMask | None:
    """A mask in its parts; None where nothing is read by one side alone."""
    if mask is None:
        return None
    first: list[Expr] = []
    last: list[Expr] = []
    others: list[Expr] = []
    for condition in conjuncts_of(mask):
        limit = _limit(condition)
        if limit is None:
            others.append(condition)
        else:
            (last if limit[0] else first).append(limit[1])
    rest = reduce(lambda a, b: make(Op.AND, a, b), others) if others else None
    roots = [*first, *last, *([] if rest is None else [rest])]
    parts = largest(roots, _is_read_by_one_side)
    if not parts:
        return None
    made = {node: var(f"cut{n}", node.axes, node.dtype, VarKind.CUT) for n, node in enumerate(parts)}
    first, last = ([substitute(e, made) for e in limits] for limits in (first, last))
    rest = None if rest is None else substitute(rest, made)
    return PartedMask(tuple(first), tuple(last), rest, tuple((v, node) for node, v in made.items()))


def _is_read_by_one_side(node: Expr) -> bool:
    sides = node.axes & SIDES
    return len(sides) == 1 and any(n.op is Op.LOAD and n.axes & sides for n in topological(node))


def _limit(condition: Expr) -> tuple[bool, Expr] | None:
    """A condition as a limit of keys, of 32 bits: is it the last key or the first, and which? None where it is none."""
    negated = condition.op is Op.NOT
    inner = condition.args[0] if negated else condition
    if inner.op not in (Op.LESS, Op.LESS_EQUAL) or inner.args[0].dtype not in INTEGERS:
        return None
    a, b = inner.args[::-1] if negated else inner.args  # a <= b, or a < b
    if Axis.KEY not in condition.axes or not Ranges().never_wrap(a, b):
        return None
    step, row = 0, [(-1 if (inner.op is Op.LESS) is not negated else 0, const(1, Type.INT))]
    for term in terms(difference(b, a)):
        number, of = split_coefficient(term)
        bare = of.args[0] if of is not None and of.op is Op.CAST else of
        if bare is KV_IDX:
            step += int(number)
        elif of is not None and Axis.KEY in of.axes:
            return None
        else:
            row.append((int(number), const(1, Type.INT) if of is None else of))
    limit = None if abs(step) != 1 else _limit_of(row if step < 0 else [(-number, of) for number, of in row])
    return None if limit is None else (step < 0, limit)


def _limit_of(row: list[tuple[int, Expr]]) -> Expr | None:
    """A sum of numbers times what a row says: a key, or what no key reaches in its place. None where it may wrap."""

    def added(dtype: Type) -> Expr:
        return add(*(mul(const(number, dtype), cast(of, dtype)) for number, of in row))

    if fits(Ranges()(added(Type.LONG)), SMALL):
        return added(Type.INT)
    if not Ranges().never_wrap(added(Type.LONG)):
        return None
    most, least = const(LONGEST, Type.LONG), const(-1, Type.LONG)
    return cast(make(Op.MAXIMUM, make(Op.MINIMUM, added(Type.LONG), most), least), Type.INT)
