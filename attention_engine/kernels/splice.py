"""Puts a program's expressions in place inside a kernel: each becomes TileLang arithmetic, shared values named once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tilelang.language as T
from tilelang.language.eager.builder import Builder
from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as tir_builder

from attention_engine.ir.expr import Expr, Op, Type, count_uses, topological
from attention_engine.kernels.chance import InCell, chance, chance_below, in_cell, in_cell_of_tile
from attention_engine.passes.index_ranges import Ranges
from attention_engine.passes.strength import PARTS

DTYPES = {Type.BOOL: "bool", Type.INT: "int32", Type.LONG: "int64", Type.FLOAT: "float32"}
FP32_MOST = (2 - 2**-23) * 2.0**127
DEEPEST = 64  # operations of one formula: compilers walk over formulas by recursion
CHEAP = frozenset({Op.CONST, Op.VAR, Op.CAST, Op.DETACH})


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + T.exp2(x * -1.4426950408889634))


def _expm1(x: Any) -> Any:
    """exp(x) - 1, near 0 by its series, where the difference would have few digits left."""
    x, series = name_value(x), T.float32(1)
    for n in range(7, 1, -1):
        series = 1.0 + x * (1.0 / n) * series
    return T.if_then_else(T.abs(x) < 0.3, x * series, T.exp2(x * 1.4426950408889634) - 1.0)


def _softplus(x: Any) -> Any:
    x = name_value(x)
    return T.max(x, T.float32(0)) + T.log1p(T.exp2(T.abs(x) * -1.4426950408889634))


def _fast_power(a: Any, b: Any, may_be_negative: bool) -> Any:
    """a ** b where nvcc's fast math makes pow exp2(b * log2(a)), which has NaN for a negative base, and for 0 ** 0.

    As IEEE has it: a negative base has a power where the exponent is whole, and anything to the power of 0 is 1.
    """
    a, b = name_value(a), name_value(b)
    power = T.if_then_else(tirx.EQ(b, T.float32(0)), T.float32(1), T.pow(T.abs(a) if may_be_negative else a, b))
    if not may_be_negative:
        return power
    power, half = name_value(power), name_value(b * 0.5)
    of_negative = T.if_then_else(tirx.EQ(T.floor(half), half), power, -power)
    of_negative = T.if_then_else(tirx.EQ(T.floor(b), b), of_negative, T.sqrt(a))  # NaN
    return T.if_then_else(a < T.float32(0), of_negative, power)


def _shift_left(a: Any, b: Any) -> Any:
    bits = DataType(a.dtype).bits
    return a * 0 if isinstance(b, tirx.IntImm) and b.value >= bits else T.shift_left(a, b)


def _shift_right(a: Any, b: Any) -> Any:
    bits = DataType(a.dtype).bits
    return T.shift_right(a, bits - 1 if isinstance(b, tirx.IntImm) and b.value >= bits else b)


def _floor_mod(a: Any, b: Any) -> Any:
    return T.floormod(a, b)


def both(a: Any, b: Any) -> Any:
    """a and b, both computed: the jumps that && makes in a tile of comparisons cost time and registers."""
    return tirx.bitwise_and(a, b)


TILELANG: dict[Op, Callable[..., Any]] = {
    Op.ADD: lambda a, b: a + b,
    Op.MUL: lambda a, b: a * b,
    Op.RECIP: lambda a: 1.0 / a,
    Op.FLOORDIV: lambda a, b: T.floordiv(a, b),
    Op.MOD: _floor_mod,
    Op.POW: lambda a, b: T.pow(a, b),
    Op.MAXIMUM: lambda a, b: T.max(a, b),
    Op.MINIMUM: lambda a, b: T.min(a, b),
    Op.EXP: lambda a: T.exp2(a * 1.4426950408889634),
    Op.EXP2: lambda a: T.exp2(a),
    Op.EXPM1: _expm1,
    Op.LOG: lambda a: T.log(a),
    Op.LOG2: lambda a: T.log2(a),
    Op.LOG1P: lambda a: T.log1p(a),
    Op.SOFTPLUS: _softplus,
    Op.SQRT: lambda a: T.sqrt(a),
    Op.RSQRT: lambda a: T.rsqrt(a),
    Op.TANH: lambda a: T.tanh(a),
    Op.SIGMOID: _sigmoid,
    Op.ERF: lambda a: T.erf(a),
    Op.SIN: lambda a: T.sin(a),
    Op.COS: lambda a: T.cos(a),
    Op.ATAN: lambda a: T.atan(a),
    Op.ABS: lambda a: T.abs(a) if "float" in str(a.dtype) else T.max(a, -a),
    Op.FLOOR: lambda a: T.floor(a),
    Op.ROUND: lambda a: T.nearbyint(a),
    Op.LESS: lambda a, b: a < b,
    Op.LESS_EQUAL: lambda a, b: a <= b,
    Op.EQUAL: lambda a, b: tirx.EQ(a, b),
    Op.AND: both,
    Op.OR: lambda a, b: tirx.bitwise_or(a, b),
    Op.NOT: lambda a: T.Not(a),
    Op.BIT_AND: lambda a, b: tirx.bitwise_and(a, b),
    Op.BIT_OR: lambda a, b: tirx.bitwise_or(a, b),
    Op.BIT_XOR: lambda a, b: tirx.bitwise_xor(a, b),
    Op.SHIFT_LEFT: _shift_left,
    Op.SHIFT_RIGHT: _shift_right,
    Op.CHANCE: lambda seed, b, h, q, kv: chance(name_value, seed, b, h, in_cell(q), in_cell(kv)),
    Op.WHERE: lambda c, a, b: T.if_then_else(c, a, b),
    Op.DETACH: lambda a: a,
}

NEVER_NEGATIVE = frozenset({Op.ABS, Op.EXP, Op.EXP2, Op.SIGMOID, Op.SOFTPLUS, Op.SQRT, Op.RSQRT})


def never_negative(expr: Expr) -> bool:
    """Is an expression 0 or more, whatever it reads? No says only that this is not plain to see."""
    match expr.op:
        case Op.CONST:
            return float(expr.value) >= 0
        case Op.MAXIMUM:
            return any(map(never_negative, expr.args))
        case Op.ADD | Op.MINIMUM:
            return all(map(never_negative, expr.args))
        case Op.MUL:
            return expr.args[0] is expr.args[1] or all(map(never_negative, expr.args))
        case Op.WHERE:
            return all(map(never_negative, expr.args[1:]))
        case Op.CAST | Op.DETACH:
            return expr.args[0].dtype is not Type.LONG and never_negative(expr.args[0])  # which may wrap
        case _:
            return expr.op in NEVER_NEGATIVE


def _wrapping_absolute(a: Any) -> Any:
    return T.max(a, wrapping(Op.MUL, T.int64(-1), a))


def wrapping(op: Op, *operands: Any) -> Any:
    """A sum, product, shift to the left or absolute value of int64 numbers that may leave 64 bits, as torch has it.

    Compilers take signed numbers for ones that never do: these are unsigned meanwhile, and TileLang, which sees through
    conversions, finds the result in a variable.
    """
    if op is Op.ABS:
        return _wrapping_absolute(*operands)
    held = [name_value(a) if isinstance(a, tirx.IntImm) else a for a in operands]  # TileLang refuses what is below 0
    return name_value(T.cast(TILELANG[op](*(T.cast(a, "uint64") for a in held)), "int64"))


WRAPPING = frozenset({Op.ADD, Op.MUL, Op.ABS, Op.SHIFT_LEFT})


class Reader(Protocol):
    """Reads a custom input at indices, as a value of a type.

    inside_too: indices that are known to lie in axes of these lengths, and so need no guard.
    """

    def __call__(
        self, name: str, indices: list[Any], dtype: Type, inside_too: Sequence[tuple[Any, Any]] = ()
    ) -> Any: ...


def constant(expr: Expr) -> Any:
    """A number; infinities as they are, and so what fp32 has no room for."""
    if expr.dtype is Type.FLOAT:
        value = float(expr.value)
        infinite = abs(value) > FP32_MOST
        return T.infinity("float32") * math.copysign(1, value) if infinite else T.float32(value)
    number = {Type.BOOL: T.bool, Type.INT: T.int32, Type.LONG: T.int64}[expr.dtype]
    return number(expr.value)


def name_value(value: Any) -> Any:
    """Holds a value in a variable of its own: TileLang would spell a mere name out again at each use.

    Nor does it see through it: products of lengths, told to its prover at each of its questions, take seconds.
    """
    variable = T.alloc_var(str(value.dtype))
    tir_builder.buffer_store(variable, value, [0])
    return variable[0]


def name_as(name: str, value: Any) -> Any:
    """A value under a name of its own, worked out once."""
    return Builder.current().bind(name, value)


def hold_value(value: Any) -> Any:
    """A value, the same in all lanes, that compilers hold in a register rather than work out again at each use."""
    return name_value(T.shfl_sync(name_value(value), 0))


def take_for_granted(condition: Any) -> None:
    """Spares the guards that TileLang sets where it can't prove what always holds."""
    tir_builder.evaluate(T.assume(condition))


