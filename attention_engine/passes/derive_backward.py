"""The backward pass of a program from its forward alone.

`online_fwd` on the whole row as one tile gives the final weight E(x, rho), rho the row reductions. A program whose
result doesn't depend on how a row is cut has E = phi(x) * c(rho), so that with dw_j = dO . v_j and delta = dO . o

    dx_j = dw_j dE/dx + sum over reductions of A_r d f_r/dx,    A_r = delta * d log E / d rho_r + sum of dF dF/d rho_r

where rho_r = sum of f_r(x_j) and F are the returned rows. A max that only steadies the numbers has no gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attention_engine.errors import BackwardNotDerived
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import LEAVES, Axis, Expr, Op, Type, const, is_const, make, substitute, topological
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
    final_variable,
    row_variable,
)
from attention_engine.passes.differentiate import differentiate, log_derivative
from attention_engine.passes.simplify import add, factor_out, factors, mul, simplify, split_coefficient, terms
from attention_engine.passes.strength import use_exp2

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
            "  Return o times or divided by row values, or write the static method `backward`."
        )
    return ClosedForm(mul(weights, factor), end, dict(zip((n for n, _ in program.finals), finals, strict=True)))


def reductions_in(*roots: Expr) -> list[Expr]:
    """The row reductions below the roots, inner ones first."""
    return [n for n in topological(*roots) if n.op is Op.REDUCE]


def is_steadying(reduction: Expr, *roots: Expr) -> bool:
    """Does shifting this reduction leave the roots as they are? Tried on random rows in float64."""
    for seed in range(3):
        draw, length = random.Random(seed), 7
        values = {}
        for node in topological(*roots):
            if node.op is Op.VAR or node.op is Op.LOAD:
                values[node] = _sample(node, draw, length)
        inner = topological(reduction)
        at = evaluate(reduction, {n: v for n, v in values.items() if n in inner}, length)
        for root in roots:
            plain = evaluate(root, values, length)
            shifted = evaluate(root, {**values, reduction: at + 0.37}, length)
            if not all(_near(a, b) for a, b in zip(_row(plain), _row(shifted), strict=True)):
                return False
    return True


def _sample(node: Expr, draw: random.Random, length: int) -> object:
    kind = {Type.FLOAT: lambda: draw.gauss(0, 1), Type.INT: lambda: draw.randrange(5), Type.BOOL: lambda: True}[node.dtype]
    return [kind() for _ in range(length)] if Axis.KEY in node.axes else kind()


def _row(value: object) -> list[float]:
    return value if isinstance(value, list) else [value]  # type: ignore[list-item]


def _near(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= 1e-9 * (abs(a) + abs(b)) or (a != a and b != b)


class _Deriver:
    """Collects the gradients of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.closed = close(program)
        self.undifferentiated: dict[str, str] = {}
        self.sensitivities = self._sensitivities()

    def _sensitivities(self) -> Gradients:
        """A_r for each reduction that has one."""
        weight, finals = self.closed.weight, self.closed.finals
        found: Gradients = {}
        for reduction in reductions_in(weight, *finals.values()):
            extreme = reduction.arg != "sum"
            if extreme and is_steadying(reduction, weight, *finals.values()):
                continue
            slope = log_derivative(weight, reduction, SCORE)
            if slope is None:
                raise BackwardNotDerived(
                    f"the final weight {weight} is not a factor of the score times a factor of the row (seen at {reduction}).\n"
                    "  Write the static method `backward`."
                )
            if extreme and not is_const(slope, 0):
                raise BackwardNotDerived(
                    f"the weights depend on {reduction} itself, not only through sums; the gradient of a row's extreme is "
                    "not derived.\n  Detach it (`.detach()`) to hold it constant, or write the static method `backward`."
                )
            parts = [mul(DELTA, slope)]
            for name, final in finals.items():
                (by_final,) = differentiate(final, [reduction])
                if extreme and not is_const(by_final, 0):
                    self.undifferentiated[name] = f"it holds {reduction}, whose gradient is not derived"
                    continue
                parts.append(mul(final_gradient(name), by_final))
            found[reduction] = factor_out(add(*parts))
        live = {r: a for r, a in found.items() if not is_const(a, 0)}
        self._refuse_nested(live)
        return live

    def _refuse_nested(self, live: Gradients) -> None:
        for reduction in live:
            for inner in live:
                (slope,) = differentiate(reduction.args[0], [inner])
                if inner is not reduction and not is_const(slope, 0):
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

    def of_row(self, load: Expr) -> Expr | None:
        """What a row adds to the gradient of a read that stands outside the sums; None where it stands inside."""
        if Axis.KEY in load.axes or any(load in topological(r.args[0]) for r in self.sensitivities):
            return None
        slope = log_derivative(self.closed.weight, load, SCORE)
        if slope is None:
            return None
        parts = [mul(DELTA, slope)]
        for name, final in self.closed.finals.items():
            (by_final,) = differentiate(final, [load])
            parts.append(mul(final_gradient(name), by_final))
        return add(*parts)


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


