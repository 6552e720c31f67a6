"""What every attention kernel shares: its parameters, windows on tensors, loops that splice, and products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder, _patch_prim_func_attrs
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as tir_builder

from attention_engine.ir.expr import Expr, Op, Type, topological
from attention_engine.ir.linear import LinearProblem
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.kernels.asked import noted, verify_held
from attention_engine.kernels.splice import DTYPES, Reader, Splice, name_value
from attention_engine.passes.row_terms import KV_PLACE
from attention_engine.passes.strength import PARTS
from attention_engine.plan.buffers import BATCH, KEYS, QUERIES, Arguments, Number, Size
from attention_engine.plan.forms import ROW_PAD

FLOAT = "float32"
LANES = 8  # columns of a tile of pairs that the threads of a row share among them, two each
Buffers = Mapping[str, Any]
Inside = Sequence[tuple[Any, Any]]  # (index, length of its axis)
Corners = tuple[tuple[Any, Any], tuple[Any, Any]]  # the first query and key of a tile, and the last


def build(name: str, parameters: Mapping[str, Any], body: Callable[[Buffers], None]) -> Any:
    """The PrimFunc with these parameters (in order) and this body, a T.macro of the buffers by name."""
    builder = Builder()
    with noted() as asked, builder.prim_func(name):
        buffers = {n: builder.prim_func_arg(n, t) for n, t in parameters.items()}
        body(buffers)
    made = _patch_prim_func_attrs(builder.get(), builder)
    if asked is not None:
        verify_held(name, made, asked)
    return made


def padded_length(length: Any, pad: int) -> Any:
    """A run-time length rounded up for rows that are the backward pass's own, `problem.padded_rows` in a kernel."""
    return T.ceildiv(length + ROW_PAD, pad) * pad


class Sizes:
    """The run-time lengths of one kernel, each one variable by its name."""

    def __init__(self, problem: Problem | LinearProblem) -> None:
        self.axes = {name: axes for name, _, axes in problem.custom}
        self._lengths: dict[str, Any] = {}
        self.batch, self.q, self.kv = (self.variable(size.name) for size in (BATCH, QUERIES, KEYS))

    def variable(self, name: str) -> Any:
        """The variable with this name."""
        if name not in self._lengths:
            self._lengths[name] = T.dynamic(name)
        return self._lengths[name]

    def declare(self, arguments: Arguments) -> dict[str, Any]:
        """The parameters of a kernel with these arguments, by name and in order.

        Strides are multiples of a number: so copies may still be wide.
        """
        found: dict[str, Any] = {}
        for argument in arguments:
            if isinstance(argument, Number):
                found[argument.name] = self.variable(argument.name)
                continue
            shape = [self.spell(size) for size in argument.shape]
            if argument.strides:
                strides = {name: self.variable(name) for name in argument.strides}
                steps = [argument.unit * s for s in strides.values()]
                steps += [1] * (len(shape) - len(steps))
                found |= {**strides, argument.name: T.StridedTensor(shape, steps, argument.dtype)}
            else:
                found[argument.name] = T.Tensor(shape, argument.dtype)
        return found

    def spell(self, size: Size) -> Any:
        """A size of a buffer, of the variables."""
        if isinstance(size, int):
            return size
        values: dict[Expr, Any] = {}
        for node in topological(size):
            args = [values[a] for a in node.args]
            match node.op:
                case Op.CONST:
                    values[node] = int(node.value)
                case Op.VAR:
                    values[node] = self.variable(node.name)
                case Op.ADD if isinstance(args[1], int) and args[1] < 0:
                    values[node] = args[0] - -args[1]
                case Op.ADD:
                    values[node] = args[0] + args[1]
                case Op.MUL:
                    values[node] = args[0] * args[1]
                case Op.FLOORDIV:
                    values[node] = args[0] // args[1]
                case _:
                    raise AssertionError(f"{node.op} in a size")
        return values[size]

    def inside(self, problem: Problem, batch: Any, head: Any) -> Inside:
        """A block's batch and head, for `reader`."""
        return (batch, self.batch), (head, problem.heads)


