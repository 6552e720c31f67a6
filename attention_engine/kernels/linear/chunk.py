"""What a chunk computes from its own tokens and a state: the output, and the gradients of q, k and v.

All four are one form. With rows x, columns y, others z and a state M:

    result = row weight * (x M) + sum over columns of (decay * (x . y)) z

    result  x   y   z   M                                       the rows are
    o       q   k   v   the state before the chunk              queries: columns up to the row
    dq      do  v   k   the same, transposed                    queries
    dk      v   do  q   the gradient of the state after it, transposed    keys: columns from the row on
    dv      k   q   do  the same                                keys

The row weight is exp(g_i) of a query, exp(g_T - g_j) of a key. A block makes a tile of the result's columns; the summed
dim runs in steps. Gradients of heads that share a q or k are summed in registers, up to `tile.heads` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, topological
from attention_engine.ir.linear import GRADIENT, LinearProblem, LinearProgram, LinearTile, X
from attention_engine.ir.problem import padded
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Operand,
    build,
    load,
    loop,
    multiply,
    named,
    over_pairs,
    over_rows,
    store,
)
from attention_engine.kernels.linear.common import (
    Block,
    LinearSizes,
    Source,
    SourceTile,
    add_product,
    copy,
    load_source,
    reduce_sum,
    tiled,
)
from attention_engine.passes.differentiate import ONE, differentiate
from attention_engine.passes.mods import differentiate_mod
from attention_engine.passes.simplify import mul


@dataclass(frozen=True)
class Role:
    """One row of the table above; own: the tensor whose gradient the result is (None: the output)."""

    name: str
    rows: str
    columns: str
    others: str
    own: str | None
    over_keys: bool
    transposed: bool


ROLES = {
    r.name: r
    for r in (
        Role("output", "q", "k", "v", None, over_keys=False, transposed=False),
        Role("dq", "do", "v", "k", "q", over_keys=False, transposed=True),
        Role("dk", "v", "do", "q", "k", over_keys=True, transposed=True),
        Role("dv", "k", "q", "do", "v", over_keys=True, transposed=False),
    )
}


@dataclass(frozen=True)
class ReadSum:
    """What rows add to the gradient of a read: slope of the row * sum over columns of the summand (of X, GRADIENT)."""

    read: Expr
    summand: Expr
    slope: Expr


def read_sums(program: LinearProgram, own: Source, reads: tuple[Expr, ...]) -> list[ReadSum]:
    """How the gradients of these reads are summed."""
    if own.factor is not None:  # d(f x) = x df, and df is the row's
        slopes = differentiate(own.factor, reads)
        return [ReadSum(r, mul(X, GRADIENT), slope) for r, slope in zip(reads, slopes, strict=True)]
    return [ReadSum(r, e, ONE) for r, e in differentiate_mod(program, own.name).reads if r in reads]


def _reads_x(expr: Expr) -> bool:
    return X in topological(expr)


def heads_a_block(problem: LinearProblem, name: str, tile: LinearTile) -> int:
    """How many of the heads that share one head of a tensor a block sums: the largest divisor that the tile allows."""
    group = problem.heads // problem.heads_of(name)
    return max(n for n in range(1, group + 1) if group % n == 0 and n <= max(tile.heads, 1))


def parts_of(problem: LinearProblem, role: Role, tile: LinearTile) -> int:
    """How many partial gradients of a shared head blocks leave to be added up; 1: the gradient itself."""
    if role.own is None:
        return 1
    return problem.heads // problem.heads_of(role.own) // heads_a_block(problem, role.own, tile)


def column_tiles(problem: LinearProblem, role: Role, tile: LinearTile) -> tuple[int, int]:
    """The width of a tile of the result, and how many there are."""
    dim = problem.dim if role.transposed else problem.dim_v
    width = min(tile.outer, padded(dim))
    return width, tiled(dim, width)


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


class _Chunk:
    """The kernel under construction: what all its parts know."""

    def __init__(
        self, problem: LinearProblem, program: LinearProgram, role: Role, tile: LinearTile, decay_rows: bool,
        reads: tuple[Expr, ...],
    ) -> None:  # fmt: skip
        self.problem, self.program, self.role, self.tile = problem, program, role, tile
        self.sizes = LinearSizes(problem, tile.chunk)
        self.x, self.y, self.z = (Source(n, problem, program) for n in (role.rows, role.columns, role.others))
        self.own = Source(role.own, problem, program) if role.own else None
        self.decays = program.decays
        self.decay_rows = decay_rows and self.decays and role.transposed
        self.reads = read_sums(program, self.own, reads) if self.own else []
        self.gradient = differentiate_mod(program, self.own.name).x if self.own and self.own.elementwise else None
        self.needs_own = self.decay_rows or bool(self.reads) or (self.gradient is not None and _reads_x(self.gradient))
        self.inner = min(tile.inner, padded(self.x.dim))
        self.inner_tiles = tiled(self.x.dim, self.inner)
        self.width, self.width_tiles = column_tiles(problem, role, tile)
        self.heads = heads_a_block(problem, role.own, tile) if role.own else 1
        self.parts = parts_of(problem, role, tile)

    def parameters(self) -> dict[str, Any]:
        sizes, problem, role = self.sizes, self.problem, self.role
        names = dict.fromkeys([role.rows, role.columns, role.others, *([role.own] if role.own else [])])
        found = {**sizes.inputs(*names), **sizes.custom()}
        if self.decays:
            found["sums"] = sizes.rows()
        found["states"] = sizes.states()
        heads, dim = problem.heads_of(role.own or "v"), problem.dim_of(role.own or "v")
        shape = [sizes.batch, sizes.length, heads, dim]
        found["result"] = T.Tensor(shape, problem.dtype) if self.parts == 1 else T.Tensor([self.parts, *shape], FLOAT)
        row_names = (["of_state", "of_pairs"] if self.decay_rows else []) + [
            f"read_{n}" for n in range(len(self.reads))
        ]
        found.update({n: T.Tensor([self.width_tiles, *sizes.rows().shape], FLOAT) for n in row_names})
        return found

    def build(self) -> Any:
        tile, problem, sizes, role = self.tile, self.problem, self.sizes, self.role
        chunk, width, inner = tile.chunk, self.width, self.inner
        own_heads = problem.heads_of(role.own or "v")
        rows_whole = tile.in_registers

        @T.macro
        def gather(
            block: Block, index: Any, inner0: Any, column0: Any, x: SourceTile, y: SourceTile, state: Operand,
            scores: Accumulator, result: Accumulator,
        ) -> None:  # fmt: skip
            load_source(x, block, inner0)
            load_source(y, block, inner0)
            load(state, self.state_window(block, index, inner0, column0))
            add_product(x.operand, y.operand, scores, transpose_B=True, rows=rows_whole)
            add_product(x.operand, state, result, transpose_B=role.transposed, rows=rows_whole)

        @T.macro
        def body(buffers: Any) -> None:
            with T.Kernel(
                self.width_tiles * sizes.chunks, own_heads * self.parts, sizes.batch, threads=tile.threads
            ) as (
                place,
                shared_head,
                batch,
            ):
                T.annotate_min_blocks_per_sm(tile.blocks)
                x = SourceTile(self.x, chunk, inner)
                y = SourceTile(self.y, chunk, inner)
                z = SourceTile(self.z, chunk, width)
                own = SourceTile(self.own, chunk, width) if self.needs_own else None
                state = Operand("state", problem, (width, inner) if role.transposed else (inner, width))
                weights = Operand("weights", problem, (chunk, chunk), fragment=tile.in_registers)
                scores = Accumulator("scores", problem, (chunk, chunk))
                pairs = Accumulator("pairs", problem, (chunk, chunk)) if self.decay_rows else None
                result = Accumulator("result", problem, (chunk, width))
                rows = _Rows(chunk, width, self.needs_own)
                total = T.alloc_fragment([chunk, width], FLOAT) if self.heads > 1 else None
                index, column0 = place // self.width_tiles, (place % self.width_tiles) * width
                if self.heads > 1:
                    T.fill(total, 0)
                for number in loop(self.heads, tile.stages if self.inner_tiles == 1 and self.heads > 1 else 0):
                    head = shared_head * self.heads + number
                    block = Block(buffers, sizes, batch, head, index * chunk)
                    if self.decays:
                        T.copy(buffers["sums"][batch, head, index * chunk : (index + 1) * chunk], rows.sums)
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
                    load_source(z, block, column0)
                    if self.needs_own:
                        load_source(own, block, column0)
                    if self.decay_rows:
                        self.sum_state_rows(block, own, result.sum, rows, place)
                        T.clear(pairs.sum)
                        multiply(own.operand, z.operand, pairs.sum, transpose_B=True, rows=rows_whole)
                        self.sum_pairs(block, pairs.sum, scores.sum, rows, place)
                    load(weights, scores.sum)
                    add_product(weights, z.operand, result, rows=rows_whole)
                    if len(self.reads) > 0:
                        self.sum_reads(block, own, result.sum, rows, place)
                    self.chain(block, own, result.sum, rows, column0)
                    if self.heads > 1:
                        for i, d in T.Parallel(chunk, width):
                            total[i, d] += result.sum[i, d]
                final = total if self.heads > 1 else result.sum
                T.copy(final, self.result_window(buffers, batch, shared_head, index * chunk, column0))

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

    def find_factors(self, block: Block, rows: _Rows) -> None:
        """What rows and columns are multiplied with, other than decay."""
        block.factors(rows.x, self.x)
        block.factors(rows.yz, self.y, self.z)
        if self.own is not None and not self.own.elementwise:
            block.factors(rows.own, self.own)
        if self.decays:
            sums, last = rows.sums, self.tile.chunk - 1
            kept = (lambda i: sums[last] - sums[i]) if self.role.over_keys else (lambda i: sums[i])
            block.rows(rows.weights, lambda i: rows.x[i] * T.exp2(kept(i)))
        else:
            rows.weights = rows.x

    def weigh_rows(self, result: Any, rows: _Rows) -> None:
        """result *= the row weight."""
        over_pairs(self.tile.chunk, self.width, lambda i, d: store(result, result[i, d] * rows.weights[i], i, d))

    def weigh_pairs(self, scores: Any, rows: _Rows) -> None:
        """scores become weights; 0 where the query comes before the key."""

        def entry(i: Any, j: Any) -> None:
            value = scores[i, j] * rows.x[i] * rows.yz[j]
            if self.decays:
                sums = rows.sums
                value = value * T.exp2(sums[j] - sums[i] if self.role.over_keys else sums[i] - sums[j])
            store(scores, T.if_then_else(j >= i if self.role.over_keys else i >= j, value, 0.0), i, j)

        over_pairs(self.tile.chunk, self.tile.chunk, entry)

    def own_value(self, own: SourceTile, rows: _Rows, i: Any, d: Any) -> Any:
        """An entry of the own tensor after its mod, as the products take it."""
        value = own.value(i, d)
        return value if own.source.elementwise else value * rows.own[i]

    def sum_state_rows(self, block: Block, own: SourceTile, result: Any, rows: _Rows, place: Any) -> None:
        """of_state = own . result, where the result is the state's part still."""

        def entry(i: Any, d: Any) -> None:
            store(rows.products, result[i, d] * self.own_value(own, rows, i, d), i, d)

        over_pairs(self.tile.chunk, self.width, entry)
        reduce_sum(rows.products, rows.added, 1)
        self.keep_rows(block, rows.added, block.buffers["of_state"], place)

    def sum_pairs(self, block: Block, pairs: Any, weights: Any, rows: _Rows, place: Any) -> None:
        """of_pairs = what a row's pairs add, decayed product of q . k and do . v; pairs: the products of own and z."""
        by_factor = self.own is not None and not self.own.elementwise

        def entry(i: Any, j: Any) -> None:
            value = pairs[i, j] * weights[i, j]
            store(pairs, value * rows.own[i] if by_factor else value, i, j)

        over_pairs(self.tile.chunk, self.tile.chunk, entry)
        reduce_sum(pairs, rows.added, 1)
        self.keep_rows(block, rows.added, block.buffers["of_pairs"], place)

    def sum_reads(self, block: Block, own: SourceTile, result: Any, rows: _Rows, place: Any) -> None:
        """The row sums of the reads' gradients."""
        for number, read in enumerate(self.reads):
            if number == 0 or read.summand is not self.reads[number - 1].summand:

                def entry(i: Any, d: Any, summand: Expr = read.summand) -> None:
                    (value,) = block.splice(i, own.raw_value(i, d), result[i, d])(summand)
                    store(rows.products, value, i, d)

                over_pairs(self.tile.chunk, self.width, entry)
                reduce_sum(rows.products, rows.added, 1)

            def scale(i: Any, slope: Expr = read.slope) -> None:
                (value,) = block.splice(i)(slope)
                inside = block.token0 + i < self.sizes.length
                store(rows.scaled, T.if_then_else(inside, rows.added[i] * value, 0.0), i)

            over_rows(self.tile.chunk, scale)
            self.keep_rows(block, rows.scaled, block.buffers[f"read_{number}"], place)

    def keep_rows(self, block: Block, values: Any, target: Any, place: Any) -> None:
        stop = block.token0 + self.tile.chunk
        copy(values, target[place % self.width_tiles, block.batch, block.head, block.token0 : stop])

    def chain(self, block: Block, own: SourceTile | None, result: Any, rows: _Rows, column0: Any) -> None:
        """The gradient of the own tensor from that of what its mod made of it."""
        if self.own is None or self.own.mod is X:
            return

        def entry(i: Any, d: Any) -> None:
            if self.gradient is None:
                value = result[i, d] * rows.own[i]
            else:
                (value,) = block.splice(i, own.raw_value(i, d) if own else None, result[i, d])(self.gradient)
            store(result, value, i, d)

        over_pairs(self.tile.chunk, self.width, entry)


class _Rows:
    """Numbers of the chunk's tokens, and what they are summed in."""

    def __init__(self, chunk: int, width: int, sums: bool) -> None:
        names = ("sums_tile", "row_factors", "column_factors", "own_factors", "row_weights")
        self.sums, self.x, self.yz, self.own, self.weights = (named(n, T.alloc_shared([chunk], FLOAT)) for n in names)
        self.added = self.scaled = self.products = None
        if sums:
            self.added, self.scaled = (named(n, T.alloc_fragment([chunk], FLOAT)) for n in ("added", "scaled"))
            self.products = named("products", T.alloc_fragment([chunk, width], FLOAT))
