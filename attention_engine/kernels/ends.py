"""Maths of a tile that is shorter where a clamped index is at one of its ends in the whole tile (passes/ends.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.kernels.common import Corners, Place
from attention_engine.passes.ends import Ends


def at_ends(place: Place, ends: Ends | None, corners: Corners, expr: Expr, action: Callable[[Expr], None]) -> None:
    """action(expr), or in a tile at an end, action(what the expression is there)."""
    if ends is None:
        action(expr)
        return
    least, most = (_extreme(place, ends, corners, highest) for highest in (False, True))
    actions = tuple(bind(action, e) for e in (ends.below, ends.above, expr))
    _choose(most <= ends.least, least >= ends.most, actions)


def past_end(place: Place, ends: Ends, corners: Corners, late: bool) -> Any:
    """Is the index at one end in the whole tile: the one of late queries, or that of early ones?"""
    if (ends.factors()[0] > 0) is late:
        return _extreme(place, ends, corners, False) >= ends.most
    return _extreme(place, ends, corners, True) <= ends.least


def _extreme(place: Place, ends: Ends, corners: Corners, highest: bool) -> Any:
    """The lowest or highest index in the tile, which is at one of its corners."""
    query, key = (corners[(factor > 0) is highest][side] for side, factor in enumerate(ends.factors()))
    return place.splice(query, key, {})(ends.index)[0]


@T.macro
def _choose(below: Any, above: Any, actions: tuple[Callable[[], None], ...]) -> None:
    if below:
        actions[0]()
    else:
        if above:
            actions[1]()
        else:
            actions[2]()
