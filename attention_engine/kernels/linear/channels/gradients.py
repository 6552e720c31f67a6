"""The gradients of q, k and of each channel's decay in a chunk, from the states before it and the gradients after it.

With w_ij = do_i . v_j, S the state before the chunk, dS the gradient of that after it, g the sums of decays, G the last
one:

    dq_i = exp2(g_i) (do_i S^T) + sum over j <= i of w_ij k_j exp2(g_i - g_j)
    dk_j = exp2(G - g_j) (v_j dS^T) + sum over i >= j of w_ij q_i exp2(g_i - g_j)

Pairs meet level by level (see common.py): with X the level's tile and W its weights, (W + W^T) X is what its queries
and keys get of each other. A decay scales what came before its token for all from the token on:

    da_t = exp2(G) <S, dS> + sum over i >= t of q_i dq_i by S + sum over j < t of k_j dk_j by dS + pairs with j < t <= i

The last is the sum from t on of what pairs add to q_i dq_i less k_j dk_j; both are made of the same rounded numbers, so
that pairs which lie within cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import DECAY_LIMIT, LinearProblem, LinearProgram, LinearTile, channel_tiles, tiled
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Buffers,
    Operand,
    accumulate,
    build,
    loop,
    named,
    over_pairs,
    store,
)
from attention_engine.kernels.linear.channels.common import (
    APART_BY_COLUMNS,
    ExactOperand,
    Levels,
    ModifiedTile,
    OwnGradient,
    RawTile,
    RowSums,
    WeighedTile,
    load_exact,
    load_sums,
    multiply_exact,
    read_names,
    spaced_rows,
    sums_tile,
)
from attention_engine.kernels.linear.channels.decays import decay_entry
from attention_engine.kernels.linear.common import (
    Block,
    LinearSizes,
    Source,
    StateOperand,
    add_state_product,
    copy,
    load_state,
)
from attention_engine.kernels.methods import macro_method
from attention_engine.passes.mods import differentiate_mod
from attention_engine.plan import linear_buffers


def channel_gradients(
    problem: LinearProblem, program: LinearProgram, tile: LinearTile, of_decay: bool, parts: int,
    reads: tuple[tuple[Expr, ...], tuple[Expr, ...], tuple[Expr, ...]],
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, do, [decay], custom..., sums, states, d_states, [overlap], dq, dk, [d_decay],
    row sums...).

    dq, dk: (batch, length, heads, dim) with one head for each head of v, in the tensors' dtype, fp32 where heads are
    still to be summed. Where `of_decay`: overlap as states.py leaves it, in so many `parts`, and d_decay, fp32, like
    decay. reads: of q, k and decay, as in rows.py.
    """
    return _Gradients(problem, program, tile, of_decay, parts, reads).build()


@dataclass(frozen=True)
class _Meeting:
    """Where a level's pairs meet: their weights, as an operand and in registers; tokens as they meet; what moves."""

    weights: ExactOperand
    masked: Any
    tile: WeighedTile
    moved: Any


