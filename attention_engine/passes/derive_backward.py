"""The backward pass of a program from its forward alone.

`online_fwd` on the whole row as one tile gives the final weight E(x, rho), rho the row reductions. A program whose
result doesn't depend on how a row is cut has E = phi(x) * c(rho), so that with dw_j = dO . v_j and delta = dO . o

    dx_j = dw_j dE/dx + sum over reductions of A_r d f_r/dx,    A_r = delta * d log E / d rho_r + sum of dF dF/d rho_r

where rho_r = sum of f_r(x_j) and F are the returned rows. Of a max, each of the n pairs that reach it takes
A_r / n * d f_r/dx; one that only steadies the numbers has no gradient. What stands inside another reduction gets its
part of that one's A.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import assert_never

from attention_engine.errors import BackwardNotDerived
from attention_engine.ir.expr import (
    Axis,
    Expr,
    Extremum,
    Op,
    Type,
    const,
    is_const,
    make,
    substitute,
    topological,
)
from attention_engine.ir.program import (
    DELTA,
    OUTPUT,
    PRODUCT,
    SCORE,
    WEIGHT,
    WEIGHT_GRADIENT,
    Backward,
    Extreme,
    Program,
    final_gradient,
    final_variable,
)
from attention_engine.ir.reach import may_be_far, may_be_infinite
from attention_engine.ir.verify import checked, verify_backward
from attention_engine.passes.absent_pairs import guard_row
from attention_engine.passes.differentiate import ZERO, differentiate, log_derivative
from attention_engine.passes.row_values import RowValues, name_product, reductions_in, unlike
from attention_engine.passes.simplify import (
    add,
    construct,
    factor_out,
    factors,
    mul,
    recip,
    reduce,
    simplify,
    split_coefficient,
    terms,
    where,
)
from attention_engine.passes.steadying import is_steadying
from attention_engine.passes.strength import LOG2_E, use_exp2

Gradients = dict[Expr, Expr]


@dataclass(frozen=True)
class ClosedForm:
    """A row as one tile: the final weight, the states and the returned rows, of SCORE and row reductions."""

    weight: Expr
    states: dict[Expr, Expr]
    finals: dict[str, Expr]


def close(program: Program) -> ClosedForm:
    """The program on a whole row at once; refuses an epilogue that doesn't scale the output."""
    start = {s.variable: const(s.initial) for s in program.states}
    updates = [substitute(s.update, start) for s in program.states]
    weights, *updates = simplify(substitute(program.weights, start), *updates)
    end = {s.variable: u for s, u in zip(program.states, updates, strict=True)}
    output, *finals = simplify(substitute(program.output, end), *(substitute(f, end) for _, f in program.finals))
    (factor,) = differentiate(output, [OUTPUT])
    (at_zero,) = simplify(substitute(output, {OUTPUT: const(0.0)}))
    if OUTPUT in topological(factor) or not is_const(at_zero, 0):
        raise BackwardNotDerived(
            f"the epilogue's output is {output}, which is not the output so far times a factor of the row.\n"
            "  Return o times or divided by row values; apply the rest to the engine's output."
        )
    return ClosedForm(mul(weights, factor), end, dict(zip((n for n, _ in program.finals), finals, strict=True)))


def _is_differentiable(reduction: Expr) -> bool:
    """Does what is reduced have a gradient, straight or through reductions inside?"""
    inside = [n for n in topological(reduction.args[0]) if n is SCORE or n.op is Op.LOAD or n.op is Op.REDUCE]
    targets = [n for n in inside if n.dtype is Type.FLOAT]
    return any(not is_const(slope, 0) for slope in differentiate(reduction.args[0], targets))


def _not_derived(extreme: Expr, inner: Expr) -> BackwardNotDerived:
    return BackwardNotDerived(
        f"the gradient of {extreme} is not derived, as {inner} stands inside.\n"
        "  Detach it (`.detach()`), or write the static method `backward`."
    )


def _slope_of(outer: Expr, inner: Expr) -> Expr:
    """d outer / d inner, of two reductions."""
    (slope,) = differentiate(outer.args[0], [inner])
    if is_const(slope, 0):
        return ZERO
    if outer.arg != "sum":
        raise _not_derived(outer, inner)
    return add(ZERO, *(reduce("sum", term) for term in terms(slope)))


