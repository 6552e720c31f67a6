"""Runs a user's functions once, on symbols, and notes what they do as a Program."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from attention_engine.errors import (
    BadInitialValue,
    FactoryNotCalled,
    MaskIsNoCondition,
    MissingState,
    NotAFunction,
    NotReduced,
    StatesNotDeclared,
    UnknownState,
    WrongArity,
    WrongResult,
    did_you_mean,
)
from attention_engine.frontend.custom_io import CustomInputs, CustomIO, counted
from attention_engine.frontend.frames import where_from
from attention_engine.frontend.online_func import OnlineFunc, SymbolScalar, Var
from attention_engine.frontend.symbols import CAPTURE, Symbol, convert, lift, without_reductions, wrap
from attention_engine.ir.expr import Axis, Expr, Op, Type, const
from attention_engine.ir.merge import returned_by_part
from attention_engine.ir.program import (
    DELTA,
    KV_IDX,
    OUTPUT,
    PRODUCT,
    Q_IDX,
    ROW,
    SCORE,
    WEIGHT,
    WEIGHT_GRADIENT,
    B,
    H,
    Program,
    State,
    final_variable,
    state_variable,
)
from attention_engine.ir.verify import checked, verify_program
from attention_engine.passes.index_ranges import settle_comparisons
from attention_engine.passes.pack_documents import PackDocuments
from attention_engine.passes.simplify import simplify
from attention_engine.passes.widths import widen

ALL_AXES = frozenset(Axis)
PAIR_AXES = ALL_AXES - {Axis.CHANNEL}
SCORE_ARGUMENTS = "score, custom, b, h, q_idx, kv_idx"


def place_of(function: Callable[..., object]) -> str:
    """Where the function stands, as `file.py:12: name`."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function)).rpartition("<locals>.")[2]
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}: {name}" if code else name


def call(function: Callable[..., object], arguments: str, values: Sequence[object], custom: CustomInputs | None) -> Any:
    """Calls with the arguments it asks for: the listed ones and, if it takes one more, the custom inputs."""
    if not callable(function):
        given, instead = type(function).__name__, _instead(function, arguments)
        raise NotAFunction(f"a {given} was given where a function of ({arguments}) belongs.{instead}")
    if getattr(function, "makes_mods", False):
        raise FactoryNotCalled(
            f"{function.__name__} makes a function of ({arguments}). Call it: {function.__name__}"
            f"({', '.join(inspect.signature(function).parameters)})."
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return function(*values)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*values)
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = len([p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD])
    count = len(placed)
    _check_place_of_custom(function, arguments, [p.name for p in placed], custom)
    more = placed[len(values)] if count > len(values) else None
    if more is not None and more.name == "kv_idx" and "kv_idx" not in arguments:
        raise WrongArity(
            f"{place_of(function)} asks for kv_idx, and is called with ({arguments}), and one more, custom.\n"
            "  What depends on the key belongs in score_mod, before a row's scores are reduced."
        )
    if more is not None and custom is not None and (more.default is more.empty or more.name.startswith("custom")):
        values = [*values, custom]
    if count >= len(values) >= needed:
        return function(*values)
    raise _wrong_arity(function, arguments, count, custom)


def _wrong_arity(
    function: Callable[..., object], arguments: str, count: int, custom: CustomInputs | None
) -> WrongArity:  # fmt: skip
    """What is said of a function that takes so many arguments."""
    if arguments == SCORE_ARGUMENTS and count == 5:
        return WrongArity(
            f"{place_of(function)} takes 5 arguments, as FlexAttention's does. Put custom second: ({arguments}).\n"
            "  FlexAttention's score is scaled already: say scale=dim ** -0.5 to the engine."
        )
    one_more = "" if custom is None else ", and one more, custom, if it reads custom inputs"
    bound = "\n  Is @staticmethod missing above it?" if inspect.ismethod(function) else ""
    return WrongArity(
        f"{place_of(function)} takes {counted(count, 'argument')}. It is called with ({arguments}){one_more}.{bound}"
    )


