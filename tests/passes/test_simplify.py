"""Simplify keeps the value, reaches its normal form in one walk, and makes equal sums and products one node."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Axis, Expr, Op, Type, const, make, topological, var
from attention_engine.passes.simplify import CONSTRUCTORS, factor_out, factors, group_of, simplify, terms
from attention_engine.passes.strength import lighten, open_pairs, use_exp2
from tests.expressions import FLOATS, INTS, agree, as_row, expressions, floats, ints, sample

X, Y, COLUMN, ROW, SLOPE = FLOATS
I, J, N = INTS
C, D = make(Op.LESS, X, Y), make(Op.LESS, COLUMN, Y)


def simple(expr: Expr) -> Expr:
    return simplify(expr)[0]


def well_conditioned(expr: Expr, values) -> bool:
    """Do its numbers stay small enough that another order of operations rounds alike, and away from jumps?"""
    for node in topological(expr):
        row = as_row(evaluate(node, values, 5))
        if any(abs(x) > 1e4 for x in row):
            return False
        if node.op in (Op.LESS, Op.LESS_EQUAL) and node.args[0].dtype is Type.FLOAT:
            pairs = zip(*(as_row(evaluate(a, values, 5)) for a in node.args), strict=True)
            if any(abs(a - b) < 1e-6 for a, b in pairs):
                return False
    return True


@settings(max_examples=400)
@given(expressions())
def test_the_value_is_kept(expr):
    values = sample(expr)
    assume(well_conditioned(expr, values))
    new = simple(expr)
    assert agree(evaluate(expr, values, 5), evaluate(new, values, 5)), f"{expr}\nbecame {new}"
    assert new.dtype is expr.dtype
    assert new.axes <= expr.axes


@settings(max_examples=400)
@given(expressions())
def test_a_normal_form_is_its_own_normal_form(expr):
    once = simple(expr)
    assert simple(once) is once, f"{expr}\nbecame {once}\nand then {simple(once)}"


@pytest.mark.parametrize(
    "rewrite",
    [factor_out, lambda e: use_exp2(e)[0], lambda e: open_pairs(e)[0], lambda e: lighten(e)[0]],
    ids=["factor_out", "use_exp2", "open_pairs", "lighten"],
)
@settings(max_examples=150)
@given(floats())
def test_the_later_rewrites_keep_the_value(rewrite, expr):
    values = sample(expr)
    assume(well_conditioned(expr, values))
    new = rewrite(simple(expr))
    assert agree(evaluate(expr, values, 5), evaluate(new, values, 5)), f"{simple(expr)}\nbecame {new}"


@pytest.mark.parametrize("op", [Op.ADD, Op.MUL])
@settings(max_examples=150)
@given(parts=st.lists(floats(6), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_the_order_of_a_sum_or_product_does_not_matter(op, parts, seed):
    parts = [simple(p) for p in parts]
    assume(all(p.op is not Op.CONST for p in parts))
    numbers = [n.value for n in topological(*parts) if n.op is Op.CONST and n.dtype is Type.FLOAT]
    assume(all(n * 64 == int(n * 64) for n in numbers))  # others round differently in other orders

    def joined(draw: random.Random) -> Expr:
        """The parts in random order, in random brackets."""
        left = draw.sample(parts, len(parts))
        while len(left) > 1:
            at = draw.randrange(len(left) - 1)
            left[at : at + 2] = [make(op, left[at], left[at + 1])]
        return simple(left[0])

    draw = random.Random(seed)
    first, second = joined(draw), joined(draw)
    assert first is second, f"{first}\n{second}"


@settings(max_examples=100)
@given(parts=st.lists(ints(), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_int_sums_are_the_same_node_in_any_order(parts, seed):
    shuffled = random.Random(seed).sample(parts, len(parts))
    a, b = parts[0], shuffled[0]
    for more, other in zip(parts[1:], shuffled[1:], strict=True):
        a, b = a + more, b + other
    assert simple(a) is simple(b)


def test_forms():
    f, i = const, lambda n: const(n, Type.INT)
    same = [
        (X + 0.0, X),
        (X * 1.0, X),
        (X * 0.0, f(0.0)),
        (X - X, f(0.0)),
        (X + X, X * 2.0),
        ((-X) * -1.0, X),
        (X * 2.0 * 0.5, X),
        (X + (X + Y) * 3.0 - (X + Y) * 2.0, X * 2.0 + Y),
        (X + (X + Y) * 2.0 - (X + Y) * 3.0, -Y),
        (-(X - Y), Y - X),
        (make(Op.RECIP, make(Op.RECIP, X)), X),
        (f(1.0) / make(Op.EXP, X), make(Op.EXP, -X)),
        (make(Op.LOG, make(Op.EXP, X)), X),
        (make(Op.LOG2, make(Op.EXP2, X)), X),
        (make(Op.POW, X, f(2.0)), X * X),
        (make(Op.POW, X, f(-1.0)), f(1.0) / X),
        (make(Op.POW, X, f(0.5)), make(Op.SQRT, X)),
        (make(Op.POW, f(4.0), f(0.5)), f(2.0)),
        (make(Op.MAXIMUM, X, X), X),
        (make(Op.MAXIMUM, f(-float("inf")), X), X),
        (make(Op.MAXIMUM, f(0.0), X), make(Op.MAXIMUM, X, f(0.0))),
        (make(Op.WHERE, make(Op.NOT, C), X, Y), make(Op.WHERE, C, Y, X)),
        (make(Op.WHERE, const(True), X, Y), X),
        (make(Op.WHERE, C, X, X), X),
        (make(Op.WHERE, C, X, f(0.0)) + make(Op.WHERE, C, Y, f(0.0)), make(Op.WHERE, C, X + Y, f(0.0))),
        (make(Op.WHERE, C, X, f(0.0)) + make(Op.WHERE, C, -X, f(0.0)), f(0.0)),
        (make(Op.WHERE, C, X, f(0.0)) * 2.0 + make(Op.WHERE, C, Y, f(0.0)), make(Op.WHERE, C, X * 2.0 + Y, f(0.0))),
        (make(Op.WHERE, C, X, f(0.0)) * make(Op.WHERE, C, Y, f(0.0)), make(Op.WHERE, C, X * Y, f(0.0))),
        (make(Op.WHERE, C, X, f(0.0)) * make(Op.WHERE, C, f(0.0), Y), f(0.0)),
        (
            make(Op.WHERE, C, X, f(0.0)) * make(Op.WHERE, D, Y, f(0.0)),
            make(Op.WHERE, D, Y, f(0.0)) * make(Op.WHERE, C, X, f(0.0)),
        ),
        (make(Op.AND, C, const(True)), C),
        (make(Op.OR, C, const(True)), const(True)),
        (make(Op.NOT, make(Op.NOT, C)), C),
        (make(Op.ABS, X * -3.0), make(Op.ABS, X) * 3.0),
        (make(Op.REDUCE, X * ROW, arg="sum"), make(Op.REDUCE, X, arg="sum") * ROW),
        (make(Op.REDUCE, X * -2.0, arg="max"), make(Op.REDUCE, X, arg="min") * -2.0),
        (make(Op.CAST, I, arg=Type.INT), I),
        (make(Op.CAST, i(3), arg=Type.FLOAT), f(3.0)),
        ((I - J) * 2 + J * 2, I * 2),
        (make(Op.LESS, I, I), const(False)),
        (make(Op.EQUAL, I, I), const(True)),
        (f(2.0) + f(3.0) * 4.0, f(14.0)),
    ]
    for before, after in same:
        assert simple(before) is simple(after), f"{before} became {simple(before)}, not {simple(after)}"


def test_what_is_not_chosen_does_not_spoil_a_product():
    """1 / sqrt(x) is infinite at 0, and 0 * inf is NaN."""
    product = simple(make(Op.WHERE, make(Op.LESS, const(0.0), X), ROW, const(0.0)) * make(Op.RSQRT, X))
    assert evaluate(product, {X: [0.0, 4.0], ROW: 3.0}, 2) == [0.0, 1.5]


def test_a_float_is_not_taken_as_equal_to_itself():
    """NaN isn't."""
    assert simple(make(Op.EQUAL, X, X)).op is Op.EQUAL


