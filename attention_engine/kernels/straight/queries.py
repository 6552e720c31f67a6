"""The backward pass over queries: a block holds a tile of queries and walks over the keys.

No atomics: dQ, and gradients of custom inputs that a row sums up, are bitwise the same in every run.
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
    Sizes,
    accumulate,
    build,
    load,
    loop,
    multiply,
    named,
    place_at,
    where_partial,
    window,
)
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.pair_maths import PairMaths, PairTile, of_pairs
from attention_engine.kernels.side_reads import SideReads, side_reads
from attention_engine.kernels.staged import StagedReads, copy_staged
from attention_engine.kernels.tiles import KeyWalk, Visit, Walks
from attention_engine.kernels.unseen import SeenTile
from attention_engine.passes.schedule import BackwardSchedule, keeps_products
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile


def backward_queries(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, summed: tuple[Expr, ...], tile: Tile,
    row_pad: int, with_dq: bool = True, wide: bool = False,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., [tile_lists], do, rows..., [dq], sums...). wide: dq is fp32.

    sums: fp32 (batch, heads, queries), the row sums of the expressions `summed` over kept pairs. row_pad: of the rows.
    """
    sizes = Sizes(problem)
    parameters = sizes.declare(
        attention_buffers.over_queries(problem, schedule, rows, summed, tile, row_pad, with_dq, wide=wide)
    )
    kernel = _OverQueries(problem, schedule, rows, tile, sizes, summed, with_dq)
    return build("backward_queries" if with_dq else "exact_delta", parameters, kernel.run)


@T.macro
def store_row(values: Any, row: Any, batch: Any, head: Any, q0: Any, rows: int) -> None:
    """Writes the values of a block's queries to a row of the caller, as T.copy would; with nothing to vectorize.

    TileLang plans how to vectorize a loop anew for each way that it tries to lay registers out: two thirds of the time
    that lowering the kernel took. A loop of one step it need not plan.
    """
    for i, _ in T.Parallel(rows, 1):
        if q0 + i < row.shape[2]:
            row[batch, head, q0 + i] = values[i]


@dataclass(frozen=True)
class _OfDq:
    """What dQ is made of, and its sum."""

    gradients: Operand
    sum: Accumulator


@dataclass(frozen=True)
class _Tiles:
    """A block's tiles. k: without what stands in rows that nobody sees, where dQ is made. weights: the products' own,
    unless later formulas read those. contribution: what pairs add to a sum of rows."""

    q: Operand
    do: Operand
    k: Operand
    v: Operand
    keys: SeenTile
    products: Any
    weights: Any
    gradients: Any
    contribution: Any
    dq: _OfDq | None
    rows: dict[Expr, Any]
    sums: list[Any]
    staged: StagedReads
    sides: SideReads