class _Deriver:
    """Collects the gradients of one program, of its output and these returned rows.

    extremes: those that got a gradient, with what stands for them.
    """

    def __init__(self, program: Program, closed: ClosedForm, finals: dict[str, Expr]) -> None:
        self.program = program
        self.closed = closed
        self.finals = finals
        self.extremes: dict[Expr, Extreme] = {}
        self.sensitivities = self._sensitivities()

    def _sensitivities(self) -> Gradients:
        """A_r for each reduction that has one: what arrives at it from the weights and from returned rows, straight or
        through other reductions."""
        weight, finals = self.closed.weight, self.finals
        of_weight: Gradients = {}
        of_finals: dict[str, Gradients] = {name: {} for name in finals}
        found: Gradients = {}
        reductions = reductions_in(weight, *finals.values())
        for reduction in reversed(reductions):
            extreme = reduction.arg != "sum"
            if extreme and not _is_differentiable(reduction):
                continue
            if not (extreme and is_steadying(reduction, weight)):
                self._arrive(of_weight, reduction, mul(DELTA, self._log_slope(reduction)))
            for name, final in finals.items():
                if not (extreme and is_steadying(reduction, final)):
                    (slope,) = differentiate(final, [reduction])
                    self._arrive(of_finals[name], reduction, mul(final_gradient(name), slope))
            parts = [arrived[reduction] for arrived in (of_weight, *of_finals.values()) if reduction in arrived]
            sensitivity = factor_out(add(ZERO, *parts))
            if not is_const(sensitivity, 0):
                found[reduction] = sensitivity
        return {r: found[r] for r in reductions if r in found}

    def _log_slope(self, reduction: Expr) -> Expr:
        slope = log_derivative(self.closed.weight, reduction, SCORE)
        if slope is None:
            raise BackwardNotDerived(
                f"the final weight {self.closed.weight} is not a factor of the score times a factor of the row "
                f"(seen at {reduction}).\n  Write the static method `backward`."
            )
        return slope

    def _arrive(self, arrived: Gradients, reduction: Expr, straight: Expr) -> None:
        """Notes what arrives at a reduction, from outer ones that did get something too."""
        through = [mul(a, _slope_of(outer, reduction)) for outer, a in arrived.items()]
        total = add(straight, *through)
        if not is_const(total, 0):
            arrived[reduction] = total

    def _by_finals(self, target: Expr) -> Expr:
        """What gradients of returned rows add to that of a target that stands in them outside reductions."""
        slopes = ((name, differentiate(final, [target])[0]) for name, final in self.finals.items())
        return add(ZERO, *(mul(final_gradient(name), slope) for name, slope in slopes))

    def with_respect_to(self, target: Expr) -> Expr:
        """What a pair adds to the gradient of `target` (SCORE, or a read of a custom input by online_fwd)."""
        (direct,) = differentiate(self.closed.weight, [target], WEIGHT_GRADIENT)
        parts = [direct]
        for reduction, sensitivity in self.sensitivities.items():
            match reduction.reduction:
                case "sum":
                    parts += differentiate(reduction.args[0], [target], sensitivity)
                case "max" | "min" as kind:
                    parts.append(self._where_reached(reduction, kind, target, sensitivity))
                case _ as kind:
                    assert_never(kind)
        return factor_out(add(*parts))

    def _where_reached(self, reduction: Expr, kind: Extremum, target: Expr, sensitivity: Expr) -> Expr:
        """An equal share of an extreme's gradient for each pair that reaches it, as torch.amax has it."""
        inside = reduction.args[0]
        if is_const(differentiate(inside, [target])[0], 0):
            return ZERO
        if inner := reductions_in(inside):
            raise _not_derived(reduction, inner[0])
        value = simplify(substitute(inside, {SCORE: self.program.score}))[0]
        number = len(self.extremes)
        taken = dict(self.program.finals)
        rows = unlike(f"extreme{number}", taken), unlike(f"reached{number}", taken)
        extreme = self.extremes.setdefault(reduction, Extreme(number, kind, value, rows))
        (part,) = differentiate(inside, [target], mul(sensitivity, recip(extreme.count)))
        return where(construct(make(Op.EQUAL, extreme.of_pair, extreme.row)), part, ZERO)

    def of_load(self, load: Expr) -> tuple[Expr | None, Expr | None]:
        """What a pair and what a row add to the gradient of a read by online_fwd or the epilogue (None: nothing)."""
        by_finals = self._by_finals(load)
        slope = self._row_slope(load)
        if slope is None:
            return self.with_respect_to(load), None if is_const(by_finals, 0) else by_finals
        return None, add(mul(DELTA, slope), by_finals)

    def _row_slope(self, load: Expr) -> Expr | None:
        """d log(weight) / d load, where it is a row's and divides by nothing that could be 0."""
        weight = self.closed.weight
        if Axis.KEY in load.axes or any(load in topological(r) for r in self.sensitivities):
            return None
        slope = log_derivative(weight, load, SCORE)
        if slope is None:
            return None
        divided = {n for n in topological(slope) if n.op is Op.RECIP} - set(topological(weight))
        return slope if all(is_positive(n.args[0]) for n in divided) else None


