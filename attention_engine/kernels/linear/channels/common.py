"""What the kernels of per-channel decay share: sums of decays by channel, tiles with mods, and pairs level by level.

`sums` holds, for each (batch, head, token, channel), the sum of log2 decays from the chunk's first token to this one.
A pair of tokens weighs sum_d q_id k_jd exp2(sums_id - sums_jd), and exp2(-sums_jd) alone would overflow. So a pair
meets at a boundary between its two tokens: with l the highest bit in which i and j differ, that is i with the bits
below l cleared. What decay leaves from j to the boundary, and from there to i, are both at most 1. At level l a token
with bit l set is a query, another is a key: one tile X_l holds both, X_l X_l^T all pairs of the level. A chunk of 2^n
tokens has n levels; a token with itself meets without decay. Only differences of sums, later less earlier, are
exponentiated.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearProblem, LinearProgram, X
from attention_engine.kernels.common import FLOAT, Operand, load, multiply, named, over_pairs, store
from attention_engine.kernels.linear.common import Block, Source, copy, reduce_sum
from attention_engine.passes.mods import differentiate_mod

# Entries that rows in shared memory have beyond a tile's width, so that a warp's threads meet in few banks: a pair of
# entries a thread and 8 rows, as fragments lie; or columns that are summed a row a thread, with pairs still aligned.
APART_BY_PAIRS = 8
APART_BY_COLUMNS = 2


def spaced_rows(rows: int, columns: int, dtype: str, apart: int) -> Any:
    """A tile in shared memory whose rows are that far apart; it is addressed as one without."""
    return T.alloc_shared((rows, columns + apart), dtype)


@T.macro
def copy_spaced(source: Any, target: Any) -> None:
    """T.copy from or to such a tile, which TMA can't: its tiles have no gaps."""
    T.copy(source, target, disable_tma=True)


class RawTile:
    """A chunk's tile of a source in shared memory as it came; its entries are read through the mod, in fp32."""

    def __init__(self, source: Source, chunk: int, columns: int) -> None:
        self.source, self.columns = source, columns
        self.block: Block
        self.column0: Any
        self.raw = named(f"{source.name}_raw", spaced_rows(chunk, columns, source.problem.dtype, APART_BY_PAIRS))

    def load(self, block: Block, column0: Any) -> None:
        """Fills the tile with columns of the block's chunk from column0 on."""
        self.block, self.column0 = block, column0
        window = block.window(self.source, column0, self.columns)
        copy_spaced(window, self.raw[0 : block.sizes.chunk, 0 : self.columns])

    def raw_value(self, i: Any, d: Any) -> Any:
        """An entry before the mod."""
        return T.cast(self.raw[i, d], FLOAT)

    def inside(self, i: Any, d: Any) -> Any:
        """Does the entry exist in the tensor?"""
        return self.block.inside(self.source, i, self.column0 + d, self.columns)

    def value(self, i: Any, d: Any) -> Any:
        """An entry after the mod; 0 outside the tensor."""
        x = self.raw_value(i, d)
        if self.source.mod is X:
            return x
        (value,) = self.block.splice(i, x)(self.source.mod)
        return T.if_then_else(self.inside(i, d), value, 0.0)


class ModifiedTile:
    """A chunk's tile of a source after its mod (rounded once), ready for products."""

    def __init__(self, source: Source, chunk: int, columns: int) -> None:
        self.source, self.columns = source, columns
        shape = (chunk, columns)
        self.operand = Operand(source.name, source.problem, shape)
        self.raw: RawTile | None = None
        self.modified: Any = None
        if source.mod is not X:
            self.raw = RawTile(source, chunk, columns)
            self.modified = named(f"{source.name}_modified", T.alloc_fragment(shape, FLOAT))

    def load(self, block: Block, column0: Any) -> None:
        """Fills the tile with columns of the block's chunk from column0 on."""
        if self.raw is None:
            load(self.operand, block.window(self.source, column0, self.columns))
            return
        self.raw.load(block, column0)
        value, modified = self.raw.value, self.modified
        over_pairs(*self.operand.shape, lambda i, d: store(modified, value(i, d), i, d))
        load(self.operand, modified)


class WeighedTile:
    """A chunk's tile times what decay leaves of each entry, ready for products."""

    def __init__(self, name: str, problem: LinearProblem, chunk: int, columns: int) -> None:
        self.operand = Operand(name, problem, (chunk, columns))
        self.weighed = named(f"{name}_weighed", T.alloc_fragment((chunk, columns), FLOAT))

    def fill(self, value: Any, distance: Any) -> None:
        """Entries value(i, d) * exp2(distance(i, d))."""
        weighed = self.weighed
        over_pairs(*self.operand.shape, lambda i, d: store(weighed, value(i, d) * T.exp2(distance(i, d)), i, d))
        load(self.operand, weighed)


class ExactOperand:
    """A matrix of fp32 numbers as a left operand that loses nothing: in 16 bits, and what that rounding lost beside it.

    Tiles are rounded for their decays already; one more rounding would leave results less exact than plain PyTorch's.
    """

    def __init__(self, name: str, problem: LinearProblem, shape: tuple[int, int]) -> None:
        self.whole = Operand(name, problem, shape)
        self.lost = Operand(f"{name}_lost", problem, shape) if problem.dtype != "float32" else None
        self.shape = shape


