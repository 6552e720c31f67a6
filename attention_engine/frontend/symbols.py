"""The symbolic values that mods are handed: arithmetic on them builds expressions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, NoReturn

from attention_engine.errors import (
    MisplacedReduction,
    NumberTooLarge,
    SymbolAsIndex,
    TensorInMod,
    UnknownReduction,
    UnsupportedOperation,
)
from attention_engine.frontend.advice import NUMPY, no_row, way_out
from attention_engine.frontend.frames import spelled, where_from
from attention_engine.frontend.unanswered import Unanswered
from attention_engine.ir.evaluate import WIDEST
from attention_engine.ir.expr import Axis, Expr, Op, Type, const, make

FP32_MOST, FP32_LEAST = (2 - 2**-23) * 2.0**127, 2.0**-126  # the least that is not taken as 0 in fast arithmetic
RANKS = {Type.BOOL: 0, Type.INT: 1, Type.FLOAT: 2}
CAPTURE: ContextVar[Any] = ContextVar("capture", default=None)  # the captured.Capture of the tracing that runs
_reduces_nothing: ContextVar[str] = ContextVar("reduces_nothing", default="")


@contextmanager
def without_reductions(where: str) -> Iterator[None]:
    """Refuses get_reduce inside, and says that it stood there."""
    token = _reduces_nothing.set(where)
    try:
        yield
    finally:
        _reduces_nothing.reset(token)


def lift(value: object) -> Expr:
    """A symbol's expression, a Python number as a constant, or a tensor's one number: read at each call, in a trace."""
    if isinstance(value, Symbol):
        return value.expr
    number = value
    if hasattr(type(value), "requires_grad") and (capture := CAPTURE.get()) is not None:
        return capture.number(value)  # type: ignore[no-any-return]
    item, numel = getattr(value, "item", None), getattr(value, "numel", None)
    if item is not None and (numel() if numel is not None else getattr(value, "size", 1)) == 1:
        number = item()
    match number:
        case bool() | int() if -(2**63) <= number < 2**63:
            return const(number)
        case int():
            raise NumberTooLarge(f"{where_from()}an integer of {number.bit_length()} bits. Write it as a float.")
        case float():
            return const(in_fp32(number))
    raise TensorInMod(
        f"{where_from()}a {type(value).__name__} can't be mixed with symbolic values."
        + " It is all custom inputs: read one, custom['name']." * hasattr(type(value), "input_tensors")
        + "\n  Use Python numbers, tensors, or custom inputs: CustomIO({'name': axes}) and custom['name']."
    )


def in_fp32(number: float) -> float:
    """A number beyond fp32's range as fp32 has it, infinite or 0: what is decided of it in passes holds in kernels."""
    if abs(number) > FP32_MOST:
        return math.copysign(math.inf, number)
    return 0.0 if abs(number) < FP32_LEAST else number


def convert(expr: Expr, to: Type) -> Expr:
    """The expression as a value of this type."""
    if expr.dtype is to:
        return expr
    return const(expr.value, to) if expr.op is Op.CONST else make(Op.CAST, expr, arg=to)


def unify(*operands: object, least: Type = Type.BOOL) -> list[Expr]:
    """The operands as expressions of one type: the widest of theirs, and at least this one."""
    exprs = [lift(o) for o in operands]
    to = max([least, *(e.dtype for e in exprs)], key=RANKS.__getitem__)
    return [convert(e, to) for e in exprs]


