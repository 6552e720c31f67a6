"""Sums of per-channel decays within chunks."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.linear import DECAY_LIMIT, LinearProblem, LinearProgram, LinearTile, tiled
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import FLOAT, build, over_pairs, store
from attention_engine.kernels.linear.channels.common import (
    APART_BY_COLUMNS,
    copy_spaced,
    spaced_rows,
    sums_window,
)
from attention_engine.kernels.linear.common import LOG2_E, Block, LinearSizes
from attention_engine.plan import linear_buffers


def decay_entry(block: Block, i: Any, column: Any) -> Any:
    """The decay of token i of the chunk; outside the tensor that of the nearest entry."""
    sizes = block.sizes
    token, column = T.min(block.token0 + i, sizes.length - 1), T.min(column, sizes.problem.dim - 1)
    return T.cast(block.buffers["decay"][block.batch, token, block.head, column], FLOAT)


def sum_decays(problem: LinearProblem, program: LinearProgram, tile: LinearTile) -> Any:
    """The PrimFunc: (decay, custom..., sums): log2 decays summed from each chunk's first token on."""
    sizes = LinearSizes(problem, tile.chunk)
    width = min(tile.inner, padded(problem.dim))
    tiles = tiled(problem.dim, width)
    parameters = sizes.declare(linear_buffers.sum_decays(problem, tile.chunk))

    def read(block: Block, logs: Any, d0: Any) -> None:
        def entry(i: Any, d: Any) -> None:
            (value,) = block.splice(i, decay_entry(block, i, d0 + d))(program.decay)
            value = T.max(value, T.float32(DECAY_LIMIT)) * T.float32(LOG2_E)
            store(logs, T.if_then_else(block.token0 + i < sizes.length, value, 0.0), i, d)

        over_pairs(tile.chunk, width, entry)

    @T.macro
    def body(buffers: Any) -> None:
        grid = tiles * sizes.chunks, problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block_index, head, batch):
            logs = spaced_rows(tile.chunk, width, FLOAT, APART_BY_COLUMNS)
            d0 = (block_index % tiles) * width
            block = Block(buffers, sizes, batch, head, (block_index // tiles) * tile.chunk)
            read(block, logs, d0)
            T.cumsum(logs, dim=0)
            copy_spaced(logs[0 : tile.chunk, 0:width], sums_window(block, d0, width))

    return build("sum_channel_decays", parameters, body)