def window(buffer: Any, batch: Any, head: Any, start: Any, length: int, dim: int) -> Any:
    """Rows [start, start + length) of one head, `dim` entries each; what lies outside the tensor reads as 0."""
    return buffer[batch, start : start + length, head, 0:dim]


def reader(buffers: Buffers, inside: Inside = ()) -> Reader:
    """Reads custom inputs; an index out of range reads 0 and touches nothing.

    inside: indices that are known to lie in axes of these lengths, and so need no guard; a read may know of more.
    """

    def read(name: str, indices: list[Any], dtype: Type, inside_too: Inside = ()) -> Any:
        buffer = buffers[f"custom_{name}"]
        if not indices:
            return T.cast(buffer[0], DTYPES[dtype])

        def is_safe(index: Any, length: Any) -> bool:
            known = any(index is one and _same_length(length, of) for one, of in (*inside, *inside_too))
            return isinstance(index, int) or _is_zero(index) or known

        asked: Any = None
        for index, length in zip(indices, buffer.shape, strict=True):
            if is_safe(index, length):
                continue
            guard = T.And(index >= 0, index < length)
            asked = guard if asked is None else T.And(asked, guard)
        safe = [i if is_safe(i, n) else within(i, n) for i, n in zip(indices, buffer.shape, strict=True)]
        value = T.cast(buffer[tuple(safe)], DTYPES[dtype])
        return value if asked is None else T.if_then_else(asked, value, T.cast(0, DTYPES[dtype]))

    return read


def within(index: Any, length: Any) -> Any:
    """An index of any width, or the nearest that there is, in 32 bits."""
    return T.cast(T.max(T.min(index, length - 1), 0), "int32")


def _same_length(a: Any, b: Any) -> bool:
    """Are two lengths, numbers or names of them, the same?"""
    return bool(a.value == b) if isinstance(b, int) and hasattr(a, "value") else bool(a.same_as(b))


def _is_zero(index: Any) -> bool:
    return getattr(index, "value", None) == 0


def named(name: str, buffer: Any) -> Any:
    """A buffer under a name that the printed kernel shows."""
    return IRBuilder.name(name.replace(".", "_"), buffer)


def store(buffer: Any, value: Any, *indices: Any) -> None:
    """buffer[indices] = value, from plain Python."""
    tir_builder.buffer_store(buffer, value, list(indices))


@T.macro
def fill(buffer: Any, value: Any) -> None:
    """Fills a buffer; for plain Python, where a bare T.fill would not be noted."""
    T.fill(buffer, value)


@T.macro
def lie_alike(fragment: Any, other: Any) -> None:
    """Gives a fragment the layout of another, before each entry is written of nothing that lies in registers.

    TileLang finds no layout for one that is reduced then. nvcc drops the copies.
    """
    T.copy(other, fragment)


@T.macro
def over_rows(rows: int, body: Callable[[Any], None]) -> None:
    """Runs `body` for each row of a tile, in parallel."""
    for i in T.Parallel(rows):
        body(i)


@T.macro
def over_pairs(rows: int, columns: int, body: Callable[[Any, Any], None]) -> None:
    """Runs `body` for each entry of a tile, in parallel."""
    for i, j in T.Parallel(rows, columns):
        body(i, j)


