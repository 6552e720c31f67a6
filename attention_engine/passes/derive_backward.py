"""The backward pass of a program from its forward alone.

`online_fwd` on the whole row as one tile gives the final weight E(x, rho), rho the row reductions. A program whose
result doesn't depend on how a row is cut has E = phi(x) * c(rho), so that with dw_j = dO . v_j and delta = dO . o

    dx_j = dw_j dE/dx + sum over reductions of A_r d f_r/dx,    A_r = delta * d log E / d rho_r + sum of dF dF/d rho_r

where rho_r = sum of f_r(x_j) and F are the returned rows. A max that only steadies the numbers has no gradient.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from attention_engine.errors import BackwardNotDerived
from attention_engine.ir.evaluate import Value, evaluate
from attention_engine.ir.expr import (
    Axis,
    Expr,
    Number,
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
    Program,
    final_gradient,
)
from attention_engine.ir.reach import may_be_far, may_be_infinite
from attention_engine.passes.absent_pairs import guard_row
from attention_engine.passes.differentiate import ZERO, differentiate, log_derivative
from attention_engine.passes.row_values import RowValues, name_product, near, reductions_in
from attention_engine.passes.simplify import add, factor_out, factors, mul, simplify, split_coefficient
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


FARTHEST = 10**5  # an index that is tried: beyond it a score in float64 loses the digits that are compared


def is_steadying(reduction: Expr, *roots: Expr) -> bool:
    """Does shifting this reduction leave the roots as they are? Tried on random rows, large, small, positive.

    And at indices on both sides of every number that they may be compared with: each index takes each such place.
    """
    length, seen, nodes = 7, 0, topological(reduction, *roots)
    places = sorted({*range(5)}.union(*(_about(n) for n in nodes if n.op is Op.CONST)))
    for seed in range(max(8, 2 * len(places))):
        center, spread = [(0.0, 1.0), (0.0, 4.0), (0.0, 0.1), (3.0, 0.5)][seed % 4]
        draw = random.Random(seed)
        variables = [n for n in nodes if n.op in (Op.VAR, Op.LOAD)]
        offset = draw.randrange(len(places)) if seed >= len(places) else 0
        values = {}
        for k, n in enumerate(variables):
            turn = [places[(seed + k * offset + m) % len(places)] for m in range(length)]
            values[n] = _sample(n, draw, center, spread, turn)
        at = evaluate(reduction, values, length)
        for root in roots:
            plain = _row(evaluate(root, values, length))
            shifted = _row(evaluate(root, {**values, reduction: at + 0.37}, length))
            if not all(near(a, b) for a, b in zip(plain, shifted, strict=True)):
                return False
            seen += sum(map(math.isfinite, plain))
    return seen > 0  # a row of NaNs shows nothing


def _about(node: Expr) -> set[int]:
    """The indices beside a constant."""
    number = node.arg
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= FARTHEST:
        return set()
    return {n for n in (math.floor(number) - 1, math.floor(number), math.floor(number) + 1) if n >= 0}


def _sample(node: Expr, draw: random.Random, center: float, spread: float, places: list[int]) -> object:
    def number(place: int) -> Number:
        match node.dtype:
            case Type.FLOAT:
                return draw.gauss(center, spread)
            case Type.INT | Type.LONG:
                return place
            case Type.BOOL:
                return True

    return [number(p) for p in places] if Axis.KEY in node.axes else number(places[0])


def _row(value: Value) -> list[float]:
    return value if isinstance(value, list) else [value]


def has_gradient(root: Expr, inner: Expr) -> bool:
    """Does a gradient of the root reach this node inside it, straight or through row reductions?"""
    if not is_const(differentiate(root, [inner])[0], 0):
        return True
    between = [r for r in reductions_in(root) if r is not inner and inner in topological(r)]
    return any(not is_const(differentiate(root, [r])[0], 0) and has_gradient(r.args[0], inner) for r in between)


class _Deriver:
    """Collects the gradients of one program."""

    def __init__(self, program: Program, closed: ClosedForm) -> None:
        self.program = program
        self.closed = closed
        self.undifferentiated: dict[str, str] = {}
        self.steadying: set[Expr] = set()
        self.sensitivities = self._sensitivities()

    def _sensitivities(self) -> Gradients:
        """A_r for each sum that has one."""
        live: Gradients = {}
        for reduction in reductions_in(self.closed.weight, *self.closed.finals.values()):
            if reduction.arg != "sum":
                self._set_aside(reduction)
                continue
            slope = log_derivative(self.closed.weight, reduction, SCORE)
            if slope is None:
                raise BackwardNotDerived(
                    f"the final weight {self.closed.weight} is not a factor of the score times a factor of the row "
                    f"(seen at {reduction}).\n  Write the static method `backward`."
                )
            sensitivity = factor_out(add(mul(DELTA, slope), self._by_finals(reduction)))
            if not is_const(sensitivity, 0):
                live[reduction] = sensitivity
        for reduction in live:
            self._refuse_nested(reduction)
        return live

    def _set_aside(self, extreme: Expr) -> None:
        """An extreme gets no gradient: refuses weights that need one, and notes the returned rows that would."""
        if is_steadying(extreme, self.closed.weight):
            self.steadying.add(extreme)
        elif has_gradient(self.closed.weight, extreme):
            raise BackwardNotDerived(
                f"the weights depend on {extreme} itself; the gradient of a row's extreme is not derived.\n"
                "  Detach it (`.detach()`) to hold it constant, or write the static method `backward`."
            )
        for name, final in self.closed.finals.items():
            if has_gradient(final, extreme) and not is_steadying(extreme, final):
                self.undifferentiated[name] = f"it holds {extreme}, whose gradient is not derived"

    def _by_finals(self, target: Expr) -> Expr:
        """What gradients of returned rows add to that of a target that stands in them outside reductions."""
        slopes = ((name, differentiate(final, [target])[0]) for name, final in self.closed.finals.items())
        return add(ZERO, *(mul(final_gradient(name), slope) for name, slope in slopes))

    def _refuse_nested(self, reduction: Expr) -> None:
        for inner in reductions_in(reduction.args[0]):
            if inner not in self.steadying and has_gradient(reduction.args[0], inner):
                raise BackwardNotDerived(
                    f"{reduction} depends on {inner}, which has a gradient of its own.\n"
                    "  Detach the inner one (`.detach()`), or write the static method `backward`."
                )

    def with_respect_to(self, target: Expr) -> Expr:
        """What a pair adds to the gradient of `target` (SCORE, or a read of a custom input by online_fwd)."""
        (direct,) = differentiate(self.closed.weight, [target], WEIGHT_GRADIENT)
        parts = [direct]
        for reduction, sensitivity in self.sensitivities.items():
            (part,) = differentiate(reduction.args[0], [target], sensitivity)
            parts.append(part)
        return factor_out(add(*parts))

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


def merge_row_factor(weight: Expr, apart: bool = False) -> Expr:
    """exp(u) * R as exp(u + log R), R a positive factor of the row: one number a row then serves (softmax: its lse).

    apart: as exp2(log2(e) * u + log2 R), two numbers of a row, as u's may be so far from 0 that log R would be lost.
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
    if apart:
        exponent = add(mul(const(LOG2_E), inner.args[0]), *(mul(const(LOG2_E), log) for log in logs))
        return mul(const(float(number)), *others, make(Op.EXP2, exponent))
    return mul(const(float(number)), *others, make(Op.EXP, add(inner.args[0], *logs)))


