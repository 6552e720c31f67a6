"""Reads of custom inputs at a pair's own query and key, without guards in tiles that lie inside the tensors whole.

Guards cost more than reads: an index is compared and cut, and an address of 64 bits made of it, for each pair. Without
them the pairs of a thread lie at constant distances from one address.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial as bind
from functools import reduce
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, Op, topological
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.kernels.common import Corners, Place, Sizes


def where_inside(
    place: Place, sizes: Sizes, corners: Corners, exprs: Iterable[Expr], known: Collection[Expr],
    action: Callable[[Place], None],
) -> None:  # fmt: skip
    """action(place), in which a tile's pairs compute `exprs`; known: the reads that are no reads of memory."""
    # a number without indices is one entry to a kernel
    found = topological(*exprs, known=known)
    reads = [node for node in found if node.op is Op.LOAD and node.args and node not in known]
    asked = {(i, axis) for read in reads for i, axis in zip(read.args, sizes.axes[read.name], strict=True)}
    lasts, lengths = zip((Q_IDX, KV_IDX), corners[1], strict=True), {"seq_len": sizes.q, "seq_len_kv": sizes.kv}
    inside = {(i, axis): (last, length) for i, last in lasts for axis, length in lengths.items() if (i, axis) in asked}
    if not inside:
        action(place)
    else:
        known_too = tuple((i, length) for (i, _), (_, length) in inside.items())
        ends = [last < length for last, length in inside.values()]
        _choose(reduce(T.And, ends), bind(action, replace(place, inside=known_too)), bind(action, place))


@T.macro
def _choose(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    if condition:
        then()
    else:
        otherwise()
