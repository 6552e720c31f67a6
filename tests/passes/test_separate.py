"""Formulas in factors of the row and of the key, and the algebra that merges ask of polynomials."""

import math
import random

import pytest

from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Axis, Op, const, make, topological, var
from attention_engine.ir.program import ROW, SCORE
from attention_engine.passes.polynomials import Polynomial, solve
from attention_engine.passes.separate import Inseparable, separate
from attention_engine.passes.simplify import add, mul, recip, simplify
from attention_engine.passes.transfer import ratio

Y, Z = var("y", ROW), var("z", ROW)
KEYS = 5


def of(op, *args):
    return make(op, *args)


def exp(x):
    return of(Op.EXP, x)


MINUS_Y = mul(const(-1.0), Y)
FORMULAS = {
    "sum": SCORE + Y,
    "square of a difference": of(Op.POW, SCORE - Y, const(2.0)),
    "cube": of(Op.POW, SCORE + Y, const(3.0)),
    "exponential": exp(SCORE - Y),
    "power of two": of(Op.EXP2, SCORE * 0.5 + Y * Z),
    "weighted exponential": exp(SCORE - Y) * (SCORE - Y),
    "quotient": SCORE / (Y * SCORE),
    "root": of(Op.SQRT, exp(Y) * exp(SCORE)),
    "turn": of(Op.SIN, SCORE + Y) + of(Op.COS, SCORE - Z),
    "positive part": of(Op.MAXIMUM, exp(Y) * SCORE, const(0.0)),
    "distance from 0": of(Op.ABS, Y * SCORE),
    "choice of the row": of(Op.WHERE, of(Op.LESS, Y, Z), SCORE * Y, SCORE),
    "choice of the key": of(Op.WHERE, of(Op.LESS, SCORE, const(0.0)), SCORE * Y, Z + SCORE),
    "logarithm": of(Op.LOG, exp(Y) * (SCORE * SCORE)),
    "of the key alone": of(Op.TANH, SCORE),
    "of the row alone": of(Op.TANH, Y),
}


def values(seed):
    draw = random.Random(seed)
    return {SCORE: [draw.gauss(0.0, 1.0) for _ in range(KEYS)], Y: draw.gauss(0.0, 1.0), Z: draw.gauss(0.0, 1.0)}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_terms_add_up_to_the_formula(name):
    (formula,) = simplify(FORMULAS[name])
    terms = separate(formula, {Y, Z})
    for d, key in terms:
        assert Axis.KEY not in d.axes
        assert not {Y, Z} & set(_leaves(key))
    for seed in range(5):
        known = values(seed)
        found = evaluate(add(const(0.0), *(mul(d, key) for d, key in terms)), known, KEYS)
        wanted = evaluate(formula, known, KEYS)
        found, wanted = ([x] * KEYS if not isinstance(x, list) else x for x in (found, wanted))
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def _leaves(node):
    return {node} if not node.args else set().union(*map(_leaves, node.args))


@pytest.mark.parametrize(
    "formula",
    [of(Op.SIGMOID, SCORE - Y), exp(SCORE * Y), of(Op.MAXIMUM, SCORE, Y), of(Op.SQRT, SCORE * Y),
     of(Op.RECIP, SCORE + Y), of(Op.WHERE, of(Op.LESS, SCORE, Y), SCORE, Y)],
)  # fmt: skip
def test_what_is_no_such_sum_is_named(formula):
    with pytest.raises(Inseparable) as error:
        separate(const(2.0) * formula, {Y, Z})
    assert error.value.node is formula


def test_a_ratio_subtracts_exponents_before_it_raises_them():
    part, whole = {Y: var("a", ROW)}, {Y: var("b", ROW)}
    assert ratio(exp(MINUS_Y), part, whole) is exp(part[Y] - whole[Y])
    assert ratio(recip(Y), part, whole) is mul(part[Y], recip(whole[Y]))
    assert ratio(mul(Z, recip(Y)), part, whole) is mul(part[Y], recip(whole[Y]))  # Z, the same in both, may be 0


@pytest.mark.parametrize("seed", range(20))
def test_polynomials_are_the_numbers_of_their_expressions(seed):
    draw = random.Random(seed)
    expr = _random_polynomial(draw, 4)
    known = {n: draw.uniform(-2.0, 2.0) for n in (Y, Z)}
    opened = Polynomial.of(simplify(expr)[0])
    assert evaluate(opened.expr(), known) == pytest.approx(evaluate(expr, known), rel=1e-9, abs=1e-9)
    assert (opened + -opened).is_zero
    assert (opened * opened + -Polynomial.of(simplify(expr * expr)[0])).is_zero


def _random_polynomial(draw, depth):
    if depth == 0:
        return draw.choice([Y, Z, const(float(draw.randrange(-3, 4)))])
    a, b = (_random_polynomial(draw, depth - 1) for _ in range(2))
    return a + b if draw.random() < 0.6 else a * b


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("of_numbers", [True, False])
def test_equations_are_solved(seed, of_numbers):
    """Unknowns that were chosen first, and as many equations as there are, or one more."""
    draw = random.Random(seed)
    count = draw.randrange(1, 4)
    wanted = [add(const(draw.uniform(-2.0, 2.0)), mul(const(draw.uniform(-2.0, 2.0)), Z)) for _ in range(count)]
    equations = []
    for _ in range(count + draw.randrange(2)):
        row = [const(draw.uniform(-2.0, 2.0)) if of_numbers else Y * draw.uniform(-2.0, 2.0) + Z for _ in range(count)]
        other = add(const(0.0), *(mul(c, w) for c, w in zip(row, wanted, strict=True)))
        equations.append([Polynomial.of(simplify(e)[0]) for e in (*row, other)])
    found = solve(equations)
    if found is None:  # numbers that don't cancel to the last bit
        assert len(equations) > count
        return
    known = {Y: 0.7, Z: -1.3}
    for f, w in zip(found, wanted, strict=True):
        assert evaluate(f, known) == pytest.approx(evaluate(w, known), rel=1e-6, abs=1e-6)


def test_equations_without_a_solution_have_none():
    one, two = Polynomial.number(1.0), Polynomial.number(2.0)
    assert solve([[one, one], [one, two]]) is None
    assert solve([[Polynomial.of(Y), one], [Polynomial.of(Y), two]]) is None


def test_a_turn_is_solved_without_a_quotient():
    """The sum of two squares is 1: no angle divides by 0."""
    s, c = of(Op.SIN, Y), of(Op.COS, Y)
    minus = mul(const(-1.0), s)
    x, y = solve([[*map(Polynomial.of, (c, minus)), Polynomial.of(Z)], [*map(Polynomial.of, (s, c)), Polynomial({})]])
    for angle in (0.0, math.pi / 2, 1.0):
        known = {Y: angle, Z: 2.0}
        assert (evaluate(x, known), evaluate(y, known)) == pytest.approx((2 * math.cos(angle), -2 * math.sin(angle)))
    assert not any(n.op is Op.RECIP for n in topological(x, y))
