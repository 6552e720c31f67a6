"""Which numbers an integer may be, by interval arithmetic over its expression; comparisons that no index can change.

Integers are torch's int64. A range that leaves 64 bits wraps, and then anything may come of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from attention_engine.ir.chance import RANGE
from attention_engine.ir.evaluate import WIDEST
from attention_engine.ir.expr import INTEGERS, Expr, Op, Type, const, topological, transform
from attention_engine.ir.packing import OF_PLACES
from attention_engine.ir.program import KV_IDX, Q_IDX, QUERY_PLACES, B, H, is_start

Number = int | float
Range = tuple[Number, Number]  # least and greatest; of a float, of its finite values

NARROW: Range = (-(2**31), 2**31 - 1)
WIDE: Range = (-(2**63), 2**63 - 1)
LONGEST = 2**26  # queries or keys: offsets of a head of 32 numbers fill 32 bits then
MOST_ENTRIES = 2**30  # of an axis of a custom input
MOST_BLOCKS = 2**16  # batches or heads: a launch has no more of them
INDICES: dict[Expr, Range] = {
    Q_IDX: (0, LONGEST - 1), KV_IDX: (0, LONGEST - 1), B: (0, MOST_BLOCKS - 1), H: (0, MOST_BLOCKS - 1)
}  # fmt: skip
STARTS_FROM: Range = (1 - LONGEST, LONGEST - 1)  # below 0, where the last query has the place of the last key
BOUNDED: dict[Op, Range] = {
    Op.TANH: (-1.0, 1.0), Op.SIGMOID: (0.0, 1.0), Op.ERF: (-1.0, 1.0), Op.SIN: (-1.0, 1.0), Op.COS: (-1.0, 1.0),
    Op.ATAN: (-2.0, 2.0), Op.CHANCE: (0, RANGE - 1),
}  # fmt: skip
DENORMAL = 150  # bits below 1 of the least float


def fits(found: Range | None, width: Range) -> bool:
    """Does a range lie within another? One that isn't known does not."""
    return found is not None and width[0] <= found[0] and found[1] <= width[1]


class Ranges:
    """The ranges of expressions. wide: the custom inputs that hold int64, where reads have no width of their own yet.

    Integers all have a range; of a float it may be None, not known. A float that is not finite becomes any integer,
    as in torch.
    """

    def __init__(self, wide: Collection[str] = ()) -> None:
        self.wide = wide
        self._found: dict[Expr, Range | None] = {}
        self._wrapping: set[Expr] = set()

    def __call__(self, expr: Expr) -> Range | None:
        """The expression's range."""
        if expr not in self._found:
            for node in topological(expr):
                if node not in self._found:
                    self._find(node)
        return self._found[expr]

    def wraps(self, node: Expr) -> bool:
        """May the operation leave 64 bits, its operands aside?"""
        self(node)
        return node in self._wrapping

    def never_wrap(self, *exprs: Expr) -> bool:
        """Do no operations in the expressions leave 64 bits?"""
        return not any(self.wraps(node) for node in topological(*exprs))

    def _find(self, node: Expr) -> None:
        found = self._leaf(node) or self._inner(node)
        if node.dtype in INTEGERS:
            if not fits(found, WIDE):
                self._wrapping.add(node)
                found = WIDE
            assert found is not None
            found = int(found[0]), int(found[1])
        self._found[node] = found if found is not None and all(map(math.isfinite, found)) else None

    def _leaf(self, node: Expr) -> Range | None:
        if node in INDICES or node.op in BOUNDED:
            return INDICES[node] if node in INDICES else BOUNDED[node.op]
        if node.op is Op.CONST and node.dtype is not Type.BOOL:
            return (node.value, node.value) if math.isfinite(node.value) else None
        if is_start(node):
            return STARTS_FROM
        if node.op is Op.LOAD and node.name == QUERY_PLACES:
            return 0, LONGEST - 1
        if node.op is Op.LOAD and node.name in OF_PLACES:
            return -LONGEST, LONGEST
        if node.op in (Op.VAR, Op.LOAD) and node.dtype in INTEGERS:
            return WIDE if node.dtype is Type.LONG or (node.op is Op.LOAD and node.name in self.wide) else NARROW
        return None

    def _inner(self, node: Expr) -> Range | None:
        operands = [self._found[a] for a in node.args]
        if node.op is Op.WHERE:
            operands = operands[1:]
        if node.op is Op.CAST:
            return _cast(node.args[0].dtype, node.dtype, operands[0])
        rule = RULES.get(node.op)
        known = [r for r in operands if r is not None]
        return None if rule is None or not known or len(known) < len(operands) else rule(*known)


