"""The backward pass over keys: a block holds a tile of keys and walks over the queries (of all heads that share them).

Scores stand transposed, (keys, queries), so that weights and their gradients go from registers into the products that
make dV and dK. dQ is summed into an fp32 workspace by atomics, unless another kernel makes it (queries.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import Backward, row_variable
from attention_engine.kernels.bounds import either
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Buffers,
    Operand,
    Place,
    Sizes,
    accumulate,
    build,
    load,
    loop,
    multiply,
    named,
    place_at,
    reader,
    where_partial,
    window,
)
from attention_engine.kernels.diagonals import Diagonal, sum_diagonals
from attention_engine.kernels.key_sums import KeySum, key_sums_of, sum_keys
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.pair_maths import NOTHING, PairMaths, PairTile, factor_of, of_pairs
from attention_engine.kernels.staged import StagedReads, copy_staged
from attention_engine.kernels.tiles import QueryWalk, Visit, Walks
from attention_engine.kernels.unseen import clear_operand
from attention_engine.kernels.workspace import take_sums_for_granted, workspace_offset
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.schedule import BackwardSchedule, keeps_products
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile


def backward(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, vectors: bool, with_dq: bool,
    summed: CustomSums = NOTHING, wide: bool = False,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., [tile_lists], do, rows..., dk, dv, [workspace], custom sums...).

    wide: dk and dv are fp32.
    custom sums: key_sum (batch, heads or key heads, keys), diagonal (batch, heads, strips, queries + keys), where entry
    query - key + keys - 1 is a diagonal's, and d_custom, like the custom inputs.
    """
    sizes = Sizes(problem)
    parameters = sizes.declare(attention_buffers.over_keys(problem, schedule, rows, tile, with_dq, summed, wide=wide))
    kernel = _OverKeys(problem, schedule, rows, tile, sizes, summed, with_dq, vectors)
    return build("backward", parameters, kernel.run)


@dataclass(frozen=True)
class _Tiles:
    """A block's tiles. weights: the products' own, unless later formulas read those; reaching: those that values are
    multiplied with. contribution: what pairs add to a sum that is made of other numbers than gradients of products;
    shared_tile: where diagonals are summed from."""

    k: Operand
    v: Operand
    q: Operand
    do: Operand
    products: Any
    weights: Any
    reaching: Any
    gradients: Any
    weights_in: Operand
    gradients_in: Operand
    dk: Accumulator
    dv: Accumulator
    rows: dict[Expr, Any]
    contribution: Any
    shared_tile: Any
    key_sums: list[KeySum]
    staged: StagedReads


