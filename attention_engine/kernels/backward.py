"""The backward pass over keys: a block holds a tile of keys and walks over the queries (of all heads that share them).

Scores stand transposed, (keys, queries), so that weights and their gradients go from registers into the products that
make dV and dK. dQ is summed into an fp32 workspace by atomics, unless another kernel makes it (backward_queries.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Axis, Expr, topological
from attention_engine.ir.problem import Problem, Tile, padded
from attention_engine.ir.program import PRODUCT, WEIGHT, WEIGHT_GRADIENT, Backward, row_variable
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Operand,
    Place,
    Sizes,
    accumulate,
    assign,
    block_values,
    build,
    either,
    is_partial,
    load,
    loop,
    multiply,
    named,
    over_pairs,
    q_range,
    reader,
    store,
    where_partial,
    window,
)
from attention_engine.kernels.rows import place_in_workspace, workspace
from attention_engine.kernels.splice import both
from attention_engine.passes.analyse_mask import analyse_mask
from attention_engine.passes.schedule import BackwardSchedule


def by_pair(schedule: BackwardSchedule) -> list[tuple[Expr, Expr]]:
    """The reads whose gradient is summed pair by pair, by atomics."""
    return [(load, e) for load, e in schedule.pair_gradients if Axis.KEY in load.axes]


def keeps_products(schedule: BackwardSchedule) -> bool:
    """Do later formulas read the products that the weights came from?"""
    return PRODUCT in topological(schedule.product_gradient, *(e for _, e in schedule.pair_gradients))


def backward_parameters(
    sizes: Sizes, problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, with_dq: bool
) -> dict[str, Any]:
    """The parameters of a kernel over keys, by name and in order."""
    parameters = sizes.inputs(problem)
    customs = {name: parameters[f"custom_{name}"] for name, _, _ in problem.custom}
    parameters.update(sizes.output_gradient(problem))
    parameters.update({n: sizes.row(problem, tile.row_pad) for n, _ in rows.rows})
    parameters["dk"] = sizes.tensor(sizes.kv, problem.kv_heads, problem.dim, problem)
    parameters["dv"] = sizes.tensor(sizes.kv, problem.kv_heads, problem.dim_v, problem)
    if with_dq:
        parameters["workspace"] = workspace(sizes, problem, tile)
    for name in dict.fromkeys(read.name for read, _ in by_pair(schedule)):
        parameters[f"d_custom_{name}"] = T.Tensor(customs[name].shape, FLOAT)
    return parameters


def backward(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, vectors: bool, with_dq: bool
) -> Any:
    """The PrimFunc: (q, k, v, custom..., do, rows..., dk, dv, [workspace], d_custom...).

    d_custom: fp32, like the custom inputs whose reads depend on the key; the caller zeroes them.
    """
    sizes = Sizes()
    parameters = backward_parameters(sizes, problem, schedule, rows, tile, with_dq)
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    plan = analyse_mask(schedule.mask)

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
            kv0 = block * tile.kv
            load(k, window(buffers["k"], batch, kv_head, kv0, tile.kv, dim))
            load(v, window(buffers["v"], batch, kv_head, kv0, tile.kv, dim_v))
            T.fill(dk, 0)
            T.fill(dv, 0)
            first, stop = q_range(plan, kv0, kv0 + tile.kv - 1, tile.q, T.ceildiv(sizes.q, tile.q))
            for step in loop(problem.group * (stop - first), tile.stages):
                head = kv_head * problem.group + step % problem.group
                q_tile = first + step // problem.group
                q0 = q_tile * tile.q
                place = Place(batch, head, block_values(schedule.block, batch, head, reader(buffers)), reader(buffers))
                maths = PairMaths(schedule, (tile.kv, tile.q), place, row_tiles, sizes, q0, kv0, transposed=True)
                load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
                T.clear(products)
                multiply(k, q, products, transpose_B=True, rows=not tile.shared_weights)
                load(do, window(buffers["do"], batch, head, q0, tile.q, dim_v))
                T.clear(gradients)
                multiply(v, do, gradients, transpose_B=True, rows=not tile.shared_weights)
                for name, _ in rows.rows:
                    T.copy(buffers[name][batch, head, q0 : q0 + tile.q], row_tiles[row_variable(name)])
                maths.weigh(products, weights)
                outside = T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
                partial = either(is_partial(plan, q0, q0 + tile.q - 1, kv0, kv0 + tile.kv - 1), outside)
                where_partial(partial, bind(maths.mask, weights))
                load(weights_in, weights)
                accumulate(weights_in, do, dv_sums, rows=not tile.shared_weights)
                for read, expr in by_pair(schedule):
                    maths.scatter(products, weights, gradients, read, expr, buffers[f"d_custom_{read.name}"])
                maths.differentiate(products, weights, gradients)
                where_partial(partial, bind(maths.mask, gradients))
                load(gradients_in, gradients)
                accumulate(gradients_in, q, dk_sums, rows=not tile.shared_weights)
                if with_dq:
                    gradients_out = gradients_in.in_shared_memory(problem)
                    if gradients_out is not gradients_in:
                        T.copy(gradients_in.whole, gradients_out.whole)
                    dq = T.alloc_fragment([tile.q, dim], FLOAT)
                    T.clear(dq)
                    multiply(gradients_out, k, dq, transpose_A=True, rows=False)
                    for i, d in T.Parallel(tile.q, dim):
                        T.atomic_add(
                            buffers["workspace"][
                                batch, head, q_tile * (tile.q * dim) + place_in_workspace(i, d, tile, dim, vectors)
                            ],
                            dq[i, d],
                        )
            if schedule.scale != 1:
                for j, d in T.Parallel(tile.kv, dim):
                    dk[j, d] *= schedule.scale
            T.copy(dk, window(buffers["dk"], batch, kv_head, kv0, tile.kv, dim))
            T.copy(dv, window(buffers["dv"], batch, kv_head, kv0, tile.kv, dim_v))

    return build("backward", parameters, body)


class PairMaths:
    """A backward schedule on the tiles of a kernel, whose rows are keys (transposed) or queries."""

    def __init__(self, schedule: BackwardSchedule, shape: tuple[int, int], place: Place, rows: dict[Expr, Any],
                 sizes: Sizes, q0: Any, kv0: Any, transposed: bool) -> None:  # fmt: skip
        self.schedule, self.shape, self.place, self.rows, self.sizes = schedule, shape, place, rows, sizes
        self.q0, self.kv0, self.transposed = q0, kv0, transposed

    def _splice(self, i: Any, j: Any, values: dict[Expr, Any]) -> Any:
        query, key = (j, i) if self.transposed else (i, j)
        of_row = {variable: tile[query] for variable, tile in self.rows.items()}
        return self.place.splice(self.q0 + query, self.kv0 + key, {**of_row, **values})

    def weigh(self, products: Any, weights: Any) -> None:
        """weights = the final weights of the products."""

        def entry(i: Any, j: Any) -> None:
            assign([(weights, self.schedule.weights)], self._splice(i, j, {PRODUCT: products[i, j]}), i, j)

        over_pairs(*self.shape, entry)

    def _inside(self, i: Any, j: Any) -> Any:
        query, key = (j, i) if self.transposed else (i, j)
        return both(self.kv0 + key < self.sizes.kv, self.q0 + query < self.sizes.q)

    def _keep(self, i: Any, j: Any) -> Any:
        inside = self._inside(i, j)
        if self.schedule.mask is None:
            return inside
        (kept,) = self._splice(i, j, {})(self.schedule.mask)
        return both(inside, kept)

    def mask(self, *targets: Any) -> None:
        """Each target = 0 for masked pairs, and those past the ends."""
        self._clear(self._keep, targets)

    def cut(self, *targets: Any) -> None:
        """Each target = 0 for pairs past the ends."""
        self._clear(self._inside, targets)

    def drop(self, *targets: Any) -> None:
        """Each target = 0 for pairs that the mask drops."""
        self._clear(lambda i, j: self._splice(i, j, {})(self.schedule.mask)[0], targets)

    def _clear(self, keep: Callable[[Any, Any], Any], targets: tuple[Any, ...]) -> None:
        def entry(i: Any, j: Any) -> None:
            kept = keep(i, j)
            for target in targets:
                store(target, T.if_then_else(kept, target[i, j], T.float32(0)), i, j)

        over_pairs(*self.shape, entry)

    def _values(self, products: Any, weights: Any, gradients: Any, i: Any, j: Any) -> dict[Expr, Any]:
        values = {WEIGHT: weights[i, j], WEIGHT_GRADIENT: gradients[i, j]}
        if keeps_products(self.schedule):
            values[PRODUCT] = products[i, j]
        return values

    def differentiate(self, products: Any, weights: Any, gradients: Any) -> None:
        """gradients (of the weights) become gradients of the products, without their factor."""

        def entry(i: Any, j: Any) -> None:
            splice = self._splice(i, j, self._values(products, weights, gradients, i, j))
            assign([(gradients, self.schedule.product_gradient)], splice, i, j)

        over_pairs(*self.shape, entry)

    def contribute(self, products: Any, weights: Any, gradients: Any, expr: Expr, target: Any) -> None:
        """target = what each pair adds to a read's gradient, 0 for masked pairs."""

        def entry(i: Any, j: Any) -> None:
            (value,) = self._splice(i, j, self._values(products, weights, gradients, i, j))(expr)
            store(target, T.if_then_else(self._keep(i, j), value, T.float32(0)), i, j)

        over_pairs(*self.shape, entry)

    def scatter(self, products: Any, weights: Any, gradients: Any, read: Expr, expr: Expr, target: Any) -> None:
        """Adds what each kept pair contributes to the entries that it read; reads out of range add nothing."""

        def entry(i: Any, j: Any) -> None:
            splice = self._splice(i, j, self._values(products, weights, gradients, i, j))
            value, *indices = splice(expr, *read.args)
            keep = self._keep(i, j)
            for index, length in zip(indices, target.shape, strict=True):
                keep = T.And(keep, T.And(index >= 0, index < length))
            safe = [T.max(T.min(i, n - 1), 0) for i, n in zip(indices, target.shape, strict=True)]
            add_atomically(target, safe, T.if_then_else(keep, value, T.float32(0)))

        over_pairs(*self.shape, entry)


@T.macro
def add_atomically(target: Any, indices: list[Any], value: Any) -> None:
    """target[indices] += value, by an atomic."""
    T.atomic_add(target[tuple(indices)], value)
