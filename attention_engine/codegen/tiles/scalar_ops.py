"""What the scalar operations and data types of a tile program mean on torch tensors and Python numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Value = Any  # a Python number, a 0-dim tensor, or one tensor element for each lane of a parallel nest

STORAGE: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.int64,  # sums and products have the same bits
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
UNSIGNED_MASKS = {"uint8": 0xFF, "uint16": 0xFFFF, "uint32": 0xFFFF_FFFF}


def is_float(dtype: str) -> bool:
    """Whether the name is one of a floating type."""
    return "float" in dtype


def compute_dtype(dtype: str) -> torch.dtype:
    """The torch type that arithmetic uses: int64, masked, for unsigned integers, which torch has few operations for."""
    return torch.int64 if dtype in UNSIGNED_MASKS else STORAGE[dtype]


def poison(dtype: str) -> float | int | bool:
    """What memory nobody wrote holds: NaN, or the integer which makes loops empty and indices out of range."""
    if is_float(dtype):
        return math.nan
    return False if dtype == "bool" else torch.iinfo(STORAGE[dtype]).min


def wraps(dtype: str) -> Callable[[Value], Value]:
    """Reduction of an integer result to its type's range, as the hardware's registers do."""
    if dtype in UNSIGNED_MASKS:
        mask = UNSIGNED_MASKS[dtype]
        return lambda value: value & mask
    half = 1 << (int(dtype.removeprefix("u").removeprefix("int")) - 1)

    def wrap(value: Value) -> Value:
        if isinstance(value, torch.Tensor) or -half <= value < half:
            return value
        return (value + half) % (2 * half) - half

    return wrap


def lift(value: Value, dtype: torch.dtype) -> torch.Tensor:
    """The value as a tensor."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)


def cast(value: Value, dtype: str) -> Value:
    """Conversion between types: floats round to nearest even, floats to integers towards zero."""
    if isinstance(value, torch.Tensor):
        if dtype in UNSIGNED_MASKS:
            return value.to(torch.int64) & UNSIGNED_MASKS[dtype]
        return value.to(STORAGE[dtype])
    if dtype == "bool":
        return bool(value)
    if is_float(dtype):
        return float(value) if dtype in ("float32", "float64") else lift(value, STORAGE[dtype])
    return wraps(dtype)(int(value))


def reinterpret(value: Value, source: str, target: str) -> torch.Tensor:
    """The same bits read as another type of the same width."""
    stored = lift(value, compute_dtype(source)).to(_signed(source))
    bits = stored.view(_signed(target))
    return bits.to(torch.int64) & UNSIGNED_MASKS[target] if target in UNSIGNED_MASKS else bits


def _signed(dtype: str) -> torch.dtype:
    return STORAGE[dtype.removeprefix("u")]


