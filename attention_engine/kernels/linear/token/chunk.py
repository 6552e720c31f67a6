"""What a chunk computes from its own tokens and a stored state, all chunks at once (the form: roles.py).

A block makes a tile of the result's columns; the summed dim runs in steps. Gradients of heads that share a q or k are
summed in registers, up to `tile.heads` of them.
"""

from __future__ import annotations

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
    Operand,
    accumulate,
    build,
    load,
    loop,
    multiply,
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
        tile, problem, sizes, role = self.tile, self.problem, self.sizes, self.role
        chunk, width, inner = tile.chunk, self.width, self.inner
        whole_rows = tile.in_registers

        @T.macro
        def gather(
            block: Block, index: Any, inner0: Any, column0: Any, x: SourceTile, y: SourceTile, state: StateOperand,
            scores: Accumulator, result: Accumulator,
        ) -> None:  # fmt: skip
            if not self.rows_stay:
                load_source(x, block, inner0)
                load_source(y, block, inner0)
            load_state(state, self.state_window(block, index, inner0, column0))
            accumulate(x.operand, y.operand, scores, transpose_B=True, whole_rows=whole_rows)
            add_state_product(x.operand, state, result, transpose_B=role.transposed, whole_rows=whole_rows)

        @T.macro
        def body(buffers: Any) -> None:
            with T.Kernel(
                self.width_tiles * sizes.chunks, problem.heads // self.heads, sizes.batch, threads=tile.threads
            ) as (
                block_index,
                shared_head,
                batch,
            ):
                share_sm(tile)
                x = SourceTile(self.x, chunk, inner)
                y = SourceTile(self.y, chunk, inner)
                z = SourceTile(self.z, chunk, width)
                own = SourceTile(self.own, chunk, width) if self.needs_own else None
                state = StateOperand("state", problem, (width, inner) if role.transposed else (inner, width))
                weights = Operand("weights", problem, (chunk, chunk), fragment=tile.in_registers)
                scores = Accumulator("scores", problem, (chunk, chunk))
                pairs = Accumulator("pairs", problem, (chunk, chunk)) if self.decay_rows else None
                result = Accumulator("result", problem, (chunk, width))
                rows = Rows(problem, chunk, width, self.needs_own)
                total = T.alloc_fragment([chunk, width], FLOAT) if self.sums_heads else None
                index, column0 = block_index // self.width_tiles, (block_index % self.width_tiles) * width
                first = Block(buffers, sizes, batch, shared_head * self.heads, index * chunk)
                if self.sums_heads:
                    T.fill(total, 0)
                if self.rows_stay:
                    load_source(x, first, 0)
                    load_source(y, first, 0)
                if self.stays(self.z):
                    load_source(z, first, column0)
                if self.needs_own and self.stays(self.own):
                    load_source(own, first, column0)
                for number in loop(self.heads, tile.stages if self.inner_tiles == 1 and self.heads > 1 else 0):
                    head = shared_head * self.heads + number
                    block = Block(buffers, sizes, batch, head, index * chunk)
                    if self.decays:
                        load_decays(rows.sums, buffers, batch, head, index)
                    self.find_factors(block, rows)
                    T.clear(scores.sum)
                    T.clear(result.sum)
                    if self.inner_tiles == 1:
                        gather(block, index, 0, column0, x, y, state, scores, result)
                    else:
                        for step in loop(self.inner_tiles, tile.stages):
                            gather(block, index, step * inner, column0, x, y, state, scores, result)
                    self.weigh_rows(result.sum, rows)
                    self.weigh_pairs(scores.sum, rows)
                    if not self.stays(self.z):
                        load_source(z, block, column0)
                    if self.needs_own and not self.stays(self.own):
                        load_source(own, block, column0)
                    if self.decay_rows:
                        self.sum_state_rows(block, own, result.sum, rows, block_index)
                        T.clear(pairs.sum)
                        multiply(own.operand, z.operand, pairs.sum, transpose_B=True, whole_rows=whole_rows)
                        self.sum_pairs(block, pairs.sum, scores.sum, rows, block_index)
                    load(weights, scores.sum)
                    accumulate(weights, z.operand, result, whole_rows=whole_rows)
                    if len(self.reads) > 0:
                        self.sum_reads(block, own, result.sum, rows, block_index)
                    self.chain(block, own, result.sum, rows, column0)
                    if self.sums_heads:
                        for i, d in T.Parallel(chunk, width):
                            total[i, d] += result.sum[i, d]
                    else:
                        T.copy(result.sum, self.result_window(buffers, batch, head, index * chunk, column0))
                if self.sums_heads:
                    T.copy(total, self.result_window(buffers, batch, shared_head, index * chunk, column0))

        return build(f"chunk_{role.name}", self.parameters(), body)

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
