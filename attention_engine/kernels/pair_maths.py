"""A backward schedule on the tiles of a kernel: products become weights, and gradients of weights those of products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, topological
from attention_engine.ir.program import KV_IDX, PRODUCT, Q_IDX, WEIGHT, WEIGHT_GRADIENT, Extreme
from attention_engine.kernels.common import (
    FLOAT,
    Corners,
    Place,
    Sizes,
    assign,
    over_pairs,
    parts_of_indices,
    store,
    within,
)
from attention_engine.kernels.ends import at_ends
from attention_engine.kernels.inside import where_inside
from attention_engine.kernels.side_reads import SideReads
from attention_engine.kernels.splice import both, is_read, name_value
from attention_engine.kernels.staged import StagedReads
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.row_values import proportion
from attention_engine.passes.schedule import BackwardSchedule, keeps_products
from attention_engine.passes.strength import split_casts

NOTHING = CustomSums()


def factor_of(schedule: BackwardSchedule, expr: Expr) -> float | None:
    """k, where a pair adds k times the gradient of its product (without its factor): then that tile is summed."""
    return proportion(expr, schedule.product_gradient)


def of_pairs(schedule: BackwardSchedule) -> list[Expr]:
    """The expressions that are computed for each pair."""
    gradients = (e for _, e in schedule.pair_gradients)
    return [schedule.weights, schedule.product_gradient, *gradients, *(e.value for e in schedule.extremes)]


@dataclass(frozen=True)
class PairTile:
    """A tile of pairs: its shape, (queries, keys) or transposed, and the first query and key.

    rows: the rows of numbers that its pairs read, by their variables. staged: biases of pairs that were copied ahead.
    sides: what was read of custom inputs for its rows and keys.
    chosen: where others chose which weights meet values: reads their choice, which says so of an entry.
    """

    shape: tuple[int, int]
    transposed: bool
    q0: Any
    kv0: Any
    rows: dict[Expr, Any]
    staged: StagedReads | None = None
    sides: SideReads = field(default_factory=SideReads)
    chosen: Callable[[], Callable[[Any, Any], Any]] | None = None


class PairMaths:
    """A backward schedule on a tile of pairs."""

    def __init__(self, schedule: BackwardSchedule, sizes: Sizes, place: Place, tile: PairTile) -> None:
        self.schedule, self.sizes, self.place = schedule, sizes, place
        self.shape, self.transposed, self.q0, self.kv0 = tile.shape, tile.transposed, tile.q0, tile.kv0
        self.rows, self.staged, self.sides, self.chosen = tile.rows, tile.staged, tile.sides, tile.chosen

    def _splice(self, place: Place, i: Any, j: Any, values: dict[Expr, Any]) -> Any:
        query, key = (j, i) if self.transposed else (i, j)
        of_row = {variable: tile[query] for variable, tile in self.rows.items()}
        if self.staged is not None:
            of_row |= self.staged.values(query, key)
        of_row |= self.sides.values(query, key)
        sides = (Q_IDX, self.q0, query), (KV_IDX, self.kv0, key)
        row, column = sides[::-1] if self.transposed else sides
        parts = parts_of_indices(*row, *column)
        return place.splice(self.q0 + query, self.kv0 + key, {**of_row, **parts, **values})

    def weigh(self, products: Any, weights: Any) -> None:
        """weights = the final weights of the products."""
        weigh = bind(self._weigh, products, weights)
        at_ends(self.place, self.schedule.ends, self._corners(), self.schedule.weights, weigh)

    def _corners(self) -> Corners:
        queries, keys = self.shape[::-1] if self.transposed else self.shape
        return (self.q0, self.kv0), (self.q0 + (queries - 1), self.kv0 + (keys - 1))

    def _over_pairs(self, entry: Callable[[Place, Any, Any], None], *exprs: Expr | None) -> None:
        """entry(place, i, j) for each pair, which computes the expressions."""

        def walk(place: Place) -> None:
            over_pairs(*self.shape, bind(entry, place))

        known = {**({} if self.staged is None else self.staged.tiles), **self.sides.of_queries, **self.sides.of_keys}
        wanted = [expr for expr in exprs if expr is not None]
        where_inside(self.place, self.sizes, self._corners(), wanted, known, walk)

    def _weigh(self, products: Any, weights: Any, expr: Expr) -> None:
        def entry(place: Place, i: Any, j: Any) -> None:
            assign([(weights, split)], self._splice(place, i, j, {PRODUCT: products[i, j]}), i, j)

        (split,) = split_casts(expr)
        self._over_pairs(entry, expr)

    def _inside(self, _: Place, i: Any, j: Any) -> Any:
        query, key = (j, i) if self.transposed else (i, j)
        return both(self.kv0 + key < self.sizes.kv, self.q0 + query < self.sizes.q)

    def _keep(self, place: Place, i: Any, j: Any) -> Any:
        inside = self._inside(place, i, j)
        if self.schedule.mask is None:
            return inside
        (kept,) = self._splice(place, i, j, {})(self.schedule.mask)
        return both(inside, kept)

    def mask(self, *targets: Any) -> None:
        """Each target = 0 for masked pairs, and those past the ends."""
        self._clear(self._keep, targets, self.schedule.mask)

    def cut(self, *targets: Any) -> None:
        """Each target = 0 for pairs past the ends."""
        self._clear(self._inside, targets)

    def drop(self, *targets: Any) -> None:
        """Each target = 0 for pairs that the mask drops."""
        self._clear(
            lambda place, i, j: self._splice(place, i, j, {})(self.schedule.mask)[0], targets, self.schedule.mask
        )

    def _clear(
        self, keep: Callable[[Place, Any, Any], Any], targets: tuple[Any, ...], asked: Expr | None = None
    ) -> None:
        def entry(place: Place, i: Any, j: Any) -> None:
            kept = keep(place, i, j)
            for target in targets:
                store(target, T.if_then_else(kept, target[i, j], T.float32(0)), i, j)

        self._over_pairs(entry, asked)

    def _at(
        self, place: Place, products: Any, weights: Any, gradients: Any, i: Any, j: Any, *exprs: Expr,
        unless: Callable[[Any], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Splices expressions of a pair's product, weight and gradient. unless: of `_unless_dropped`, if known."""
        unless = unless or self._unless_dropped(place, i, j)
        values = {WEIGHT: weights[i, j], WEIGHT_GRADIENT: unless(gradients[i, j])}
        if keeps_products(self.schedule):
            values[PRODUCT] = products[i, j]
        read = topological(*exprs) if self.schedule.extremes else ()
        for extreme in self.schedule.extremes:
            if extreme.of_pair in read:
                values[extreme.of_pair] = self._value(place, products, i, j, extreme)
        return self._splice(place, i, j, values)

    def _unless_dropped(self, place: Place, i: Any, j: Any) -> Callable[[Any], Any]:
        """What makes 0 of numbers where a pair's weight met no value."""
        if self.schedule.dropped is None:
            return lambda value: value
        dropped = name_value(self._splice(place, i, j, {})(self.schedule.dropped)[0])
        return lambda value: T.if_then_else(dropped, T.float32(0), value)

    def meet_values(self, weights: Any, target: Any) -> None:
        """target = the weights that values are multiplied with, 0 for dropped pairs."""

        def entry(place: Place, i: Any, j: Any) -> None:
            value = self._unless_dropped(place, i, j)(weights[i, j])
            store(target, T.cast(value, target.dtype), i, j)

        self._over_pairs(entry)

    def _value(self, place: Place, products: Any, i: Any, j: Any, extreme: Extreme) -> Any:
        """What of a pair a row's extreme is of, computed alike wherever it is computed."""
        return name_value(self._splice(place, i, j, {PRODUCT: products[i, j]})(extreme.value)[0])

    def reach(self, products: Any, extreme: Extreme, target: Any) -> None:
        """target = what the extreme is of; what no row's extreme is, for pairs that aren't kept."""
        never = -T.infinity(FLOAT) if extreme.kind == "max" else T.infinity(FLOAT)

        def entry(place: Place, i: Any, j: Any) -> None:
            value = self._value(place, products, i, j, extreme)
            store(target, T.if_then_else(self._keep(place, i, j), value, never), i, j)

        self._over_pairs(entry, extreme.value, self.schedule.mask)

    def differentiate(self, products: Any, weights: Any, gradients: Any, then_meet_values: bool = False) -> None:
        """gradients (of the weights) become gradients of the products, without their factor. then_meet_values: weights
        become those that values are multiplied with."""

        keeps = None if self.chosen is None else self.chosen()

        def entry(place: Place, i: Any, j: Any) -> None:
            unless = self._unless_dropped(place, i, j) if keeps is None else _where(name_value(keeps(i, j)))
            splice = self._at(place, products, weights, gradients, i, j, split, unless=unless)
            assign([(gradients, split)], splice, i, j)
            if then_meet_values and self.schedule.dropped is not None:
                store(weights, unless(weights[i, j]), i, j)

        (split,) = split_casts(self.schedule.product_gradient)
        self._over_pairs(entry, split)

    def contribute(self, products: Any, weights: Any, gradients: Any, expr: Expr, target: Any) -> None:
        """target = what each pair adds to a read's gradient, 0 for masked pairs."""

        def entry(place: Place, i: Any, j: Any) -> None:
            (value,) = self._at(place, products, weights, gradients, i, j, expr)(expr)
            store(target, T.if_then_else(self._keep(place, i, j), value, T.float32(0)), i, j)

        self._over_pairs(entry, expr, self.schedule.mask)

    def scatter(self, products: Any, weights: Any, gradients: Any, read: Expr, expr: Expr, target: Any) -> None:
        """Adds what each kept pair contributes to the entries that it read; reads out of range add nothing."""

        def entry(place: Place, i: Any, j: Any) -> None:
            value, *indices = self._at(place, products, weights, gradients, i, j, expr)(expr, *read.args)
            indices = [name_value(i) if is_read(a) else i for i, a in zip(indices, read.args, strict=True)]
            keep = self._keep(place, i, j)
            for index, length in zip(indices, target.shape, strict=True):
                keep = T.And(keep, T.And(index >= 0, index < length))
            safe = [within(i, n) for i, n in zip(indices, target.shape, strict=True)]
            add_atomically(target, safe, T.if_then_else(keep, value, T.float32(0)))

        self._over_pairs(entry, expr, self.schedule.mask)


def _where(kept: Any) -> Callable[[Any], Any]:
    """What makes 0 of numbers unless this holds."""
    return lambda value: T.if_then_else(kept, value, T.float32(0))


@T.macro
def add_atomically(target: Any, indices: list[Any], value: Any) -> None:
    """target[indices] += value, by an atomic."""
    T.atomic_add(target[tuple(indices)], value)