def merge_row_factor(weight: Expr) -> Expr:
    """exp(u) * R as exp(u + log R), R a positive factor of the row: one number a row then serves (softmax: its lse)."""
    number, rest = split_coefficient(weight)
    if rest is None:
        return weight
    parts = factors(rest)
    inner = next((p for p in parts if p.op is Op.EXP and Axis.KEY in p.axes), None)
    positive = [p for p in parts if Axis.KEY not in p.axes and is_positive(p)]
    if inner is None or not positive:
        return weight
    logs = [
        mul(const(-1.0), make(Op.LOG, p.args[0])) if p.op is Op.RECIP else simplify(make(Op.LOG, p))[0] for p in positive
    ]
    others = [p for p in parts if p is not inner and p not in positive]
    return mul(const(float(number)), *others, make(Op.EXP, add(inner.args[0], *logs)))


def _name_weight(expr: Expr, weight: Expr) -> Expr:
    """The expression with the final weight, wherever it stands whole or as part of a product, named WEIGHT."""
    number, rest = split_coefficient(weight)
    if rest is None:
        return expr
    wanted = factors(rest)
    done: dict[Expr, Expr] = {}
    for node in topological(expr):
        have = factors(node)
        if node is weight:
            done[node] = WEIGHT
        elif all(have.count(f) >= wanted.count(f) for f in wanted):
            for factor in wanted:
                have.remove(factor)
            done[node] = mul(const(1.0 / number), WEIGHT, *(done.get(f, f) for f in have))
        else:
            done[node] = simplify(make(node.op, *(done[a] for a in node.args), arg=node.arg,
                                       dtype=node.dtype if node.op is Op.LOAD else None))[0] if node.args else node  # fmt: skip
    return done[expr]


class _Rows:
    """Turns row values that the backward's pairs need into rows to save and rows to read."""

    def __init__(self, program: Program, closed: ClosedForm) -> None:
        self.states = {s.variable for s in program.states}
        self.by_states = {value: state for state, value in closed.states.items() if value.op is not Op.CONST}
        self.finals = [(row, final_variable(name)) for name, row in program.finals]
        self.saved: dict[Expr, str] = {}
        self.rows: dict[Expr, str] = {}

    def in_states(self, expr: Expr) -> Expr:
        """The expression with row reductions as the final states that hold them."""
        expr = simplify(substitute(expr, self.by_states))[0]
        if left := reductions_in(expr):
            raise BackwardNotDerived(
                f"the backward pass needs {left[0]}, which no row state carries to the end of the row.\n"
                "  Keep it in a state (online_rowscales), or write the static method `backward`."
            )
        return expr

    def name(self, *roots: Expr) -> list[Expr]:
        """The roots, every row value in them (the largest whole) replaced by a row variable."""
        done = {node: row_variable(self._row(node)) for node in largest(roots, self._is_row)}
        return [substitute(r, done) for r in roots]

    def _is_row(self, node: Expr) -> bool:
        return Axis.KEY not in node.axes and any(self._is_fact(n) for n in topological(node))

    def _is_fact(self, node: Expr) -> bool:
        return node in self.states or _is_late(node)

    def _row(self, node: Expr) -> str:
        return self.rows.setdefault(self.settle(node), f"row{len(self.rows)}")

    def settle(self, node: Expr) -> Expr:
        """A row value as an expression of saved rows, DELTA and final gradients."""
        for final, variable in self.finals:
            if (ratio := proportion(node, final)) is not None:
                return mul(const(ratio), variable)
        parts = largest([node], self._is_savable)
        keep = {part: final_variable(self.saved.setdefault(part, f"_{len(self.saved)}")) for part in parts}
        return simplify(substitute(node, keep))[0]

    def _is_savable(self, node: Expr) -> bool:
        inside = topological(node)
        return any(n in self.states for n in inside) and not any(_is_late(n) for n in inside)


