"""A role's whole pass in one walk: a block keeps a tile of one head's M in registers from the first token to the last.

Nothing but the role's tensors and its result meets memory (the form, and M: roles.py). Queries are walked forward, keys
in reverse. A block makes a tile of the result's columns, and the part of M that they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import ROLES, LinearProblem, LinearProgram, LinearTile, Role
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Buffers,
    Operand,
    accumulate,
    build,
    load,
    loop,
    named,
    over_pairs,
    store,
)
from attention_engine.kernels.linear.common import (
    Block,
    HeldTile,
    Part,
    SourceTile,
    StateOperand,
    add_state_product,
    copy,
    load_decays,
    load_source,
    load_state,
    share_sm,
)
from attention_engine.kernels.linear.token.roles import RoleKernel, Rows
from attention_engine.kernels.methods import macro_method
from attention_engine.plan import linear_buffers


def walk(
    problem: LinearProblem, program: LinearProgram, role: str, tile: LinearTile, starts: bool, ends: bool,
    reads: tuple[Expr, ...], pieces: bool = False,
) -> Any:  # fmt: skip
    """The PrimFunc: (x, y, z, [own], custom..., [sums], [piece], [first], result, [last], row sums...).

    first: the state that a forward walk begins with, or the gradient of the last state, where `starts`; last: the state
    (or gradient of the first one) that the walk of "output" or "dv" ends with, where `ends`; both fp32, and with
    `pieces` one for each (states.py). The rest as in chunk.py, with no heads summed.
    """
    return _Walk(problem, program, ROLES[role], tile, starts, ends, reads, pieces).build()


@dataclass(frozen=True)
class _StateStep:
    """What a state moves on by: the tiles of y and z; z as it is weighed, in registers and as an operand, if it is."""

    y: SourceTile
    z: SourceTile
    values: Operand | None
    weighted: Any
    state: Accumulator


class _Walk(RoleKernel):
    """The kernel under construction."""

    def __init__(
        self, problem: LinearProblem, program: LinearProgram, role: Role, tile: LinearTile, starts: bool, ends: bool,
        reads: tuple[Expr, ...], pieces: bool,
    ) -> None:  # fmt: skip
        super().__init__(problem, program, role, tile, False, reads)
        self.starts, self.ends, self.pieces, self.dim = starts, ends, pieces, padded(self.x.dim)
        self.weighs = self.decays or self.by_column
        self.reuses = self.weighs and not problem.splits  # results leave through the weighed others' memory

    def parameters(self) -> dict[str, Any]:
        given = self.role.name, self.tile, self.starts, self.ends, len(self.reads), self.pieces
        return self.sizes.declare(linear_buffers.walk(self.problem, self.program, *given))

    def build(self) -> Any:
        return build(f"walk_{self.role.name}" if self.role.own else "forward", self.parameters(), self.run)

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for a tile of a head's columns."""
        tile, problem, sizes, chunk, width = self.tile, self.problem, self.sizes, self.tile.chunk, self.width
        grid = sizes.walks(self.width_tiles, self.pieces), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block_index, head, batch):
            share_sm(tile)
            x, y = (SourceTile(s, chunk, self.dim) for s in (self.x, self.y))
            z = SourceTile(self.z, chunk, width)
            own = self.held_own()
            weighted = T.alloc_fragment([chunk, width], FLOAT) if self.weighs else None
            values = Operand("values", problem, (chunk, width)) if self.weighs else None
            weights = Operand("weights", problem, (chunk, chunk), fragment=tile.in_registers)
            before = StateOperand("before", problem, (self.dim, width))
            scores = Accumulator("scores", problem, (chunk, chunk))
            result = Accumulator("result", problem, (chunk, width))
            state = Accumulator("state", problem, (self.dim, width))
            staged = self.way_out(values)
            held, made = state.sum, result.sum
            rows = Rows(problem, chunk, width, self.needs_own)
            column_weights = named("column_weights", T.alloc_shared([chunk], FLOAT))
            walked = sizes.part(block_index, self.width_tiles, batch, self.pieces)
            column0 = walked.tile * width
            if self.starts:
                self.first_state(buffers, held, walked, head, column0)
            else:
                T.fill(held, 0)
            for step in loop(walked.chunks, tile.stages):
                index = walked.chunk(step, self.role.over_keys)
                block = Block(buffers, sizes, batch, head, index * chunk)
                load_source(x, block, 0)
                load_source(y, block, 0)
                load_source(z, block, column0)
                if own is not None:
                    T.copy(block.window(own.source, column0, width), own.held)
                if self.decays:
                    load_decays(rows.sums, buffers, batch, head, index)
                self.find_factors(block, rows)
                self.find_column_weights(block, rows, column_weights)
                load_state(before, held)
                T.clear(scores.sum)
                accumulate(x.operand, y.operand, scores, transpose_B=True, whole_rows=tile.in_registers)
                T.clear(made)
                add_state_product(x.operand, before, result, whole_rows=tile.in_registers)
                self.weigh_pairs(scores.sum, rows)
                self.weigh_rows(made, rows)
                load(weights, scores.sum)
                accumulate(weights, z.operand, result, whole_rows=tile.in_registers)
                self.move_state(_StateStep(y, z, values, weighted, state), rows, column_weights)
                if len(self.reads) > 0:
                    self.sum_reads(block, own, made, rows, block_index)
                self.chain(block, own, made, rows, column0)
                T.copy(made, staged)
                T.copy(staged, self.result_window(buffers, block, column0))
            if self.ends:
                T.copy(held, walked.state(buffers["last"], head, slice(0, self.dim), slice(column0, column0 + width)))

    @macro_method
    def move_state(self, step: _StateStep, rows: Rows, column_weights: Any) -> None:
        """The state after the chunk, from the one before it."""
        chunk, width = self.tile.chunk, self.width
        if step.values is not None:
            self.weigh_others(step.z, column_weights if self.decays else rows.yz, step.weighted)
            load(step.values, step.weighted)
        if self.decays:
            for i, j in T.Parallel(self.dim, width):
                step.state.sum[i, j] *= T.exp2(rows.sums.upto(chunk - 1))
        weighed = step.z.operand if step.values is None else step.values
        accumulate(step.y.operand, weighed, step.state, transpose_A=True, whole_rows=False)

    def held_own(self) -> HeldTile | None:
        """The own tensor's tile, where it is read."""
        return HeldTile(self.own, self.tile.chunk, self.width) if self.own is not None and self.needs_own else None

    def way_out(self, values: Operand | None) -> Any:
        """The shared memory by which a result leaves."""
        if values is not None and self.reuses:
            return values.whole
        return T.alloc_shared([self.tile.chunk, self.width], self.problem.dtype)

    def result_window(self, buffers: Any, block: Block, column0: Any) -> Any:
        stop = block.token0 + self.tile.chunk
        return buffers["result"][block.batch, block.token0 : stop, block.head, column0 : column0 + self.width]

    def find_column_weights(self, block: Block, rows: Rows, target: Any) -> None:
        """What decay leaves of a column in M past the chunk, with the column's own factor."""
        if self.decays:
            sums, last = rows.sums, self.tile.chunk - 1
            left = sums.upto if self.role.over_keys else (lambda i: sums.between(i, last))
            block.rows(target, lambda i: rows.yz[i] * T.exp2(left(i)) if self.by_column else T.exp2(left(i)))

    def weigh_others(self, z: SourceTile, weights: Any, weighted: Any) -> None:
        over_pairs(self.tile.chunk, self.width, lambda j, d: store(weighted, z.value(j, d) * weights[j], j, d))

    def first_state(self, buffers: Any, held: Any, walked: Part, head: Any, column0: Any) -> None:
        """held = the first state's tile; of a transposed M, entry by entry."""
        first, last_d, last_e = buffers["first"], self.problem.dim - 1, self.problem.dim_v - 1
        if not self.role.transposed:
            copy(walked.state(first, head, slice(0, self.dim), slice(column0, column0 + self.width)), held)
            return

        def entry(i: Any, j: Any) -> None:
            d, e = column0 + j, i
            value = walked.state(first, head, T.min(d, last_d), T.min(e, last_e))
            store(held, T.if_then_else(T.And(d <= last_d, e <= last_e), value, 0.0), i, j)

        over_pairs(self.dim, self.width, entry)