def test_what_belongs_to_a_row_stands_together():
    product = simple(X * ROW * SLOPE * Y)
    assert {group_of(f) for f in factors(product.args[1])} == {2, 3}
    assert group_of(product.args[0]) == 0
    total = simple(ROW + X + SLOPE + COLUMN)
    assert [group_of(t) for t in terms(total)] == [0, 1, 2, 3]


def test_shared_values_stay_shared():
    """A chain of 60 squares is 60 nodes, not 2 ** 60."""
    expr = X
    for _ in range(60):
        expr = make(Op.SIN, expr + make(Op.COS, expr))
    assert len(topological(simple(expr))) <= len(topological(expr))


def test_a_chain_of_5000_operations_is_simplified_without_recursion():
    expr = X
    for n in range(2500):
        expr = make(Op.SIN if n % 2 else Op.MAXIMUM, *((expr,) if n % 2 else (expr, Y)))
        expr = expr + 0.0
    start = time.perf_counter()
    assert simple(simple(expr)) is simple(expr)
    assert time.perf_counter() - start < 10


def test_every_operation_has_a_constructor():
    assert set(CONSTRUCTORS) == set(Op) - {Op.CONST, Op.VAR}


def test_exp_of_a_pair_becomes_exp2_and_of_a_row_stays():
    pair, row = use_exp2(simple(make(Op.EXP, X - ROW)), simple(make(Op.EXP, ROW)))
    assert pair.op is Op.EXP2
    assert row is make(Op.EXP, ROW)


def test_a_number_is_multiplied_with_the_row():
    (light,) = lighten(simple(X * ROW * 3.0))
    assert light is make(Op.MUL, X, make(Op.MUL, const(3.0), ROW))


def test_a_common_factor_comes_out():
    expr = simple(X * ROW + Y * ROW)
    assert factor_out(expr) is simple(ROW * (X + Y))


def test_a_variable_of_no_axis_stands_with_the_block():
    assert group_of(var("alone", [])) == 3
    assert group_of(var("channel", [Axis.CHANNEL, Axis.QUERY])) == 0