def settle_comparisons(condition: Expr, wide: Collection[str] = ()) -> Expr:
    """The condition, its comparisons as truths where the ranges of both sides decide them; wide: as in Ranges."""
    ranges = Ranges(wide)

    def change(node: Expr) -> Expr:
        if node.op not in (Op.LESS, Op.LESS_EQUAL, Op.EQUAL) or node.args[0].dtype not in INTEGERS:
            return node
        sides = [ranges(a) for a in node.args]
        (a, b), (c, d) = (s for s in sides if s is not None)
        if b < c or a > d or (node.op is Op.LESS and a == d):
            return const(node.op is not Op.EQUAL and b < c)
        return const(True) if node.op is Op.LESS_EQUAL and b == c else node

    return transform([condition], change)[0]


def _hull(numbers: Iterable[Number]) -> Range:
    numbers = list(numbers)
    return min(numbers), max(numbers)


def _corners(function: Callable[[Number, Number], Number]) -> Callable[[Range, Range], Range]:
    return lambda a, b: _hull(function(x, y) for x in a for y in b)


def _cast(of: Type, to: Type, found: Range | None) -> Range | None:
    if of is Type.BOOL:
        return 0, 1
    if of is Type.FLOAT and to in INTEGERS and found is not None:
        reach = [abs(x) * 2**-10 + 1 for x in found]  # what fp32 may have rounded on the way
        return math.floor(found[0] - reach[0]), math.ceil(found[1] + reach[1])
    return found


def _floor_quotient(a: Range, b: Range) -> Range:
    if b[0] <= 0 <= b[1]:
        most = max(abs(a[0]), abs(a[1]))
        return -most, most
    return _hull(x // y for x in a for y in b)


def _remainder(a: Range, b: Range) -> Range:
    """Of the divisor's sign."""
    if a[0] >= 0 and b[0] > a[1]:
        return a
    return min(b[0] + 1, 0), max(b[1] - 1, 0)


def _absolute(a: Range) -> Range:
    return max(a[0], -a[1], 0), max(a[1], -a[0])


def _bits(*found: Range) -> int:
    """Of the numbers in the ranges, their signs aside."""
    return max(int(x if x >= 0 else -1 - x).bit_length() for r in found for x in r)


def _and(a: Range, b: Range) -> Range:
    positive = [r[1] for r in (a, b) if r[0] >= 0]
    return (0, min(positive)) if positive else (-(2 ** _bits(a, b)), 2 ** _bits(a, b) - 1)


def _joined_bits(a: Range, b: Range) -> Range:
    most = 2 ** _bits(a, b)
    return (0 if min(a[0], b[0]) >= 0 else -most), most - 1


def _shift_left(a: Range, b: Range) -> Range:
    if not 0 <= b[0] <= b[1] < WIDEST:
        return WIDE
    return _hull(int(x) << int(y) for x in a for y in b)


def _shift_right(a: Range, b: Range) -> Range:
    if b[0] < 0:  # then all bits leave but the sign
        return min(a[0], -1), max(a[1], 0)
    return _hull(int(x) >> min(int(y), WIDEST - 1) for x in a for y in b)


def _logarithm(base: float) -> Callable[[Range], Range | None]:
    """Of the positive numbers in a range."""
    return lambda a: (-DENORMAL, math.log(a[1]) / math.log(base)) if a[1] > 0 else None


def _reciprocal(a: Range) -> Range | None:
    return None if a[0] <= 0 <= a[1] else _hull(1 / x for x in a)


RULES: dict[Op, Callable[..., Range | None]] = {
    Op.ADD: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    Op.MUL: _corners(lambda x, y: x * y),
    Op.RECIP: _reciprocal,
    Op.FLOORDIV: _floor_quotient,
    Op.MOD: _remainder,
    Op.MAXIMUM: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    Op.MINIMUM: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    Op.ABS: _absolute,
    Op.FLOOR: lambda a: (math.floor(a[0]), math.floor(a[1])),
    Op.ROUND: lambda a: (round(a[0]), round(a[1])),
    Op.BIT_AND: _and,
    Op.BIT_OR: _joined_bits,
    Op.BIT_XOR: _joined_bits,
    Op.SHIFT_LEFT: _shift_left,
    Op.SHIFT_RIGHT: _shift_right,
    Op.LOG: _logarithm(math.e),
    Op.LOG2: _logarithm(2.0),
    Op.SQRT: lambda a: (0.0, math.sqrt(max(a[1], 0))),
    Op.WHERE: lambda a, b: _hull((*a, *b)),
    Op.DETACH: lambda a: a,
}