@T.macro
def load_exact(operand: ExactOperand, values: Any) -> None:
    """Fills the operand from a fragment, which is used up."""
    load(operand.whole, values)
    if operand.lost is not None:
        for i, j in T.Parallel(operand.shape[0], operand.shape[1]):
            values[i, j] -= T.cast(operand.whole.whole[i, j], FLOAT)
        load(operand.lost, values)


@T.macro
def multiply_exact(a: ExactOperand, b: Operand, c: Any, transpose_A: bool = False) -> None:
    """c += a @ b."""
    multiply(a.whole, b, c, transpose_A=transpose_A)
    if a.lost is not None:
        multiply(a.lost, b, c, transpose_A=transpose_A)


class Levels:
    """How the pairs of a chunk meet; sums: the chunk's tile of decays, in shared memory."""

    def __init__(self, chunk: int, sums: Any) -> None:
        self.sums = sums
        self.count = chunk.bit_length() - 1  # chunks are powers of two

    def is_query(self, level: Any, i: Any) -> Any:
        """Is token i a query at this level?"""
        return T.bitwise_and(T.shift_right(i, level), 1) == 1

    def distance(self, level: Any, i: Any, d: Any) -> Any:
        """The log2 of what decay leaves between the token and its boundary; at most 0."""
        boundary = T.shift_left(T.bitwise_or(T.shift_right(i, level), 1), level)
        to_boundary = self.sums[i, d] - self.sums[boundary - 1, d]
        return T.if_then_else(self.is_query(level, i), to_boundary, -to_boundary)

    def meet(self, level: Any, i: Any, j: Any) -> Any:
        """Do query i and key j meet at this level?"""
        return T.And(i > j, T.shift_right(T.bitwise_xor(i, j), level) == 1)

    def fill(self, tile: WeighedTile, level: Any, q: RawTile, k: RawTile) -> None:
        """Makes the tile X of the level."""

        def value(i: Any, d: Any) -> Any:
            return T.if_then_else(self.is_query(level, i), q.value(i, d), k.value(i, d))

        tile.fill(value, lambda i, d: self.distance(level, i, d))


def sums_tile(chunk: int, columns: int) -> Any:
    """A tile of sums in shared memory, for load_sums."""
    return named("sums_tile", spaced_rows(chunk, columns, FLOAT, APART_BY_PAIRS))


def load_sums(tile: Any, block: Block, column0: Any, columns: int) -> None:
    """Fills a tile with the chunk's sums."""
    copy_spaced(sums_window(block, column0, columns), tile[0 : block.sizes.chunk, 0:columns])


def sums_window(block: Block, column0: Any, columns: int) -> Any:
    """The chunk's tile of sums."""
    stop = block.token0 + block.sizes.chunk
    return block.buffers["sums"][block.batch, block.head, block.token0 : stop, column0 : column0 + columns]


def read_names(name: str, reads: tuple[Expr, ...]) -> list[str]:
    """The parameters that take what a tensor's entries add to the gradients of its mod's reads."""
    return [f"{name}_read_{n}" for n in range(len(reads))]


class OwnGradient:
    """From the gradient of what a mod made to that of the tensor, and of the custom inputs that the mod reads."""

    def __init__(self, program: LinearProgram, name: str, reads: tuple[Expr, ...]) -> None:
        self.name, self.mod = name, program.mod(name)
        by_mod = differentiate_mod(program, name)
        self.x = by_mod.x
        self.reads = dict(zip(read_names(name, reads), (e for r, e in by_mod.reads if r in reads), strict=True))

    @property
    def needed(self) -> bool:
        """Is there more to do than to take the gradient as it is?"""
        return self.mod is not X or bool(self.reads)

    def finish(self, tile: RawTile, gradient: Any, sums: RowSums | None, part: Any) -> None:
        """Notes what rows add to reads, then turns the gradient (a fragment) into the tensor's own."""
        block, shape = tile.block, gradient.shape

        def at(expr: Expr, i: Any, d: Any) -> Any:
            (value,) = block.splice(i, tile.raw_value(i, d), gradient[i, d])(expr)
            return T.if_then_else(tile.inside(i, d), value, 0.0)

        for name, expr in self.reads.items():
            assert sums is not None
            sums.keep(block, lambda i, d, expr=expr: at(expr, i, d), name, part)
        if self.mod is not X:
            over_pairs(*shape, lambda i, d: store(gradient, at(self.x, i, d), i, d))


class RowSums:
    """Sums over the columns of a tile, kept as numbers of tokens."""

    def __init__(self, chunk: int, columns: int) -> None:
        self.shape = (chunk, columns)
        self.products = named("products", T.alloc_fragment((chunk, columns), FLOAT))
        self.added = named("added", T.alloc_fragment([chunk], FLOAT))

    def sum(self, value: Any) -> Any:
        """The sum over d of value(i, d), a fragment."""
        products = self.products
        over_pairs(*self.shape, lambda i, d: store(products, value(i, d), i, d))
        reduce_sum(products, self.added, 1)
        return self.added

    def keep(self, block: Block, value: Any, name: str, part: Any) -> None:
        """buffer[part, batch, head, token] = the sum."""
        stop = block.token0 + self.shape[0]
        copy(self.sum(value), block.buffers[name][part, block.batch, block.head, block.token0 : stop])
