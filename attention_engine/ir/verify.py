"""What is valid: expressions, programs, their backward passes, the laws of linear attentions. No pass may leave less.

A variable is valid where whoever runs the expression has its value: each law names what an expression may read.
Schedules have their laws in passes/verify_schedule.py. `checked` asks where ATTENTION_ENGINE_VERIFY is set; tests do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Concatenate, ParamSpec, TypeVar, get_args

from attention_engine import settings
from attention_engine.ir.expr import INTEGERS, Axis, Expr, Extremum, Op, Reduction, Type, dtype_of, topological
from attention_engine.ir.linear import GRADIENT, LinearProgram, ModGradient, X
from attention_engine.ir.merge import Merge, part_variable, whole_variable
from attention_engine.ir.pretty import formula
from attention_engine.ir.program import (
    DELTA,
    KV_IDX,
    OUTPUT,
    PAIR,
    PRODUCT,
    Q_IDX,
    ROW,
    SCORE,
    WEIGHT,
    WEIGHT_GRADIENT,
    B,
    Backward,
    H,
    Program,
    final_gradient,
    final_variable,
    row_variable,
)


class InvalidIR(Exception):
    """A pass left what no other takes. It is a mistake of this package, never of its user."""


Types = frozenset[Type]
PLACES = frozenset({B, H, Q_IDX, KV_IDX})
OF_PAIR, OF_ROW, OF_ENTRY = frozenset(PAIR), frozenset(ROW), frozenset({*ROW, Axis.CHANNEL})

_ANY, _FLOAT, _BOOL = frozenset(Type), frozenset({Type.FLOAT}), frozenset({Type.BOOL})
_NUMBER = _FLOAT | INTEGERS
_OF_FLOATS = (Op.RECIP, Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG1P, Op.SOFTPLUS, Op.SQRT, Op.RSQRT, Op.TANH,
              Op.SIGMOID, Op.ERF, Op.SIN, Op.COS, Op.ATAN, Op.FLOOR, Op.ROUND, Op.REDUCE)  # fmt: skip
_OF_INTEGERS = (
    Op.FLOORDIV, Op.MOD, Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT
)  # fmt: skip

# What each operand may be. Operands of one operation are of one type, but for a choice's condition: nothing is cast
# unless a CAST says so. A read has an integer for each axis of its custom input, whose number is not known here.
OPERANDS: dict[Op, tuple[Types, ...]] = {
    **dict.fromkeys(_OF_FLOATS, (_FLOAT,)),
    **dict.fromkeys((Op.ADD, Op.MUL, Op.MAXIMUM, Op.MINIMUM), (_NUMBER, _NUMBER)),
    **dict.fromkeys(_OF_INTEGERS, (INTEGERS, INTEGERS)),
    **dict.fromkeys((Op.LESS, Op.LESS_EQUAL, Op.EQUAL), (_ANY, _ANY)),
    **dict.fromkeys((Op.AND, Op.OR), (_BOOL, _BOOL)),
    Op.POW: (_FLOAT, _FLOAT),
    Op.ABS: (_NUMBER,),
    Op.NOT: (_BOOL,),
    Op.WHERE: (_BOOL, _ANY, _ANY),
    Op.CAST: (_ANY,),
    Op.DETACH: (_ANY,),
    Op.CHANCE: (frozenset({Type.LONG}), INTEGERS, INTEGERS, INTEGERS, INTEGERS),
    Op.CONST: (),
    Op.VAR: (),
}
TOGETHER = {Op.WHERE: slice(1, None), Op.CHANCE: slice(1, None)}  # which operands are of one type, where not all are
REDUCTIONS = get_args(Reduction)
IN_32_BITS = range(-(2**31), 2**31)

T = TypeVar("T")
P = ParamSpec("P")


def checked(law: Callable[Concatenate[T, P], None], found: T, *others: P.args, **named: P.kwargs) -> T:
    """What a pass found, held against a law where settings ask for it. Raises InvalidIR."""
    if settings.verifies():
        law(found, *others, **named)
    return found


def refuse(what: str, law: str, node: Expr | None = None, inside: Expr | None = None) -> InvalidIR:
    """The error: what was looked at, the law that it breaks, and the node that breaks it."""
    at = "" if node is None else f"\n  at: {_text(node)}"
    within = "" if inside is None or inside is node else f"\n  in: {_text(inside)}"
    return InvalidIR(f"{what}: {law}{at}{within}\n  This is a mistake in attention_engine, not in your function.")


def _text(expr: Expr) -> str:
    """The formula; of a node with another number of operands than its operation's there is none."""
    odd = (n for n in topological(expr) if n.op is not Op.LOAD and len(n.args) != len(OPERANDS[n.op]))
    return formula(expr, {n: f"{n.op.value}({', '.join(a.op.value for a in n.args)})" for n in odd})


def verify_nodes(what: str, *roots: Expr) -> None:
    """Is each node below the roots one that its operation can be?"""
    for node in topological(*roots):
        if (law := _broken(node)) is not None:
            raise refuse(what, law, node, roots[0] if len(roots) == 1 else None)


