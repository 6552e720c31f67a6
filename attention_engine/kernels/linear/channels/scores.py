"""The weights of a chunk's pairs: sum_d q_id k_jd exp2(sums_id - sums_jd) for keys j up to the query i."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile, tiled
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import FLOAT, build, loop, multiply, named, over_pairs, over_rows, store
from attention_engine.kernels.linear.channels.common import (
    Levels,
    RawTile,
    RowSums,
    WeighedTile,
    load_sums,
    sums_tile,
)
from attention_engine.kernels.linear.common import Block, LinearSizes, Source
from attention_engine.plan import linear_buffers


def scores(problem: LinearProblem, program: LinearProgram, tile: LinearTile) -> Any:
    """The PrimFunc: (q, k, custom..., sums, scores)."""
    sizes = LinearSizes(problem, tile.chunk)
    chunk, width = tile.chunk, min(tile.inner, padded(problem.dim))
    sources = [Source(n, problem, program) for n in ("q", "k")]
    parameters = sizes.declare(linear_buffers.channel_scores(problem, tile))

    def add_own(rows: RowSums, own: Any, q: RawTile, k: RawTile) -> None:
        added = rows.sum(lambda i, d: q.value(i, d) * k.value(i, d))
        over_rows(chunk, lambda i: store(own, own[i] + added[i], i))

    def add_level(levels: Levels, level: Any, pairs: Any, total: Any) -> None:
        def entry(i: Any, j: Any) -> None:
            store(total, total[i, j] + T.if_then_else(levels.meet(level, i, j), pairs[i, j], 0.0), i, j)

        over_pairs(chunk, chunk, entry)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(sizes.chunks, problem.heads, sizes.batch, threads=tile.threads) as (index, head, batch):
            block = Block(buffers, sizes, batch, head, index * chunk)
            q, k = (RawTile(s, chunk, width) for s in sources)
            sums = sums_tile(chunk, width)
            meeting = WeighedTile("meeting", problem, chunk, width)
            pairs = named("pairs", T.alloc_fragment([chunk, chunk], FLOAT))
            total = named("total", T.alloc_fragment([chunk, chunk], FLOAT))
            own, own_shared = T.alloc_fragment([chunk], FLOAT), T.alloc_shared([chunk], FLOAT)
            rows, levels = RowSums(chunk, width), Levels(chunk, sums)
            T.clear(total)
            T.clear(own)
            for step in loop(tiled(problem.dim, width), 0):
                q.load(block, step * width)
                k.load(block, step * width)
                load_sums(sums, block, step * width, width)
                add_own(rows, own, q, k)
                for level in loop(levels.count, 0):
                    levels.fill(meeting, level, q, k)
                    T.clear(pairs)
                    multiply(meeting.operand, meeting.operand, pairs, transpose_B=True)
                    add_level(levels, level, pairs, total)
            T.copy(own, own_shared)  # from the layout of rows to that of pairs
            for i, j in T.Parallel(chunk, chunk):
                total[i, j] += T.if_then_else(i == j, own_shared[i], 0.0)
            T.copy(total, buffers["scores"][batch, head, index * chunk : (index + 1) * chunk, 0:chunk])

    return build("channel_scores", parameters, body)