def truncate_to_tf32(operand: torch.Tensor) -> torch.Tensor:
    """A float32 operand as the tensor cores see it: the low 13 of its 23 mantissa bits do not exist."""
    return (operand.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def as_matrix_operand(tile: torch.Tensor) -> torch.Tensor:
    """A tile as an operand of an fp32-accumulating matrix product (integers: of an exact one)."""
    if tile.dtype == torch.float32:
        return truncate_to_tf32(tile)
    if tile.dtype == torch.float64:
        return tile
    return tile.float() if tile.dtype.is_floating_point else tile.to(torch.int32)


def _maximum(a: Value, b: Value) -> Value:
    if not isinstance(a, torch.Tensor):
        a, b = b, a
    if isinstance(b, torch.Tensor):
        return torch.maximum(a, b)
    return a.clamp_min(b) if isinstance(a, torch.Tensor) else max(a, b)


def _minimum(a: Value, b: Value) -> Value:
    if not isinstance(a, torch.Tensor):
        a, b = b, a
    if isinstance(b, torch.Tensor):
        return torch.minimum(a, b)
    return a.clamp_max(b) if isinstance(a, torch.Tensor) else min(a, b)


def _truncated_quotient(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _truncated_remainder(a: int, b: int) -> int:
    return a - b * _truncated_quotient(a, b)


def _lane_truncated_quotient(a: Value, b: Value) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _lane_truncated_remainder(a: Value, b: Value) -> torch.Tensor:
    return torch.fmod(lift(a, torch.int64).to(b.dtype) if isinstance(b, torch.Tensor) else a, b)


def _power(a: Value, b: Value) -> Value:
    both_numbers = not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)
    return a**b if both_numbers else torch.pow(a, b)


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


@dataclass(frozen=True)
class Binary:
    """One operation of two values: on Python integers, on integer lanes, on floats."""

    scalar: Callable[[Value, Value], Value]
    lanes: Callable[[Value, Value], Value]
    real: Callable[[Value, Value], Value]
    overflows: bool = False


def _same(function: Callable[[Value, Value], Value], *, overflows: bool = False) -> Binary:
    return Binary(function, function, function, overflows)


BINARY: dict[str, Binary] = {
    "Add": _same(operator.add, overflows=True),
    "Sub": _same(operator.sub, overflows=True),
    "Mul": _same(operator.mul, overflows=True),
    "Div": Binary(_truncated_quotient, _lane_truncated_quotient, operator.truediv),
    "Mod": Binary(_truncated_remainder, _lane_truncated_remainder, torch.fmod),
    "FloorDiv": _same(operator.floordiv),
    "FloorMod": _same(operator.mod),
    "Max": Binary(max, _maximum, _maximum),
    "Min": Binary(min, _minimum, _minimum),
    "EQ": _same(operator.eq),
    "NE": _same(operator.ne),
    "LT": _same(operator.lt),
    "LE": _same(operator.le),
    "GT": _same(operator.gt),
    "GE": _same(operator.ge),
    "tirx.bitwise_and": _same(operator.and_),
    "tirx.bitwise_or": _same(operator.or_),
    "tirx.bitwise_xor": _same(operator.xor),
    "tirx.shift_left": _same(operator.lshift, overflows=True),
    "tirx.shift_right": _same(operator.rshift),
    "tirx.pow": _same(_power),
    "tirx.fmod": _same(torch.fmod),
    "tirx.atan2": _same(torch.atan2),
    "tirx.copysign": _same(torch.copysign),
    "tl.max_nan": _same(_maximum),
    "tl.min_nan": _same(_minimum),
}

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tirx.exp": torch.exp,
    "tirx.exp2": torch.exp2,
    "tirx.exp10": lambda x: torch.pow(10.0, x),
    "tirx.log": torch.log,
    "tirx.log2": torch.log2,
    "tirx.log10": torch.log10,
    "tirx.log1p": torch.log1p,
    "tirx.sqrt": torch.sqrt,
    "tirx.rsqrt": torch.rsqrt,
    "tirx.tanh": torch.tanh,
    "tirx.sigmoid": torch.sigmoid,
    "tirx.erf": torch.erf,
    "tirx.sin": torch.sin,
    "tirx.cos": torch.cos,
    "tirx.tan": torch.tan,
    "tirx.asin": torch.asin,
    "tirx.acos": torch.acos,
    "tirx.atan": torch.atan,
    "tirx.sinh": torch.sinh,
    "tirx.cosh": torch.cosh,
    "tirx.asinh": torch.asinh,
    "tirx.acosh": torch.acosh,
    "tirx.atanh": torch.atanh,
    "tirx.fabs": torch.abs,
    "tirx.floor": torch.floor,
    "tirx.ceil": torch.ceil,
    "tirx.trunc": torch.trunc,
    "tirx.round": _round_half_away,
    "tirx.nearbyint": torch.round,
    "tirx.isnan": torch.isnan,
    "tirx.isinf": torch.isinf,
    "tirx.isfinite": torch.isfinite,
    "tirx.bitwise_not": torch.bitwise_not,
    "tl.__exp": torch.exp,
    "tl.__exp10": lambda x: torch.pow(10.0, x),
    "tl.__log": torch.log,
    "tl.__log2": torch.log2,
    "tl.__log10": torch.log10,
    "tl.__sin": torch.sin,
    "tl.__cos": torch.cos,
    "tl.__tan": torch.tan,
    "tl.fast_rcp": torch.reciprocal,
}
