"""What the kernels of linear attention share: tensors by name, mods on the way in, decays and factors of rows.

Tokens are cut into chunks. `sums` holds, for each (batch, head, token), the sum of log2 decays from the chunk's first
token to this one; only differences of it are exponentiated, later less earlier, so nothing overflows where decays are
at most 1. It is padded to whole chunks by tokens that keep everything. Where results are as exact as fp32, it comes in
two parts: of a sum of -1000 alone, what is left of a token just before would have four digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tilelang.language as T

from attention_engine.arch import H100
from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import GRADIENT, LinearProblem, LinearProgram, LinearTile, StatesForm, X
from attention_engine.ir.program import Q_IDX, B, H
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Operand,
    Sizes,
    accumulate,
    load,
    multiply,
    named,
    over_pairs,
    over_rows,
    reader,
    store,
)
from attention_engine.kernels.splice import Splice
from attention_engine.passes.differentiate import ONE
from attention_engine.passes.mods import row_factor
from attention_engine.passes.simplify import mul


@T.macro
def copy(source: Any, target: Any) -> None:
    """T.copy for plain Python, where a bare one would not be noted."""
    T.copy(source, target)


@T.macro
def reduce_sum(source: Any, target: Any, dim: int) -> None:
    """T.reduce_sum for plain Python."""
    T.reduce_sum(source, target, dim=dim)


LOG2_E = 1.4426950408889634
COPYING = 128  # threads that TileLang adds where warps of their own copy; they keep 24 registers each


@T.macro
def share_sm(tile: LinearTile) -> None:
    """Has registers left for `tile.blocks` blocks on an SM.

    Where warps of their own copy, they hand registers to the others; TileLang's default, 240 for each of those, is more
    than several blocks have, and asking for more than there is waits forever.
    """
    T.annotate_min_blocks_per_sm(tile.blocks)
    if tile.blocks > 1 and tile.specialize and tile.stages > 0:
        T.annotate_producer_reg_dealloc(24)
        T.annotate_consumer_reg_alloc(consumer_registers(tile))


def consumer_registers(tile: LinearTile) -> int:
    """What a computing thread may have, in steps of 8, where copying ones keep 24."""
    threads = tile.threads + COPYING
    at_launch = H100().registers_per_sm // (tile.blocks * threads) // 8 * 8
    return min((at_launch * threads - 24 * COPYING) // tile.threads // 8 * 8, 240)


class LinearSizes(Sizes):
    """The run-time sizes of a linear attention: one length for all, cut into chunks."""

    def __init__(self, problem: LinearProblem, chunk: int) -> None:
        super().__init__(problem)
        self.problem, self.chunk = problem, chunk
        self.length = self.q = self.kv = self.variable("length")

    @property
    def chunks(self) -> Any:
        """How many chunks there are."""
        return T.ceildiv(self.length, self.chunk)

    def part(self, block_index: Any, tiles: int, batch: Any, pieces: bool) -> Part:
        """What a block walks along: a batch, or a piece of it. block_index: among the tiles of all pieces."""
        if not pieces:
            return Part(block_index, (batch,), 0, self.chunks)
        piece, each = block_index // tiles, self.variable("piece_length") // self.chunk
        first = T.max(piece * each, 0)  # it is: so guards of indices go
        return Part(block_index % tiles, (batch, piece), first, T.min(each, self.chunks - first))

    def walks(self, tiles: int, pieces: bool) -> Any:
        """How many blocks walk along a head's tokens. Tiles of a piece stand side by side: their number is known, so
        that no block divides by another."""
        return self.variable("pieces") * tiles if pieces else tiles


@dataclass(frozen=True)
class Part:
    """Tokens of a batch that are walked along. tile: which of a head's; at: where the first and last state are, but for
    the head; first: its first chunk; chunks: how many it has."""

    tile: Any
    at: tuple[Any, ...]
    first: Any
    chunks: Any

    def chunk(self, step: Any, reverse: bool) -> Any:
        """The chunk of a step."""
        if len(self.at) == 1:
            return self.chunks - 1 - step if reverse else step
        return self.first + (self.chunks - 1 - step if reverse else step)

    def state(self, states: Any, head: Any, rows: Any, columns: Any) -> Any:
        """A window of its first or last state, or an entry."""
        return states[(*self.at, head, rows, columns)]


class Source:
    """One of q, k, v, do as a kernel loads it: its tiles, its mod, and the factor of a row where that is all there is.

    A mod that is a factor of the row is left to the weights; any other is computed where the tile is loaded.
    """

    def __init__(self, name: str, problem: LinearProblem, program: LinearProgram) -> None:
        self.name, self.problem = name, problem
        self.dim = problem.dim_of(name)
        self.heads = problem.heads_of(name)
        self.mod = X if name == "do" else program.mod(name)
        self.factor = row_factor(self.mod)
        self.elementwise = self.factor is None

    def head_of(self, head: Any) -> Any:
        """The tensor's head that a value head reads."""
        group = self.problem.heads // self.heads
        return head if group == 1 else head // group


