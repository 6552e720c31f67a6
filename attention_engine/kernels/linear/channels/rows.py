"""What a chunk makes of a state and the weights of its pairs: the output, and the gradient of v.

result = (x * what decay leaves) M + weights z

result  x   M                                          z    weights
o       q   the state before the chunk                 v    of each query's keys
dv      k   the gradient of the state after the chunk  do   of each key's queries
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile, tiled, width_tiles
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import FLOAT, Accumulator, accumulate, build, loop
from attention_engine.kernels.linear.channels.common import (
    ExactOperand,
    ModifiedTile,
    OwnGradient,
    RawTile,
    RowSums,
    WeighedTile,
    load_exact,
    load_sums,
    sums_tile,
)
from attention_engine.kernels.linear.common import (
    Block,
    LinearSizes,
    Source,
    StateOperand,
    add_state_product,
    load_state,
)
from attention_engine.plan import linear_buffers


@dataclass(frozen=True)
class Role:
    """One row of the table above; own: the tensor whose gradient the result is (None: the output)."""

    name: str
    left: str
    others: str
    own: str | None
    over_keys: bool


ROLES = {r.name: r for r in (Role("output", "q", "v", None, False), Role("dv", "k", "do", "v", True))}


def channel_rows(
    problem: LinearProblem, program: LinearProgram, role_name: str, tile: LinearTile, reads: tuple[Expr, ...]
) -> Any:
    """The PrimFunc: (x, z, [own], custom..., sums, states, scores, result, row sums...).

    result: like v, contiguous. reads: the reads of custom inputs in the own tensor's mod whose gradient is wanted; row
    sums (tiles, batch, heads, tokens), fp32, one for each.
    """
    role, sizes = ROLES[role_name], LinearSizes(problem, tile.chunk)
    chunk, inner = tile.chunk, min(tile.inner, padded(problem.dim))
    width, tiles = min(tile.outer, padded(problem.dim_v)), width_tiles(problem, tile)
    left_source, other_source = (Source(n, problem, program) for n in (role.left, role.others))
    finish = OwnGradient(program, role.own, reads) if role.own else None
    parameters = sizes.declare(linear_buffers.channel_rows(problem, role_name, tile, len(reads)))

    def weigh(left: RawTile, weighed: WeighedTile, sums: Any) -> None:
        last = chunk - 1
        weighed.fill(left.value, lambda i, d: sums[last, d] - sums[i, d] if role.over_keys else sums[i, d])

    def finish_own(block: Block, result: Any, part: Any) -> None:
        if finish is None or not finish.needed:
            return
        own = RawTile(Source(finish.name, problem, program), chunk, width)
        own.load(block, part * width)
        finish.finish(own, result, RowSums(chunk, width) if finish.reads else None, part)

    @T.macro
    def body(buffers: Any) -> None:
        grid = tiles * sizes.chunks, problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block_index, head, batch):
            index, part = block_index // tiles, block_index % tiles
            block = Block(buffers, sizes, batch, head, index * chunk)
            left = RawTile(left_source, chunk, inner)
            weighed = WeighedTile("left", problem, chunk, inner)
            other = ModifiedTile(other_source, chunk, width)
            sums = sums_tile(chunk, inner)
            state = StateOperand("state", problem, (inner, width))
            pairs = T.alloc_fragment([chunk, chunk], FLOAT)
            weights = ExactOperand("weights", problem, (chunk, chunk))
            result = Accumulator("result", problem, (chunk, width))
            T.clear(result.sum)
            for step in loop(tiled(problem.dim, inner), 0):
                d0, v0 = step * inner, part * width
                left.load(block, d0)
                load_sums(sums, block, d0, inner)
                weigh(left, weighed, sums)
                load_state(state, buffers["states"][batch, head, index, d0 : d0 + inner, v0 : v0 + width])
                add_state_product(weighed.operand, state, result)
            T.copy(buffers["scores"][batch, head, index * chunk : (index + 1) * chunk, 0:chunk], pairs)
            load_exact(weights, pairs)
            other.load(block, part * width)
            accumulate(weights.whole, other.operand, result, transpose_A=role.over_keys)
            if weights.lost is not None:
                accumulate(weights.lost, other.operand, result, transpose_A=role.over_keys)
            finish_own(block, result.sum, part)
            stop, end = (index + 1) * chunk, (part + 1) * width
            T.copy(result.sum, buffers["result"][batch, index * chunk : stop, head, part * width : end])

    return build(f"channel_{role.name}", parameters, body)
