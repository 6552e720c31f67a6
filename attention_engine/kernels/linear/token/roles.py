"""The one form of all that a chunk computes, and the maths that its kernels share.

With rows x, columns y, others z and a state M:

    result = row weight * (x M) + sum over columns of (decay * (x . y)) z

    result  x   y   z   M                                       the rows are
    o       q   k   v   the state before the chunk              queries: columns up to the row
    dq      do  v   k   the same, transposed                    queries
    dk      v   do  q   the gradient of the state after it, transposed    keys: columns from the row on
    dv      k   q   do  the same                                keys

The row weight is exp(g_i) of a query, exp(g_T - g_j) of a key. M is itself made of columns and others: passing a chunk,
it becomes exp(g_T) M + sum over columns of (column weight * y)^T z, where the column weight is exp(g_T - g_j) of a key,
exp(g_i) of a query; for queries chunks come first to last, for keys last to first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import GRADIENT, LinearProblem, LinearProgram, LinearTile, Role, X, column_tiles
from attention_engine.kernels.common import FLOAT, named, over_pairs, over_rows, store
from attention_engine.kernels.linear.common import (
    Block,
    DecaySums,
    HeldTile,
    LinearSizes,
    Source,
    SourceTile,
    copy,
    product_of,
    reduce_sum,
)
from attention_engine.passes.differentiate import ONE, differentiate
from attention_engine.passes.mods import differentiate_mod, reads_own
from attention_engine.passes.simplify import mul


@dataclass(frozen=True)
class ReadSum:
    """What rows add to the gradient of a read: slope of the row * sum over columns of the summand (of X, GRADIENT)."""

    read: Expr
    summand: Expr
    slope: Expr


def read_sums(program: LinearProgram, own: Source, reads: tuple[Expr, ...]) -> list[ReadSum]:
    """How the gradients of these reads are summed."""
    if own.factor is not None:  # d(f x) = x df, and df is the row's
        slopes = differentiate(own.factor, reads)
        return [ReadSum(r, mul(X, GRADIENT), slope) for r, slope in zip(reads, slopes, strict=True)]
    return [ReadSum(r, e, ONE) for r, e in differentiate_mod(program, own.name).reads if r in reads]


class Rows:
    """Numbers of the chunk's tokens, and what they are summed in."""

    def __init__(self, problem: LinearProblem, chunk: int, width: int, sums: bool) -> None:
        self.sums = DecaySums(problem, chunk, "sums_tile")
        names = ("row_factors", "column_factors", "own_factors", "row_weights")
        self.x, self.yz, self.own, self.weights = (named(n, T.alloc_shared([chunk], FLOAT)) for n in names)
        self.added: Any = None
        self.scaled: Any = None
        self.products: Any = None
        if sums:
            self.added, self.scaled = (named(n, T.alloc_fragment([chunk], FLOAT)) for n in ("added", "scaled"))
            self.products = named("products", T.alloc_fragment([chunk, width], FLOAT))