class Block:
    """Where a kernel's block is: batch, value head, first token of its chunk; and what it reads there."""

    def __init__(self, buffers: Any, sizes: LinearSizes, batch: Any, head: Any, token0: Any) -> None:
        self.buffers, self.sizes, self.batch, self.head, self.token0 = buffers, sizes, batch, head, token0

    def splice(self, i: Any, x: Any = None, gradient: Any = None) -> Splice:
        """Splices at token i of the chunk."""
        values = {B: self.batch, H: self.head, Q_IDX: self.token0 + i}
        if x is not None:
            values[X] = x
        if gradient is not None:
            values[GRADIENT] = gradient
        return Splice(values, reader(self.buffers))

    def window(self, source: Source, column0: Any, columns: int) -> Any:
        """The chunk's tile of a tensor; what lies outside it reads as 0."""
        rows = self.sizes.chunk
        buffer = self.buffers[source.name]
        return buffer[
            self.batch, self.token0 : self.token0 + rows, source.head_of(self.head), column0 : column0 + columns
        ]

    def inside(self, source: Source, i: Any, column: Any, columns: int) -> Any:
        """Does entry (i, column) of a tile exist? Where it doesn't, no mod may make something of its 0."""
        within = self.token0 + i < self.sizes.length
        return within if source.dim % columns == 0 else T.And(within, column < source.dim)

    def modify(self, source: Source, raw: Any, target: Any, column0: Any, columns: int) -> None:
        """target = the mod of the raw tile."""

        def entry(i: Any, d: Any) -> None:
            x = T.cast(raw[i, d], FLOAT)
            (value,) = self.splice(i, x)(source.mod)
            store(target, T.if_then_else(self.inside(source, i, column0 + d, columns), value, 0.0), i, d)

        over_pairs(self.sizes.chunk, columns, entry)

    def factors(self, target: Any, *sources: Source) -> None:
        """target[i] = the product of the sources' row factors at token i; past the end 0."""
        self.rows(target, lambda i: self.splice(i)(product_of(*sources))[0])

    def rows(self, target: Any, value: Callable[[Any], Any]) -> None:
        """target[i] = value(i), past the end 0; target is in shared memory.

        By way of registers: what goes straight from memory to shared memory, TileLang's copying warps take over, and
        they write the next chunk's as soon as the tiles loaded beside it are read.
        """
        held = T.alloc_fragment([self.sizes.chunk], FLOAT)

        def entry(i: Any) -> None:
            store(held, T.if_then_else(self.token0 + i < self.sizes.length, value(i), 0.0), i)

        over_rows(self.sizes.chunk, entry)
        copy(held, target)


class DecaySums:
    """The sums of a chunk's log2 decays, in shared memory."""

    def __init__(self, problem: LinearProblem, chunk: int, name: str) -> None:
        self.chunk = chunk
        self.whole = named(name, T.alloc_shared([chunk], FLOAT))
        self.low = named(f"{name}_low", T.alloc_shared([chunk], FLOAT)) if problem.splits else None

    def upto(self, i: Any) -> Any:
        """The sum at token i."""
        return self.whole[i] if self.low is None else self.whole[i] + self.low[i]

    def between(self, earlier: Any, later: Any) -> Any:
        """The sum at one token less that at another: what stands between them."""
        difference = self.whole[later] - self.whole[earlier]
        return difference if self.low is None else difference + (self.low[later] - self.low[earlier])


@T.macro
def load_decays(sums: DecaySums, buffers: Any, batch: Any, head: Any, index: Any) -> None:
    """Fills the sums of a chunk."""
    if sums.low is None:
        T.copy(buffers["sums"][batch, head, index * sums.chunk : (index + 1) * sums.chunk], sums.whole)
    else:
        T.copy(buffers["sums"][0, batch, head, index * sums.chunk : (index + 1) * sums.chunk], sums.whole)
        T.copy(buffers["sums"][1, batch, head, index * sums.chunk : (index + 1) * sums.chunk], sums.low)


@dataclass(frozen=True)
class StatesWalk:
    """A walk along chunks that keeps states, or in reverse their gradients: what all parts of its kernel know."""

    problem: LinearProblem
    program: LinearProgram
    tile: LinearTile
    form: StatesForm

    @cached_property
    def sizes(self) -> LinearSizes:
        """The lengths."""
        return LinearSizes(self.problem, self.tile.chunk)

    @property
    def names(self) -> tuple[str, str]:
        """The tensors whose products are summed."""
        return ("q", "do") if self.form.reverse else ("k", "v")


def state_before(block: Block, form: StatesForm, chunk: Any, at: tuple[Any, Any], kept: Any) -> Any:
    """An entry of the state before a chunk, of which `kept` is rounded: with `initial`, the first unrounded."""
    problem, (i, j), kept = block.sizes.problem, at, T.cast(kept, FLOAT)
    if not form.initial:
        return kept
    inside = T.And(chunk == 0, T.And(i < problem.dim, j < problem.dim_v))
    first = (block.batch, 0, block.head) if form.pieces else (block.batch, block.head)
    place = (*first, T.min(i, problem.dim - 1), T.min(j, problem.dim_v - 1))
    return T.if_then_else(inside, block.buffers["initial"][place], kept)


