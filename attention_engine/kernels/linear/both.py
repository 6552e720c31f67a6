"""dQ and dK of a chunk in one kernel: the same weights of pairs, once as they are and once transposed (roles.py).

With P[i, j] = decay * (do_i . v_j) for keys j up to query i, dQ = row weight * (do S^T) + P k and dK = row weight *
(v dS^T) + P^T q. q, k, v and do are loaded once instead of twice, and P is made once. What pairs add to the gradient of
decays is a row's own entry times the pairs' part of its gradient, so q . k is not made at all.
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
    heads_a_block,
    parts_of,
    tiled,
)
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import FLOAT, Accumulator, Operand, build, load, loop, over_pairs, store
from attention_engine.kernels.linear.common import Block, LinearSizes, SourceTile, add_product, load_source, share_sm
from attention_engine.kernels.linear.roles import RoleKernel, Rows


def both_rows(
    problem: LinearProblem, program: LinearProgram, tile: LinearTile, decay_rows: bool, q_reads: tuple[Expr, ...],
    k_reads: tuple[Expr, ...],
) -> Any:  # fmt: skip
    """The PrimFunc: (do, v, k, q, custom..., [sums], states, d_states, dq, dk, dq's row sums..., dk's...).

    states: those before chunks; d_states: the gradients of those after them. dq, dk and the row sums are as chunk.py's
    results. The tile is dq's: its inner cuts v's dim, its outer the head dim.
    """
    return _Both(problem, program, tile, decay_rows, q_reads, k_reads).build()


class _Side(RoleKernel):
    """dQ or dK within the kernel."""

    def __init__(
        self, problem: LinearProblem, program: LinearProgram, role: str, tile: LinearTile, decay_rows: bool,
        reads: tuple[Expr, ...],
    ) -> None:  # fmt: skip
        super().__init__(problem, program, ROLES[role], tile, decay_rows, reads, f"{role}_")
        self.states = "d_states" if self.role.over_keys else "states"
        self.parts, self.heads = parts_of(problem, self.role, tile), heads_a_block(problem, self.role, tile)
        self.sums_heads = self.heads > 1

    def result(self) -> Any:
        """The parameter of the gradient: in parts, where blocks leave some, fp32."""
        sizes, problem, own = self.sizes, self.problem, self.role.own or ""
        shape = [sizes.batch, sizes.length, problem.heads_of(own), problem.dim_of(own)]
        return T.Tensor(shape, problem.dtype) if self.parts == 1 else T.Tensor([self.parts, *shape], FLOAT)

    def window(self, buffers: Any, batch: Any, shared_head: Any, token0: Any, column0: Any) -> Any:
        """The chunk's tile of the gradient."""
        stop, end = token0 + self.tile.chunk, column0 + self.width
        result = buffers[self.role.name]
        if self.parts == 1:
            return result[batch, token0:stop, shared_head, column0:end]
        return result[shared_head % self.parts, batch, token0:stop, shared_head // self.parts, column0:end]


class _Both:
    """The kernel under construction."""

    def __init__(
        self, problem: LinearProblem, program: LinearProgram, tile: LinearTile, decay_rows: bool,
        q_reads: tuple[Expr, ...], k_reads: tuple[Expr, ...],
    ) -> None:  # fmt: skip
        self.problem, self.tile, self.sizes = problem, tile, LinearSizes(problem, tile.chunk)
        self.q = _Side(problem, program, "dq", tile, decay_rows, q_reads)
        self.k = _Side(problem, program, "dk", tile, decay_rows, k_reads)
        for side in (self.q, self.k):
            side.sizes = self.sizes
        self.heads, self.width = self.q.heads, self.q.width
        self.inner = min(tile.inner, padded(problem.dim_v))
        self.inner_tiles = tiled(problem.dim_v, self.inner)
        self.by_own = self.q.by_own or self.k.by_own  # then P k and P^T q have weights of their own

    def parameters(self) -> dict[str, Any]:
        states = {"states": self.sizes.states(), "d_states": self.sizes.states()}
        results = {"dq": self.q.result(), "dk": self.k.result()}
        return {**self.q.inputs(), **states, **results, **self.q.row_sums(), **self.k.row_sums()}

    def build(self) -> Any:
        tile, problem, sizes, chunk, width, inner = (
            self.tile, self.problem, self.sizes, self.tile.chunk, self.width, self.inner,
        )  # fmt: skip
        whole_rows, sums_heads = tile.in_registers, self.q.sums_heads

        @T.macro
        def gather(
            block: Block, index: Any, inner0: Any, column0: Any, do: SourceTile, v: SourceTile, before: Operand,
            after: Operand, scores: Accumulator, of_q: Accumulator, of_k: Accumulator,
        ) -> None:  # fmt: skip
            load_source(do, block, inner0)
            load_source(v, block, inner0)
            load(before, self.state_window(block, self.q, index, inner0, column0))
            load(after, self.state_window(block, self.k, index, inner0, column0))
            add_product(do.operand, v.operand, scores, transpose_B=True, rows=whole_rows)
            add_product(do.operand, before, of_q, transpose_B=True, rows=whole_rows)
            add_product(v.operand, after, of_k, transpose_B=True, rows=whole_rows)

        @T.macro
        def finish(
            side: _Side, block: Block, own: SourceTile, other: SourceTile, weights: Operand, result: Accumulator,
            pairs: Accumulator | None, rows: Rows, total: Any, place: Any, column0: Any, shared_head: Any,
        ) -> None:  # fmt: skip
            if pairs is None:
                add_product(weights, other.operand, result, transpose_A=side.role.over_keys, rows=whole_rows)
            else:
                side.sum_own(block, own, result.sum, rows, "of_state", place)
                T.clear(pairs.sum)
                add_product(weights, other.operand, pairs, transpose_A=side.role.over_keys, rows=whole_rows)
                side.sum_own(block, own, pairs.sum, rows, "of_pairs", place)
                for i, d in T.Parallel(chunk, width):
                    result.sum[i, d] += pairs.sum[i, d]
            if len(side.reads) > 0:
                side.sum_reads(block, own, result.sum, rows, place)
            side.chain(block, own, result.sum, rows, column0)
            if sums_heads:
                for i, d in T.Parallel(chunk, width):
                    total[i, d] += result.sum[i, d]
            else:
                T.copy(result.sum, side.window(block.buffers, block.batch, shared_head, block.token0, column0))

        @T.macro
        def body(buffers: Any) -> None:
            with T.Kernel(
                self.q.width_tiles * sizes.chunks, problem.heads // self.heads, sizes.batch, threads=tile.threads
            ) as (place, shared_head, batch):
                share_sm(tile)
                do, v = SourceTile(self.q.x, chunk, inner), SourceTile(self.q.y, chunk, inner)
                q, k = SourceTile(self.q.own, chunk, width), SourceTile(self.k.own, chunk, width)
                before, after = Operand("before", problem, (width, inner)), Operand("after", problem, (width, inner))
                weights = Operand("weights", problem, (chunk, chunk))
                of_keys = Operand("key_weights", problem, (chunk, chunk)) if self.by_own else weights
                scores = Accumulator("scores", problem, (chunk, chunk))
                scaled = T.alloc_fragment([chunk, chunk], FLOAT) if self.by_own else scores.sum
                of_q = Accumulator("of_q", problem, (chunk, width))
                of_k = Accumulator("of_k", problem, (chunk, width))
                pairs = Accumulator("pairs", problem, (chunk, width)) if self.q.decay_rows else None
                q_rows = Rows(chunk, width, self.q.needs_own or self.k.needs_own)
                k_rows = q_rows.beside(chunk)
                q_total = T.alloc_fragment([chunk, width], FLOAT) if sums_heads else None
                k_total = T.alloc_fragment([chunk, width], FLOAT) if sums_heads else None
                index, column0 = place // self.q.width_tiles, (place % self.q.width_tiles) * width
                first = Block(buffers, sizes, batch, shared_head * self.heads, index * chunk)
                if sums_heads:
                    T.fill(q_total, 0)
                    T.fill(k_total, 0)
                if self.stays(q):
                    load_source(q, first, column0)
                if self.stays(k):
                    load_source(k, first, column0)
                for number in loop(self.heads, tile.stages if self.inner_tiles == 1 and self.heads > 1 else 0):
                    head = shared_head * self.heads + number
                    block = Block(buffers, sizes, batch, head, index * chunk)
                    if not self.stays(q):
                        load_source(q, block, column0)
                    if not self.stays(k):
                        load_source(k, block, column0)
                    if self.q.decays:
                        T.copy(buffers["sums"][batch, head, index * chunk : (index + 1) * chunk], q_rows.sums)
                    self.find_factors(block, q_rows, k_rows)
                    T.clear(scores.sum)
                    T.clear(of_q.sum)
                    T.clear(of_k.sum)
                    if self.inner_tiles == 1:
                        gather(block, index, 0, column0, do, v, before, after, scores, of_q, of_k)
                    else:
                        for step in loop(self.inner_tiles, tile.stages):
                            gather(block, index, step * inner, column0, do, v, before, after, scores, of_q, of_k)
                    self.weigh_pairs(scores.sum, q_rows, k_rows)
                    if self.by_own:
                        self.scale(scores.sum, scaled, k_rows if self.k.by_own else None, by_column=True)
                    load(weights, scaled)
                    if self.by_own:
                        self.scale(scores.sum, scaled, q_rows if self.q.by_own else None, by_column=False)
                        load(of_keys, scaled)
                    self.q.weigh_rows(of_q.sum, q_rows)
                    self.k.weigh_rows(of_k.sum, k_rows)
                    finish(self.q, block, q, k, weights, of_q, pairs, q_rows, q_total, place, column0, shared_head)
                    finish(self.k, block, k, q, of_keys, of_k, pairs, k_rows, k_total, place, column0, shared_head)
                if sums_heads:
                    T.copy(q_total, self.q.window(buffers, batch, shared_head, index * chunk, column0))
                    T.copy(k_total, self.k.window(buffers, batch, shared_head, index * chunk, column0))

        return build("chunk_dq_dk", self.parameters(), body)

    def stays(self, tile: SourceTile) -> bool:
        """Is a tile of q or k the same for all heads that a block takes?"""
        return self.heads > 1 and not tile.source.elementwise

    def state_window(self, block: Block, side: _Side, index: Any, inner0: Any, column0: Any) -> Any:
        states = block.buffers[side.states]
        return states[block.batch, block.head, index, column0 : column0 + self.width, inner0 : inner0 + self.inner]

    def find_factors(self, block: Block, q_rows: Rows, k_rows: Rows) -> None:
        """v's factor and, where they have one, q's and k's; the row weights of both sides."""
        if self.k.by_row:
            block.factors(k_rows.x, self.k.x)
        for side, rows in ((self.q, q_rows), (self.k, k_rows)):
            if side.own is not None and side.by_own:
                block.factors(rows.own, side.own)
            side.find_row_weights(block, rows)

    def weigh_pairs(self, scores: Any, q_rows: Rows, k_rows: Rows) -> None:
        """scores become weights, but for the factors of q and k; 0 where the query comes before the key."""

        def entry(i: Any, j: Any) -> None:
            value = scores[i, j]
            if self.k.by_row:
                value = value * k_rows.x[j]
            if self.q.decays:
                value = value * T.exp2(q_rows.sums[i] - q_rows.sums[j])
            store(scores, T.if_then_else(i >= j, value, 0.0), i, j)

        over_pairs(self.tile.chunk, self.tile.chunk, entry)

    def scale(self, scores: Any, scaled: Any, rows: Rows | None, by_column: bool) -> None:
        """scaled = the weights with the factors of the others that they are multiplied with."""

        def entry(i: Any, j: Any) -> None:
            value = scores[i, j]
            store(scaled, value if rows is None else value * rows.own[j if by_column else i], i, j)

        over_pairs(self.tile.chunk, self.tile.chunk, entry)
