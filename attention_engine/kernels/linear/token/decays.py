"""Decays before and after: their sums within chunks, and their gradient from what chunks and states add to it."""

from __future__ import annotations

import math
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import DECAY_LIMIT, LinearProblem, LinearProgram
from attention_engine.kernels.common import FLOAT, build, over_pairs, store
from attention_engine.kernels.linear.common import LOG2_E, Block, LinearSizes
from attention_engine.passes.mods import differentiate_mod
from attention_engine.plan import linear_buffers

CHUNKS = 8  # that a block takes: one alone is over before the next block has started


def _entry(buffers: Any, sizes: LinearSizes, block: Block, i: Any) -> Any:
    """The decay of token i of the chunk; 0 past the end."""
    if "decay" not in buffers:
        return T.float32(0)
    token = T.min(block.token0 + i, sizes.length - 1)
    return T.cast(buffers["decay"][block.batch, token, block.head], FLOAT)


def unit_of(chunk: int) -> float:
    """A power of two of which the sum of a chunk's log2 decays is at most 2**24: fp32 sums multiples of it exactly."""
    return float(2.0 ** (math.ceil(math.log2(-DECAY_LIMIT * LOG2_E * chunk)) - 24))


def sum_decays(problem: LinearProblem, program: LinearProgram, chunk: int, threads: int = 128) -> Any:
    """The PrimFunc: ([decay], custom..., sums): log2 decays summed from each chunk's first token on.

    Where sums have two parts, each decay is cut: into the nearest multiple of a unit, whose sums and their differences
    are exact, and what is left, of which a chunk's sum is small.
    """
    sizes = LinearSizes(problem, chunk)
    parameters = sizes.declare(linear_buffers.sum_decays(problem, chunk))
    unit = T.float32(unit_of(chunk))

    def read(buffers: Any, block: Block, logs: Any, lows: Any) -> None:
        def entry(n: Any, c: Any) -> None:
            i = n * chunk + c
            (value,) = block.splice(i, _entry(buffers, sizes, block, i))(program.decay)
            value = T.max(value, T.float32(DECAY_LIMIT)) * T.float32(LOG2_E)
            value = T.if_then_else(block.token0 + i < sizes.length, value, 0.0)
            if lows is None:
                store(logs, value, n, c)
            else:
                store(logs, T.round(value / unit) * unit, n, c)
                store(lows, value - logs[n, c], n, c)

        over_pairs(CHUNKS, chunk, entry)

    def write(buffers: Any, block: Block, logs: Any, lows: Any) -> None:
        def entry(n: Any, c: Any) -> None:
            token = block.token0 + n * chunk + c
            at = (block.batch, block.head, token)
            parts = [(at, logs)] if lows is None else [((0, *at), logs), ((1, *at), lows)]
            for which, part in parts:
                write_where(token < sizes.chunks * chunk, buffers["sums"], which, part[n, c])

        over_pairs(CHUNKS, chunk, entry)

    @T.macro
    def write_where(inside: Any, sums: Any, at: Any, value: Any) -> None:
        if inside:
            store(sums, value, *at)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(T.ceildiv(sizes.chunks, CHUNKS), problem.heads, sizes.batch, threads=threads) as (
            part, head, batch
        ):  # fmt: skip
            logs = T.alloc_shared([CHUNKS, chunk], FLOAT)
            lows = T.alloc_shared([CHUNKS, chunk], FLOAT) if problem.splits else None
            block = Block(buffers, sizes, batch, head, part * CHUNKS * chunk)
            read(buffers, block, logs, lows)
            T.cumsum(logs, dim=1)
            if problem.splits:
                T.cumsum(lows, dim=1)
            write(buffers, block, logs, lows)

    return build("sum_decays", parameters, body)