def _instead(given: object, arguments: str) -> str:
    """What to give in place of something that is no function."""
    if hasattr(type(given), "requires_grad"):
        return f" Read it in one: lambda {arguments}: tensor[...]."
    if isinstance(given, str):
        return " Give the function itself: attention_engine.library has many, or write a lambda."
    if isinstance(given, (list, tuple)) and arguments != SCORE_ARGUMENTS:
        return " Join masks by library.and_masks(...) or or_masks(...)."
    return " The engine's scale= multiplies scores by a number." if arguments == SCORE_ARGUMENTS else ""


def _check_place_of_custom(
    function: Callable[..., object], arguments: str, names: Sequence[str], custom: CustomInputs | None
) -> None:
    """WrongArity where a parameter is called custom and is given something else."""
    wanted = arguments if custom is None else f"{arguments}, custom"
    found = [n for n, name in enumerate(names) if name == "custom"]
    place = wanted.split(", ").index("custom") if "custom" in wanted.split(", ") else None
    if found and place is not None and found[0] != place:
        raise WrongArity(
            f"{place_of(function)} takes custom as its argument {found[0] + 1}. It is called with ({wanted}): make it "
            f"argument {place + 1}."
        )


def is_number(value: object) -> bool:
    """May a function return it? A symbolic value, a Python number, or a captured tensor of one number."""
    of_one = hasattr(type(value), "requires_grad") and getattr(value, "numel", lambda: 0)() == 1
    return of_one or isinstance(value, (Symbol, bool, int, float))


def _number(function: Callable[..., object], what: str, value: object, allowed: frozenset[Axis] = PAIR_AXES) -> Expr:
    """A result as a float expression over the allowed axes."""
    if not is_number(value):
        raise WrongResult(
            f"{place_of(function)} returned {type(value).__name__} as {what}. Return a symbolic value, or a number"
            f"{' (is a `return` missing?)' if value is None else ''}."
        )
    expr = lift(value)
    if extra := expr.axes - allowed:
        of_keys = Axis.KEY in extra
        held = "a value of each key" if of_keys else "the output"
        way_out = "Reduce it: x.get_reduce('sum')." if of_keys else "Make it of the row states alone."
        raise NotReduced(f"{place_of(function)} returned {what} that still holds {held}: {expr}. {way_out}")
    return convert(expr, Type.FLOAT)


def _mask(mask_mod: Callable[..., object], custom: CustomInputs) -> Expr:
    with without_reductions("a mask_mod"):
        result = call(mask_mod, "b, h, q_idx, kv_idx", _indices(), custom)
    number = is_number(result) and type(result) not in (int, float)
    expr = lift(result) if number else None
    if expr is None or expr.dtype is not Type.BOOL:
        shown = type(result).__name__ if expr is None else f"the number {expr}"
        raise MaskIsNoCondition(
            f"{place_of(mask_mod)} returned {shown}. Return a condition, True where the pair is kept: q_idx >= kv_idx"
            f"{' (is a `return` missing?)' if result is None else ''}."
        ).blaming(*[] if expr is None else [expr])
    return expr


def _indices() -> list[Symbol]:
    return [wrap(B), wrap(H), wrap(Q_IDX), wrap(KV_IDX)]


class _Rowscales(dict[str, Symbol]):
    """Row states by name; an unknown one is an error that lists the known."""

    def __init__(self, values: Mapping[str, Symbol], what: str, owner: str) -> None:
        super().__init__(values)
        self.what, self.owner = what, owner

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownState(f"{where_from()}row states are read by name in brackets: [{name!r}].")

    def __missing__(self, name: str) -> Symbol:
        known = ", ".join(map(repr, self)) or "none"
        meant = did_you_mean(name, self)
        raise UnknownState(
            f"{where_from()}{self.owner} reads the {self.what} {name!r}, which isn't declared.{meant} Declared: "
            f"{known}."
        )


def _initial(owner: OnlineFunc, name: str, scalar: object) -> float:
    if isinstance(scalar, (SymbolScalar, Var)):
        return scalar.value if isinstance(scalar, Var) else scalar.value.value
    if isinstance(scalar, (int, float)) and not isinstance(scalar, bool):
        holds = scalar == scalar if isinstance(scalar, float) else abs(scalar) < 2**128
        if holds:
            return float(scalar)
    raise BadInitialValue(
        f"{type(owner).__name__}: the row state {name!r} starts at {scalar!r}. "
        "Write a number, 0.0 or -math.inf, or Var('-inf')."
    )


