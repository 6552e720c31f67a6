"""Loop bounds from a mask: comparisons of affine expressions say which tiles hold a kept pair, and which are whole."""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.ir.expr import INTEGERS, Axis, Expr, Op, const
from attention_engine.ir.program import KV_IDX, Q_IDX, is_start
from attention_engine.passes.index_ranges import LONGEST, Ranges
from attention_engine.passes.simplify import add, mul, split_coefficient, terms

FARTHEST = 2**62  # of a bound's numbers: kernels have 64 bits for what they add up to


@dataclass(frozen=True)
class Bound:
    """Kept pairs have q * q_idx + kv * kv_idx + offset + the sum of the starts, each times its number, >= 0.

    starts: (where an index starts, number), where a launch says that. Kernels take them into the offset.
    """

    q: int
    kv: int
    offset: int
    starts: tuple[tuple[Expr, int], ...] = ()

    @property
    def reach(self) -> int:
        """The largest number that may come up while it is computed."""
        up, down = (sum(max(sign * number, 0) for number in (self.q, self.kv)) for sign in (1, -1))
        of_starts = sum(abs(number) for _, number in self.starts)
        return (max(up, down) + of_starts) * (LONGEST - 1) + abs(self.offset)


@dataclass(frozen=True)
class MaskPlan:
    """What is known of a mask without looking at pairs: each kept pair meets all bounds; `exact`: and they suffice."""

    bounds: tuple[Bound, ...]
    exact: bool

    def of_all_batches(self) -> MaskPlan:
        """The bounds that are the same in every batch."""
        found = tuple(b for b in self.bounds if not any(Axis.BATCH in start.axes for start, _ in b.starts))
        return self if found == self.bounds else MaskPlan(found, False)


def analyse_mask(mask: Expr | None) -> MaskPlan:
    """The bounds of a mask in normal form."""
    if mask is None:
        return MaskPlan((), True)
    bounds: list[Bound] = []
    exact = True
    for part in conjuncts_of(mask):
        found = _bounds(part)
        exact = exact and found is not None
        bounds += found or []
    return MaskPlan(tuple(bounds), exact)


def conjuncts_of(mask: Expr) -> list[Expr]:
    """The conditions that a mask joins by and."""
    if mask.op is Op.AND:
        return [c for a in mask.args for c in conjuncts_of(a)]
    return [mask]


def _bounds(condition: Expr) -> list[Bound] | None:
    negated = condition.op is Op.NOT
    inner = condition.args[0] if negated else condition
    if inner.op not in (Op.LESS, Op.LESS_EQUAL, Op.EQUAL) or inner.args[0].dtype not in INTEGERS:
        return None
    a, b = inner.args
    if not Ranges().never_wrap(a, b):
        return None
    if inner.op is Op.EQUAL:
        pair = [_affine(difference(b, a), 0), _affine(difference(a, b), 0)]
        found = [p for p in pair if p is not None]
        return None if negated or len(found) < 2 else found
    strict = inner.op is Op.LESS
    one = _affine(difference(a, b), 0 if strict else -1) if negated else _affine(difference(b, a), -1 if strict else 0)
    return None if one is None else [one]


def difference(a: Expr, b: Expr) -> Expr:
    """a - b, in normal form."""
    return add(a, mul(const(-1, b.dtype), b))


def _affine(expr: Expr, offset: int) -> Bound | None:
    """expr + offset >= 0 as a bound, where expr is affine in q_idx and kv_idx."""
    found = {Q_IDX: 0, KV_IDX: 0}
    starts: dict[Expr, int] = {}
    left = [(1, expr)]
    while left:
        factor, part = left.pop()
        for term in terms(part):
            number, rest = split_coefficient(term)
            if rest is None:
                offset += factor * int(number)
            elif rest in found:
                found[rest] += factor * int(number)
            elif is_start(rest):
                starts[rest] = starts.get(rest, 0) + factor * int(number)
            elif rest.op is Op.CAST and rest.args[0].dtype in INTEGERS:  # the same number in another width
                left.append((factor * int(number), rest.args[0]))
            else:
                return None
    bound = Bound(found[Q_IDX], found[KV_IDX], offset, tuple(both for both in starts.items() if both[1] != 0))
    return bound if bound.reach < FARTHEST else None