def derive_backward(program: Program) -> Backward:
    """The backward pass; raises BackwardNotDerived, with what to do, where it can't be had."""
    closed = close(program)
    far = program.forward is None and may_be_far(program.score)
    weight = merge_row_factor(closed.weight, far) if program.forward is None else program.forward
    loads = _float_loads(closed.weight, *closed.finals.values())
    by_hand = program.backward
    deriver = _Deriver(program, closed) if by_hand is None or loads else None
    pair: Gradients = {}
    by_row: Gradients = {}
    undifferentiated: dict[str, str] = {}
    if deriver is not None:
        undifferentiated = deriver.undifferentiated
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
    return _assemble(program, closed, weight, by_score[0], pair, by_row, undifferentiated)


def _float_loads(*roots: Expr) -> list[Expr]:
    return [n for n in topological(*roots) if n.op is Op.LOAD and n.dtype is Type.FLOAT]


def magnifies_delta(closed: ClosedForm, rows: list[Expr]) -> bool:
    """Could the gradients magnify an error of delta beyond that of the weights?

    A pair multiplies delta by weight * d log(phi) / dx. For exp the second factor is a number; for relu^2 it is 2 / x,
    and a row of scores near 0 then shows every bit that the rounding of o took from delta.
    """
    reads = bool(rows) and DELTA in topological(*rows)
    return reads and log_derivative(closed.weight, SCORE, SCORE) is None


def _assemble(program: Program, closed: ClosedForm, weight: Expr, product: Expr, pair: Gradients, by_row: Gradients,
              undifferentiated: dict[str, str]) -> Backward:  # fmt: skip
    rows = RowValues(program.finals, closed.states)
    far = program.forward is None and may_be_far(program.score)
    (weight,) = use_exp2(rows.in_states(weight), differences=far)
    weights, *named = rows.name(weight, *use_exp2(*(rows.in_states(e) for e in (factor_out(product), *pair.values()))))
    in_score = {SCORE: simplify(program.score)[0]}
    if not far:
        (weights,) = use_exp2(substitute(weights, in_score))
    product, *pairs = use_exp2(*(substitute(e, in_score) for e in named))
    row_gradients = tuple((load, rows.settle(rows.in_states(expr))) for load, expr in by_row.items())
    unbounded = may_be_infinite(program.score)
    of_pairs = {(guard_row(expr) if unbounded else expr): name for expr, name in rows.rows.items()}
    needed = [e for e in (*rows.rows, *(g for _, g in row_gradients))]
    used = {n.name for n in topological(*needed) if n.op is Op.VAR} if needed else set()
    saved = [(n, e) for n, e in program.finals if f"final.{n}" in used]
    saved += [(name, expr) for expr, name in rows.saved.items()]
    read = tuple((name, expr) for expr, name in of_pairs.items())
    return Backward(tuple(saved), read, weights, product, tuple(zip(pair, pairs, strict=True)), row_gradients,
                    tuple(undifferentiated.items()), magnifies_delta(closed, needed),
                    in_score[SCORE] if far else None)  # fmt: skip