class RoleKernel:
    """A kernel of one role under construction: what all its parts know, and the maths of its tiles."""

    def __init__(
        self, problem: LinearProblem, program: LinearProgram, role: Role, tile: LinearTile, decay_rows: bool,
        reads: tuple[Expr, ...],
    ) -> None:  # fmt: skip
        self.problem, self.program, self.role, self.tile = problem, program, role, tile
        self.sizes = LinearSizes(problem, tile.chunk)
        self.x, self.y, self.z = (Source(n, problem, program) for n in (role.rows, role.columns, role.others))
        self.own = Source(role.own, problem, program) if role.own else None
        self.by_row, self.by_column = (product_of(*s) is not ONE for s in ([self.x], [self.y, self.z]))
        self.by_own = self.own is not None and not self.own.elementwise and self.own.mod is not X
        self.decays = program.decays
        self.decay_rows = decay_rows and self.decays and role.transposed
        self.reads = read_sums(program, self.own, reads) if self.own else []
        self.gradient = differentiate_mod(program, self.own.name).x if self.own and self.own.elementwise else None
        self.needs_own = self.decay_rows or (self.own is not None and reads_own(program, self.own.name, reads))
        self.width, self.width_tiles = column_tiles(problem, role, tile)

    def find_factors(self, block: Block, rows: Rows) -> None:
        """What rows and columns are multiplied with, other than decay.

        Factors of 1 are left out: what lies past the end is 0 in the tiles themselves.
        """
        if self.by_row:
            block.factors(rows.x, self.x)
        if self.by_column:
            block.factors(rows.yz, self.y, self.z)
        if self.own is not None and self.by_own:
            block.factors(rows.own, self.own)
        if self.decays:
            sums, last = rows.sums, self.tile.chunk - 1

            def kept(i: Any) -> Any:
                return sums.between(i, last) if self.role.over_keys else sums.upto(i)

            block.rows(rows.weights, lambda i: rows.x[i] * T.exp2(kept(i)) if self.by_row else T.exp2(kept(i)))
        elif self.by_row:
            rows.weights = rows.x

    def weigh_rows(self, result: Any, rows: Rows) -> None:
        """result *= the row weight."""
        if self.decays or self.by_row:
            over_pairs(self.tile.chunk, self.width, lambda i, d: store(result, result[i, d] * rows.weights[i], i, d))

    def weigh_pairs(self, scores: Any, rows: Rows) -> None:
        """scores become weights; 0 where the query comes before the key."""

        def entry(i: Any, j: Any) -> None:
            value = scores[i, j]
            if self.by_row:
                value = value * rows.x[i]
            if self.by_column:
                value = value * rows.yz[j]
            if self.decays:
                sums = rows.sums
                value = value * T.exp2(sums.between(i, j) if self.role.over_keys else sums.between(j, i))
            store(scores, T.if_then_else(j >= i if self.role.over_keys else i >= j, value, 0.0), i, j)

        over_pairs(self.tile.chunk, self.tile.chunk, entry)

    def own_value(self, own: SourceTile, rows: Rows, i: Any, d: Any) -> Any:
        """An entry of the own tensor after its mod, as the products take it."""
        value = own.value(i, d)
        return value * rows.own[i] if self.by_own else value

    def sum_reads(
        self, block: Block, own: SourceTile | HeldTile | None, result: Any, rows: Rows, block_index: Any
    ) -> None:  # fmt: skip
        """The row sums of the reads' gradients."""
        for number, read in enumerate(self.reads):
            if number == 0 or read.summand is not self.reads[number - 1].summand:

                def entry(i: Any, d: Any, summand: Expr = read.summand) -> None:
                    (value,) = block.splice(i, own.raw_value(i, d) if own else None, result[i, d])(summand)
                    store(rows.products, value, i, d)

                over_pairs(self.tile.chunk, self.width, entry)
                reduce_sum(rows.products, rows.added, 1)

            def scale(i: Any, slope: Expr = read.slope) -> None:
                (value,) = block.splice(i)(slope)
                inside = block.token0 + i < self.sizes.length
                store(rows.scaled, T.if_then_else(inside, rows.added[i] * value, 0.0), i)

            over_rows(self.tile.chunk, scale)
            self.keep_rows(block, rows.scaled, block.buffers[f"read_{number}"], block_index)

    def keep_rows(self, block: Block, values: Any, target: Any, block_index: Any) -> None:
        """Writes numbers of rows to a parameter of row_sums."""
        stop = block.token0 + self.tile.chunk
        copy(values, target[block_index % self.width_tiles, block.batch, block.head, block.token0 : stop])

    def chain(self, block: Block, own: SourceTile | HeldTile | None, result: Any, rows: Rows, column0: Any) -> None:
        """The gradient of the own tensor from that of what its mod made of it."""
        if self.own is None or self.own.mod is X:
            return

        def entry(i: Any, d: Any) -> None:
            if self.gradient is None:
                value = result[i, d] * rows.own[i]
            else:
                (value,) = block.splice(i, own.raw_value(i, d) if own else None, result[i, d])(self.gradient)
            store(result, value, i, d)

        over_pairs(self.tile.chunk, self.width, entry)
