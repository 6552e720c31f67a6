"""States between chunks where each channel has its decay, and in reverse their gradients.

A block holds a tile of one head's state in registers. Forward: S_d = exp2(G_d) S_d + sum_j exp2(G_d - g_jd) k_jd v_j,
and what is kept for chunk c is the state before it. Backward: dS_d = exp2(G_d) dS_d + sum_i exp2(g_id) q_id do_i, and
what is kept for chunk c is the gradient of the state after it. g: sums of decays in the chunk, G at its end.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import tilelang.language as T

from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile, StatesForm, tiled, width_tiles
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import FLOAT, Accumulator, Buffers, accumulate, build, loop
from attention_engine.kernels.linear.channels.common import (
    ModifiedTile,
    RawTile,
    WeighedTile,
    load_sums,
    sums_tile,
)
from attention_engine.kernels.linear.common import Block, Source, StatesWalk, state_before
from attention_engine.kernels.methods import macro_method
from attention_engine.plan import linear_buffers


def states(problem: LinearProblem, program: LinearProgram, tile: LinearTile, form: StatesForm) -> Any:
    """The PrimFunc: (left, right, custom..., sums, [piece], [first], [other], [initial], [kept], last, [overlap]).

    left, right: k, v forward; q, do in reverse. first: the initial state (in reverse: the gradient of the last), where
    `starts`. last: the last state (in reverse: the gradient of the initial one), fp32. With `pieces` there is one of
    each for every piece of so many tokens: (batch, pieces, heads, dim, dim_v). Where `overlaps`: other, the
    states that the forward walk kept, and overlap (batch, heads, chunks, parts, dim): exp2(G_d) <S_d, dS_d> of each
    chunk and tile of v, which is what every token of the chunk's decays gets from states. initial: the state that the
    forward walk began with, unrounded, where `initial`: all that the first chunk's overlap is made of.
    """
    return _States(problem, program, tile, form).build()


class _States(StatesWalk):
    """The kernel under construction."""

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a block's state."""
        problem, tile = self.problem, self.tile
        return min(tile.inner, padded(problem.dim)), min(tile.outer, padded(problem.dim_v))

    @cached_property
    def parts(self) -> int:
        """Blocks that share the rows of a state."""
        return width_tiles(self.problem, self.tile)

    def build(self) -> Any:
        """The PrimFunc."""
        arguments = linear_buffers.states_walk(self.problem, self.program, self.tile, self.form)
        name = "channel_states" if self.form.keeps else "last_channel_states"
        return build(f"{name}_backward" if self.form.reverse else name, self.sizes.declare(arguments), self.run)

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for a tile of a head's state."""
        problem, tile, sizes, form, (dim, dim_v), parts = (
            self.problem, self.tile, self.sizes, self.form, self.shape, self.parts
        )  # fmt: skip
        left_source, right_source = (Source(n, problem, self.program) for n in self.names)
        tiles = tiled(problem.dim, dim) * parts
        grid = sizes.walks(tiles, form.pieces), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (place, head, batch):
            left = RawTile(left_source, tile.chunk, dim)
            weighed = WeighedTile("left", problem, tile.chunk, dim)
            right = ModifiedTile(right_source, tile.chunk, dim_v)
            sums = sums_tile(tile.chunk, dim)
            kept = T.alloc_shared([dim], FLOAT)
            state = Accumulator("state", problem, (dim, dim_v))
            held = state.sum
            walked = sizes.part(place, tiles, batch, form.pieces)
            block_index = walked.tile
            d0, v0 = (block_index // parts) * dim, (block_index % parts) * dim_v
            if form.starts:
                T.copy(walked.state(buffers["first"], head, slice(d0, d0 + dim), slice(v0, v0 + dim_v)), held)
            else:
                T.fill(held, 0)
            for step in loop(walked.chunks, 0):
                index = walked.chunk(step, form.reverse)
                block = Block(buffers, sizes, batch, head, index * tile.chunk)
                if form.keeps:
                    T.copy(held, buffers["kept"][batch, head, index, d0 : d0 + dim, v0 : v0 + dim_v])
                left.load(block, d0)
                right.load(block, v0)
                load_sums(sums, block, d0, dim)
                for i in T.Parallel(dim):
                    kept[i] = T.exp2(sums[tile.chunk - 1, i])
                if form.overlaps:
                    self.note_overlap(block, held, kept, index, block_index)
                self.weigh(left, weighed, sums)
                for i, j in T.Parallel(dim, dim_v):
                    held[i, j] *= kept[i]
                accumulate(weighed.operand, right.operand, state, transpose_A=True, whole_rows=False)
            T.copy(held, walked.state(buffers["last"], head, slice(d0, d0 + dim), slice(v0, v0 + dim_v)))

    def weigh(self, left: RawTile, weighed: WeighedTile, sums: Any) -> None:
        """Each token's share of the state, as decay leaves it."""
        last = self.tile.chunk - 1
        weighed.fill(left.value, lambda i, d: sums[i, d] if self.form.reverse else sums[last, d] - sums[i, d])

    @macro_method
    def note_overlap(self, block: Block, held: Any, kept: Any, index: Any, block_index: Any) -> None:
        """What the decays of all tokens of a chunk get from states."""
        buffers, (dim, dim_v), parts = block.buffers, self.shape, self.parts
        batch, head = block.batch, block.head
        other = T.alloc_shared([dim, dim_v], self.problem.state_dtype)
        products = T.alloc_fragment([dim, dim_v], FLOAT)
        of_rows = T.alloc_fragment([dim], FLOAT)
        d0, v0 = (block_index // parts) * dim, (block_index % parts) * dim_v
        T.copy(buffers["other"][batch, head, index, d0 : d0 + dim, v0 : v0 + dim_v], other)
        for i, j in T.Parallel(dim, dim_v):
            products[i, j] = held[i, j] * state_before(block, self.form, index, (d0 + i, v0 + j), other[i, j])
        T.reduce_sum(products, of_rows, dim=1)
        for i in T.Parallel(dim):
            of_rows[i] *= kept[i]
        T.copy(of_rows, buffers["overlap"][batch, head, index, block_index % parts, d0 : d0 + dim])