class _Gradients:
    """The kernel under construction: what all its parts know."""

    def __init__(
        self, problem: LinearProblem, program: LinearProgram, tile: LinearTile, of_decay: bool, parts: int,
        reads: tuple[tuple[Expr, ...], tuple[Expr, ...], tuple[Expr, ...]],
    ) -> None:  # fmt: skip
        self.problem, self.program, self.tile, self.of_decay, self.parts = problem, program, tile, of_decay, parts
        self.sizes, self.chunk = LinearSizes(problem, tile.chunk), tile.chunk
        self.inner = min(tile.inner, padded(problem.dim_v))
        self.width, self.tiles = min(tile.outer, padded(problem.dim)), channel_tiles(problem, tile)
        self.sources = {n: Source(n, problem, program) for n in ("q", "k", "v", "do")}
        self.of_q, self.of_k = OwnGradient(program, "q", reads[0]), OwnGradient(program, "k", reads[1])
        self.by_decay = differentiate_mod(program, "decay")
        names = read_names("decay", reads[2])
        self.decay_reads = dict(zip(names, (e for r, e in self.by_decay.reads if r in reads[2]), strict=True))

    def parameters(self) -> dict[str, Any]:
        counts = len(self.of_q.reads), len(self.of_k.reads), len(self.decay_reads)
        arguments = linear_buffers.channel_gradients(self.problem, self.tile, self.of_decay, self.parts, counts)
        return self.sizes.declare(arguments)

    def build(self) -> Any:
        return build("channel_gradients", self.parameters(), self.run)

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for a chunk of tokens and a tile of channels of a head."""
        problem, sizes, chunk, inner, width = self.problem, self.sizes, self.chunk, self.inner, self.width
        grid = self.tiles * sizes.chunks, problem.heads, sizes.batch
        with T.Kernel(*grid, threads=self.tile.threads) as (block_index, head, batch):
            index, part = block_index // self.tiles, block_index % self.tiles
            d0 = part * width
            block = Block(buffers, sizes, batch, head, index * chunk)
            do, v = (ModifiedTile(self.sources[n], chunk, inner) for n in ("do", "v"))
            before, after = (StateOperand(n, problem, (width, inner)) for n in ("before", "after"))
            q, k = (RawTile(self.sources[n], chunk, width) for n in ("q", "k"))
            weights = Accumulator("weights", problem, (chunk, chunk))
            dq, dk = (Accumulator(n, problem, (chunk, width)) for n in ("dq", "dk"))
            level_weights = ExactOperand("level_weights", problem, (chunk, chunk))
            masked = named("masked", T.alloc_fragment([chunk, chunk], FLOAT))
            meeting = WeighedTile("meeting", problem, chunk, width)
            moved = named("moved", T.alloc_fragment([chunk, width], FLOAT))
            sums = sums_tile(chunk, width)
            met = _Meeting(level_weights, masked, meeting, moved)
            own = named("own_weights", T.alloc_shared([chunk], FLOAT))
            levels, decays = Levels(chunk, sums), _Decays(self, block) if self.of_decay else None
            T.clear(weights.sum)
            T.clear(dq.sum)
            T.clear(dk.sum)
            for step in loop(tiled(problem.dim_v, inner), 0):
                v0 = step * inner
                do.load(block, v0)
                v.load(block, v0)
                load_state(before, buffers["states"][batch, head, index, d0 : d0 + width, v0 : v0 + inner])
                load_state(after, buffers["d_states"][batch, head, index, d0 : d0 + width, v0 : v0 + inner])
                accumulate(do.operand, v.operand, weights, transpose_B=True)
                add_state_product(do.operand, before, dq, transpose_B=True)
                add_state_product(v.operand, after, dk, transpose_B=True)
            q.load(block, d0)
            k.load(block, d0)
            load_sums(sums, block, d0, width)
            self.weigh_states(dq.sum, dk.sum, sums)
            if decays is not None:
                decays.start(q, k, dq.sum, dk.sum)
            for i, j in T.Parallel(chunk, chunk):
                if i == j:
                    own[i] = weights.sum[i, j]
            for level in loop(levels.count, 0):
                self.meet(levels, level, met, weights, (q, k))
                self.add_level(levels, level, moved, dq.sum, dk.sum)
                if decays is not None:
                    decays.add_level(levels, level, moved, meeting.operand)
            self.add_own(own, q, k, dq.sum, dk.sum)
            sums_of_rows = self.row_sums()
            if decays is not None:
                decays.finish(index, d0, sums_of_rows, part)
            self.of_q.finish(q, dq.sum, sums_of_rows, part)
            self.of_k.finish(k, dk.sum, sums_of_rows, part)
            stop, end = (index + 1) * chunk, d0 + width
            T.copy(dq.sum, buffers["dq"][batch, index * chunk : stop, head, d0:end])
            T.copy(dk.sum, buffers["dk"][batch, index * chunk : stop, head, d0:end])

    @macro_method
    def meet(
        self, levels: Levels, level: Any, of: _Meeting, weights: Accumulator, qk: tuple[RawTile, RawTile]
    ) -> None:  # fmt: skip
        """What the pairs of a level move, each token from the other."""
        for i, j in T.Parallel(self.chunk, self.chunk):
            of.masked[i, j] = T.if_then_else(levels.meet(level, i, j), weights.sum[i, j], 0.0)
        load_exact(of.weights, of.masked)
        levels.fill(of.tile, level, *qk)
        T.clear(of.moved)
        multiply_exact(of.weights, of.tile.operand, of.moved)
        multiply_exact(of.weights, of.tile.operand, of.moved, transpose_A=True)

    def row_sums(self) -> RowSums | None:
        """Room for sums of rows, where any are asked for."""
        asked = bool(self.of_q.reads or self.of_k.reads or self.decay_reads)
        return RowSums(self.chunk, self.width) if asked else None

    def weigh_states(self, dq: Any, dk: Any, sums: Any) -> None:
        """What decay leaves of the states' parts."""
        last = self.chunk - 1

        def entry(i: Any, d: Any) -> None:
            store(dq, dq[i, d] * T.exp2(sums[i, d]), i, d)
            store(dk, dk[i, d] * T.exp2(sums[last, d] - sums[i, d]), i, d)

        over_pairs(self.chunk, self.width, entry)

    def add_level(self, levels: Levels, level: Any, moved: Any, dq: Any, dk: Any) -> None:
        """What the level's pairs add; `moved` is left as it is at the tokens themselves."""

        def entry(i: Any, d: Any) -> None:
            value = moved[i, d] * T.exp2(levels.distance(level, i, d))
            query = levels.is_query(level, i)
            store(dq, dq[i, d] + T.if_then_else(query, value, 0.0), i, d)
            store(dk, dk[i, d] + T.if_then_else(query, 0.0, value), i, d)

        over_pairs(self.chunk, self.width, entry)

    def add_own(self, own: Any, q: RawTile, k: RawTile, dq: Any, dk: Any) -> None:
        """What a token's key adds to its own query's gradient, and the reverse."""

        def entry(i: Any, d: Any) -> None:
            store(dq, dq[i, d] + own[i] * k.value(i, d), i, d)
            store(dk, dk[i, d] + own[i] * q.value(i, d), i, d)

        over_pairs(self.chunk, self.width, entry)


