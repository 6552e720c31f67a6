"""States between chunks, by a walk along the tokens: forward those of the output, backward their gradients.

A block holds a tile of one head's state in registers. Forward: S = exp(g_T) S + sum_j exp(g_T - g_j) k_j^T v_j, and
what is kept for chunk c is the state before it. Backward: dS = exp(g_T) dS + sum_i exp(g_i) q_i^T do_i, and what is
kept for chunk c is the gradient of the state after it. g: sums of decays in the chunk, g_T at its end.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile, state_tiles, tile_of_state, tiled
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
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
    LinearSizes,
    Source,
    SourceTile,
    load_decays,
    load_source,
    product_of,
    share_sm,
    state_before,
)
from attention_engine.plan import linear_buffers


def states(
    problem: LinearProblem,
    program: LinearProgram,
    tile: LinearTile,
    reverse: bool,
    starts: bool,
    overlaps: bool,
    initial: bool,
) -> Any:
    """The PrimFunc: (left, right, custom..., [sums], [first], [other], [initial], kept, last, [overlap]).

    left, right: k, v forward; q, do in reverse. first: the initial state (in reverse: the gradient of the last), where
    `starts`. last: the last state (in reverse: the gradient of the initial one), fp32. Where `overlaps`: other, the
    states that the forward walk kept, and overlap (batch, heads, chunks, tiles): exp(g_T) <S, dS> of each chunk and
    tile, which is what all tokens of the chunk's decays get from states. initial: the state that the forward walk began
    with, unrounded, where `initial`: all that the first chunk's overlap is made of.
    """
    sizes = LinearSizes(problem, tile.chunk)
    names = ("q", "do") if reverse else ("k", "v")
    left_source, right_source = (Source(n, problem, program) for n in names)
    dim, dim_v = tile_of_state(problem, tile)
    dim_v_tiles, tiles = tiled(problem.dim_v, dim_v), state_tiles(problem, tile)
    decays = program.decays
    parameters = sizes.declare(linear_buffers.states_walk(problem, program, tile, reverse, starts, overlaps, initial))

    def weigh(block: Block, sums: Any, weights: Any) -> None:
        """The factor of each token's k^T v (or q^T do): what decay leaves of it, and the row factors of both mods."""
        whole = product_of(left_source, right_source)

        def entry(i: Any) -> Any:
            (value,) = block.splice(i)(whole)
            return value * T.exp2(sums.upto(i) if reverse else sums.between(i, tile.chunk - 1)) if decays else value

        block.rows(weights, entry)

    def weigh_right(block: Block, raw: Any, weights: Any, weighted: Any, v0: Any) -> None:
        def entry(i: Any, d: Any) -> None:
            x = T.cast(raw[i, d], FLOAT)
            if right_source.elementwise:
                (x,) = block.splice(i, x)(right_source.mod)
                x = T.if_then_else(block.inside(right_source, i, v0 + d, dim_v), x, 0.0)
            store(weighted, x * weights[i], i, d)

        over_pairs(tile.chunk, dim_v, entry)

    @T.macro
    def note_overlap(
        buffers: Any, held: Any, sums: Any, batch: Any, head: Any, chunk: Any, part: Any, d0: Any, v0: Any
    ) -> None:
        other = T.alloc_shared([dim, dim_v], problem.state_dtype)
        products = T.alloc_fragment([dim, dim_v], FLOAT)
        of_rows = T.alloc_fragment([dim], FLOAT)
        across = T.alloc_shared([dim], FLOAT)  # from the state's layout to one that sums over rows
        each = T.alloc_fragment([dim], FLOAT)
        whole = T.alloc_fragment([1], FLOAT)
        T.copy(buffers["other"][batch, head, chunk, d0 : d0 + dim, v0 : v0 + dim_v], other)
        for i, j in T.Parallel(dim, dim_v):
            products[i, j] = held[i, j] * state_before(
                buffers, batch, head, chunk, d0 + i, v0 + j, other[i, j], problem, initial
            )
        T.reduce_sum(products, of_rows, dim=1)
        T.copy(of_rows, across)
        T.copy(across, each)
        T.reduce_sum(each, whole, dim=0)
        for i in T.Parallel(1):
            buffers["overlap"][batch, head, chunk, part] = whole[i] * T.exp2(sums.upto(tile.chunk - 1))

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(tiles, problem.heads, sizes.batch, threads=tile.threads) as (part, head, batch):
            share_sm(tile)
            left = SourceTile(left_source, tile.chunk, dim)
            raw = T.alloc_shared([tile.chunk, dim_v], problem.dtype)
            weighted = T.alloc_fragment([tile.chunk, dim_v], FLOAT)
            right = Operand("right", problem, (tile.chunk, dim_v))
            sums = DecaySums(problem, tile.chunk, "sums")
            weights = T.alloc_shared([tile.chunk], FLOAT)
            state = Accumulator("state", problem, (dim, dim_v))
            staged = T.alloc_shared([dim, dim_v], problem.state_dtype)  # from there rows leave whole
            held = state.sum
            d0, v0 = (part // dim_v_tiles) * dim, (part % dim_v_tiles) * dim_v
            if starts:
                T.copy(buffers["first"][batch, head, d0 : d0 + dim, v0 : v0 + dim_v], held)
            else:
                T.fill(held, 0)
            for step in loop(sizes.chunks, tile.stages):
                chunk = sizes.chunks - 1 - step if reverse else step
                block = Block(buffers, sizes, batch, head, chunk * tile.chunk)
                T.copy(held, staged)
                T.copy(staged, buffers["kept"][batch, head, chunk, d0 : d0 + dim, v0 : v0 + dim_v])
                load_source(left, block, d0)
                T.copy(block.window(right_source, v0, dim_v), raw)
                if decays:
                    load_decays(sums, buffers, batch, head, chunk)
                if overlaps:
                    note_overlap(buffers, held, sums, batch, head, chunk, part, d0, v0)
                weigh(block, sums, weights)
                weigh_right(block, raw, weights, weighted, v0)
                load(right, weighted)
                if decays:
                    for i, j in T.Parallel(dim, dim_v):
                        held[i, j] *= T.exp2(sums.upto(tile.chunk - 1))
                accumulate(left.operand, right, state, transpose_A=True, whole_rows=False)
            T.copy(held, buffers["last"][batch, head, d0 : d0 + dim, v0 : v0 + dim_v])

    return build("states_backward" if reverse else "states", parameters, body)
