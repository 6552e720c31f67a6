"""The backward pass over keys: a block holds a tile of keys and walks over the queries (of all heads that share them).

Scores stand transposed, (keys, queries), so that weights and their gradients go from registers into the products that
make dV and dK. dQ is summed into an fp32 workspace by atomics, unless another kernel makes it (backward_queries.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, topological
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.ir.program import KV_IDX, PRODUCT, Q_IDX, WEIGHT, WEIGHT_GRADIENT, Backward, Extreme, row_variable
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Corners,
    Operand,
    Place,
    Sizes,
    accumulate,
    assign,
    block_values,
    build,
    load,
    loop,
    multiply,
    named,
    over_pairs,
    parts_of_indices,
    reader,
    store,
    where_partial,
    window,
    within,
)
from attention_engine.kernels.diagonals import sum_diagonals
from attention_engine.kernels.ends import at_ends
from attention_engine.kernels.inside import where_inside
from attention_engine.kernels.key_sums import shared_between_heads, sum_keys
from attention_engine.kernels.rows import take_sums_for_granted, workspace_offset
from attention_engine.kernels.splice import both, name_value
from attention_engine.kernels.staged import StagedReads, copy_staged
from attention_engine.kernels.tiles import QueryWalk, either
from attention_engine.kernels.unseen import clear_operand
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.row_values import proportion
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.strength import split_casts
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers

NOTHING = CustomSums()


def factor_of(schedule: BackwardSchedule, expr: Expr) -> float | None:
    """k, where a pair adds k times the gradient of its product (without its factor): then that tile is summed."""
    return proportion(expr, schedule.product_gradient)


def of_pairs(schedule: BackwardSchedule) -> list[Expr]:
    """The expressions that are computed for each pair."""
    gradients = (e for _, e in schedule.pair_gradients)
    return [schedule.weights, schedule.product_gradient, *gradients, *(e.value for e in schedule.extremes)]


def keeps_products(schedule: BackwardSchedule) -> bool:
    """Do later formulas read the products that the weights came from?"""
    read = topological(schedule.product_gradient, *(e for _, e in schedule.pair_gradients))
    return PRODUCT in read or len(schedule.extremes) > 0


def backward(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, vectors: bool, with_dq: bool,
    summed: CustomSums = NOTHING,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., [tile_lists], do, rows..., dk, dv, [workspace], custom sums...).

    custom sums: key_sum (batch, heads or key heads, keys), diagonal (batch, heads, strips, queries + keys), where entry
    query - key + keys - 1 is a diagonal's, and d_custom, like the custom inputs.
    """
    sizes = Sizes(problem)
    plan = plan_tiles(schedule.mask)
    parameters = sizes.declare(attention_buffers.over_keys(problem, schedule, rows, tile, with_dq, summed))
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    own_tile = [factor_of(schedule, e) is None for _, e in (*summed.of_keys, *summed.diagonals)]
    in_products = with_dq and not problem.splits and not any(own_tile[len(summed.of_keys) :])  # dS is shared anyhow
    own_shared_tile = len(summed.diagonals) > 0 and not in_products
    seen = key_condition(schedule.mask)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(T.ceildiv(sizes.kv, tile.kv), problem.kv_heads, sizes.batch, threads=tile.threads) as (
            block,
            kv_head,
            batch,
        ):
            k = Operand("k", problem, (tile.kv, dim))
            v = Operand("v", problem, (tile.kv, dim_v))
            q = Operand("q", problem, (tile.q, dim))
            do = Operand("do", problem, (tile.q, dim_v))
            products = T.alloc_fragment([tile.kv, tile.q], FLOAT)
            weights = T.alloc_fragment([tile.kv, tile.q], FLOAT) if keeps_products(schedule) else products
            gradients = T.alloc_fragment([tile.kv, tile.q], FLOAT)
            weights_in = Operand("weights_in", problem, (tile.kv, tile.q), fragment=not tile.shared_weights)
            gradients_in = Operand("gradients_in", problem, (tile.kv, tile.q), fragment=not tile.shared_weights)
            dk_sums = Accumulator("dk", problem, (tile.kv, dim))
            dv_sums = Accumulator("dv", problem, (tile.kv, dim_v))
            dk, dv = dk_sums.sum, dv_sums.sum
            row_tiles = {row_variable(n): named(f"{n}_tile", T.alloc_shared([tile.q], FLOAT)) for n, _ in rows.rows}
            contribution = T.alloc_fragment([tile.kv, tile.q], FLOAT) if any(own_tile) else gradients
            shared_tile = T.alloc_shared([tile.kv, tile.q], FLOAT) if own_shared_tile else None
            key_sums = [T.alloc_fragment([tile.kv], FLOAT) for _ in summed.of_keys]
            staged = StagedReads(of_pairs(schedule), problem, tile)
            kv0 = block * tile.kv
            load(k, window(buffers["k"], batch, kv_head, kv0, tile.kv, dim))
            load(v, window(buffers["v"], batch, kv_head, kv0, tile.kv, dim_v))
            if with_dq and seen is not None:
                of_keys = Place(batch, kv_head, {}, reader(buffers, sizes.inside(problem, batch, kv_head)))
                clear_operand(seen, of_keys, kv0, k)
            T.fill(dk, 0)
            T.fill(dv, 0)
            for total in key_sums:
                T.fill(total, 0)
            walk = QueryWalk(plan, problem, sizes, tile, buffers, batch, kv_head, block)
            for step in loop(walk.count, tile.stages):
                visit = walk.at(step)
                head = visit.head
                q0 = visit.start
                read = reader(buffers, sizes.inside(problem, batch, head))
                place = Place(batch, head, block_values(schedule.block, batch, head, read), read, problem.approximate)
                maths = PairMaths(schedule, (tile.kv, tile.q), place, row_tiles, sizes, q0, kv0, True, staged)
                load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
                T.clear(products)
                multiply(k, q, products, transpose_B=True, whole_rows=not tile.shared_weights)
                load(do, window(buffers["do"], batch, head, q0, tile.q, dim_v))
                T.clear(gradients)
                multiply(v, do, gradients, transpose_B=True, whole_rows=not tile.shared_weights)
                for name, _ in rows.rows:
                    T.copy(buffers[name][batch, head, q0 : q0 + tile.q], row_tiles[row_variable(name)])
                if len(staged.tiles) > 0:
                    copy_staged(staged, buffers, batch, head, q0, kv0)
                maths.weigh(products, weights)
                outside = T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
                partial = either(visit.is_partial(q0), outside)
                where_partial(partial, bind(maths.mask, weights))
                load(weights_in, weights)
                accumulate(weights_in, do, dv_sums, whole_rows=not tile.shared_weights)
                for read, expr in summed.scattered:
                    maths.scatter(products, weights, gradients, read, expr, buffers[f"d_custom_{read.name}"])
                for number, (read, expr) in enumerate(summed.of_keys):
                    if factor_of(schedule, expr) is None:
                        maths.contribute(products, weights, gradients, expr, contribution)
                        sum_keys(read, problem, contribution, key_sums[number], tile, buffers, number, place, kv0, 1.0)
                for number, (_, expr) in enumerate(summed.diagonals):
                    if factor_of(schedule, expr) is None:
                        maths.contribute(products, weights, gradients, expr, contribution)
                        T.copy(contribution, shared_tile)
                        sum_diagonals(summed, shared_tile, tile, buffers, number, place, q0, kv0, sizes, 1.0)
                maths.differentiate(products, weights, gradients)
                where_partial(partial, bind(maths.mask, gradients))
                for number, (read, expr) in enumerate(summed.of_keys):
                    factor = factor_of(schedule, expr)
                    if factor is not None:
                        sum_keys(read, problem, gradients, key_sums[number], tile, buffers, number, place, kv0, factor)
                load(gradients_in, gradients)
                accumulate(gradients_in, q, dk_sums, whole_rows=not tile.shared_weights)
                if not in_products:
                    for number, (_, expr) in enumerate(summed.diagonals):
                        factor = factor_of(schedule, expr)
                        if factor is not None:
                            T.copy(gradients, shared_tile)
                            sum_diagonals(summed, shared_tile, tile, buffers, number, place, q0, kv0, sizes, factor)
                if with_dq:
                    gradients_out = gradients_in.in_shared_memory(problem)
                    if gradients_out is not gradients_in:
                        T.copy(gradients_in.whole, gradients_out.whole)
                    if in_products:
                        for number, (_, expr) in enumerate(summed.diagonals):
                            factor, source = factor_of(schedule, expr), gradients_out.whole
                            sum_diagonals(summed, source, tile, buffers, number, place, q0, kv0, sizes, factor)
                    dq = T.alloc_fragment([tile.q, dim], FLOAT)
                    T.clear(dq)
                    multiply(gradients_out, k, dq, transpose_A=True, whole_rows=False)
                    take_sums_for_granted(buffers, batch * problem.heads + head, q0 * dim, tile.q * dim)
                    for i, d in T.Parallel(tile.q, dim):
                        T.atomic_add(
                            buffers["workspace"][
                                batch * problem.heads + head, q0 * dim + workspace_offset(i, d, tile, dim, vectors)
                            ],
                            dq[i, d],
                        )
            for number, (read, _) in enumerate(summed.of_keys):
                if not shared_between_heads(read, problem):
                    T.copy(key_sums[number], buffers[f"key_sum{number}"][batch, kv_head, kv0 : kv0 + tile.kv])
            if schedule.scale != 1:
                for j, d in T.Parallel(tile.kv, dim):
                    dk[j, d] *= schedule.scale
            T.copy(dk, window(buffers["dk"], batch, kv_head, kv0, tile.kv, dim))
            T.copy(dv, window(buffers["dv"], batch, kv_head, kv0, tile.kv, dim_v))

    return build("backward", parameters, body)