def is_positive(expr: Expr) -> bool:
    """Is the value above 0 for certain, in a row that keeps a pair?"""
    match expr.op:
        case Op.CONST:
            return expr.value > 0
        case Op.EXP | Op.EXP2 | Op.SIGMOID:
            return True
        case Op.RECIP | Op.SQRT | Op.RSQRT | Op.REDUCE | Op.DETACH:
            return is_positive(expr.args[0])
        case Op.MUL:
            return all(is_positive(a) for a in expr.args)
        case Op.ADD:
            return all(is_positive(a) or _not_negative(a) for a in expr.args) and any(is_positive(a) for a in expr.args)
        case Op.MAXIMUM:
            return any(is_positive(a) for a in expr.args)
        case _:
            return False


def _not_negative(expr: Expr) -> bool:
    return expr.op is Op.ABS or (expr.op is Op.MAXIMUM and any(a.op is Op.CONST and a.value >= 0 for a in expr.args))


def merge_row_factor(weight: Expr, apart: bool = False, whole: bool = False) -> Expr:
    """exp(u) * R as exp(u + log R), R a positive factor of the row: one number a row then serves (softmax: its lse).

    apart: as exp2(log2(e) * u + log2 R), two numbers of a row, as u's may be so far from 0 that log R would be lost.
    whole: a number above 0 that it is multiplied with joins R.
    """
    number, rest = split_coefficient(weight)
    if rest is None:
        return weight
    parts = factors(rest)
    inner = next((p for p in parts if p.op is Op.EXP and Axis.KEY in p.axes), None)
    positive = [p for p in parts if Axis.KEY not in p.axes and is_positive(p)]
    if inner is None or not positive:
        return weight
    logs = [
        mul(const(-1.0), make(Op.LOG, p.args[0])) if p.op is Op.RECIP else simplify(make(Op.LOG, p))[0]
        for p in positive
    ]
    others = [p for p in parts if p is not inner and p not in positive]
    if whole and number > 0:
        logs, number = [*logs, const(math.log(number))], 1.0
    if apart:
        exponent = add(mul(const(LOG2_E), inner.args[0]), *(mul(const(LOG2_E), log) for log in logs))
        return mul(const(float(number)), *others, make(Op.EXP2, exponent))
    return mul(const(float(number)), *others, make(Op.EXP, add(inner.args[0], *logs)))


def derive_backward(program: Program) -> Backward:
    """The backward pass; raises BackwardNotDerived, with what to do, where it can't be had.

    Returned rows that can't have a gradient beside the others' are noted in it, with the reason.
    """
    closed = close(program)
    names = list(closed.finals)
    try:
        return checked(verify_backward, _derive(program, closed, names), program)
    except BackwardNotDerived:
        found = _derive(program, closed, [])
    kept: list[str] = []
    refused = []
    for name in names:
        try:
            found = _derive(program, closed, [*kept, name])
            kept.append(name)
        except BackwardNotDerived as error:
            refused.append((name, str(error).splitlines()[0].removesuffix(".")))
    return checked(verify_backward, dataclasses.replace(found, undifferentiated=tuple(refused)), program)


