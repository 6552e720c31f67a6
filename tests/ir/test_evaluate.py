"""Expressions on Python numbers mean what Python and IEEE say."""

from __future__ import annotations

import math

import pytest

from attention_engine.ir.evaluate import CASTS, FOLDS, LOWEST, PYTHON, evaluate, evaluate_all
from attention_engine.ir.expr import Axis, Op, Type, const, make, var
from tests.expressions import FLOATS, INTS

X, Y, COLUMN, ROW, SLOPE = FLOATS
I, J, N = INTS
INF, NAN = math.inf, math.nan

CASES = {
    Op.ADD: [((2.0, 3.0), 5.0)], Op.MUL: [((2.0, 3.0), 6.0)],
    Op.RECIP: [((4.0,), 0.25), ((0.0,), INF), ((-0.0,), -INF)],
    Op.FLOORDIV: [((7, 2), 3), ((-7, 2), -4), ((7, 0), 0)], Op.MOD: [((7, 3), 1), ((-7, 3), 2), ((7, 0), 0)],
    Op.POW: [((2.0, 3.0), 8.0), ((-2.0, 0.5), NAN), ((10.0, 400.0), INF)],
    Op.MAXIMUM: [((1.0, 2.0), 2.0), ((NAN, 1.0), NAN)], Op.MINIMUM: [((1.0, 2.0), 1.0)],
    Op.EXP: [((1.0,), math.e), ((1000.0,), INF), ((-INF,), 0.0)], Op.EXP2: [((3.0,), 8.0), ((5000.0,), INF)],
    Op.LOG: [((math.e,), 1.0), ((0.0,), -INF), ((-1.0,), NAN)], Op.LOG2: [((8.0,), 3.0), ((0.0,), -INF)],
    Op.LOG1P: [((0.0,), 0.0), ((-1.0,), -INF)], Op.SQRT: [((9.0,), 3.0), ((-1.0,), NAN)],
    Op.RSQRT: [((4.0,), 0.5), ((0.0,), INF)], Op.TANH: [((0.5,), math.tanh(0.5))],
    Op.SIGMOID: [((0.0,), 0.5), ((-1000.0,), 0.0), ((1000.0,), 1.0)], Op.ERF: [((0.5,), math.erf(0.5))],
    Op.SIN: [((1.0,), math.sin(1.0)), ((INF,), NAN)], Op.COS: [((1.0,), math.cos(1.0))],
    Op.ABS: [((-2.0,), 2.0), ((-2,), 2)], Op.FLOOR: [((-1.5,), -2.0), ((INF,), INF)],
    Op.LESS: [((1, 2), True), ((2, 2), False)], Op.LESS_EQUAL: [((2, 2), True), ((3, 2), False)],
    Op.EQUAL: [((2, 2), True), ((2, 3), False)], Op.AND: [((True, False), False), ((True, True), True)],
    Op.OR: [((False, False), False), ((True, False), True)], Op.NOT: [((True,), False)],
    Op.EXPM1: [((1e-10,), math.expm1(1e-10)), ((1000.0,), INF)], Op.ATAN: [((1.0,), math.pi / 4)],
    Op.SOFTPLUS: [((0.0,), math.log(2.0)), ((-1e4,), 0.0), ((1e4,), 1e4), ((-40.0,), math.exp(-40.0))],
    Op.ROUND: [((0.5,), 0.0), ((1.5,), 2.0), ((-2.6,), -3.0), ((INF,), INF)],
    Op.BIT_AND: [((6, 3), 2), ((-1, 6), 6)], Op.BIT_OR: [((6, 3), 7)], Op.BIT_XOR: [((6, 3), 5), ((6, -1), -7)],
    Op.SHIFT_LEFT: [((3, 2), 12), ((3, 64), 0)], Op.SHIFT_RIGHT: [((13, 2), 3), ((-1, 3), -1)],
    Op.CHANCE: [((0, 0, 0, 0, 0), 0x6CA8BB)],
    Op.WHERE: [((True, 1.0, 2.0), 1.0), ((False, 1.0, 2.0), 2.0)], Op.DETACH: [((1.5,), 1.5)],
}  # fmt: skip


