"""What pairs read of custom inputs by their query alone, or by their key alone: read once a row and once a key.

A tile has 64 times as many pairs as rows or keys, and each read has its guard. A mask of packed sequences reads five
tables at each pair, and where it is asked in several passes, each of them did: most of a kernel's text, and of the time
that TileLang took for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr
from attention_engine.kernels.common import Place, named, over_rows, store
from attention_engine.kernels.splice import DTYPES
from attention_engine.passes.row_values import reads_of_one_side


@dataclass(frozen=True)
class SideReads:
    """The reads of one side, each with its tile: of_queries in registers, of_keys in shared memory."""

    of_queries: Mapping[Expr, Any] = field(default_factory=dict)
    of_keys: Mapping[Expr, Any] = field(default_factory=dict)

    def values(self, query: Any, key: Any) -> dict[Expr, Any]:
        """What the reads are at a pair of the tile."""
        rows = {read: tile[query] for read, tile in self.of_queries.items()}
        return rows | {read: tile[key] for read, tile in self.of_keys.items()}

    def take_queries(self, place: Place, q0: Any) -> None:
        """Reads those of the tile's queries, from q0 on."""
        _take(self.of_queries, lambda i: place.splice(q0 + i, None, {}))

    def take_keys(self, place: Place, kv0: Any) -> None:
        """Reads those of the tile's keys, from kv0 on."""
        _take(self.of_keys, lambda j: place.splice(None, kv0 + j, {}))


def side_reads(exprs: Iterable[Expr | None], queries: int, keys: int) -> SideReads:
    """Tiles for what some expressions read by one side, made in a kernel."""
    reads = reads_of_one_side(expr for expr in exprs if expr is not None)
    of_queries = [read for read in reads if Axis.QUERY in read.axes]
    of_keys = [read for read in reads if Axis.KEY in read.axes]
    return SideReads(
        {n: named(f"{n.name}_of_row", T.alloc_fragment([queries], DTYPES[n.dtype])) for n in of_queries},
        {n: named(f"{n.name}_of_key", T.alloc_shared([keys], DTYPES[n.dtype])) for n in of_keys},
    )


def _take(tiles: Mapping[Expr, Any], at: Any) -> None:
    if not tiles:
        return
    (length,) = {int(tile.shape[0]) for tile in tiles.values()}

    def row(i: Any) -> None:
        for tile, value in zip(tiles.values(), at(i)(*tiles), strict=True):
            store(tile, value, i)

    over_rows(length, row)
