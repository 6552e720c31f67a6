"""States between chunks, by a walk along the tokens: forward those of the output, backward their gradients.

A block holds a tile of one head's state in registers. Forward: S = exp(g_T) S + sum_j exp(g_T - g_j) k_j^T v_j, and
what is kept for chunk c is the state before it. Backward: dS = exp(g_T) dS + sum_i exp(g_i) q_i^T do_i, and what is
kept for chunk c is the gradient of the state after it. g: sums of decays in the chunk, g_T at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tilelang.language as T

from attention_engine.ir.linear import (
    LinearProblem,
    LinearProgram,
    LinearTile,
    StatesForm,
    state_tiles,
    tile_of_state,
    tiled,
)
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Buffers,
    Operand,
    accumulate,
    build,
    load,
    loop,
    over_pairs,
    store,
)
from attention_engine.kernels.linear.common import (
    Block,
    DecaySums,
    Source,
    SourceTile,
    StatesWalk,
    load_decays,
    load_source,
    product_of,
    share_sm,
    state_before,
)
from attention_engine.kernels.methods import macro_method
from attention_engine.plan import linear_buffers


def states(problem: LinearProblem, program: LinearProgram, tile: LinearTile, form: StatesForm) -> Any:
    """The PrimFunc: (left, right, custom..., [sums], [piece], [first], [other], [initial], [kept], last, [overlap]).

    left, right: k, v forward; q, do in reverse. first: the initial state (in reverse: the gradient of the last), where
    `starts`. last: the last state (in reverse: the gradient of the initial one), fp32. With `pieces` there is one of
    each for every piece of so many tokens: (batch, pieces, heads, dim, dim_v). Where `overlaps`: other, the
    states that the forward walk kept, and overlap (batch, heads, chunks, tiles): exp(g_T) <S, dS> of each chunk and
    tile, which is what all tokens of the chunk's decays get from states. initial: the state that the forward walk began
    with, unrounded, where `initial`: all that the first chunk's overlap is made of.
    """
    return _States(problem, program, tile, form).build()


@dataclass(frozen=True)
class _Part:
    """The tile of a state that a block has: its number, and its first row and column."""

    number: Any
    d0: Any
    v0: Any


class _States(StatesWalk):
    """The kernel under construction."""

    @cached_property
    def sources(self) -> tuple[Source, Source]:
        """The tensors whose products are summed."""
        left, right = (Source(n, self.problem, self.program) for n in self.names)
        return left, right

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a block's state."""
        return tile_of_state(self.problem, self.tile)

    def build(self) -> Any:
        """The PrimFunc."""
        arguments = linear_buffers.states_walk(self.problem, self.program, self.tile, self.form)
        name = "states" if self.form.keeps else "last_states"
        return build(f"{name}_backward" if self.form.reverse else name, self.sizes.declare(arguments), self.run)

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for a tile of a head's state."""
        problem, tile, sizes, form, (dim, dim_v) = self.problem, self.tile, self.sizes, self.form, self.shape
        dim_v_tiles, (left_source, right_source) = tiled(problem.dim_v, dim_v), self.sources
        tiles = state_tiles(problem, tile)
        grid = sizes.walks(tiles, form.pieces), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block_index, head, batch):
            share_sm(tile)
            left = SourceTile(left_source, tile.chunk, dim)
            raw = T.alloc_shared([tile.chunk, dim_v], problem.dtype)
            weighted = T.alloc_fragment([tile.chunk, dim_v], FLOAT)
            right = Operand("right", problem, (tile.chunk, dim_v))
            sums = DecaySums(problem, tile.chunk, "sums")
            weights = T.alloc_shared([tile.chunk], FLOAT)
            state = Accumulator("state", problem, (dim, dim_v))
            staged = T.alloc_shared([dim, dim_v], problem.state_dtype) if form.keeps else None  # rows leave it whole
            held = state.sum
            walked = sizes.part(block_index, tiles, batch, form.pieces)
            d0, v0 = (walked.tile // dim_v_tiles) * dim, (walked.tile % dim_v_tiles) * dim_v
            at = _Part(walked.tile, d0, v0)
            if form.starts:
                T.copy(walked.state(buffers["first"], head, slice(d0, d0 + dim), slice(v0, v0 + dim_v)), held)
            else:
                T.fill(held, 0)
            for step in loop(walked.chunks, tile.stages):
                chunk = walked.chunk(step, form.reverse)
                block = Block(buffers, sizes, batch, head, chunk * tile.chunk)
                if form.keeps:
                    T.copy(held, staged)
                    T.copy(staged, buffers["kept"][batch, head, chunk, d0 : d0 + dim, v0 : v0 + dim_v])
                load_source(left, block, d0)
                T.copy(block.window(right_source, v0, dim_v), raw)
                if self.program.decays:
                    load_decays(sums, buffers, batch, head, chunk)
                if form.overlaps:
                    self.note_overlap(block, held, sums, chunk, at)
                self.weigh(block, sums, weights)
                self.weigh_right(block, raw, weights, weighted, v0)
                load(right, weighted)
                if self.program.decays:
                    for i, j in T.Parallel(dim, dim_v):
                        held[i, j] *= T.exp2(sums.upto(tile.chunk - 1))
                accumulate(left.operand, right, state, transpose_A=True, whole_rows=False)
            T.copy(held, walked.state(buffers["last"], head, slice(d0, d0 + dim), slice(v0, v0 + dim_v)))

    def weigh(self, block: Block, sums: DecaySums, weights: Any) -> None:
        """The factor of each token's k^T v (or q^T do): what decay leaves of it, and the row factors of both mods."""
        whole, last = product_of(*self.sources), self.tile.chunk - 1

        def entry(i: Any) -> Any:
            (value,) = block.splice(i)(whole)
            if not self.program.decays:
                return value
            return value * T.exp2(sums.upto(i) if self.form.reverse else sums.between(i, last))

        block.rows(weights, entry)

    def weigh_right(self, block: Block, raw: Any, weights: Any, weighted: Any, v0: Any) -> None:
        """The right tensor after its mod, each token with its factor."""
        (_, right), (_, dim_v) = self.sources, self.shape

        def entry(i: Any, d: Any) -> None:
            x = T.cast(raw[i, d], FLOAT)
            if right.elementwise:
                (x,) = block.splice(i, x)(right.mod)
                x = T.if_then_else(block.inside(right, i, v0 + d, dim_v), x, 0.0)
            store(weighted, x * weights[i], i, d)

        over_pairs(self.tile.chunk, dim_v, entry)

    @macro_method
    def note_overlap(self, block: Block, held: Any, sums: DecaySums, chunk: Any, at: _Part) -> None:
        """What the decays of all tokens of a chunk get from states."""
        buffers, (dim, dim_v) = block.buffers, self.shape
        batch, head, part, d0, v0 = block.batch, block.head, at.number, at.d0, at.v0
        other = T.alloc_shared([dim, dim_v], self.problem.state_dtype)
        products = T.alloc_fragment([dim, dim_v], FLOAT)
        of_rows = T.alloc_fragment([dim], FLOAT)
        across = T.alloc_shared([dim], FLOAT)  # from the state's layout to one that sums over rows
        each = T.alloc_fragment([dim], FLOAT)
        whole = T.alloc_fragment([1], FLOAT)
        T.copy(buffers["other"][batch, head, chunk, d0 : d0 + dim, v0 : v0 + dim_v], other)
        for i, j in T.Parallel(dim, dim_v):
            products[i, j] = held[i, j] * state_before(block, self.form, chunk, (d0 + i, v0 + j), other[i, j])
        T.reduce_sum(products, of_rows, dim=1)
        T.copy(of_rows, across)
        T.copy(across, each)
        T.reduce_sum(each, whole, dim=0)
        for i in T.Parallel(1):
            buffers["overlap"][batch, head, chunk, part] = whole[i] * T.exp2(sums.upto(self.tile.chunk - 1))