def _add_parts(block: Block, tiles: tuple[int, int, int], queries: Any, keys: Any) -> None:
    """What the queries' and keys' rows of some chunks add, from the parts that those came in."""
    parts = {"of_queries": tiles[0], "of_query_pairs": tiles[0], "of_keys": tiles[1], "of_key_pairs": tiles[1]}
    buffers, sizes, chunk = block.buffers, block.sizes, block.sizes.chunk

    def entry(n: Any, c: Any) -> None:
        token = T.min(block.token0 + n * chunk + c, sizes.chunks * chunk - 1)
        total = {
            name: sum(buffers[name][p, block.batch, block.head, token] for p in range(count))
            for name, count in parts.items()
        }
        store(queries, total["of_queries"] + (total["of_query_pairs"] - total["of_key_pairs"]), n, c)
        store(keys, total["of_keys"], n, c)

    over_pairs(CHUNKS, chunk, entry)


def decay_gradients(
    problem: LinearProblem, program: LinearProgram, chunk: int, tiles: tuple[int, int, int], reads: tuple[Expr, ...],
    threads: int = 128,
) -> Any:  # fmt: skip
    """The PrimFunc: ([decay], custom..., dq's rows of_queries, of_query_pairs, dk's of_keys, of_key_pairs, overlap,
    [gradient], read sums...).

    The gradient of the log decay of token t of a chunk: overlap + sum of of_keys before t + sum from t on of of_queries
    and of_query_pairs less of_key_pairs. A decay scales what the tokens before it gave to those from it on; nothing is
    subtracted but pairs of the chunk from themselves. tiles: how many parts dq's rows, dk's and overlap come in.
    gradient: fp32 (batch, length, heads), of decay before its mod, where the mod reads it.
    """
    sizes = LinearSizes(problem, chunk)
    parameters = sizes.declare(linear_buffers.decay_gradients(problem, chunk, tiles, len(reads)))
    by_x = differentiate_mod(program, "decay")
    wanted = [e for r, e in by_x.reads if r in reads]

    def write(buffers: Any, block: Block, first: Any, queries: Any, keys: Any) -> None:
        def entry(n: Any, c: Any) -> None:
            i, index = n * chunk + c, T.min(first + n, sizes.chunks - 1)
            x = _entry(buffers, sizes, block, i)
            before = T.if_then_else(c > 0, keys[n, T.max(c - 1, 0)], 0.0)
            overlap = sum(buffers["overlap"][block.batch, block.head, index, part] for part in range(tiles[2]))
            log_decay = block.splice(i, x)(program.decay)[0]
            total = T.if_then_else(log_decay > DECAY_LIMIT, overlap + before + queries[n, c], 0.0)
            values = block.splice(i, x, total)(by_x.x, *wanted)
            write_where(buffers, block.token0 + i < sizes.length, block, i, values)

        over_pairs(CHUNKS, chunk, entry)

    def put(buffers: Any, block: Block, i: Any, values: Any) -> None:
        if problem.decay_dtype:
            store(buffers["gradient"], values[0], block.batch, block.token0 + i, block.head)
        for number, value in enumerate(values[1:]):
            store(buffers[f"read_{number}"], value, block.batch, block.head, block.token0 + i)

    @T.macro
    def write_where(buffers: Any, inside: Any, block: Block, i: Any, values: Any) -> None:
        if inside:
            put(buffers, block, i, values)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(T.ceildiv(sizes.chunks, CHUNKS), problem.heads, sizes.batch, threads=threads) as (
            part, head, batch
        ):  # fmt: skip
            queries, keys = T.alloc_shared([CHUNKS, chunk], FLOAT), T.alloc_shared([CHUNKS, chunk], FLOAT)
            first = part * CHUNKS
            block = Block(buffers, sizes, batch, head, first * chunk)
            _add_parts(block, tiles, queries, keys)
            T.cumsum(queries, dim=1, reverse=True)
            T.cumsum(keys, dim=1)
            write(buffers, block, first, queries, keys)

    return build("decay_gradients", parameters, body)