def _check_keys(function: Callable[..., object], what: str, given: object, declared: Mapping[str, object]) -> None:
    if not isinstance(given, Mapping):
        raise WrongResult(f"{place_of(function)} returned {type(given).__name__} where a dict of {what}s belongs.")
    known = ", ".join(map(repr, declared)) or "none"
    if missing := [n for n in declared if n not in given]:
        raise MissingState(f"{place_of(function)} gives no {what} {missing[0]!r}. Return each: {known}.")
    if extra := [n for n in given if n not in declared]:
        meant = did_you_mean(extra[0], declared)
        raise UnknownState(
            f"{place_of(function)} gives a {what} {extra[0]!r} that isn't declared.{meant} Declared: {known}."
        )


def _unpack(function: Callable[..., object], result: object, names: str, count: int) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) != count:
        shown = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise WrongResult(f"{place_of(function)} returned {shown}. Return ({names}).")
    return result


class _OnlineTrace:
    """What tracing an OnlineFunc found."""

    def __init__(self, func: OnlineFunc, custom: CustomInputs) -> None:
        self.func, self.custom = func, custom
        self.name = type(func).__name__
        if not hasattr(func, "online_rowscales"):
            raise StatesNotDeclared(
                f"{self.name}.__init__ doesn't declare its row states.\n"
                "  Call super().__init__(online_rowscales={...}, final_rowscales={...}) in it."
            )
        self.initial = {n: _initial(func, n, s) for n, s in func.online_rowscales.items()}
        self.states = self._scales("row state", {n: wrap(state_variable(n)) for n in self.initial})
        self.final_names = list(func.final_rowscales)
        self.finals = self._scales("returned row", {n: wrap(final_variable(n)) for n in self.final_names})
        self._online()
        self._epilogue()
        self.forward = self._optional(
            "forward", "scores, final_rowscales, b, h, q_idx, kv_idx", [wrap(SCORE), self.finals]
        )
        self.backward = self._optional(
            "backward",
            "dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx",
            [wrap(WEIGHT_GRADIENT), wrap(WEIGHT), self.finals, wrap(DELTA)],
        )

    def _scales(self, what: str, values: Mapping[str, Symbol]) -> _Rowscales:
        return _Rowscales(values, what, self.name)

    def _online(self) -> None:
        function = self.func.online_fwd
        values = [wrap(SCORE), self._copy(), *_indices()[:3]]
        result = call(function, "scores, online_rowscales, b, h, q_idx", values, self.custom)
        weights, states, rescale = _unpack(function, result, "weights, new_rowscales, rescale", 3)
        _check_keys(function, "row state", states, self.initial)
        self.weights = _number(function, "weights", weights)
        row = frozenset(ROW)
        self.updates = {n: _number(function, f"the row state {n!r}", states[n], row) for n in self.initial}
        if isinstance(rescale, SymbolScalar):  # SymbolScalar("o_scale", Var("1")) says "no rescale"
            rescale = rescale.value.value
        self.rescale = _number(function, "rescale", rescale, row)
        if self.rescale.op is Op.CONST and not math.isfinite(self.rescale.value):
            found = f"{place_of(function)} returned {self.rescale} as rescale."
            raise WrongResult(f"{found} Return a finite factor, 1 for none.")

    def _copy(self) -> _Rowscales:
        return self._scales("row state", dict(self.states))

    def _epilogue(self) -> None:
        function = self.func.online_fwd_epilogue
        values = [wrap(OUTPUT), self._copy(), *_indices()[:3]]
        with without_reductions("online_fwd_epilogue"):
            result = call(function, "o, online_rowscales, b, h, q_idx", values, self.custom)
        output, finals = _unpack(function, result, "o, final_rowscales", 2)
        _check_keys(function, "returned row", finals, dict.fromkeys(self.final_names))
        row = frozenset(ROW)
        self.output = _number(function, "the output", output, row | {Axis.CHANNEL})
        self.final_exprs = [(n, _number(function, f"the returned row {n!r}", finals[n], row)) for n in self.final_names]

    def _optional(self, method: str, arguments: str, values: Sequence[object]) -> Expr | None:
        function = getattr(self.func, method, None)
        if function is None:
            return None
        with without_reductions(f"`{method}`"):
            result = call(function, arguments, [*values, *_indices()], self.custom)
        return _number(function, "its result", result)


