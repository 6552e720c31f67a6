"""A forward schedule on the tiles of a kernel: products become scores and weights, and row states move on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, Op, const, make, topological
from attention_engine.ir.program import KV_IDX, OUTPUT, PRODUCT, Q_IDX
from attention_engine.kernels.common import (
    FLOAT,
    LANES,
    Corners,
    Place,
    Sizes,
    add_columns,
    assign,
    fill,
    lie_alike,
    over_pairs,
    over_rows,
    parts_of_indices,
    store,
)
from attention_engine.kernels.ends import at_ends
from attention_engine.kernels.inside import where_inside
from attention_engine.kernels.splice import both, hold_value
from attention_engine.kernels.staged import StagedReads
from attention_engine.passes.row_terms import KV_FIRST, terms_beside_product
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.steps import KEEP, OTHER, TILE, ReduceStep, RowStep, SumStep, TileStep
from attention_engine.passes.strength import split_casts
from attention_engine.plan.forms import Tile

REDUCE = {"sum": T.reduce_sum, "max": T.reduce_max, "min": T.reduce_min}


def row_variables(schedule: ForwardSchedule) -> list[Expr]:
    """Every row value that the kernel keeps in registers."""
    found = dict.fromkeys(v for v, _ in schedule.initial)
    for step in (*schedule.steps, schedule.output_rows):
        match step:
            case ReduceStep():
                found[step.variable] = None
            case RowStep():
                found.update(dict.fromkeys(v for v, _ in step.assignments))
            case TileStep() | SumStep():
                pass
    return list(found)


def needs_another(schedule: ForwardSchedule) -> bool:
    """Is a tile reduced that is neither scores nor weights?"""
    return any(isinstance(s, ReduceStep) and (s.source is not None or s.absolute) for s in schedule.steps)


def of_pairs(schedule: ForwardSchedule) -> list[Expr]:
    """The expressions that are computed for each pair."""
    found = [schedule.score]
    for step in schedule.steps:
        match step:
            case ReduceStep():
                found += [] if step.source is None or step.source is OTHER else [step.source]
            case TileStep():
                found += [step.value, *([] if step.other is None else [step.other])]
            case RowStep():
                pass
    return found


def sums_in_parts(schedule: ForwardSchedule, tile: Tile) -> dict[Expr, Any]:
    """Room for the row states that threads may hold in parts: a part is the columns that a thread has of eight."""
    return {s.state: T.alloc_fragment([tile.q, LANES], FLOAT) for s in schedule.steps if isinstance(s, SumStep)}


@T.macro
def multiply_rows(values: Any, factors: Any, tile: Tile, columns: int) -> None:
    """values *= factors, row by row."""
    for i, d in T.Parallel(tile.q, columns):
        values[i, d] *= factors[i]


@T.macro
def rescale(output: Any, factors: Any, tile: Tile, dim_v: int) -> None:
    """Brings the output so far to what its rows hold by now; lazily, where a warp has a row whose factor is not 1."""
    if tile.lazy_rescale:
        changed = T.alloc_var("bool")
        changed = False
        for i in T.Parallel(tile.q):
            changed = T.Or(changed, factors[i] != 1)
        if T.any_sync(changed) != 0:
            multiply_rows(output, factors, tile, dim_v)
    else:
        multiply_rows(output, factors, tile, dim_v)


@T.macro
def multiply_row(row: Any, factors: Any, tile: Tile) -> None:
    """row *= factors."""
    for i in T.Parallel(tile.q):
        row[i] *= factors[i]


@T.macro
def add_columns_in_order(part: Any, values: Any, tile: Tile) -> None:
    """Adds each column of a tile to the part of its own, one after another: sums take weights in the order in which
    they are made and packed, so that ptxas sets all three among exponentials."""
    for m in T.unroll(tile.kv // LANES):
        for i, c in T.Parallel(tile.q, LANES):
            part[i, c] = part[i, c] + values[i, m * LANES + c]


@dataclass(frozen=True)
class ScoreTile:
    """A tile of scores, and what stands beside it: a second tile, where a row value is made of another formula; row
    values; parts of row states, where threads hold them so (`sums_in_parts`); biases that were copied ahead."""

    scores: Any
    other: Any
    rows: dict[Expr, Any]
    parts: dict[Expr, Any]
    staged: StagedReads


class TileMaths:
    """The schedule's steps on a tile of scores, whose first query is q0."""

    def __init__(
        self, schedule: ForwardSchedule, tile: Tile, sizes: Sizes, place: Place, q0: Any, of: ScoreTile
    ) -> None:  # fmt: skip
        self.schedule, self.tile, self.sizes, self.place, self.q0 = schedule, tile, sizes, place, q0
        self.scores, self.other, self.rows, self.parts, self.staged = of.scores, of.other, of.rows, of.parts, of.staged

    def query(self, i: Any) -> Any:
        """The query of a row of the tile."""
        return self.q0 + i

    def of_row(self, i: Any) -> dict[Expr, Any]:
        """What a row has of its own beside its query and its values: nothing, where a tile is of one head."""
        return {}

    @property
    def stop(self) -> Any:
        """One past the last key."""
        return self.sizes.kv

    def _row(self, i: Any) -> dict[Expr, Any]:
        return {**{variable: fragment[i] for variable, fragment in self.rows.items()}, **self.of_row(i)}

    def _keep(self, place: Place, i: Any, j: Any, kv0: Any) -> Any:
        inside = kv0 + j < self.stop
        if self.schedule.mask is None:
            return inside
        (keep,) = place.splice(self.query(i), kv0 + j, self.of_row(i))(self.schedule.mask)
        return both(inside, keep)

    def _over_pairs(
        self, kv0: Any, exprs: list[Expr], entry: Callable[[Place, Any, Any], None], place: Place | None = None
    ) -> None:
        """entry(place, i, j) for each pair, which computes `exprs`."""

        def walk(place: Place) -> None:
            over_pairs(self.tile.q, self.tile.kv, bind(entry, place))

        where_inside(place or self.place, self.sizes, self._corners(kv0), exprs, self.staged.tiles, walk)

    def _corners(self, kv0: Any) -> Corners:
        return (self.q0, kv0), (self.q0 + (self.tile.q - 1), kv0 + (self.tile.kv - 1))

    def _map(
        self, made: Sequence[tuple[Any, Expr]], kv0: Any, entry_is: Expr, place: Place | None = None
    ) -> None:  # fmt: skip
        """target = expr of each for each pair; entry_is: the variable that stands for the tile's entry."""
        exprs = [expr for _, expr in made]
        asks = KEEP in topological(*exprs)

        def entry(place: Place, i: Any, j: Any) -> None:
            values = {**self._row(i), **self.staged.values(i, j), entry_is: self.scores[i, j]}
            values |= parts_of_indices(Q_IDX, self.q0, i, KV_IDX, kv0, j)
            if asks:
                values[KEEP] = self._keep(place, i, j, kv0)
            assign(split, place.splice(self.q0 + i, kv0 + j, values), i, j)

        split = [*zip([target for target, _ in made], split_casts(*exprs), strict=True)]
        mask = [self.schedule.mask] if asks and self.schedule.mask is not None else []
        self._over_pairs(kv0, [*exprs, *mask], entry, place)

    def _by_ends(self, kv0: Any, action: Callable[[Expr], None]) -> None:
        """action(the score), or what the score is in a tile at an end."""
        at_ends(self.place, self.schedule.ends, self._corners(kv0), self.schedule.score, action)

    def score(self, kv0: Any) -> None:
        """The tile of products becomes the tile of scores."""
        if self.schedule.score is not PRODUCT:
            self._by_ends(kv0, lambda score: self._map([(self.scores, score)], kv0, PRODUCT))

    def start_scores(self, kv0: Any) -> None:
        """The tile before its products are added: the score's other terms.

        A lane tells its warp the block's values anew: what each register begins with would else be held in one more.
        """

        def start(score: Expr) -> None:
            added = terms_beside_product(score) or const(0.0)
            read = topological(added)
            held = {v: hold_value(x) for v, x in self.place.block.items() if v in read}
            self._map([(self.scores, added)], kv0, TILE, replace(self.place, block={**self.place.block, **held}))

        self._by_ends(kv0, start)

    def mask(self, kv0: Any) -> None:
        """Masked pairs hold the fill."""
        asked = [] if self.schedule.mask is None else [self.schedule.mask]
        self.fill_unless(kv0, asked, lambda place, i, j: self._keep(place, i, j, kv0))

    def fill_unless(self, kv0: Any, asked: list[Expr], keep: Callable[[Place, Any, Any], Any]) -> None:
        """Pairs that keep(place, row, column), which computes the expressions, says no of hold the fill."""
        fill = -T.infinity(FLOAT) if self.schedule.fill == -math.inf else T.float32(self.schedule.fill)

        def entry(place: Place, i: Any, j: Any) -> None:
            store(self.scores, T.if_then_else(keep(place, i, j), self.scores[i, j], fill), i, j)

        self._over_pairs(kv0, asked, entry)

    def weigh(self, kv0: Any, before_weights: Callable[[], None] | None = None) -> None:
        """The tile of scores becomes weights, and the row states move on.

        before_weights: what else to do, before weights are made of scores that rows were reduced from, or at the end.
        """
        for step in self.schedule.steps:
            if before_weights is not None and isinstance(step, TileStep):
                before_weights()
                before_weights = None
            match step:
                case ReduceStep():
                    source = self.scores
                    if step.source is not None or step.absolute:
                        if step.source is not OTHER:
                            self._make_other(step.source or make(Op.ABS, TILE), kv0)
                        source = self.other
                    target = self.rows[step.variable]
                    if step.kind == "sum":
                        REDUCE[step.kind](source, target, dim=1)
                    else:
                        fill(target, self.schedule.least if step.kind == "max" else -self.schedule.least)
                        REDUCE[step.kind](source, target, dim=1, clear=False)
                case SumStep():
                    self._sum(step)
                case RowStep():
                    self._rows(step, {KV_FIRST: kv0})
                case TileStep():
                    beside = [] if step.other is None else [(self.other, step.other)]
                    self._map([(self.scores, step.value), *beside], kv0, TILE)
        if self.schedule.dropped is not None:
            self._drop(kv0, self.schedule.dropped)
        if before_weights is not None:
            before_weights()

    def _make_other(self, expr: Expr, kv0: Any) -> None:
        """The second tile, of the first."""
        if TILE not in topological(expr):
            lie_alike(self.other, self.scores)
        self._map([(self.other, expr)], kv0, TILE)

    def _drop(self, kv0: Any, dropped: Expr) -> None:
        """Weights that meet no value are 0; rows know them."""

        def entry(place: Place, i: Any, j: Any) -> None:
            parts = parts_of_indices(Q_IDX, self.q0, i, KV_IDX, kv0, j)
            (leaves,) = place.splice(self.q0 + i, kv0 + j, parts)(dropped)
            store(self.scores, T.if_then_else(leaves, T.float32(0), self.scores[i, j]), i, j)

        self._over_pairs(kv0, [dropped], entry)

    def start(self) -> None:
        """The row states as they begin."""
        for variable, value in self.schedule.initial:
            fill(self.rows[variable], value)
        for part in self.parts.values():
            fill(part, 0)

    def _sum(self, step: SumStep) -> None:
        part, row, factor = self.parts.get(step.state), self.rows[step.state], step.factor
        if part is not None:
            if factor is not None:
                multiply_rows(part, self.rows[factor], self.tile, LANES)
            if self.tile.woven:
                add_columns_in_order(part, self.scores, self.tile)
            else:
                add_columns(part, self.scores, self.tile.q, self.tile.kv)
        else:
            if factor is not None:
                multiply_row(row, self.rows[factor], self.tile)
            REDUCE["sum"](self.scores, row, dim=1, clear=False)

    def join(self) -> None:
        """The row states that were held in parts, before the end."""
        for state, part in self.parts.items():
            REDUCE["sum"](part, self.rows[state], dim=1)

    def _rows(self, step: RowStep, of_tile: dict[Expr, Any]) -> None:
        def entry(i: Any) -> None:
            splice = self.place.splice(self.query(i), None, self._row(i) | of_tile)
            assign([(self.rows[v], e) for v, e in step.assignments], splice, i)

        over_rows(self.tile.q, entry)

    def finish(self, output: Any, dim_v: int) -> None:
        """The epilogue, on the output so far."""
        self.finish_rows()
        self.finish_columns(output, dim_v)

    def finish_rows(self) -> None:
        """The row values that the epilogue makes."""
        if self.schedule.output_rows.assignments:
            self._rows(self.schedule.output_rows, {})

    def finish_columns(self, output: Any, dim_v: int) -> None:
        """The epilogue on so many columns of the output, when its row values are there."""
        if self.schedule.output is OUTPUT:
            return

        def entry(i: Any, d: Any) -> None:
            splice = self.place.splice(self.query(i), None, {**self._row(i), OUTPUT: output[i, d]})
            assign([(output, self.schedule.output)], splice, i, d)

        over_pairs(self.tile.q, dim_v, entry)

    def write_row(self, target: Any, expr: Expr) -> None:
        """A row that the caller keeps."""

        def entry(i: Any) -> None:
            assign([(target, expr)], self.place.splice(self.query(i), None, self._row(i)), i)

        over_rows(self.tile.q, entry)