def _derive(program: Program, closed: ClosedForm, finals: list[str]) -> Backward:
    """The backward pass with the gradients of these returned rows."""
    far = program.forward is None and may_be_far(program.score)
    joins, weight = program.dropped is not None, program.forward
    if weight is None:
        weight = merge_row_factor(closed.weight, far, joins)
    loads = _float_loads(closed.weight, *closed.finals.values())
    by_hand = program.backward
    deriver = _Deriver(program, closed, {n: closed.finals[n] for n in finals}) if by_hand is None or loads else None
    pair: Gradients = {}
    by_row: Gradients = {}
    undifferentiated: dict[str, str] = {}
    if deriver is not None:
        for load in loads:
            of_pair, of_row = deriver.of_load(load)
            if of_pair is not None:
                pair[load] = name_product(of_pair, closed.weight, WEIGHT)
            if of_row is not None:
                by_row[load] = of_row
    if by_hand is not None:
        (score_gradient,) = simplify(by_hand)
        undifferentiated = {n: "a `backward` written by hand doesn't say it" for n in closed.finals}
    else:
        assert deriver is not None
        score_gradient = name_product(deriver.with_respect_to(SCORE), closed.weight, WEIGHT)
    score_loads = _float_loads(program.score)
    by_score = differentiate(program.score, [PRODUCT, *score_loads], score_gradient)
    for load, gradient in zip(score_loads, by_score[1:], strict=True):
        pair[load] = add(pair[load], gradient) if load in pair else gradient
    extremes = deriver.extremes if deriver is not None else {}
    rows = RowValues(program.finals, closed.states, {reduction: e.row for reduction, e in extremes.items()}, joins)
    found = _assemble(program, closed, rows, weight, by_score[0], pair, by_row)
    noted = tuple(undifferentiated.items())
    return dataclasses.replace(found, undifferentiated=noted, extremes=tuple(extremes.values()))


def _float_loads(*roots: Expr) -> list[Expr]:
    return [n for n in topological(*roots) if n.op is Op.LOAD and n.dtype is Type.FLOAT]


def magnifies_delta(closed: ClosedForm, rows: list[Expr]) -> bool:
    """Could the gradients magnify an error of delta beyond that of the weights?

    A pair multiplies delta by weight * d log(phi) / dx. For exp the second factor is a number; for relu^2 it is 2 / x,
    and a row of scores near 0 then shows every bit that the rounding of o took from delta.
    """
    reads = bool(rows) and DELTA in topological(*rows)
    return reads and log_derivative(closed.weight, SCORE, SCORE) is None


def led_by_arriving(expr: Expr) -> Expr:
    """Factors number * dweight + rest as number * (dweight + rest / number): where pairs are dropped, dweight is the
    result of a choice, which nothing but an addition then follows."""

    def led(factor: Expr) -> Expr:
        for term in terms(factor) if factor.op is Op.ADD else ():
            number, rest = split_coefficient(term)
            if rest is WEIGHT_GRADIENT:
                others = (mul(const(1.0 / number), t) for t in terms(factor) if t is not term)
                return mul(const(float(number)), add(rest, *others))
        return factor

    number, rest = split_coefficient(expr)
    return expr if rest is None else mul(const(float(number)), *map(led, factors(rest)))


def _assemble(
    program: Program, closed: ClosedForm, rows: RowValues, weight: Expr, product: Expr, pair: Gradients,
    by_row: Gradients,
) -> Backward:  # fmt: skip
    far = program.forward is None and may_be_far(program.score)
    (weight,) = use_exp2(rows.in_states(weight), differences=far)
    gradients = [factor_out(product), *pair.values()]
    if program.dropped is not None:
        gradients = [led_by_arriving(factor_out(e)) for e in gradients]
    weights, *named = rows.name(weight, *use_exp2(*map(rows.in_states, gradients)))
    in_score = {SCORE: simplify(program.score)[0]}
    if not far:
        (weights,) = use_exp2(substitute(weights, in_score))
    product, *pairs = use_exp2(*(substitute(e, in_score) for e in named))
    row_gradients = tuple((load, rows.settle(rows.in_states(expr))) for load, expr in by_row.items())
    unbounded = may_be_infinite(program.score)
    of_pairs = {(guard_row(expr) if unbounded else expr): name for expr, name in rows.rows.items()}
    needed = [*rows.rows, *(g for _, g in row_gradients)]
    used = set(topological(*needed))
    saved = [(n, e) for n, e in program.finals if final_variable(n) in used]
    saved += [(name, expr) for expr, name in rows.saved.items()]
    read = tuple((name, expr) for expr, name in of_pairs.items())
    return Backward(tuple(saved), read, weights, product, tuple(zip(pair, pairs, strict=True)), row_gradients,
                    exact_delta=magnifies_delta(closed, needed), score=in_score[SCORE] if far else None)  # fmt: skip