class PairMaths:
    """A backward schedule on the tiles of a kernel, whose rows are keys (transposed) or queries."""

    def __init__(self, schedule: BackwardSchedule, shape: tuple[int, int], place: Place, rows: dict[Expr, Any],
                 sizes: Sizes, q0: Any, kv0: Any, transposed: bool, staged: StagedReads | None = None,
                 ) -> None:  # fmt: skip
        self.staged = staged
        self.schedule, self.shape, self.place, self.rows, self.sizes = schedule, shape, place, rows, sizes
        self.q0, self.kv0, self.transposed = q0, kv0, transposed

    def _splice(self, place: Place, i: Any, j: Any, values: dict[Expr, Any]) -> Any:
        query, key = (j, i) if self.transposed else (i, j)
        of_row = {variable: tile[query] for variable, tile in self.rows.items()}
        if self.staged is not None:
            of_row |= self.staged.values(query, key)
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

        known = {} if self.staged is None else self.staged.tiles
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
        self._clear(lambda *at: self._splice(*at, {})(self.schedule.mask)[0], targets, self.schedule.mask)

    def _clear(
        self, keep: Callable[[Place, Any, Any], Any], targets: tuple[Any, ...], asked: Expr | None = None
    ) -> None:
        def entry(place: Place, i: Any, j: Any) -> None:
            kept = keep(place, i, j)
            for target in targets:
                store(target, T.if_then_else(kept, target[i, j], T.float32(0)), i, j)

        self._over_pairs(entry, asked)

    def _at(self, place: Place, products: Any, weights: Any, gradients: Any, i: Any, j: Any, *exprs: Expr) -> Any:
        """Splices expressions of a pair's product, weight and gradient."""
        values = {WEIGHT: weights[i, j], WEIGHT_GRADIENT: gradients[i, j]}
        if keeps_products(self.schedule):
            values[PRODUCT] = products[i, j]
        read = topological(*exprs) if self.schedule.extremes else ()
        for extreme in self.schedule.extremes:
            if extreme.of_pair in read:
                values[extreme.of_pair] = self._value(place, products, i, j, extreme)
        return self._splice(place, i, j, values)

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

    def differentiate(self, products: Any, weights: Any, gradients: Any) -> None:
        """gradients (of the weights) become gradients of the products, without their factor."""

        def entry(place: Place, i: Any, j: Any) -> None:
            assign([(gradients, split)], self._at(place, products, weights, gradients, i, j, split), i, j)

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
            keep = self._keep(place, i, j)
            for index, length in zip(indices, target.shape, strict=True):
                keep = T.And(keep, T.And(index >= 0, index < length))
            safe = [within(i, n) for i, n in zip(indices, target.shape, strict=True)]
            add_atomically(target, safe, T.if_then_else(keep, value, T.float32(0)))

        self._over_pairs(entry, expr, self.schedule.mask)


@T.macro
def add_atomically(target: Any, indices: list[Any], value: Any) -> None:
    """target[indices] += value, by an atomic."""
    T.atomic_add(target[tuple(indices)], value)
