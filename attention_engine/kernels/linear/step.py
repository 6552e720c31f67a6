"""One token of decoding: the state moves on and gives the token's output; fp32 throughout, one pass over the state."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile, X, tiled
from attention_engine.ir.program import Q_IDX, B, H
from attention_engine.kernels.common import FLOAT, build, over_rows, reader, store
from attention_engine.kernels.linear.common import LinearSizes, Source
from attention_engine.kernels.splice import Splice
from attention_engine.plan import linear_buffers


def step(problem: LinearProblem, program: LinearProgram, tile: LinearTile, starts: bool) -> Any:
    """The PrimFunc: (q, k, v, [decay], custom..., [first], o, last); q, k, v, o have a length of 1, states are fp32."""
    sizes = LinearSizes(problem, 1)
    sources = {n: Source(n, problem, program) for n in ("q", "k", "v")}
    width = tile.outer
    dim = max(1 << (problem.dim - 1).bit_length(), 16)  # a power of two shares threads evenly
    decays = dim if problem.per_channel else 1
    parameters = sizes.declare(linear_buffers.step(problem, starts))

    def splice(buffers: Any, batch: Any, head: Any, x: Any) -> Splice:
        return Splice({B: batch, H: head, Q_IDX: T.int32(0), X: x}, reader(buffers))

    def read(buffers: Any, batch: Any, head: Any, name: str, column0: Any, columns: int, target: Any) -> None:
        source = sources[name]

        def entry(d: Any) -> None:
            inside = column0 + d < source.dim
            column = T.min(column0 + d, source.dim - 1)
            x = T.cast(buffers[name][batch, 0, source.head_of(head), column], FLOAT)
            (value,) = splice(buffers, batch, head, x)(source.mod)
            store(target, T.if_then_else(inside, value, 0.0), d)

        over_rows(columns, entry)

    def fade(buffers: Any, batch: Any, head: Any, keep: Any) -> None:
        def entry(i: Any) -> None:
            at = (batch, 0, head, *([T.min(i, problem.dim - 1)] if problem.per_channel else []))
            x = T.cast(buffers["decay"][at], FLOAT) if "decay" in buffers else T.float32(0)
            (value,) = splice(buffers, batch, head, x)(program.decay)
            store(keep, T.exp(value), i)

        over_rows(decays, entry)

    @T.macro
    def body(buffers: Any) -> None:
        grid = tiled(problem.dim_v, width), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (part, head, batch):
            state = T.alloc_fragment([dim, width], FLOAT)
            products = T.alloc_fragment([dim, width], FLOAT)
            output = T.alloc_fragment([width], FLOAT)
            q, k, v = (T.alloc_shared([n], FLOAT) for n in (dim, dim, width))
            keep = T.alloc_shared([decays], FLOAT)
            v0 = part * width
            read(buffers, batch, head, "q", 0, dim, q)
            read(buffers, batch, head, "k", 0, dim, k)
            read(buffers, batch, head, "v", v0, width, v)
            fade(buffers, batch, head, keep)
            if starts:
                T.copy(buffers["first"][batch, head, 0:dim, v0 : v0 + width], state)
            else:
                T.fill(state, 0)
            for i, d in T.Parallel(dim, width):
                state[i, d] = state[i, d] * keep[i if problem.per_channel else 0] + k[i] * v[d]
            for i, d in T.Parallel(dim, width):
                products[i, d] = state[i, d] * q[i]
            T.reduce_sum(products, output, dim=0)
            T.copy(state, buffers["last"][batch, head, 0:dim, v0 : v0 + width])
            T.copy(output, buffers["o"][batch, 0, head, v0 : v0 + width])

    return build("step", parameters, body)