class Symbol(Unanswered):
    """A symbolic value. Operators, methods and torch functions on it build expressions; its truth can't be asked."""

    __slots__ = ("expr",)
    __hash__ = Unanswered.__hash__
    FUNCTIONS: ClassVar[dict[str, Callable[..., Symbol]]] = {}

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __repr__(self) -> str:
        return repr(self.expr)

    def __format__(self, form: str) -> str:
        return repr(self)

    # arithmetic
    def __add__(self, other: object) -> Symbol:
        return wrap(make(Op.ADD, *unify(self, other, least=Type.INT)))

    __radd__ = __add__

    def __sub__(self, other: object) -> Symbol:
        a, b = unify(self, other, least=Type.INT)
        return wrap(a - b)

    def __rsub__(self, other: object) -> Symbol:
        a, b = unify(other, self, least=Type.INT)
        return wrap(a - b)

    def __mul__(self, other: object) -> Symbol:
        return wrap(make(Op.MUL, *unify(self, other, least=Type.INT)))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Symbol:
        a, b = unify(self, other, least=Type.FLOAT)
        return wrap(a / b)

    def __rtruediv__(self, other: object) -> Symbol:
        a, b = unify(other, self, least=Type.FLOAT)
        return wrap(a / b)

    def __floordiv__(self, other: object) -> Symbol:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: object) -> Symbol:
        return floor_divide(other, self)

    def __mod__(self, other: object) -> Symbol:
        return remainder(self, other)

    def __rmod__(self, other: object) -> Symbol:
        return remainder(other, self)

    def __pow__(self, other: object) -> Symbol:
        if self.expr.dtype is Type.INT and type(other) is int and 1 <= other <= 8:
            result = self
            for _ in range(other - 1):
                result = result * self
            return result
        return wrap(make(Op.POW, *unify(self, other, least=Type.FLOAT)))

    def __rpow__(self, other: object) -> Symbol:
        return wrap(make(Op.POW, *unify(other, self, least=Type.FLOAT)))

    def __neg__(self) -> Symbol:
        (a,) = unify(self, least=Type.INT)
        return wrap(-a)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return wrap(make(Op.ABS, *unify(self, least=Type.INT)))

    abs = __abs__  # type checkers look for it: a mask may be of tensors too

    # comparisons and logic
    def __lt__(self, other: object) -> Symbol:
        return wrap(make(Op.LESS, *unify(self, other)))

    def __gt__(self, other: object) -> Symbol:
        return wrap(make(Op.LESS, *unify(other, self)))

    def __le__(self, other: object) -> Symbol:
        return wrap(make(Op.LESS_EQUAL, *unify(self, other)))

    def __ge__(self, other: object) -> Symbol:
        return wrap(make(Op.LESS_EQUAL, *unify(other, self)))

    def __eq__(self, other: object) -> Symbol:  # type: ignore[override]
        return wrap(make(Op.EQUAL, *unify(self, other)))

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]
        return wrap(make(Op.NOT, make(Op.EQUAL, *unify(self, other))))

    def __and__(self, other: object) -> Symbol:
        return join("&", self, other)

    __rand__ = __and__

    def __or__(self, other: object) -> Symbol:
        return join("|", self, other)

    __ror__ = __or__

    def __xor__(self, other: object) -> Symbol:
        return join("^", self, other)

    __rxor__ = __xor__

    def __invert__(self) -> Symbol:
        return -1 - self if self.expr.dtype is Type.INT else wrap(make(Op.NOT, truth(self)))

    def __lshift__(self, other: object) -> Symbol:
        return shift(Op.SHIFT_LEFT, self, other)

    def __rlshift__(self, other: object) -> Symbol:
        return shift(Op.SHIFT_LEFT, other, self)

    def __rshift__(self, other: object) -> Symbol:
        return shift(Op.SHIFT_RIGHT, self, other)

    def __rrshift__(self, other: object) -> Symbol:
        return shift(Op.SHIFT_RIGHT, other, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        function = Symbol.FUNCTIONS.get(name)
        if function is None:
            raise UnsupportedOperation(
                f"{where_from()}symbolic values have no `{name}`. {way_out(name, Symbol.FUNCTIONS)}"
            )
        if name == "where" and self.expr.dtype is not Type.BOOL:  # x.where(condition, other), as torch's
            return lambda condition, other: where(condition, self, other)
        return lambda *args, **named: _call(name, function, (self, *args), named)

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Symbol:
        """torch.exp(x), torch.where(c, a, b) and so on, by the function's name."""
        name = getattr(function, "__name__", str(function)).removeprefix("special_")
        if name == "__getitem__":
            tensor = f"`{code}`, a tensor," if (code := spelled()) else "a tensor"
            raise SymbolAsIndex(
                f"{where_from()}{tensor} is read at a symbolic index, {args[1]}, outside of an engine's functions.\n"
                "  Read it in score_mod, mask_mod or a method of OnlineFunc."
            )
        return _call(name, _known("torch", name), args, kwargs or {})

    def __array_function__(self, function: Any, types: object, args: Any, kwargs: Any) -> Symbol:
        """numpy.where(c, a, b), numpy.clip(x, a, b) and so on, by the function's name."""
        return _call(function.__name__, _known("numpy", function.__name__), args, kwargs)

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Symbol:
        """numpy.exp(x) and so on, by the function's name; also what a numpy number on the left asks for."""
        name = str(function.__name__)
        if method != "__call__":
            raise UnsupportedOperation(f"{where_from()}numpy.{name}.{method} has no meaning in a mod. {no_row()}")
        return _call(name, _known("numpy", name), args, kwargs)


class SymbolicTensor(Symbol):
    """A symbolic value of every pair (a tile of scores): it can be reduced over the keys of a row."""

    __slots__ = ()

    def get_reduce(self, kind: str) -> Symbol:
        """The reduction over the keys of this row in the tile: "sum", "max", "min", "abssum" or "absmax"."""
        (a,) = unify(self, least=Type.FLOAT)
        if where := _reduces_nothing.get():
            raise MisplacedReduction(
                f"{where_from()}get_reduce in {where}. A row is reduced in online_fwd alone: reduce there.\n"
                "  Rows come tile by tile; a row state of the OnlineFunc carries the result."
            )
        match kind:
            case "sum" | "max" | "min":
                return wrap(make(Op.REDUCE, a, arg=kind))
            case "abssum" | "absmax":
                return wrap(make(Op.REDUCE, make(Op.ABS, a), arg=kind.removeprefix("abs")))
            case _:
                raise UnknownReduction(
                    f'{where_from()}get_reduce("{kind}") is unknown. Choose "sum", "max", "min", "abssum" or "absmax".'
                )


class SymbolicArray(Symbol):
    """A symbolic value of a row, a head or nothing at all: the same for every key."""

    __slots__ = ()

    def get_reduce(self, kind: str) -> NoReturn:
        """Always an error: there is nothing to reduce."""
        raise UnknownReduction(
            f'{where_from()}get_reduce("{kind}") on {self.expr}, which is the same for every key.\n'
            "  Reduce the scores, or what you computed from them."
        )


def wrap(expr: Expr) -> Symbol:
    """The expression as a symbol of the class that its axes ask for."""
    return SymbolicTensor(expr) if Axis.KEY in expr.axes else SymbolicArray(expr)


def truth(value: object) -> Expr:
    """The expression of a condition."""
    expr = lift(value)
    if expr.dtype is not Type.BOOL:
        raise UnsupportedOperation(
            f"{where_from()}&, |, ^ and ~ join conditions with conditions, or integers with integers, and {expr} is "
            f"{'a float' if expr.dtype is Type.FLOAT else 'an integer'}.\n"
            "  Put brackets around comparisons: (a < b) & (c < d)."
        ).blaming(expr)
    return expr


BITS = {"&": (Op.AND, Op.BIT_AND), "|": (Op.OR, Op.BIT_OR), "^": (None, Op.BIT_XOR)}


def join(sign: str, a: object, b: object) -> Symbol:
    """a & b, a | b, a ^ b: of two conditions, or bit by bit of two integers."""
    (logical, bitwise), left, right = BITS[sign], lift(a), lift(b)
    if left.dtype is right.dtype is Type.INT:
        return wrap(make(bitwise, left, right))
    both = truth(a), truth(b)
    return wrap(make(Op.NOT, make(Op.EQUAL, *both)) if logical is None else make(logical, *both))


def shift(op: Op, a: object, b: object) -> Symbol:
    """a << b or a >> b, of integers."""
    left, right = lift(a), lift(b)
    for expr in (left, right):
        if expr.dtype is not Type.INT:
            message = f"{where_from()}<< and >> shift an integer by an integer, and {expr} is none."
            raise UnsupportedOperation(message).blaming(expr)
    if right.op is Op.CONST and not 0 <= right.value < WIDEST:
        raise UnsupportedOperation(f"{where_from()}a shift by {right.value} bits, of 0 to {WIDEST - 1}.")
    return wrap(make(op, left, right))


def floor_divide(a: object, b: object) -> Symbol:
    """a // b."""
    left, right = unify(a, b, least=Type.INT)
    return wrap(make(Op.FLOORDIV, left, right) if left.dtype is Type.INT else make(Op.FLOOR, left / right))


def remainder(a: object, b: object) -> Symbol:
    """a % b, of the sign of b."""
    left, right = unify(a, b, least=Type.INT)
    return wrap(make(Op.MOD, left, right) if left.dtype is Type.INT else left - make(Op.FLOOR, left / right) * right)


def where(condition: object, a: object, b: object) -> Symbol:
    """a where the condition holds, else b: what `if` would say."""
    return wrap(make(Op.WHERE, truth(condition), *unify(a, b)))


def _call(name: str, function: Callable[..., Symbol], args: tuple[object, ...], named: dict[str, object]) -> Symbol:
    if over := named.keys() & {"dim", "axis", "keepdim", "keepdims"}:
        raise UnsupportedOperation(f"{where_from()}{name} with {min(over)}= has no meaning in a mod. {no_row()}")
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError as mismatch:
        raise UnsupportedOperation(f"{where_from()}{name} on a symbolic value: {mismatch}.") from None
    return function(*args, **named)


def _known(library: str, name: str) -> Callable[..., Symbol]:
    if known := Symbol.FUNCTIONS.get(NUMPY.get(name, name) if library == "numpy" else name):
        return known
    raise UnsupportedOperation(
        f"{where_from()}{library}.{name} has no meaning in a mod. {way_out(name, Symbol.FUNCTIONS)}"
    )