@pytest.mark.parametrize(("op", "operands", "expected"), [(op, *c) for op, cases in CASES.items() for c in cases])
def test_an_operation_on_numbers(op, operands, expected):
    found = evaluate(make(op, *map(const, operands)), {})
    assert found == expected or (found != found and expected != expected)
    assert type(found) is type(expected)


def test_every_operation_is_tried():
    assert set(CASES) == set(PYTHON)
    assert set(CASTS) == set(Type)


def test_casts():
    assert evaluate(make(Op.CAST, const(2.7), arg=Type.INT), {}) == 2
    assert evaluate(make(Op.CAST, const(-2.7), arg=Type.INT), {}) == -2
    assert evaluate(make(Op.CAST, const(INF), arg=Type.INT), {}) == 0  # no number: any will do, if it is one
    assert evaluate(make(Op.CAST, const(True), arg=Type.FLOAT), {}) == 1.0


def test_a_row_is_evaluated_entry_by_entry_and_numbers_are_repeated():
    expr = X * ROW + make(Op.CAST, J, arg=Type.FLOAT)
    assert evaluate(expr, {X: [1.0, 2.0], ROW: 10.0, J: [1, 2]}, 2) == [11.0, 22.0]


def test_reductions_over_a_row():
    values = {X: [3.0, -1.0, 2.0]}
    assert [evaluate(make(Op.REDUCE, X, arg=kind), values, 3) for kind in ("sum", "max", "min")] == [4.0, 3.0, -1.0]


def test_a_number_is_reduced_as_often_as_there_are_keys():
    assert evaluate(make(Op.REDUCE, ROW, arg="sum"), {ROW: 2.0}, 3) == 6.0


def test_a_row_of_no_keys_gives_the_neutral_values():
    values = {X: []}
    assert [evaluate(make(Op.REDUCE, X + 1.0, arg=kind), values, 0) for kind in ("sum", "max", "min")] == [
        0.0,
        LOWEST,
        -LOWEST,
    ]
    assert [FOLDS[kind]([]) for kind in ("sum", "max", "min")] == [0.0, LOWEST, -LOWEST]
    assert evaluate(X * ROW, {X: [], ROW: 1.0}, 0) == []


def test_sums_of_infinities_are_as_ieee_has_them():
    total = make(Op.REDUCE, X, arg="sum")
    assert evaluate(total, {X: [INF, 1.0]}, 2) == INF
    assert math.isnan(evaluate(total, {X: [INF, -INF]}, 2))
    assert evaluate(total, {X: [1e308, 1e308]}, 2) == INF


def test_the_value_of_an_inner_node_may_be_given():
    total = make(Op.REDUCE, make(Op.EXP, X), arg="sum")
    assert evaluate(total + 1.0, {total: 5.0}) == 6.0
    assert evaluate(total + X, {total: 5.0, X: [1.0, 2.0]}, 2) == [6.0, 7.0]


def test_a_read_of_a_custom_input_has_the_value_that_is_given():
    load = make(Op.LOAD, N, arg="slopes", dtype=Type.FLOAT)
    assert evaluate(load * 2.0, {load: 3.0}) == 6.0
    with pytest.raises(KeyError, match="no value for a variable of slopes"):
        evaluate(load * 2.0, {N: 1})


def test_a_variable_without_a_value_is_an_error():
    with pytest.raises(KeyError, match="no value for a variable of x \\+ 1"):
        evaluate(X + 1.0, {})


def test_several_roots_share_their_work():
    shared = make(Op.SIN, X)
    assert evaluate_all([shared, shared + 1.0], {X: 0.0}) == [0.0, 1.0]
    assert evaluate_all([], {}) == []


def test_a_chain_of_5000_operations_is_evaluated_without_recursion():
    expr = one = var("one", [Axis.HEAD])
    for _ in range(5000):
        expr = make(Op.MAXIMUM, make(Op.SIN, expr), expr)
    assert evaluate(expr, {one: 1.0}) == 1.0
