"""Which tiles the bounds of a mask leave: loop bounds, and which tiles may hold a masked pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.kernels.common import Place, reader
from attention_engine.kernels.splice import name_as
from attention_engine.passes.analyse_mask import Bound, MaskPlan

NO_NUMBERS: Mapping[Expr, Any] = {}
MOST_IN_32_BITS = 2**31


@dataclass(frozen=True)
class BoundHere(Bound):
    """A bound in a launch that says where its indices start: these numbers are in its offset."""

    greatest: int = 0

    @property
    def reach(self) -> int:
        """As of the bound that it is made of."""
        return self.greatest


def with_starts(plan: MaskPlan, buffers: Any, batch: Any, known: Mapping[Expr, Any] = NO_NUMBERS) -> MaskPlan:
    """The bounds in a launch that says where its indices start, these numbers in their offsets. known: some of them."""
    if not any(bound.starts for bound in plan.bounds):
        return plan
    place = Place(batch, 0, known, reader(buffers))

    def here(bound: Bound) -> Bound:
        whole = width_of(bound.reach)
        offset: Any = whole(bound.offset)
        for start, number in bound.starts:
            offset = offset + whole(number) * whole(place.splice(None, None, {})(start)[0])
        return BoundHere(bound.q, bound.kv, name_as("offset", offset), greatest=bound.reach)

    return MaskPlan(tuple(here(b) if b.starts else b for b in plan.bounds), plan.exact)


def kv_range(plan: MaskPlan, q0: Any, q1: Any, kv_tile: int, tiles: Any) -> tuple[Any, Any]:
    """First and one past the last kv tile that may hold a kept pair of queries q0..q1 (inclusive)."""
    return _range([(b.q, b.kv, b.offset, b.reach) for b in plan.bounds], q0, q1, kv_tile, tiles)


def q_range(plan: MaskPlan, kv0: Any, kv1: Any, q_tile: int, tiles: Any) -> tuple[Any, Any]:
    """First and one past the last q tile that may hold a kept pair of keys kv0..kv1 (inclusive)."""
    return _range([(b.kv, b.q, b.offset, b.reach) for b in plan.bounds], kv0, kv1, q_tile, tiles)


def _range(bounds: list[tuple[int, int, int, int]], low: Any, high: Any, tile: int, tiles: Any) -> tuple[Any, Any]:
    """fixed * x + moving * y + offset >= 0 for some x in [low, high]: which tiles of y. The last number of a bound is
    its reach."""
    first: Any = T.int32(0)
    stop: Any = tiles
    for fixed, moving, offset, reach in bounds:
        whole = width_of(reach)
        most = whole(fixed) * whole(high if fixed > 0 else low) + whole(offset)
        if moving < 0:
            stop = _nearest(T.min, stop, T.floordiv(T.floordiv(most, whole(-moving)), whole(tile)) + 1, tiles)
        elif moving > 0:
            found = T.floordiv(T.floordiv(-most + whole(moving) - 1, whole(moving)), whole(tile))
            first = _nearest(T.max, first, found, tiles)
        else:
            stop = T.if_then_else(most >= 0, stop, 0)
    return first, T.max(stop, first)


def width_of(reach: int) -> Callable[[Any], Any]:
    """What makes numbers as wide as those that come up need: as they are, or of 64 bits."""
    return (lambda number: T.cast(number, "int64")) if reach >= MOST_IN_32_BITS else lambda number: number


def _nearest(choose: Callable[[Any, Any], Any], a: Any, b: Any, tiles: Any) -> Any:
    """The less or greater of a number of tiles, of 32 bits, and one of any width."""
    if str(getattr(b, "dtype", "int32")) == "int64":
        b = T.cast(T.max(T.min(b, T.cast(tiles, "int64")), T.int64(0)), "int32")
    return choose(a, b)


def is_partial(plan: MaskPlan, q0: Any, q1: Any, kv0: Any, kv1: Any) -> Any:
    """May the tile of queries q0..q1 and keys kv0..kv1 hold a masked pair? True (Python's) where it can't be told."""
    if not plan.exact:
        return True
    partial: Any = None
    for bound in plan.bounds:
        whole = width_of(bound.reach)
        corner = whole(q0 if bound.q > 0 else q1), whole(kv0 if bound.kv > 0 else kv1)
        least = whole(bound.q) * corner[0] + whole(bound.kv) * corner[1] + whole(bound.offset)
        partial = least < 0 if partial is None else T.Or(partial, least < 0)
    return False if partial is None else partial


def either(a: Any, b: Any) -> Any:
    """a or b, of Python or TileLang truths."""
    if a is True or b is True:
        return True
    return b if a is False else a if b is False else T.Or(a, b)