@T.macro
def add_columns(part: Any, values: Any, rows: int, columns: int) -> None:
    """Adds each column of a tile to the part of its own: part (rows, LANES). No thread asks another."""
    for i, c in T.Parallel(rows, LANES):
        for m in T.unroll(columns // LANES):
            part[i, c] = part[i, c] + values[i, m * LANES + c]


def assign(targets: Iterable[tuple[Any, Expr]], splice: Splice, *indices: Any) -> None:
    """buffer[indices] = expression for each target; all are computed before any is written."""
    targets = list(targets)
    values = splice(*(e for _, e in targets))
    if len(values) > 1:
        values = [name_value(v) for v in values]
    for (buffer, _), value in zip(targets, values, strict=True):
        store(buffer, value, *indices)


@dataclass(frozen=True)
class Place:
    """Where a kernel is: the batch and head of its block, and the block's values; whether it may approximate.

    inside: lengths that its pairs' own queries or keys (Q_IDX, KV_IDX) are known to be below.
    """

    batch: Any
    head: Any
    block: Mapping[Expr, Any]
    read: Reader
    approximate: bool = False
    inside: tuple[tuple[Expr, Any], ...] = ()

    def splice(self, q_idx: Any, kv_idx: Any, values: Mapping[Expr, Any]) -> Splice:
        """Splices at one pair (or row: kv_idx None)."""
        at = {B: self.batch, H: self.head, Q_IDX: q_idx, **self.block, **values}
        if kv_idx is not None:
            at[KV_IDX] = kv_idx
        read = self.read
        if self.inside:
            read = bind(read, inside_too=[(at[index], length) for index, length in self.inside])
        return Splice(at, read, self.approximate)


@dataclass(frozen=True)
class Stage:
    """One stage of a buffer, read as a buffer of its own."""

    buffer: Any
    stage: Any

    def __getitem__(self, index: Any) -> Any:
        return self.buffer[(self.stage, *index) if isinstance(index, tuple) else (self.stage, index)]


@dataclass(frozen=True)
class Packed:
    """A fragment of 16 bits, read as fp32."""

    buffer: Any

    def __getitem__(self, index: Any) -> Any:
        return T.cast(self.buffer[index], FLOAT)


def parts_of_indices(row: Expr, row0: Any, i: Any, column: Expr, column0: Any, j: Any) -> dict[Expr, Any]:
    """What `split_casts` splits the indices into, at row i and column j of a tile that starts at (row0, column0).

    Of an accumulator a thread has rows i and i + 8 in sixteen, and columns 8 n + 2 (thread % 4) and the next.
    """
    of_row, of_column = PARTS[row], PARTS[column]
    of_thread, of_register = j % 8 // 2 * 2, j // 8 * 8 + j % 2
    return {
        of_row[0]: row0 + (i // 16 * 16 + i % 8), of_row[1]: i % 16 // 8 * 8,
        of_column[0]: column0 + of_thread, of_column[1]: of_register,
        KV_PLACE[0]: of_thread, KV_PLACE[1]: of_register,
    }  # fmt: skip


def block_values(assignments: Iterable[tuple[Expr, Expr]], batch: Any, head: Any, read: Reader) -> dict[Expr, Any]:
    """The values that a block computes once, named."""
    splice = Splice({B: batch, H: head}, read)
    assignments = list(assignments)
    values = splice(*(e for _, e in assignments))
    return {v: Builder.current().bind("of_block", value) for (v, _), value in zip(assignments, values, strict=True)}


def place_at(
    values: Iterable[tuple[Expr, Expr]], problem: Problem, sizes: Sizes, buffers: Buffers, batch: Any, head: Any
) -> Place:
    """A block's place, with these values of it."""
    read = reader(buffers, sizes.inside(problem, batch, head))
    return Place(batch, head, block_values(values, batch, head, read), read, problem.approximate)


def loop(count: Any, stages: int) -> Any:
    """Steps of a tile loop, its copies `stages` ahead (0: none, as where a copied tile is then rewritten in place)."""
    return T.Pipelined(count, num_stages=stages) if stages else T.serial(count)


@T.macro
def where_partial(partial: Any, action: Callable[[], None]) -> None:
    """Acts on a tile that may hold a masked pair: `partial` is Python's truth (then nothing is asked) or TileLang's."""
    if partial is True:
        action()
    else:
        if partial:
            action()


class Operand:
    """A matrix as a product reads it: 16-bit (or tf32) whole, or fp32 as a high and a low tf32 part.

    Source of the split: Ootomo and Yokota, 2022 (arXiv 2203.03341); the product of the two low parts is left out.
    """

    def __init__(
        self, name: str, problem: Problem | LinearProblem, shape: tuple[int, int], fragment: bool = False
    ) -> None:
        # fp32 sums and tf32 operands lie differently in registers
        in_registers = fragment and problem.dtype != "float32"
        self.shape = shape
        allocate = T.alloc_fragment if in_registers else T.alloc_shared
        self.name = name
        self.whole = named(f"{name}_tile", allocate(shape, problem.dtype))
        self.low = named(f"{name}_low", T.alloc_shared(shape, problem.dtype)) if problem.splits else None
        self.in_registers = in_registers

    def in_shared_memory(self, problem: Problem | LinearProblem) -> Operand:
        """An operand that may stand on either side of a product, transposed or not: itself, or a new one to fill."""
        return Operand(f"{self.name}_shared", problem, self.shape) if self.in_registers else self


@T.macro
def load(operand: Operand, source: Any) -> None:
    """Copies a window of a tensor (or a fragment, cast) into an operand."""
    T.copy(source, operand.whole)
    split_operand(operand)


@T.macro
def split_operand(operand: Operand) -> None:
    """What was copied whole becomes a high and a low part, where products take two."""
    if operand.low is not None:
        for i, j in T.Parallel(operand.shape[0], operand.shape[1]):
            operand.low[i, j] = operand.whole[i, j] - _high(operand.whole[i, j])
        for i, j in T.Parallel(operand.shape[0], operand.shape[1]):
            operand.whole[i, j] = _high(operand.whole[i, j])


def _high(value: Any) -> Any:
    """A float rounded to the 10 mantissa bits that tf32 keeps."""
    bits = T.reinterpret(value, "int32")
    return T.reinterpret(T.bitwise_and(bits + 0x1000, T.int32(-0x2000)), "float32")


@T.macro
def multiply(
    a: Operand, b: Operand, c: Any, transpose_A: bool = False, transpose_B: bool = False, whole_rows: bool = True
) -> None:
    """c += a @ b; whole_rows: each warp has whole rows of c (so that row reductions stay inside it)."""
    policy = T.GemmWarpPolicy.FullRow if whole_rows else T.GemmWarpPolicy.Square
    if a.low is not None:
        T.gemm(a.low, b.whole, c, transpose_A=transpose_A, transpose_B=transpose_B, policy=policy)
        T.gemm(a.whole, b.low, c, transpose_A=transpose_A, transpose_B=transpose_B, policy=policy)
    T.gemm(a.whole, b.whole, c, transpose_A=transpose_A, transpose_B=transpose_B, policy=policy)


class Accumulator:
    """A sum of products over the steps of a loop.

    Tensor cores truncate as they accumulate (arXiv 2203.03341), and over many steps that adds up: where fp32 accuracy
    is asked for, each step's product starts from zero and is added in registers.
    """

    def __init__(self, name: str, problem: Problem | LinearProblem, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.sum = named(f"{name}_sum", T.alloc_fragment(shape, FLOAT))
        self.step = named(f"{name}_step", T.alloc_fragment(shape, FLOAT)) if problem.splits else None


@T.macro
def accumulate(
    a: Operand, b: Operand, c: Accumulator, transpose_A: bool = False, transpose_B: bool = False,
    whole_rows: bool = True,
) -> None:  # fmt: skip
    """c += a @ b, in fp32 also where tensor cores truncate."""
    if c.step is None:
        multiply(a, b, c.sum, transpose_A=transpose_A, transpose_B=transpose_B, whole_rows=whole_rows)
    else:
        T.clear(c.step)
        multiply(a, b, c.step, transpose_A=transpose_A, transpose_B=transpose_B, whole_rows=whole_rows)
        for i, j in T.Parallel(c.shape[0], c.shape[1]):
            c.sum[i, j] += c.step[i, j]