def _broken(node: Expr) -> str | None:
    """The law of its operation that a node breaks."""
    op, found = node.op, [a.dtype for a in node.args]
    allowed = OPERANDS[op] if op is not Op.LOAD else (INTEGERS,) * len(found)
    if len(found) != len(allowed):
        return f"{op.value} takes {len(allowed)} operands, not {len(found)}"
    for number, (kind, types) in enumerate(zip(found, allowed, strict=True)):
        if kind not in types:
            return f"operand {number} of {op.value} is of type {kind.value}"
    together = {kind.value for kind in found[TOGETHER.get(op, slice(None))]}
    if op is not Op.LOAD and len(together) > 1:
        return f"{op.value} of {' and '.join(sorted(together))}"
    if op not in (Op.LOAD, Op.CONST, Op.VAR) and node.dtype is not dtype_of(op, node.args, node.arg):
        return f"{op.value} is of type {node.dtype.value}"
    return _broken_datum(node)


def _broken_datum(node: Expr) -> str | None:
    match node.op:
        case Op.CONST:
            return _broken_number(node)
        case Op.REDUCE:
            if node.arg not in REDUCTIONS:
                return f"there is no reduction {node.arg!r}"
            return "a reduction over keys of what differs by channel" if Axis.CHANNEL in node.args[0].axes else None
        case Op.MAXIMUM | Op.MINIMUM:
            share = node.arg
            fits = share is None or (isinstance(share, float) and 0.0 <= share <= 1.0)
            return None if fits else f"a share of {share!r} in a tie's gradient"
        case Op.VAR | Op.LOAD | Op.CAST:  # whose datum `make` asks for
            return None
        case _:
            return None if node.arg is None else f"{node.op.value} has no datum, as {node.arg!r} would be"


def _broken_number(node: Expr) -> str | None:
    number = node.arg
    wanted = {Type.BOOL: bool, Type.FLOAT: float}.get(node.dtype, int)
    if type(number) is not wanted:
        return f"a constant of type {node.dtype.value} holds {number!r}"
    if node.dtype is Type.INT and number not in IN_32_BITS:
        return f"32 bits have no room for {number!r}"
    return None


class Reads:
    """Holds expressions to what they may read.

    custom: the custom inputs that there are. Variables are told apart by identity: one of another kind, type or axes
    is another one.
    """

    def __init__(self, custom: Collection[str]) -> None:
        self.custom = frozenset(custom)

    def __call__(
        self, what: str, expr: Expr, variables: Iterable[Expr], axes: frozenset[Axis], dtype: Type = Type.FLOAT,
        reduces: bool = False,
    ) -> None:  # fmt: skip
        """Is `what` of this type, does it differ along these axes alone, and are its variables among these? reduces:
        may it reduce rows?"""
        verify_nodes(what, expr)
        if expr.dtype is not dtype:
            raise refuse(what, f"is of type {expr.dtype.value}, not {dtype.value}", expr)
        if extra := expr.axes - axes:
            raise refuse(what, f"differs along {', '.join(sorted(a.name.lower() for a in extra))}", expr)
        known = frozenset(variables)
        for node in topological(expr):
            if node.op is Op.VAR and node not in known:
                raise refuse(what, f"reads {_shown(node)}, which is not known there", node, expr)
            if node.op is Op.REDUCE and not reduces:
                raise refuse(what, "reduces a row", node, expr)
            if node.op is Op.LOAD and node.name not in self.custom:
                raise refuse(what, f"reads the custom input {node.name!r}, which is not declared", node, expr)


def _shown(variable: Expr) -> str:
    assert variable.kind is not None
    axes = "".join(a.value for a in Axis if a in variable.axes)
    return f"{variable.name} ({variable.kind.value}, {variable.dtype.value}, of {axes or 'nothing'})"


def distinct(what: str, names: Iterable[object]) -> None:
    """Does each name stand once?"""
    seen = set()
    for name in names:
        if name in seen:
            raise refuse(what, f"{name!s} stands twice")
        seen.add(name)


def verify_program(program: Program, captured: Iterable[str] = ()) -> None:
    """A program. captured: the custom inputs that tracing has found and not declared yet."""
    reads = Reads([*program.custom, *captured])
    states = {s.variable for s in program.states}
    finals = {final_variable(name) for name, _ in program.finals}
    distinct("row states", (s.name for s in program.states))
    distinct("returned rows", (name for name, _ in program.finals))
    reads("score", program.score, {PRODUCT, *PLACES}, OF_PAIR)
    if program.mask is not None:
        reads("mask", program.mask, PLACES, OF_PAIR, Type.BOOL)
    if program.dropped is not None:
        reads("dropped", program.dropped, PLACES, OF_PAIR, Type.BOOL)
    online = {SCORE, *states, *PLACES}
    for state in program.states:
        if not isinstance(state.initial, float) or math.isnan(state.initial):
            raise refuse(f"state.{state.name}", f"starts at {state.initial!r}")
        reads(f"next.{state.name}", state.update, online, OF_ROW, reduces=True)
    reads("weights", program.weights, online, OF_PAIR, reduces=True)
    reads("rescale", program.rescale, online, OF_ROW, reduces=True)
    reads("output", program.output, {OUTPUT, *states, *PLACES}, OF_ENTRY)
    for name, row in program.finals:
        reads(f"final.{name}", row, states | PLACES, OF_ROW)
    if program.forward is not None:
        reads("user.forward", program.forward, {SCORE, *finals, *PLACES}, OF_PAIR)
    if program.backward is not None:
        given = {WEIGHT_GRADIENT, WEIGHT, DELTA, *finals, *PLACES}
        reads("user.backward", program.backward, given, OF_PAIR)