class _Decays:
    """The gradient of decays: what tokens give to decays up to them (later), and to those after them (earlier)."""

    def __init__(self, kernel: _Gradients, block: Block) -> None:
        self.kernel, self.block, self.shape = kernel, block, (kernel.chunk, kernel.width)
        self.later = named("later", spaced_rows(*self.shape, FLOAT, APART_BY_COLUMNS))
        self.earlier = named("earlier", spaced_rows(*self.shape, FLOAT, APART_BY_COLUMNS))

    def start(self, q: RawTile, k: RawTile, dq: Any, dk: Any) -> None:
        """What states give; dq and dk are the states' parts still."""

        def entry(i: Any, d: Any) -> None:
            store(self.later, q.value(i, d) * dq[i, d], i, d)
            store(self.earlier, k.value(i, d) * dk[i, d], i, d)

        over_pairs(*self.shape, entry)

    def add_level(self, levels: Levels, level: Any, moved: Any, meeting: Operand) -> None:
        """What the level's pairs give."""

        def entry(i: Any, d: Any) -> None:
            x = T.cast(meeting.whole[i, d], FLOAT)
            x = x if meeting.low is None else x + meeting.low[i, d]
            sign = T.if_then_else(levels.is_query(level, i), 1.0, -1.0)
            store(self.later, self.later[i, d] + sign * x * moved[i, d], i, d)

        over_pairs(*self.shape, entry)

    def finish(self, index: Any, d0: Any, rows: RowSums | None, part: Any) -> None:
        """Sums along the tokens, through the mod, into d_decay and the sums of reads."""
        _cumsum(self.later, True)
        _cumsum(self.earlier, False)
        kernel, block = self.kernel, self.block

        def total(i: Any, d: Any) -> Any:
            column = T.min(d0 + d, kernel.problem.dim - 1)
            overlaps = block.buffers["overlap"]
            overlap = sum(overlaps[block.batch, block.head, index, p, column] for p in range(kernel.parts))
            before = T.if_then_else(i > 0, self.earlier[T.max(i - 1, 0), d], 0.0)
            return overlap + before + self.later[i, d]

        def at(expr: Expr, i: Any, d: Any) -> Any:
            x = decay_entry(block, i, d0 + d)
            kept = block.splice(i, x)(kernel.program.decay)[0] > DECAY_LIMIT
            (value,) = block.splice(i, x, T.if_then_else(kept, total(i, d), 0.0))(expr)
            inside = T.And(block.token0 + i < block.sizes.length, d0 + d < kernel.problem.dim)
            return T.if_then_else(inside, value, 0.0)

        for name, expr in kernel.decay_reads.items():
            assert rows is not None
            rows.keep(block, lambda i, d, expr=expr: at(expr, i, d), name, part)
        gradient = named("d_decay_tile", T.alloc_fragment(self.shape, FLOAT))
        over_pairs(*self.shape, lambda i, d: store(gradient, at(kernel.by_decay.x, i, d), i, d))
        stop = block.token0 + kernel.chunk
        copy(gradient, block.buffers["d_decay"][block.batch, block.token0 : stop, block.head, d0 : d0 + kernel.width])


@T.macro
def _cumsum(buffer: Any, reverse: bool) -> None:
    T.cumsum(buffer, dim=0, reverse=reverse)
