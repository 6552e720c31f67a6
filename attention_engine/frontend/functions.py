"""The functions that symbols know, each by torch's name: methods, torch functions and numpy functions look here."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from attention_engine.errors import UnsupportedOperation, as_given
from attention_engine.frontend.advice import no_row
from attention_engine.frontend.frames import where_from
from attention_engine.frontend.symbols import (
    Symbol,
    convert,
    floor_divide,
    join,
    lift,
    remainder,
    shift,
    truth,
    unify,
    where,
    wrap,
)
from attention_engine.ir.expr import Op, Type, const, make


def _elementwise(op: Op) -> Callable[[object], Symbol]:
    return lambda a: wrap(make(op, *unify(a, least=Type.FLOAT)))


def _rounding(round_float: Callable[[Symbol], Symbol]) -> Callable[[object], Symbol]:
    """Integers and conditions are whole already."""

    def build(a: object) -> Symbol:
        value = wrap(lift(a))
        return round_float(value) if value.expr.dtype is Type.FLOAT else value

    return build


def _extremum(op: Op, name: str) -> Callable[..., Symbol]:
    def build(a: object, *others: object) -> Symbol:
        if len(others) != 1:
            raise UnsupportedOperation(
                f"{where_from()}{name} takes two values: a.{name}(b). For the {name} over a row, "
                f"scores.get_reduce('{name[:3]}')."
            )
        if name in ("max", "min") and type(others[0]) is int and others[0] == -1:
            raise UnsupportedOperation(
                f"{where_from()}{name}(-1) reduces a dim in torch, and a mod has none. For the {name} over a row, "
                f"scores.get_reduce('{name}'), in online_fwd; for the {name} of two, a.{name}(-1.0)."
            )
        return wrap(make(op, *unify(a, others[0], least=Type.INT)))

    return build


def _bound(a: object, low: object = None, high: object = None, at_bound: float = 1.0) -> Symbol:
    """a within bounds, at which it has so much of the gradient."""
    result = wrap(lift(a))
    if low is not None:
        result = wrap(make(Op.MAXIMUM, *unify(result, low, least=Type.INT), arg=at_bound))
    return result if high is None else wrap(make(Op.MINIMUM, *unify(result, high, least=Type.INT), arg=at_bound))


def _clamp(a: object, min: object = None, max: object = None) -> Symbol:
    return _bound(a, min, max)


def _hardtanh(a: object, min_val: object = -1.0, max_val: object = 1.0, inplace: bool = False) -> Symbol:
    return _bound(a, min_val, max_val, at_bound=0.0)


def _to(a: object, dtype: object) -> Symbol:
    name = str(dtype)  # of torch's, numpy's or Python's
    if "bool" in name:
        return wrap(convert(lift(a), Type.BOOL))
    return wrap(convert(lift(a), Type.INT if "int" in name else Type.FLOAT))


def _infix(function: Callable[[Any, Any], Symbol]) -> Callable[[object, object], Symbol]:
    """An operator as a function, also of a number or a tensor of one number on its left."""
    return lambda a, b: function(wrap(lift(a)), b)


def _no_sum(a: object, *args: object, **named: object) -> NoReturn:
    of_pairs = "`sum` over a row is scores.get_reduce('sum'); a sum of two values is a + b."
    raise UnsupportedOperation(f"{where_from()}{no_row(of_pairs)}")


def _sign(a: object) -> Symbol:
    value = wrap(lift(a))
    if value.expr.dtype is Type.BOOL:
        return value
    one, none = (1.0, 0.0) if value.expr.dtype is Type.FLOAT else (1, 0)
    return where(value > 0, one, where(value < 0, -one, none))


FLOOR, ROUND = _elementwise(Op.FLOOR), _elementwise(Op.ROUND)
EXP, EXPM1, ERF, TANH = _elementwise(Op.EXP), _elementwise(Op.EXPM1), _elementwise(Op.ERF), _elementwise(Op.TANH)
SIN, COS = _elementwise(Op.SIN), _elementwise(Op.COS)
SIGMOID, SOFTPLUS = _elementwise(Op.SIGMOID), _elementwise(Op.SOFTPLUS)


def _truncate(a: Symbol) -> Symbol:
    return where(a < 0, -FLOOR(-a), FLOOR(a))


def _round(a: object, *, decimals: int = 0) -> Symbol:
    if decimals == 0:
        return _rounding(ROUND)(a)
    (value,), ten = unify(a, least=Type.FLOAT), 10.0 ** abs(decimals)
    return ROUND(wrap(value) * ten) / ten if decimals > 0 else ROUND(wrap(value) / ten) * ten


# Activations, as in torch.nn.functional. `inplace` changes nothing: symbols are never written on.


def _relu(a: object, inplace: bool = False) -> Symbol:
    return _bound(a, 0.0, at_bound=0.0)


def _softplus(a: object, beta: float = 1.0, threshold: float = 20.0) -> Symbol:
    value = _float(a)
    if beta == 1.0 and threshold == 20.0:  # beyond it torch takes the argument itself, which is equal to 2e-9
        return SOFTPLUS(value)
    return where(value * beta > threshold, value, SOFTPLUS(value * beta) / beta)


def _log_sigmoid(a: object) -> Symbol:
    return -SOFTPLUS(-_float(a))


def _silu(a: object, inplace: bool = False) -> Symbol:
    value = _float(a)
    return value * SIGMOID(value)


def _gelu(a: object, approximate: str = "none") -> Symbol:
    value = _float(a)
    match approximate:
        case "none":
            return 0.5 * value * (1.0 + ERF(value * math.sqrt(0.5)))
        case "tanh":
            inner = math.sqrt(2.0 / math.pi) * (value + 0.044715 * value * value * value)
            return 0.5 * value * (1.0 + TANH(inner))
        case _:
            raise UnsupportedOperation(
                f"{where_from()}gelu's approximate is {as_given(approximate)}. Choose 'none' or 'tanh'."
            )


def _elu(a: object, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    value = _float(a)
    return where(value > 0, value, alpha * EXPM1(_bound(value, high=0.0)))


def _leaky_relu(a: object, negative_slope: float = 0.01, inplace: bool = False) -> Symbol:
    value = _float(a)
    return where(value > 0, value, negative_slope * value)


def _softsign(a: object) -> Symbol:
    value = _float(a)
    return value / (1.0 + abs(value))


def _relu6(a: object, inplace: bool = False) -> Symbol:
    return _hardtanh(a, 0.0, 6.0)


def _hardsigmoid(a: object, inplace: bool = False) -> Symbol:
    return _relu6(_float(a) + 3.0) / 6.0


def _hardswish(a: object, inplace: bool = False) -> Symbol:
    value = _float(a)
    return where(value >= 3.0, value, where(value <= -3.0, 0.0, value * (value + 3.0) / 6.0))


def _mish(a: object, inplace: bool = False) -> Symbol:
    value = _float(a)
    return value * TANH(SOFTPLUS(value))


def _like(value: float | None) -> Callable[..., Symbol]:
    """zeros_like, ones_like, full_like: a number. What else torch's take (dtype, device, ...) says nothing here."""
    if value is None:
        return lambda a, fill_value, **said: wrap(lift(fill_value))
    return lambda a, **said: wrap(convert(const(value), lift(a).dtype))


