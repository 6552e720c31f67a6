"""Rows that keep no pair: their output is 0, whatever the program's formula makes of states as they began."""

from __future__ import annotations

import dataclasses
import functools

from attention_engine.ir.evaluate import LOWEST, Value, evaluate
from attention_engine.ir.expr import Expr, Op, Type, const, is_const, make, substitute, topological
from attention_engine.ir.program import OUTPUT, Program, State, state_variable
from attention_engine.ir.verify import checked, verify_program
from attention_engine.passes.differentiate import differentiate
from attention_engine.passes.simplify import mul, simplify, where


def guard_empty_rows(program: Program) -> Program:
    """The program with an output of 0 for rows that keep no pair."""
    if _is_zero_at_start(program):
        return program
    factor = output_factor(program)
    states = program.states
    if factor is not None and states:  # where every state is as it began, the factor has no meaning, kept pairs or not
        (empty,) = simplify(functools.reduce(functools.partial(make, Op.AND), map(_is_as_it_began, states)))
    else:
        name = "_kept" + "_" * max((len(s.name) for s in states), default=0)  # which no state of the user's has
        kept = State(name, 0.0, make(Op.MAXIMUM, state_variable(name), make(Op.REDUCE, const(1.0), arg="max")))
        states = (*states, kept)
        empty = make(Op.EQUAL, kept.variable, const(0.0))
    if factor is not None:
        guarded = mul(OUTPUT, where(empty, const(0.0), factor))
    else:
        guarded = where(empty, const(0.0), program.output)
    return checked(verify_program, dataclasses.replace(program, states=states, output=guarded))


def counts_kept_pairs(program: Program) -> bool:
    """Does only a state of their own tell rows that keep no pair?"""
    return not _is_zero_at_start(program) and (output_factor(program) is None or not program.states)


def output_factor(program: Program) -> Expr | None:
    """What the epilogue multiplies the output with; None where it does more."""
    (factor,) = differentiate(program.output, [OUTPUT])
    (rest,) = simplify(substitute(program.output, {OUTPUT: const(0.0)}))
    return factor if OUTPUT not in topological(factor) and is_const(rest, 0) else None


def _is_zero_at_start(program: Program) -> bool:
    values: dict[Expr, Value] = {
        n: 0.3 if n.dtype is Type.FLOAT else 1 for n in topological(program.output) if n.op in (Op.VAR, Op.LOAD)
    }
    start = {s.variable: finite(s.initial) for s in program.states}
    return bool(evaluate(program.output, values | start | {OUTPUT: 0.0}) == 0)


def _is_as_it_began(state: State) -> Expr:
    """Did no kept pair touch the state? One that starts at -inf may have met a masked tile: LOWEST times a scale."""
    if state.initial <= LOWEST:
        return make(Op.LESS, state.variable, const(LOWEST * 1e-10))
    if state.initial >= -LOWEST:
        return make(Op.LESS, const(LOWEST * -1e-10), state.variable)
    return make(Op.EQUAL, state.variable, const(state.initial))


def finite(value: float, least: float = LOWEST) -> float:
    """Infinities as the finite numbers that stand for them: `least` and its opposite."""
    return float(max(min(value, -least), least))
