"""Pairs that their score leaves out: one of -inf takes no part, as if it were masked.

Where score_mod chooses -inf by indices or custom inputs, the choice becomes a part of the mask, which bounds loops too.
What a bias holds is not asked for each pair: where a weight of -inf is 0 and no reduction sees it (softmax, sigmoid),
the numbers do it by themselves, but for a row that holds nothing else. Its lse is -inf, and -inf - -inf is NaN, so a
row value of the backward pass that is infinite becomes 0 (`guard_row`): exp(-inf + 0) is 0. Other weights (the scores
themselves, say) get a mask that asks the bias.
"""

from __future__ import annotations

import dataclasses
import math

from attention_engine.ir.expr import Expr, Op, Type, VarKind, const, is_const, make, topological
from attention_engine.ir.program import PRODUCT, Program
from attention_engine.ir.reach import HIGHEST, may_be_infinite
from attention_engine.ir.verify import checked, verify_program
from attention_engine.passes.empty_rows import counts_kept_pairs
from attention_engine.passes.fills import absorbs_absent_pairs
from attention_engine.passes.simplify import CONSTRUCTORS, add, mul, negate, simplify, split_coefficient, terms, where

LEAST = -1e38  # below it a bias is -inf, where a mask asks
FALSE = const(False, Type.BOOL)


def leave_out_absent(program: Program) -> Program:
    """The program with a mask that leaves out pairs whose score is -inf, as far as its formulas don't do it."""
    score, absent = _take_out(program.score)
    program = dataclasses.replace(program, score=score, mask=_without(program.mask, absent))
    if may_be_infinite(score) and (not absorbs_absent_pairs(program) or counts_kept_pairs(program)):
        program = dataclasses.replace(program, mask=_without(program.mask, _asks_biases(score)))
    return checked(verify_program, program)


def _without(mask: Expr | None, absent: Expr) -> Expr | None:
    if absent is FALSE:
        return mask
    kept = negate(absent)
    return simplify(kept if mask is None else make(Op.AND, mask, kept))[0]


def _take_out(score: Expr) -> tuple[Expr, Expr]:
    """The score without its choices of -inf, and where it chose them: never, where products were asked."""
    absent = FALSE
    parts = []
    for term in terms(score):
        number, rest = split_coefficient(term)
        if rest is None or rest.op is not Op.WHERE or number <= 0 or PRODUCT in topological(rest.args[0]):
            parts.append(term)
            continue
        condition, *branches = rest.args
        for place, branch in enumerate(branches):
            here = condition if place == 0 else negate(condition)
            if is_const(branch, -math.inf):
                inside = const(True, Type.BOOL)
                branches[place] = branches[1 - place]
            else:
                branches[place], inside = _take_out(branch)
            absent = CONSTRUCTORS[Op.OR](absent, CONSTRUCTORS[Op.AND](here, inside))
        parts.append(mul(const(float(number)), where(condition, *branches)))
    if all(is_const(part, -math.inf) for part in parts):
        return const(0.0), const(True, Type.BOOL)
    return add(*parts), absent


def _asks_biases(score: Expr) -> Expr:
    """Where is a score -inf by the custom inputs that are its terms?"""
    absent = FALSE
    for term in terms(score):
        number, rest = split_coefficient(term)
        if rest is not None and rest.op is Op.LOAD and number > 0:
            absent = CONSTRUCTORS[Op.OR](absent, make(Op.LESS, rest, const(LEAST)))
        elif rest is not None and rest.op is Op.WHERE and PRODUCT not in topological(rest.args[0]):
            inner = where(rest.args[0], _asks_biases(rest.args[1]), _asks_biases(rest.args[2]))
            absent = CONSTRUCTORS[Op.OR](absent, inner)
    return absent


def guard_row(row: Expr) -> Expr:
    """A row value that weights take, 0 where it is infinite: in a row that kept no pair."""
    reads_saved = any(n.kind is VarKind.FINAL for n in topological(row))
    return where(make(Op.LESS, const(HIGHEST), row), const(0.0), row) if reads_saved else row
