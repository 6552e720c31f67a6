"""The whole forward pass in one walk: a block keeps a tile of one head's state in registers from first to last token.

Nothing but q, k, v and o meets memory. Each chunk: o_i = exp(g_i) q_i S + sum_{j <= i} exp(g_i - g_j) (q_i . k_j) v_j,
then S = exp(g_T) S + sum_j exp(g_T - g_j) k_j^T v_j (g: sums of decays in the chunk, g_T at its end).
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import FLOAT, Accumulator, Operand, build, load, loop, named, over_pairs, store
from attention_engine.kernels.linear.common import (
    Block,
    LinearSizes,
    Source,
    SourceTile,
    add_product,
    load_source,
    tiled,
)


def forward(problem: LinearProblem, program: LinearProgram, tile: LinearTile, starts: bool, ends: bool) -> Any:
    """The PrimFunc: (q, k, v, custom..., [sums], [first], o, [last]).

    first: the initial state, where `starts`; last: the last one, where `ends`.
    """
    sizes = LinearSizes(problem, tile.chunk)
    chunk, dim, width = tile.chunk, padded(problem.dim), min(tile.outer, padded(problem.dim_v))
    sources = [Source(n, problem, program) for n in ("q", "k", "v")]
    decays = program.decays
    parameters = {**sizes.inputs("q", "k", "v"), **sizes.custom()}
    if decays:
        parameters["sums"] = sizes.rows()
    if starts:
        parameters["first"] = sizes.state()
    parameters["o"] = sizes.tensor(sizes.length, problem.heads, problem.dim_v, problem)
    if ends:
        parameters["last"] = sizes.state()

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(tiled(problem.dim_v, width), problem.heads, sizes.batch, threads=tile.threads) as (
            part,
            head,
            batch,
        ):
            T.annotate_min_blocks_per_sm(tile.blocks)
            q, k = (SourceTile(s, chunk, dim) for s in sources[:2])
            v = SourceTile(sources[2], chunk, width)
            weighted = T.alloc_fragment([chunk, width], FLOAT)
            values = Operand("values", problem, (chunk, width))
            weights = Operand("weights", problem, (chunk, chunk), fragment=tile.in_registers)
            before = Operand("before", problem, (dim, width))
            scores = Accumulator("scores", problem, (chunk, chunk))
            output = Accumulator("output", problem, (chunk, width))
            state = Accumulator("state", problem, (dim, width))
            held, made = state.sum, output.sum
            maths = _Maths(chunk, width, decays)
            v0 = part * width
            if starts:
                T.copy(buffers["first"][batch, head, 0:dim, v0 : v0 + width], held)
            else:
                T.fill(held, 0)
            for step in loop(sizes.chunks, tile.stages):
                block = Block(buffers, sizes, batch, head, step * chunk)
                load_source(q, block, 0)
                load_source(k, block, 0)
                load_source(v, block, v0)
                if decays:
                    T.copy(buffers["sums"][batch, head, step * chunk : (step + 1) * chunk], maths.sums)
                maths.find_weights(block, *sources)
                load(before, held)
                T.clear(scores.sum)
                add_product(q.operand, k.operand, scores, transpose_B=True, rows=tile.in_registers)
                T.clear(made)
                add_product(q.operand, before, output, rows=tile.in_registers)
                maths.weigh_pairs(scores.sum)
                maths.weigh_rows(made)
                load(weights, scores.sum)
                add_product(weights, v.operand, output, rows=tile.in_registers)
                maths.weigh_values(v, weighted)
                load(values, weighted)
                if decays:
                    for i, j in T.Parallel(dim, width):
                        held[i, j] *= T.exp2(maths.sums[chunk - 1])
                add_product(k.operand, values, state, transpose_A=True, rows=False)
                T.copy(made, buffers["o"][batch, step * chunk : (step + 1) * chunk, head, v0 : v0 + width])
            if ends:
                T.copy(held, buffers["last"][batch, head, 0:dim, v0 : v0 + width])

    return build("forward", parameters, body)


class _Maths:
    """What decays and factors of rows do to a chunk's tiles."""

    def __init__(self, chunk: int, width: int, decays: bool) -> None:
        self.chunk, self.width, self.decays = chunk, width, decays
        names = ("sums_tile", "of_query", "of_key", "query_weights", "value_weights")
        self.sums, self.of_query, self.of_key, self.query_weights, self.value_weights = (
            named(n, T.alloc_shared([chunk], FLOAT)) for n in names
        )

    def find_weights(self, block: Block, q: Source, k: Source, v: Source) -> None:
        """The numbers of each row, computed once: its factor, and with what decay leaves of the state and for it."""
        block.factors(self.of_query, q)
        block.factors(self.of_key, k, v)
        if self.decays:
            last = self.chunk - 1
            block.rows(self.query_weights, lambda i: self.of_query[i] * T.exp2(self.sums[i]))
            block.rows(self.value_weights, lambda i: self.of_key[i] * T.exp2(self.sums[last] - self.sums[i]))
        else:
            self.query_weights, self.value_weights = self.of_query, self.of_key

    def weigh_pairs(self, scores: Any) -> None:
        def entry(i: Any, j: Any) -> None:
            value = scores[i, j] * self.of_query[i] * self.of_key[j]
            if self.decays:
                value = value * T.exp2(self.sums[i] - self.sums[j])
            store(scores, T.if_then_else(i >= j, value, 0.0), i, j)

        over_pairs(self.chunk, self.chunk, entry)

    def weigh_rows(self, output: Any) -> None:
        over_pairs(self.chunk, self.width, lambda i, d: store(output, output[i, d] * self.query_weights[i], i, d))

    def weigh_values(self, v: SourceTile, weighted: Any) -> None:
        over_pairs(self.chunk, self.width, lambda j, d: store(weighted, v.value(j, d) * self.value_weights[j], j, d))