@dataclass(frozen=True)
class _OverQueries:
    """The kernel under construction."""

    problem: Problem
    schedule: BackwardSchedule
    rows: Backward
    tile: Tile
    sizes: Sizes
    summed: tuple[Expr, ...]
    with_dq: bool

    @cached_property
    def dim(self) -> int:
        """Columns of queries and keys."""
        return padded(self.problem.dim)

    @cached_property
    def dim_v(self) -> int:
        """Columns of values."""
        return padded(self.problem.dim_v)

    def tiles(self) -> _Tiles:
        """Made in the kernel."""
        problem, tile, schedule, dim, dim_v = self.problem, self.tile, self.schedule, self.dim, self.dim_v
        pairs = (tile.q, tile.kv)
        q, do = Operand("q", problem, (tile.q, dim)), Operand("do", problem, (tile.q, dim_v))
        k, v = Operand("k", problem, (tile.kv, dim)), Operand("v", problem, (tile.kv, dim_v))
        keys = SeenTile(key_condition(schedule.mask) if self.with_dq else None, k, problem, tile.stages)
        products = named("products", T.alloc_fragment(pairs, FLOAT))
        weights = named("weights", T.alloc_fragment(pairs, FLOAT) if keeps_products(schedule) else products)
        gradients = named("gradients", T.alloc_fragment(pairs, FLOAT))
        contribution = named("contribution", T.alloc_fragment(pairs, FLOAT)) if self.summed else None
        dq = None
        if self.with_dq:
            gradients_in = Operand("gradients_in", problem, pairs, fragment=True)
            dq = _OfDq(gradients_in, Accumulator("dq", problem, (tile.q, dim)))
            named("dq", dq.sum.sum)
        rows = {row_variable(n): named(f"{n}_tile", T.alloc_fragment([tile.q], FLOAT)) for n, _ in self.rows.rows}
        sums = [named("total", T.alloc_fragment([tile.q], FLOAT)) for _ in self.summed]
        staged = StagedReads([*of_pairs(schedule), *self.summed], problem, tile)
        sides = side_reads([*of_pairs(schedule), *self.summed, schedule.mask, schedule.dropped], *pairs)
        return _Tiles(q, do, k, v, keys, products, weights, gradients, contribution, dq, rows, sums, staged, sides)

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for each tile of queries of a head."""
        problem, tile, sizes, dim = self.problem, self.tile, self.sizes, self.dim
        grid = T.ceildiv(sizes.q, tile.q), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block, head, batch):
            tiles = self.tiles()
            if tiles.dq is not None:
                T.fill(tiles.dq.sum.sum, 0)
            q0 = block * tile.q
            kv_head = head // problem.group
            place = place_at(self.schedule.block, problem, sizes, buffers, batch, head)
            load(tiles.q, window(buffers["q"], batch, head, q0, tile.q, dim))
            load(tiles.do, window(buffers["do"], batch, head, q0, tile.q, self.dim_v))
            for name, _ in self.rows.rows:
                T.copy(buffers[name][batch, head, q0 : q0 + tile.q], tiles.rows[row_variable(name)])
            for total in tiles.sums:
                T.fill(total, 0)
            tiles.sides.take_queries(place, q0)
            of = Walks(plan_tiles(self.schedule.mask), problem, sizes, tile)
            walk = KeyWalk(of, buffers, batch, head, block)
            for step in loop(walk.count, tile.stages):
                visit = walk.at(step)
                kv0 = visit.start
                at = PairTile((tile.q, tile.kv), False, q0, kv0, tiles.rows, tiles.staged, tiles.sides)
                self.take_step(buffers, tiles, visit, PairMaths(self.schedule, sizes, place, at), kv_head)
            if tiles.dq is not None:
                if self.schedule.scale != 1:
                    for i, d in T.Parallel(tile.q, dim):
                        tiles.dq.sum.sum[i, d] *= self.schedule.scale
                T.copy(tiles.dq.sum.sum, window(buffers["dq"], batch, head, q0, tile.q, dim))
            for number, total in enumerate(tiles.sums):
                store_row(total, buffers[f"sum{number}"], batch, head, q0, tile.q)

    @macro_method
    def take_step(self, buffers: Buffers, tiles: _Tiles, visit: Visit, maths: PairMaths, kv_head: Any) -> None:
        """One tile of keys."""
        tile, sizes, place, q0, kv0 = self.tile, self.sizes, maths.place, maths.q0, maths.kv0
        tiles.keys.ask(buffers["k"], place.batch, kv_head, kv0)
        tiles.keys.take(buffers["k"], place.batch, kv_head, kv0, place)
        T.clear(tiles.products)
        multiply(tiles.q, tiles.k, tiles.products, transpose_B=True)
        load(tiles.v, window(buffers["v"], place.batch, kv_head, kv0, tile.kv, self.dim_v))
        T.clear(tiles.gradients)
        multiply(tiles.do, tiles.v, tiles.gradients, transpose_B=True)
        if len(tiles.staged.tiles) > 0:
            copy_staged(tiles.staged, buffers, place.batch, place.head, q0, kv0)
        tiles.sides.take_keys(place, kv0)
        maths.weigh(tiles.products, tiles.weights)
        for total, expr in zip(tiles.sums, self.summed, strict=True):
            maths.contribute(tiles.products, tiles.weights, tiles.gradients, expr, tiles.contribution)
            T.reduce_sum(tiles.contribution, total, dim=1, clear=False)
        if tiles.dq is not None:
            maths.differentiate(tiles.products, tiles.weights, tiles.gradients)
            outside = T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
            partial = either(visit.is_partial(kv0), outside)
            where_partial(partial, bind(maths.mask, tiles.gradients))
            load(tiles.dq.gradients, tiles.gradients)
            accumulate(tiles.dq.gradients, tiles.k, tiles.dq.sum)