def _is_late(node: Expr) -> bool:
    """Is it known only in the backward pass (or saved for it already)?"""
    return node is DELTA or (node.op is Op.VAR and node.name.startswith(("final.", "dfinal.")))


def largest(roots: Iterable[Expr], chosen: Callable[[Expr], bool]) -> list[Expr]:
    """The nodes below the roots that are chosen and don't stand inside another chosen one, each once."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if chosen(node):
            found[node] = None
        else:
            stack.extend(reversed(node.args))
    return list(found)


def proportion(a: Expr, b: Expr) -> float | None:
    """k where a = k * b, term by term; else None."""
    ours = {rest: number for number, rest in map(split_coefficient, terms(a))}
    theirs = {rest: number for number, rest in map(split_coefficient, terms(b))}
    if ours.keys() != theirs.keys() or None in ours:
        return None
    ratios = [ours[rest] / theirs[rest] for rest in ours]
    return ratios[0] if all(_near(r, ratios[0]) for r in ratios) else None


def derive_backward(program: Program) -> Backward:
    """The backward pass; raises BackwardNotDerived, with what to do, where it can't be had."""
    deriver = _Deriver(program) if program.backward is None else None
    closed = deriver.closed if deriver else close(program)
    weight = merge_row_factor(closed.weight) if program.forward is None else program.forward
    online = [n for n in topological(closed.weight, *closed.finals.values()) if n.op is Op.LOAD and n.dtype is Type.FLOAT]
    pair: Gradients = {}
    by_row: Gradients = {}
    if deriver is None:
        assert program.backward is not None
        score_gradient = simplify(program.backward)[0]
        undifferentiated = {n: "a `backward` written by hand doesn't say it" for n in closed.finals}
    else:
        score_gradient = _name_weight(deriver.with_respect_to(SCORE), closed.weight)
        undifferentiated = deriver.undifferentiated
        for load in online:
            if (row := deriver.of_row(load)) is not None:
                by_row[load] = row
            else:
                pair[load] = _name_weight(deriver.with_respect_to(load), closed.weight)
    score_loads = [n for n in topological(program.score) if n.op is Op.LOAD and n.dtype is Type.FLOAT]
    by_score = differentiate(program.score, [PRODUCT, *score_loads], score_gradient)
    for load, gradient in zip(score_loads, by_score[1:], strict=True):
        pair[load] = add(pair[load], gradient) if load in pair else gradient
    return _assemble(program, closed, weight, by_score[0], pair, by_row, undifferentiated)


def _assemble(program: Program, closed: ClosedForm, weight: Expr, product: Expr, pair: Gradients, by_row: Gradients,
              undifferentiated: dict[str, str]) -> Backward:  # fmt: skip
    rows = _Rows(program, closed)
    named = rows.name(*use_exp2(*(rows.in_states(e) for e in (weight, factor_out(product), *pair.values()))))
    in_score = {SCORE: simplify(program.score)[0]}
    weights, product, *pairs = use_exp2(*(substitute(e, in_score) for e in named))
    row_gradients = tuple((load, rows.settle(rows.in_states(expr))) for load, expr in by_row.items())
    needed = [e for e in (*rows.rows, *(g for _, g in row_gradients))]
    used = {n.name for n in topological(*needed) if n.op is Op.VAR} if needed else set()
    saved = [(n, e) for n, e in program.finals if f"final.{n}" in used]
    saved += [(name, expr) for expr, name in rows.saved.items()]
    return Backward(tuple(saved), _pairs(rows.rows), weights, product, tuple(zip(pair, pairs, strict=True)), row_gradients,
                    tuple(undifferentiated.items()))  # fmt: skip


def _pairs(rows: dict[Expr, str]) -> tuple[tuple[str, Expr], ...]:
    return tuple((name, expr) for expr, name in rows.items())