def is_read(index: Expr) -> bool:
    """Is an index itself read from memory, or made of what is? Guards spell an index out four times, and with it the
    guards of the read inside it: TileLang's simplifier, which takes each for granted in turn, then needs minutes."""
    return any(node.op is Op.LOAD for node in topological(index))


def _asks_chance(node: Expr) -> bool:
    """Does it ask whether a pair's number for dropout is below a constant?"""
    return node.op is Op.LESS and node.args[0].op is Op.CHANCE and node.args[1].op is Op.CONST


class Splice:
    """Emits expressions at one place of a kernel.

    values: what the variables are there; read: how a custom input is read (name, indices, type). Operands that several
    expressions of one splice share are computed once, and so are indices that are read. approximate: may reciprocals be
    off by a unit of the last place, and does nvcc make powers of logarithms?
    """

    def __init__(self, values: Mapping[Expr, Any], read: Reader, approximate: bool = False) -> None:
        self.done: dict[Expr, Any] = dict(values)
        self.read, self.approximate, self.ranges = read, approximate, Ranges()

    def __call__(self, *exprs: Expr) -> list[Any]:
        """The expressions as TileLang values; call it once with all that a place needs."""
        uses, depths = count_uses(*exprs, known=self.done), dict.fromkeys(self.done, 0)
        nodes = topological(*exprs, known=self.done)
        indices = {index for node in nodes if node.op is Op.LOAD for index in node.args if is_read(index)}
        asked = {node.args[0] for node in nodes if _asks_chance(node)}
        for node in nodes:
            if node in self.done:
                continue
            if node in asked and uses[node] == 1:
                depths[node] = 0  # with the comparison
                continue
            value = self._emit(node)
            shared = uses[node] > 1 and node.op not in CHEAP
            depth = 1 + max((depths[a] for a in node.args), default=0)
            named = shared or depth >= DEEPEST or node in indices
            depths[node] = 0 if named else depth
            self.done[node] = name_value(value) if named else value
        return [self.done[e] for e in exprs]

    def _emit(self, node: Expr) -> Any:
        if node.op is Op.CONST:
            return constant(node)
        if _asks_chance(node) and node.args[0] not in self.done:
            seed, b, h, *indices = node.args[0].args
            places = [self.done[a] for a in (seed, b, h)]
            return chance_below(name_value, int(node.args[1].value), *places, *map(self._in_cell, indices))
        operands = [self.done[a] for a in node.args]
        if node.op is Op.LOAD:
            return self.read(node.name, operands, node.dtype)
        if node.op is Op.CAST:
            return T.cast(operands[0], DTYPES[node.dtype])
        if node.op is Op.CHANCE:
            return chance(name_value, *operands[:3], *map(self._in_cell, node.args[3:]))
        if node.op is Op.RECIP and self.approximate:
            return T.fast_rcp(operands[0])
        if node.op is Op.POW and self.approximate:
            base, exponent = operands
            return _fast_power(base, exponent, may_be_negative=not never_negative(node.args[0]))
        if node.dtype is Type.LONG and node.op in WRAPPING and self.ranges.wraps(node):
            return wrapping(node.op, *operands)
        return TILELANG[node.op](*operands)

    def _in_cell(self, index: Expr) -> InCell:
        """Where in its cell a query or key is: by its parts, where it is an index of a tile itself."""
        parts = [self.done[part] for part in PARTS.get(index, ()) if part in self.done]
        return in_cell_of_tile(*parts) if parts else in_cell(self.done[index])
