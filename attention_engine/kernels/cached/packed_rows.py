"""A tile whose rows are the queries of all heads that share a key head: row i is query i // group, head i % group.

Queries stand at places in their request. What the maths has for each head, other kernels hold once a block; here it
is a value of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr, topological
from attention_engine.ir.program import H
from attention_engine.kernels.common import Place, Sizes, assign, over_pairs, over_rows
from attention_engine.kernels.tile_maths import ScoreTile, TileMaths
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.steps import KEEP
from attention_engine.plan.forms import Tile


@dataclass(frozen=True)
class Rows:
    """The rows of a block: the first of them, among those of its key head; the first query head of that; the place of
    the request's first query; how many queries the request has; one past its last key.

    owner, row: the first two indices of the request's first query in tensors of queries.
    """

    first: Any
    first_head: Any
    first_query: Any
    queries: Any
    stop: Any
    group: int
    owner: Any
    row: Any

    def at(self, i: Any) -> tuple[Any, Any, Any]:
        """A row's first indices in tensors of queries, and its head; of a row that is not there, of one that is."""
        return self.owner, self.row + T.min(self.query(i), self.queries - 1), self.head(i)

    def query(self, i: Any) -> Any:
        """Which query of the call a row is of."""
        return (self.first + i) // self.group

    def head(self, i: Any) -> Any:
        """A row's query head."""
        return self.first_head + (self.first + i) % self.group

    def exists(self, i: Any) -> Any:
        """Is a row of the tile one of the call's?"""
        return self.first + i < self.queries * self.group

    def places(self, count: int) -> tuple[Any, Any]:
        """The places of a tile's first and last query."""
        last = T.min(self.first + (count - 1), self.queries * self.group - 1)
        return self.first_query + self.first // self.group, self.first_query + last // self.group


def of_heads(schedule: ForwardSchedule) -> list[tuple[Expr, Expr]]:
    """The values of a block that differ from head to head."""
    return [(variable, value) for variable, value in schedule.block if Axis.HEAD in value.axes]


class PackedMaths(TileMaths):
    """The schedule's steps on such a tile."""

    def __init__(
        self, schedule: ForwardSchedule, tile: Tile, sizes: Sizes, place: Place, packed: Rows, of: ScoreTile
    ) -> None:  # fmt: skip
        super().__init__(schedule, tile, sizes, place, packed.first_query, of)
        self.packed = packed

    def query(self, i: Any) -> Any:
        """The place of a row's query."""
        return self.packed.first_query + self.packed.query(i)

    def of_row(self, i: Any) -> dict[Expr, Any]:
        """A row's head."""
        return {H: self.packed.head(i)}

    @property
    def stop(self) -> Any:
        """One past the request's last key."""
        return self.packed.stop

    def _map(
        self, made: Sequence[tuple[Any, Expr]], kv0: Any, entry_is: Expr, place: Place | None = None
    ) -> None:  # fmt: skip
        asks, at = KEEP in topological(*(expr for _, expr in made)), place or self.place

        def entry(i: Any, j: Any) -> None:
            values = {**self._row(i), entry_is: self.scores[i, j]}
            if asks:
                values[KEEP] = self._keep(at, i, j, kv0)
            assign(made, at.splice(self.query(i), kv0 + j, values), i, j)

        over_pairs(self.tile.q, self.tile.kv, entry)

    def _by_ends(self, kv0: Any, action: Callable[[Expr], None]) -> None:
        action(self.schedule.score)

    def start(self) -> None:
        """The row states as they begin, and what each row has of its head."""
        super().start()
        found = of_heads(self.schedule)

        def entry(i: Any) -> None:
            splice = self.place.splice(self.query(i), None, self.of_row(i))
            assign([(self.rows[v], e) for v, e in found], splice, i)

        if found:
            over_rows(self.tile.q, entry)
