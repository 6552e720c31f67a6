"""Whether a reduction only steadies numbers is tried at the places where functions of indices change."""

import pytest

from attention_engine.ir.expr import Op, Type, const, make
from attention_engine.ir.program import Q_IDX, SCORE, B, H
from attention_engine.passes.simplify import add, mul
from attention_engine.passes.steadying import is_steadying

TOP = make(Op.REDUCE, SCORE, arg="max")


def sub(a, b):
    return add(a, mul(const(-1.0), b))


def sub_of(a, b):
    return add(a, mul(const(-1), b))


def softmax():
    weight = make(Op.EXP, sub(SCORE, TOP))
    return mul(weight, make(Op.RECIP, make(Op.REDUCE, weight, arg="sum")))


def choose(condition, a, b):
    return make(Op.WHERE, condition, a, b)


def test_the_maximum_of_a_softmax_steadies():
    assert is_steadying(TOP, softmax())
    assert not is_steadying(TOP, make(Op.EXP, sub(SCORE, TOP)))


@pytest.mark.parametrize("index", [H, Q_IDX], ids=["head", "query"])
@pytest.mark.parametrize("place", [0, 4, 5, 6, 31, 1000, 65536])
def test_a_function_that_differs_at_one_place_is_seen(index, place):
    bare = make(Op.EXP, sub(SCORE, TOP))
    at = make(Op.EQUAL, index, const(place))
    from_on = make(Op.LESS, const(place - 1), index)
    for condition in (at, from_on):
        assert not is_steadying(TOP, choose(condition, bare, softmax()))
        assert is_steadying(TOP, choose(condition, softmax(), mul(const(2.0), softmax())))


CONDITIONS = {
    "a difference of indices": make(Op.EQUAL, sub_of(Q_IDX, H), const(-3001)),
    "two indices at once": make(Op.AND, make(Op.EQUAL, Q_IDX, const(77)), make(Op.EQUAL, H, const(1234))),
    "far away": make(Op.LESS, const(3_000_000), Q_IDX),
    "an input of bools": make(Op.LOAD, B, arg="apart", dtype=Type.BOOL),
    "the opposite of one": make(Op.NOT, make(Op.LOAD, B, arg="apart", dtype=Type.BOOL)),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_function_that_differs_where_a_condition_holds_is_seen(name):
    bare = make(Op.EXP, sub(SCORE, TOP))
    for condition in (CONDITIONS[name], make(Op.NOT, CONDITIONS[name])):
        assert not is_steadying(TOP, choose(condition, bare, softmax()))
        assert is_steadying(TOP, choose(condition, softmax(), mul(const(2.0), softmax())))