def verify_backward(backward: Backward, program: Program) -> None:
    """The backward pass of a program."""
    reads, finals = Reads(program.custom), dict(program.finals)
    states = {s.variable for s in program.states}
    distinct("rows that are given", backward.given_rows)
    for name, row in backward.saved:
        if name in finals and row is not finals[name]:
            raise refuse(f"saved.{name}", "a returned row has this name and is another", row)
        reads(f"saved.{name}", row, states | PLACES, OF_ROW)
    late = {DELTA, *map(final_variable, backward.given_rows), *map(final_gradient, finals), *PLACES}
    distinct("rows that pairs read", (name for name, _ in backward.rows))
    for name, row in backward.rows:
        reads(name, row, late, OF_ROW)
    rows = {row_variable(name) for name, _ in backward.rows}
    of_score = {PRODUCT} if backward.score is None else {SCORE}
    reads("weight", backward.weights, {*of_score, *rows, *PLACES}, OF_PAIR)
    if backward.score is not None:
        reads("score", backward.score, {PRODUCT, *PLACES}, OF_PAIR)
    for number, extreme in enumerate(backward.extremes):
        if extreme.number != number or extreme.kind not in get_args(Extremum):
            raise refuse(f"{extreme.of_pair}", f"is number {number}, a {extreme.kind}")
        reads(f"{extreme.of_pair}", extreme.value, {PRODUCT, *PLACES}, OF_PAIR)
    pairs = {PRODUCT, WEIGHT, WEIGHT_GRADIENT, *rows, *(e.of_pair for e in backward.extremes), *PLACES}
    reads("d_qk", backward.product_gradient, pairs, OF_PAIR)
    loads = set(program.loads())
    for gradients, known, axes in ((backward.pair_gradients, pairs, OF_PAIR), (backward.row_gradients, late, OF_ROW)):
        distinct("reads that have gradients", (load for load, _ in gradients))
        for load, gradient in gradients:
            if load not in loads or load.dtype is not Type.FLOAT:
                raise refuse(f"d_{load}", "the program reads no such number", load)
            reads(f"d_{load}", gradient, known, axes)
    if unknown := {name for name, _ in backward.undifferentiated} - finals.keys():
        raise refuse("undifferentiated", f"no row {min(unknown)!r} is returned")


def verify_merge(merge: Merge) -> None:
    """How parts of a row join: each state of states of the parts, and of those of the whole before it."""
    reads, parts = Reads(merge.program.custom), {part_variable(s.name) for s in merge.program.states}
    rows = {B, H, Q_IDX}
    distinct("states of the whole", (name for name, _ in merge.states))
    known = parts | rows
    for name, state in merge.states:
        reads(f"whole.{name}", state, known, OF_ROW, reduces=True)
        known.add(whole_variable(name))
    if merge.states and {name for name, _ in merge.states} != {s.name for s in merge.program.states}:
        raise refuse("states of the whole", "are not those of the program")
    reads("factor", merge.factor, known, OF_PAIR, reduces=True)
    for what, expr in (("states", e) for _, e in merge.states):
        _refuse_reads_of_keys(what, expr)
    _refuse_reads_of_keys("factor", merge.factor)
    reads("output", merge.output, known - parts | {OUTPUT}, OF_ENTRY)
    for name, row in merge.finals:
        reads(f"final.{name}", row, known - parts, OF_ROW)


def _refuse_reads_of_keys(what: str, expr: Expr) -> None:
    """A merge's keys are parts: what it reads of a custom input is none of a key's."""
    for node in topological(expr):
        if node.op is Op.LOAD and Axis.KEY in node.axes:
            raise refuse(what, "reads a custom input at a key, where keys are parts", node, expr)


def verify_linear(program: LinearProgram, captured: Iterable[str] = ()) -> None:
    """The mods of a linear attention, each of an entry of its tensor. captured: as for a program."""
    reads = Reads([*program.custom, *captured])
    for name, mod in program.named():
        reads(name, mod, {X, B, H, Q_IDX}, OF_ENTRY)


def verify_mod_gradient(found: ModGradient, program: LinearProgram, name: str) -> None:
    """The gradients of one mod."""
    reads = Reads(program.custom)
    given = {X, GRADIENT, B, H, Q_IDX}
    reads(f"d_{name}", found.x, given, OF_ENTRY)
    if tuple(load for load, _ in found.reads) != program.loads(name):
        raise refuse(f"d_{name}", "gradients of other reads than the mod's", program.mod(name))
    for load, gradient in found.reads:
        reads(f"d_{load}", gradient, given, OF_ENTRY)