def product_of(*sources: Source) -> Expr:
    """The product of the row factors of those sources that have one."""
    return mul(ONE, *(s.factor for s in sources if s.factor is not None))


class SourceTile:
    """A chunk's tile of a source in shared memory, ready for products.

    Raw where the mod is a factor at most, else through the mod (in fp32, rounded once).
    """

    def __init__(self, source: Source, chunk: int, columns: int) -> None:
        self.source, self.columns = source, columns
        shape = (chunk, columns)
        self.operand = Operand(source.name, source.problem, shape)
        self.raw: Any = None
        self.modified: Any = None
        if source.elementwise:
            self.raw = named(f"{source.name}_raw", T.alloc_shared(shape, source.problem.dtype))
            self.modified = named(f"{source.name}_modified", T.alloc_fragment(shape, FLOAT))

    def value(self, i: Any, d: Any) -> Any:
        """An entry as products read it, in fp32."""
        whole = T.cast(self.operand.whole[i, d], FLOAT)
        return whole if self.operand.low is None else whole + self.operand.low[i, d]

    def raw_value(self, i: Any, d: Any) -> Any:
        """An entry before the mod, in fp32."""
        return self.value(i, d) if self.raw is None else T.cast(self.raw[i, d], FLOAT)


class HeldTile:
    """A chunk's tile of a source in registers, as it came: for what only meets results of the same layout, once.

    In shared memory, warps that copy would write the next chunk's tile there, and its reads, which meet in banks, would
    have to end before that (codegen/patches/ended_reads.py).
    """

    def __init__(self, source: Source, chunk: int, columns: int) -> None:
        self.source = source
        self.held = named(f"{source.name}_held", T.alloc_fragment((chunk, columns), source.problem.dtype))

    def raw_value(self, i: Any, d: Any) -> Any:
        """An entry before the mod, in fp32."""
        return T.cast(self.held[i, d], FLOAT)


@T.macro
def load_source(tile: SourceTile, block: Block, column0: Any) -> None:
    """Fills the tile with columns from column0 on."""
    if tile.source.elementwise:
        T.copy(block.window(tile.source, column0, tile.columns), tile.raw)
        block.modify(tile.source, tile.raw, tile.modified, column0, tile.columns)
        load(tile.operand, tile.modified)
    else:
        load(tile.operand, block.window(tile.source, column0, tile.columns))


class StateOperand:
    """A tile of a state as a product reads it.

    fp16 ends at 65504, which a sum over tokens need not. There the tile is divided by a power of two, by which its
    largest number comes near that end, and `add_state_product` multiplies what the product makes. bf16 and fp32 hold
    what a state may be.
    """

    def __init__(self, name: str, problem: LinearProblem, shape: tuple[int, int]) -> None:
        self.operand, self.shape = Operand(name, problem, shape), shape
        self.scale: Any = None
        if problem.dtype == "float16":
            self.held = named(f"{name}_held", T.alloc_fragment(shape, FLOAT))
            self.scale = named(f"{name}_scale", T.alloc_fragment([1], FLOAT))
            self.of_rows, self.each = (T.alloc_fragment([shape[0]], FLOAT) for _ in range(2))
            self.across = T.alloc_shared([shape[0]], FLOAT)  # from the layout of rows to one that reduces over them


FP16_ROOM = 2.0**14  # what a tile's largest number, between 1 and 2 of its power of two, may be multiplied with


@T.macro
def load_state(state: StateOperand, source: Any) -> None:
    """Fills the operand from fp32 numbers (a window of states, or a fragment, which stays as it is)."""
    if state.scale is None:
        load(state.operand, source)
    else:
        T.copy(source, state.held)
        T.reduce_absmax(state.held, state.of_rows, dim=1)
        T.copy(state.of_rows, state.across)
        T.copy(state.across, state.each)
        T.reduce_max(state.each, state.scale, dim=0)
        for i in T.Parallel(1):
            state.scale[i] = power_of_two(state.scale[i]) / FP16_ROOM
        for i, j in T.Parallel(state.shape[0], state.shape[1]):
            state.held[i, j] *= 1.0 / state.scale[0]
        load(state.operand, state.held)


def power_of_two(value: Any) -> Any:
    """The largest power of two up to a positive number; 2**-80 for less, whose inverse is a number still."""
    bits = T.reinterpret(T.max(value, T.float32(2.0**-80)), "int32")
    return T.reinterpret(T.bitwise_and(bits, T.int32(0x7F800000)), "float32")


@T.macro
def add_state_product(
    a: Operand, state: StateOperand, c: Accumulator, transpose_B: bool = False, whole_rows: bool = True
) -> None:
    """c += a @ the state."""
    if state.scale is None:
        accumulate(a, state.operand, c, transpose_B=transpose_B, whole_rows=whole_rows)
    else:
        made = T.alloc_fragment(c.shape, FLOAT)
        T.clear(made)
        multiply(a, state.operand, made, transpose_B=transpose_B, whole_rows=whole_rows)
        for i, j in T.Parallel(c.shape[0], c.shape[1]):
            c.sum[i, j] += made[i, j] * state.scale[0]
