"""What a chunk computes from its own tokens and a stored state, all chunks at once (the form: roles.py).

A block makes a tile of the result's columns; the summed dim runs in steps. Gradients of heads that share a q or k are
summed in registers, up to `tile.heads` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import (
    ROLES,
    LinearProblem,
    LinearProgram,
    LinearTile,
    Role,
    heads_a_block,
    parts_of,
    tiled,
)
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Buffers,
    Operand,
    accumulate,
    build,
    load,
    loop,
    multiply,
    named,
    over_pairs,
    store,
)
from attention_engine.kernels.linear.common import (
    Block,
    Source,
    SourceTile,
    StateOperand,
    add_state_product,
    load_decays,
    load_source,
    load_state,
    reduce_sum,
    share_sm,
)
from attention_engine.kernels.linear.token.roles import RoleKernel, Rows
from attention_engine.kernels.methods import macro_method
from attention_engine.plan import linear_buffers


def chunk_rows(
    problem: LinearProblem, program: LinearProgram, role: str, tile: LinearTile, decay_rows: bool,
    reads: tuple[Expr, ...],
) -> Any:  # fmt: skip
    """The PrimFunc: (x, y, z, [own], custom..., [sums], states, result, [of_state, of_pairs], row sums...).

    x, y, z, own: the role's tensors, each once. result: like the output or the own tensor; where blocks leave parts,
    fp32 (parts, ...). decay_rows (dq, dk): of_state and of_pairs (tiles, batch, heads, tokens), fp32, what the row's
    state and its pairs add to the gradient of decays. reads: the custom inputs' reads in the own tensor's mod whose
    gradient is wanted; row sums (tiles, batch, heads, tokens), fp32, one for each.
    """
    return _Chunk(problem, program, ROLES[role], tile, decay_rows, reads).build()


@dataclass(frozen=True)
class _Tiles:
    """A block's tiles. own: where it is read. pairs: products of own and z, where decays have a gradient. total: the
    result of several heads."""

    x: SourceTile
    y: SourceTile
    z: SourceTile
    own: SourceTile | None
    state: StateOperand
    weights: Operand
    scores: Accumulator
    pairs: Accumulator | None
    result: Accumulator
    rows: Rows
    total: Any

    @property
    def of_decays(self) -> tuple[SourceTile, Accumulator] | None:
        """Of the gradient of decays: the own tensor, and products of it and z."""
        return None if self.own is None or self.pairs is None else (self.own, self.pairs)


@dataclass(frozen=True)
class _At:
    """Where a block is: its number among those of a head and batch, its chunk, and its first column."""

    block_index: Any
    index: Any
    column0: Any


class _Chunk(RoleKernel):
    """The kernel under construction: what all its parts know."""

    def __init__(
        self, problem: LinearProblem, program: LinearProgram, role: Role, tile: LinearTile, decay_rows: bool,
        reads: tuple[Expr, ...],
    ) -> None:  # fmt: skip
        super().__init__(problem, program, role, tile, decay_rows, reads)
        self.inner = min(tile.inner, padded(self.x.dim))
        self.inner_tiles = tiled(self.x.dim, self.inner)
        self.heads, self.parts = heads_a_block(problem, role, tile), parts_of(problem, role, tile)
        self.sums_heads = self.heads > 1 and role.own in ("q", "k")
        self.rows_stay = self.inner_tiles == 1 and self.stays(self.x) and self.stays(self.y)

    def stays(self, source: Source | None) -> bool:
        """Is a tensor's tile the same for all heads that a block takes?"""
        if source is None or source.elementwise or self.heads == 1:
            return False
        return (self.problem.heads // source.heads) % self.heads == 0

    def parameters(self) -> dict[str, Any]:
        return self.sizes.declare(
            linear_buffers.chunk_rows(
                self.problem, self.program, self.role.name, self.tile, self.decay_rows, len(self.reads)
            )
        )

    def build(self) -> Any:
        return build(f"chunk_{self.role.name}", self.parameters(), self.run)

    def tiles(self) -> _Tiles:
        """Made in the kernel."""
        tile, problem, chunk, width = self.tile, self.problem, self.tile.chunk, self.width
        state = (width, self.inner) if self.role.transposed else (self.inner, width)
        return _Tiles(
            x=SourceTile(self.x, chunk, self.inner), y=SourceTile(self.y, chunk, self.inner),
            z=SourceTile(self.z, chunk, width),
            own=SourceTile(self.own, chunk, width) if self.own is not None and self.needs_own else None,
            state=StateOperand("state", problem, state),
            weights=Operand("weights", problem, (chunk, chunk), fragment=tile.in_registers),
            scores=Accumulator("scores", problem, (chunk, chunk)),
            pairs=Accumulator("pairs", problem, (chunk, chunk)) if self.decay_rows else None,
            result=Accumulator("result", problem, (chunk, width)),
            rows=Rows(problem, chunk, width, self.needs_own),
            total=named("total", T.alloc_fragment([chunk, width], FLOAT)) if self.sums_heads else None,
        )  # fmt: skip

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for a chunk of tokens, a tile of columns, and some heads."""
        tile, sizes, chunk, width = self.tile, self.sizes, self.tile.chunk, self.width
        grid = self.width_tiles * sizes.chunks, self.problem.heads // self.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block_index, shared_head, batch):
            share_sm(tile)
            tiles = self.tiles()
            index, column0 = block_index // self.width_tiles, (block_index % self.width_tiles) * width
            at = _At(block_index, index, column0)
            first = Block(buffers, sizes, batch, shared_head * self.heads, index * chunk)
            if self.sums_heads:
                T.fill(tiles.total, 0)
            if self.rows_stay:
                load_source(tiles.x, first, 0)
                load_source(tiles.y, first, 0)
            for source in self.columns_of(tiles, stay=True):
                load_source(source, first, column0)
            for number in loop(self.heads, tile.stages if self.inner_tiles == 1 and self.heads > 1 else 0):
                head = shared_head * self.heads + number
                block = Block(buffers, sizes, batch, head, index * chunk)
                self.take_head(tiles, block, at)
                if self.sums_heads:
                    for i, d in T.Parallel(chunk, width):
                        tiles.total[i, d] += tiles.result.sum[i, d]
                else:
                    T.copy(tiles.result.sum, self.result_window(buffers, batch, head, index * chunk, column0))
            if self.sums_heads:
                T.copy(tiles.total, self.result_window(buffers, batch, shared_head, index * chunk, column0))

    def columns_of(self, tiles: _Tiles, stay: bool) -> list[SourceTile]:
        """The tiles of the result's columns that are the same for all heads of a block, or those that are not."""
        return [tile for tile in (tiles.z, tiles.own) if tile is not None and self.stays(tile.source) == stay]

    @macro_method
    def take_head(self, tiles: _Tiles, block: Block, at: _At) -> None:
        """The result of one head."""
        rows, scores, result, inner_tiles = tiles.rows, tiles.scores, tiles.result, self.inner_tiles
        if self.decays:
            load_decays(rows.sums, block.buffers, block.batch, block.head, at.index)
        self.find_factors(block, rows)
        T.clear(scores.sum)
        T.clear(result.sum)
        if inner_tiles == 1:
            self.gather(tiles, block, at.index, 0, at.column0)
        else:
            for step in loop(inner_tiles, self.tile.stages):
                self.gather(tiles, block, at.index, step * self.inner, at.column0)
        self.weigh_rows(result.sum, rows)
        self.weigh_pairs(scores.sum, rows)
        for source in self.columns_of(tiles, stay=False):
            load_source(source, block, at.column0)
        if tiles.of_decays is not None:
            self.sum_decay_rows(tiles, tiles.of_decays, block, at)
        load(tiles.weights, scores.sum)
        accumulate(tiles.weights, tiles.z.operand, result, whole_rows=self.tile.in_registers)
        if len(self.reads) > 0:
            self.sum_reads(block, tiles.own, result.sum, rows, at.block_index)
        self.chain(block, tiles.own, result.sum, rows, at.column0)

    @macro_method
    def gather(self, tiles: _Tiles, block: Block, index: Any, inner0: Any, column0: Any) -> None:
        """What a step of the summed dim adds to products of pairs, and to the state's part of the result."""
        x, y, state, whole_rows = tiles.x, tiles.y, tiles.state, self.tile.in_registers
        if not self.rows_stay:
            load_source(x, block, inner0)
            load_source(y, block, inner0)
        load_state(state, self.state_window(block, index, inner0, column0))
        accumulate(x.operand, y.operand, tiles.scores, transpose_B=True, whole_rows=whole_rows)
        add_state_product(x.operand, state, tiles.result, transpose_B=self.role.transposed, whole_rows=whole_rows)

    @macro_method
    def sum_decay_rows(
        self, tiles: _Tiles, of_decays: tuple[SourceTile, Accumulator], block: Block, at: _At
    ) -> None:  # fmt: skip
        """What the rows' state and pairs add to the gradient of decays."""
        own, pairs = of_decays
        self.sum_state_rows(block, own, tiles.result.sum, tiles.rows, at.block_index)
        T.clear(pairs.sum)
        multiply(own.operand, tiles.z.operand, pairs.sum, transpose_B=True, whole_rows=self.tile.in_registers)
        self.sum_pairs(block, pairs.sum, tiles.scores.sum, tiles.rows, at.block_index)

    def result_window(self, buffers: Any, batch: Any, shared_head: Any, token0: Any, column0: Any) -> Any:
        stop, end = token0 + self.tile.chunk, column0 + self.width
        if self.parts == 1:
            return buffers["result"][batch, token0:stop, shared_head, column0:end]
        part, head = shared_head % self.parts, shared_head // self.parts
        return buffers["result"][part, batch, token0:stop, head, column0:end]

    def state_window(self, block: Block, index: Any, inner0: Any, column0: Any) -> Any:
        states = block.buffers["states"]
        if self.role.transposed:
            return states[block.batch, block.head, index, column0 : column0 + self.width, inner0 : inner0 + self.inner]
        return states[block.batch, block.head, index, inner0 : inner0 + self.inner, column0 : column0 + self.width]

    def sum_state_rows(self, block: Block, own: SourceTile, result: Any, rows: Rows, block_index: Any) -> None:
        """of_state = own . result, where the result is the state's part still."""

        def entry(i: Any, d: Any) -> None:
            store(rows.products, result[i, d] * self.own_value(own, rows, i, d), i, d)

        over_pairs(self.tile.chunk, self.width, entry)
        reduce_sum(rows.products, rows.added, 1)
        self.keep_rows(block, rows.added, block.buffers["of_state"], block_index)

    def sum_pairs(self, block: Block, pairs: Any, weights: Any, rows: Rows, block_index: Any) -> None:
        """of_pairs = what a row's pairs add, decayed product of q . k and do . v; pairs: the products of own and z.

        No decay stands between a token and itself: the pair is in dq's rows and in dk's. In fp32 it is left out of
        both, as nothing may be left of their difference but its rounding where decays are strong.
        """

        def entry(i: Any, j: Any) -> None:
            value = pairs[i, j] * weights[i, j]
            if self.problem.splits:
                value = T.if_then_else(i == j, 0.0, value)
            store(pairs, value * rows.own[i] if self.by_own else value, i, j)

        over_pairs(self.tile.chunk, self.tile.chunk, entry)
        reduce_sum(pairs, rows.added, 1)
        self.keep_rows(block, rows.added, block.buffers["of_pairs"], block_index)