@dataclass(frozen=True)
class _OverKeys:
    """The kernel under construction."""

    problem: Problem
    schedule: BackwardSchedule
    rows: Backward
    tile: Tile
    sizes: Sizes
    summed: CustomSums
    with_dq: bool
    vectors: bool

    @cached_property
    def dim(self) -> int:
        """Columns of queries and keys."""
        return padded(self.problem.dim)

    @cached_property
    def dim_v(self) -> int:
        """Columns of values."""
        return padded(self.problem.dim_v)

    @cached_property
    def own_tiles(self) -> bool:
        """Is a sum made of other numbers than gradients of products?"""
        return any(self.factor_of(e) is None for _, e in (*self.summed.of_keys, *self.summed.diagonals))

    @cached_property
    def diagonals_in_products(self) -> bool:
        """Are diagonals summed of the gradients that make dQ? Those are in shared memory anyhow."""
        whole = all(self.factor_of(expr) is not None for _, expr in self.summed.diagonals)
        return self.with_dq and not self.problem.splits and whole

    def factor_of(self, expr: Expr) -> float | None:
        """By what a gradient of a product is multiplied to be this; None where it is another number."""
        return factor_of(self.schedule, expr)

    def tiles(self) -> _Tiles:
        """Made in the self."""
        problem, tile, summed, schedule = self.problem, self.tile, self.summed, self.schedule
        pairs, in_registers = (tile.kv, tile.q), not tile.shared_weights
        k, v = Operand("k", problem, (tile.kv, self.dim)), Operand("v", problem, (tile.kv, self.dim_v))
        q, do = Operand("q", problem, (tile.q, self.dim)), Operand("do", problem, (tile.q, self.dim_v))
        products = named("products", T.alloc_fragment(pairs, FLOAT))
        weights = named("weights", T.alloc_fragment(pairs, FLOAT) if keeps_products(schedule) else products)
        reaching = weights if schedule.dropped is None else named("reaching", T.alloc_fragment(pairs, FLOAT))
        gradients = named("gradients", T.alloc_fragment(pairs, FLOAT))
        weights_in = Operand("weights_in", problem, pairs, fragment=in_registers)
        gradients_in = Operand("gradients_in", problem, pairs, fragment=in_registers)
        dk, dv = Accumulator("dk", problem, (tile.kv, self.dim)), Accumulator("dv", problem, (tile.kv, self.dim_v))
        for name, made in (("dk", dk), ("dv", dv)):
            named(name, made.sum)
        rows = {row_variable(n): named(f"{n}_tile", T.alloc_shared([tile.q], FLOAT)) for n, _ in self.rows.rows}
        contribution = T.alloc_fragment(pairs, FLOAT) if self.own_tiles else gradients
        shares = len(summed.diagonals) > 0 and not self.diagonals_in_products
        return _Tiles(
            k=k, v=v, q=q, do=do, products=products, weights=weights, reaching=reaching, gradients=gradients,
            weights_in=weights_in, gradients_in=gradients_in, dk=dk, dv=dv, rows=rows,
            contribution=named("contribution", contribution),
            shared_tile=named("shared_tile", T.alloc_shared(pairs, FLOAT)) if shares else None,
            key_sums=key_sums_of(problem, tile, summed), staged=StagedReads(of_pairs(schedule), problem, tile),
        )  # fmt: skip

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for each tile of keys of a key head."""
        problem, schedule, tile, sizes = self.problem, self.schedule, self.tile, self.sizes
        grid = T.ceildiv(sizes.kv, tile.kv), problem.kv_heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block, kv_head, batch):
            tiles = self.tiles()
            kv0 = block * tile.kv
            of_keys = Place(batch, kv_head, {}, reader(buffers, sizes.inside(problem, batch, kv_head)))
            self.start(buffers, tiles, of_keys, kv0)
            of = Walks(plan_tiles(schedule.mask), problem, sizes, tile)
            walk = QueryWalk(of, buffers, batch, kv_head, block)
            for step in loop(walk.count, tile.stages):
                visit = walk.at(step)
                head = visit.head
                q0 = visit.start
                place = place_at(schedule.block, problem, sizes, buffers, batch, head)
                at = PairTile((tile.kv, tile.q), True, q0, kv0, tiles.rows, tiles.staged)
                self.take_step(buffers, tiles, visit, PairMaths(schedule, sizes, place, at))
            for number, key_sum in enumerate(tiles.key_sums):
                if not key_sum.by_head:
                    T.copy(key_sum.total, buffers[f"key_sum{number}"][batch, kv_head, kv0 : kv0 + tile.kv])
            if schedule.scale != 1:
                for j, d in T.Parallel(tile.kv, self.dim):
                    tiles.dk.sum[j, d] *= schedule.scale
            T.copy(tiles.dk.sum, window(buffers["dk"], batch, kv_head, kv0, tile.kv, self.dim))
            T.copy(tiles.dv.sum, window(buffers["dv"], batch, kv_head, kv0, tile.kv, self.dim_v))

    @macro_method
    def start(self, buffers: Buffers, tiles: _Tiles, place: Place, kv0: Any) -> None:
        """A block's keys and values come, and its sums begin at 0."""
        tile, seen = self.tile, key_condition(self.schedule.mask)
        load(tiles.k, window(buffers["k"], place.batch, place.head, kv0, tile.kv, self.dim))
        load(tiles.v, window(buffers["v"], place.batch, place.head, kv0, tile.kv, self.dim_v))
        if self.with_dq and seen is not None:
            clear_operand(seen, place, kv0, tiles.k)
        T.fill(tiles.dk.sum, 0)
        T.fill(tiles.dv.sum, 0)
        for key_sum in tiles.key_sums:
            T.fill(key_sum.total, 0)

    @macro_method
    def take_step(self, buffers: Buffers, tiles: _Tiles, visit: Visit, maths: PairMaths) -> None:
        """One tile of queries of one head."""
        tile, sizes, place, q0, kv0 = self.tile, self.sizes, maths.place, maths.q0, maths.kv0
        head, whole_rows = place.head, not self.tile.shared_weights
        load(tiles.q, window(buffers["q"], place.batch, head, q0, tile.q, self.dim))
        T.clear(tiles.products)
        multiply(tiles.k, tiles.q, tiles.products, transpose_B=True, whole_rows=whole_rows)
        load(tiles.do, window(buffers["do"], place.batch, head, q0, tile.q, self.dim_v))
        T.clear(tiles.gradients)
        multiply(tiles.v, tiles.do, tiles.gradients, transpose_B=True, whole_rows=whole_rows)
        for name, _ in self.rows.rows:
            T.copy(buffers[name][place.batch, head, q0 : q0 + tile.q], tiles.rows[row_variable(name)])
        if len(tiles.staged.tiles) > 0:
            copy_staged(tiles.staged, buffers, place.batch, head, q0, kv0)
        maths.weigh(tiles.products, tiles.weights)
        outside = T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
        partial = either(visit.is_partial(q0), outside)
        where_partial(partial, bind(maths.mask, tiles.weights))
        if self.schedule.dropped is not None:
            maths.meet_values(tiles.weights, tiles.reaching)
        load(tiles.weights_in, tiles.reaching)
        accumulate(tiles.weights_in, tiles.do, tiles.dv, whole_rows=whole_rows)
        self.sum_other_numbers(buffers, tiles, maths)
        maths.differentiate(tiles.products, tiles.weights, tiles.gradients)
        where_partial(partial, bind(maths.mask, tiles.gradients))
        for number, (_, expr) in enumerate(self.summed.of_keys):
            factor = self.factor_of(expr)
            if factor is not None:
                sum_keys(tiles.key_sums[number], maths, buffers, tiles.gradients, factor)
        load(tiles.gradients_in, tiles.gradients)
        accumulate(tiles.gradients_in, tiles.q, tiles.dk, whole_rows=whole_rows)
        if not self.diagonals_in_products:
            for number, (_, expr) in enumerate(self.summed.diagonals):
                factor = self.factor_of(expr)
                if factor is not None:
                    T.copy(tiles.gradients, tiles.shared_tile)
                    sum_diagonals(Diagonal(self.summed, tile, number, factor), maths, buffers, tiles.shared_tile)
        if self.with_dq:
            self.add_to_sums_of_dq(buffers, tiles, maths)

    @macro_method
    def sum_other_numbers(self, buffers: Buffers, tiles: _Tiles, maths: PairMaths) -> None:
        """Sums of what is no multiple of a product's gradient; and what atomics add, pair by pair."""
        summed, of = self.summed, (tiles.products, tiles.weights, tiles.gradients)
        for read, expr in summed.scattered:
            maths.scatter(*of, read, expr, buffers[f"d_custom_{read.name}"])
        for number, (_, expr) in enumerate(summed.of_keys):
            if self.factor_of(expr) is None:
                maths.contribute(*of, expr, tiles.contribution)
                sum_keys(tiles.key_sums[number], maths, buffers, tiles.contribution, 1.0)
        for number, (_, expr) in enumerate(summed.diagonals):
            if self.factor_of(expr) is None:
                maths.contribute(*of, expr, tiles.contribution)
                T.copy(tiles.contribution, tiles.shared_tile)
                sum_diagonals(Diagonal(summed, self.tile, number, 1.0), maths, buffers, tiles.shared_tile)

    @macro_method
    def add_to_sums_of_dq(self, buffers: Buffers, tiles: _Tiles, maths: PairMaths) -> None:
        """A step's dQ is added to the sums in memory, by atomics."""
        problem, tile, dim, place, q0 = self.problem, self.tile, self.dim, maths.place, maths.q0
        gradients_in, head = tiles.gradients_in, place.head
        gradients_out = gradients_in.in_shared_memory(problem)
        if gradients_out is not gradients_in:
            T.copy(gradients_in.whole, gradients_out.whole)
        if self.diagonals_in_products:
            for number, (_, expr) in enumerate(self.summed.diagonals):
                of, source = Diagonal(self.summed, tile, number, self.factor_of(expr)), gradients_out.whole
                sum_diagonals(of, maths, buffers, source)
        dq = T.alloc_fragment([tile.q, dim], FLOAT)
        T.clear(dq)
        multiply(gradients_out, tiles.k, dq, transpose_A=True, whole_rows=False)
        take_sums_for_granted(buffers, place.batch * problem.heads + head, q0 * dim, tile.q * dim)
        for i, d in T.Parallel(tile.q, dim):
            T.atomic_add(
                buffers["workspace"][
                    place.batch * problem.heads + head, q0 * dim + workspace_offset(i, d, tile, dim, self.vectors)
                ],
                dq[i, d],
            )