def _new(value: float) -> Callable[..., Symbol]:
    """new_zeros, new_ones, new_full: a number, of the type that is asked for. A shape must be that of one number."""

    def build(a: object, size: object = (), *more: object, dtype: object = None, **said: object) -> Symbol:
        shape = (*size, *more) if isinstance(size, (tuple, list)) else (size, *more)
        if any(n != 1 for n in shape):
            raise UnsupportedOperation(
                f"{where_from()}a tensor of shape {shape} is made of a symbolic value, which is one number.\n"
                "  Make it outside of the mod, and read it at an index."
            )
        return _to(value, lift(a).dtype.name.lower() if dtype is None else dtype)

    return build


def _float(a: object) -> Symbol:
    return wrap(*unify(a, least=Type.FLOAT))


_UNARY = [Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG1P, Op.SQRT, Op.RSQRT, Op.TANH, Op.SIGMOID, Op.ERF, Op.SIN,
          Op.COS, Op.ATAN]  # fmt: skip
MAXIMUM, MINIMUM = _extremum(Op.MAXIMUM, "maximum"), _extremum(Op.MINIMUM, "minimum")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{op.value: _elementwise(op) for op in _UNARY},
    "abs": abs,
    "absolute": abs,
    "arctan": _elementwise(Op.ATAN),
    "tan": lambda a: SIN(a) / COS(a),
    "floor": _rounding(FLOOR),
    "ceil": _rounding(lambda a: -FLOOR(-a)),
    "trunc": _rounding(_truncate),
    "fix": _rounding(_truncate),
    "round": _round,
    "sign": _sign,
    "relu": _relu,
    "relu6": _relu6,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "silu": _silu,
    "gelu": _gelu,
    "mish": _mish,
    "softplus": _softplus,
    "softsign": _softsign,
    "logsigmoid": _log_sigmoid,
    "log_sigmoid": _log_sigmoid,  # as torch calls logsigmoid inside
    "expit": SIGMOID,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "square": lambda a: a * a,
    "reciprocal": lambda a: 1.0 / a,
    "neg": operator.neg,
    "negative": operator.neg,
    "max": _extremum(Op.MAXIMUM, "max"),
    "maximum": MAXIMUM,
    "min": _extremum(Op.MINIMUM, "min"),
    "minimum": MINIMUM,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda a, min: _clamp(a, min),
    "clamp_max": lambda a, max: _clamp(a, None, max),
    "where": where,
    "masked_fill": lambda a, mask, value: where(mask, value, a),
    "pow": _infix(operator.pow),
    "add": _infix(operator.add),
    "sub": _infix(operator.sub),
    "subtract": _infix(operator.sub),
    "mul": _infix(operator.mul),
    "multiply": _infix(operator.mul),
    "div": _infix(operator.truediv),
    "divide": _infix(operator.truediv),
    "true_divide": _infix(operator.truediv),
    "remainder": remainder,
    "floor_divide": floor_divide,
    "logical_and": lambda a, b: join("&", wrap(truth(a)), b),
    "logical_or": lambda a, b: join("|", wrap(truth(a)), b),
    "logical_xor": lambda a, b: join("^", wrap(truth(a)), b),
    "logical_not": lambda a: wrap(make(Op.NOT, truth(a))),
    "bitwise_and": lambda a, b: join("&", a, b),
    "bitwise_or": lambda a, b: join("|", a, b),
    "bitwise_xor": lambda a, b: join("^", a, b),
    "bitwise_not": operator.invert,
    "bitwise_left_shift": lambda a, b: shift(Op.SHIFT_LEFT, a, b),
    "bitwise_right_shift": lambda a, b: shift(Op.SHIFT_RIGHT, a, b),
    "eq": _infix(operator.eq),
    "ne": _infix(operator.ne),
    "lt": _infix(operator.lt),
    "gt": _infix(operator.gt),
    "le": _infix(operator.le),
    "ge": _infix(operator.ge),
    "to": _to,
    "float": lambda a: wrap(convert(lift(a), Type.FLOAT)),
    "int": lambda a: wrap(convert(lift(a), Type.INT)),
    "long": lambda a: wrap(convert(lift(a), Type.INT)),
    "bool": lambda a: wrap(convert(lift(a), Type.BOOL)),
    "detach": lambda a: wrap(make(Op.DETACH, lift(a))),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _like(None),
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": lambda a, size, fill_value, **said: _new(fill_value)(a, size, **said),
    "sum": _no_sum,
}
Symbol.FUNCTIONS.update(FUNCTIONS)


def _dtype(a: Symbol) -> Any:
    """torch's name for what a symbol holds, as in `bias[h].to(score.dtype)`."""
    torch = sys.modules["torch"]
    return {Type.BOOL: torch.bool, Type.FLOAT: torch.float32}.get(a.expr.dtype, torch.int32)


Symbol.dtype = property(_dtype)  # type: ignore[attr-defined] # symbols.py is full