def trace_combine(func: OnlineFunc, program: Program, custom_io: CustomIO, types: Mapping[str, Type]) -> Expr | None:
    """What the user's `combine` multiplies the outputs of parts with, of their returned rows; None where there is no
    such method."""
    if func.combine is None:
        return None
    rows = {name: wrap(returned_by_part(name)) for name, _ in program.finals}
    given = _Rowscales(rows, "returned row", type(func).__name__)
    result = call(func.combine, "final_rowscales", [given], CustomInputs(custom_io, types))
    return simplify(_number(func.combine, "the factor", result))[0]


def trace(
    score_mod: Callable[..., object] | None,
    mask_mod: Callable[..., object] | None,
    online_func: OnlineFunc | None,
    custom_io: CustomIO,
    custom_types: Mapping[str, Type] | None = None,
    scale: float = 1.0,
) -> Program:
    """The program that the user's functions write; every expression in normal form.

    custom_types says of each custom input whether it holds floats, bools, int64 (LONG) or narrower integers (INT);
    floats where it says nothing.
    scale multiplies q . k before score_mod. Without an online_func the scores are the weights. Where custom_io says how
    sequences are packed, the program is that of their rows.
    """
    custom = CustomInputs(custom_io, custom_types or {})
    score = PRODUCT if scale == 1.0 else PRODUCT * scale
    if score_mod is not None:
        with without_reductions("a score_mod"):
            result = call(score_mod, SCORE_ARGUMENTS, [wrap(score), custom, *_indices()], None)
        if is_number(result) and lift(result).dtype is Type.BOOL:
            raise WrongResult(
                f"{place_of(score_mod)} returned a condition, {lift(result)}, as the score. A mask is given as "
                "mask_mod; the number of a condition is condition.float()."
            )
        score = _number(score_mod, "the score", result)
    mask = None if mask_mod is None else _mask(mask_mod, custom)
    online = _OnlineTrace(online_func if online_func is not None else OnlineFunc(), custom)
    states, wide = list(online.initial), wide_inputs(custom_types or {})
    found = (score, *online.updates.values(), online.weights, online.rescale, online.output,
             *(e for _, e in online.final_exprs))  # fmt: skip
    forward, backward = online.forward, online.backward
    if custom_io.packing is not None:
        pack = PackDocuments(custom_io.packing, {s.name: s.axes for s in custom_io.in_order})
        mask, found = pack.mask(mask), tuple(map(pack, found))
        forward, backward = (None if e is None else pack(e) for e in (forward, backward))
    mask = None if mask is None else settle_comparisons(mask, wide)
    roots = widen(*simplify(*found), wide=wide)
    score, updates, (weights, rescale, output, *finals) = roots[0], roots[1 : 1 + len(states)], roots[1 + len(states) :]
    optional = [widen(*simplify(e), wide=wide)[0] if e is not None else None for e in (mask, forward, backward)]
    program = Program(
        score=score,
        mask=None if optional[0] is not None and optional[0] is const(True) else optional[0],
        states=tuple(State(n, online.initial[n], u) for n, u in zip(states, updates, strict=True)),
        weights=weights,
        rescale=rescale,
        output=output,
        finals=tuple(zip(online.final_names, finals, strict=True)),
        forward=optional[1],
        backward=optional[2],
        custom=tuple(custom_io.specs),
    )
    return checked(verify_program, program, captured_names())


def captured_names() -> tuple[str, ...]:
    """What the tracing that runs calls the tensors that functions captured; they are declared when it has ended."""
    capture = CAPTURE.get()
    return () if capture is None else tuple(capture.names)


def wide_inputs(types: Mapping[str, Type]) -> set[str]:
    """The names of the custom inputs that hold int64: declared ones, by their types, and those that were captured."""
    capture = CAPTURE.get()
    return {name for name, kind in types.items() if kind is Type.LONG} | (set() if capture is None else capture.wide)
