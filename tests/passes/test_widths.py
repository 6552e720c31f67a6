"""Integers of 64 bits where 32 may not do: the same numbers, and none of 32 bits leaves them."""

import random

import pytest

from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import INTEGERS, Axis, Op, Type, const, in_64_bits, make, topological, var
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.passes.index_ranges import INDICES, NARROW, WIDE, fits
from attention_engine.passes.read_places import ReadPlace, place_of_read
from attention_engine.passes.simplify import add, mul, simplify
from attention_engine.passes.widths import widen

IDS = {name: make(Op.LOAD, B, index, arg=name, dtype=Type.INT) for name, index in (("narrow", Q_IDX), ("wide", KV_IDX))}
LENGTHS = {name: make(Op.LOAD, B, arg=name, dtype=Type.INT) for name in ("narrow", "wide")}
BINARY = [Op.ADD, Op.ADD, Op.MUL, Op.MUL, Op.MAXIMUM, Op.MINIMUM, Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.SHIFT_LEFT,
          Op.SHIFT_RIGHT]  # fmt: skip
COMPARED = [Op.LESS, Op.LESS_EQUAL, Op.EQUAL]
NUMBERS = [0, 1, -1, 2, 3, -7, 31, 33, 64, 1000, 2**16 + 1, 2**31 - 1, -(2**31), 2**32 + 5, 2**40, -(2**63), 2**63 - 1]


def draw_integer(draw, depth):
    if depth == 0 or draw.random() < 0.15:
        leaves = [Q_IDX, KV_IDX, B, H, *IDS.values(), *LENGTHS.values(), const(draw.choice(NUMBERS))]
        return draw.choice(leaves)
    a = draw_integer(draw, depth - 1)
    match draw.randrange(5):
        case 0:
            return make(Op.ABS, a)
        case 1:
            return make(draw.choice([Op.FLOORDIV, Op.MOD]), a, const(draw.choice([2, 3, 7, -3, 2**33, 255])))
        case 2:
            return make(Op.WHERE, draw_condition(draw, depth - 1), a, draw_integer(draw, depth - 1))
        case _:
            return make(draw.choice(BINARY), a, draw_integer(draw, depth - 1))


def draw_condition(draw, depth):
    return make(draw.choice(COMPARED), draw_integer(draw, depth), draw_integer(draw, depth))


def draw_number(draw, least, most):
    near = draw.choice([least, most, 0, draw.randint(least, most)]) + draw.randint(-70, 70)
    return min(max(near, least), most)


def draw_values(draw, expr):
    ranges = {"narrow": NARROW, "wide": WIDE}
    leaves = [n for n in topological(expr) if n.op in (Op.VAR, Op.LOAD)]
    return {n: draw_number(draw, *(INDICES[n] if n in INDICES else ranges[n.name])) for n in leaves}


@pytest.mark.parametrize("seed", range(60))
def test_the_numbers_stay_and_fit_their_widths(seed):
    draw = random.Random(seed)
    raw = draw_condition(draw, 4) if seed % 3 else draw_integer(draw, 4)
    (expr,) = simplify(raw)
    (found,) = widen(expr, wide={"wide"})
    assert simplify(found)[0] is found  # still in normal form
    for _ in range(60):
        values = draw_values(draw, raw)
        exact = evaluate(raw, values)
        assert evaluate(expr, values) == exact
        typed = {n: values[next(v for v in values if (v.op, v.arg, v.args) == (n.op, n.arg, n.args))]
                 for n in topological(found) if n.op in (Op.VAR, Op.LOAD)}  # fmt: skip
        assert evaluate(found, typed) == exact
        for node in topological(found):
            if node.dtype in INTEGERS:
                least, most = NARROW if node.dtype is Type.INT else WIDE
                assert least <= evaluate(node, typed) <= most, node
            if node.op not in (Op.CAST, Op.LOAD) and node.args:
                kinds = {a.dtype for a in node.args if a.dtype in INTEGERS}
                assert len(kinds) <= 1 and (node.dtype not in INTEGERS or kinds <= {node.dtype}), node


def narrow_alone(expr):
    return all(n.dtype is not Type.LONG for n in topological(expr))


@pytest.mark.parametrize("expr", [
    make(Op.LESS_EQUAL, KV_IDX, Q_IDX), make(Op.EQUAL, IDS["narrow"], make(Op.LOAD, B, KV_IDX, arg="narrow",
                                                                           dtype=Type.INT)),
    make(Op.LESS, KV_IDX, LENGTHS["narrow"]), make(Op.FLOORDIV, Q_IDX, const(64)), add(Q_IDX, mul(const(-31), KV_IDX)),
    make(Op.MOD, add(Q_IDX, mul(const(-1), KV_IDX)), const(7)),
    make(Op.LOAD, H, add(Q_IDX, mul(const(-1), KV_IDX), const(128)), arg="table", dtype=Type.FLOAT),
])  # fmt: skip
def test_what_fits_32_bits_is_left_as_it_is(expr):
    assert widen(expr, wide={"wide"}) == (expr,)


def test_a_length_of_64_bits_is_cut_once_and_compared_in_32():
    (found,) = widen(make(Op.LESS, KV_IDX, LENGTHS["wide"]), wide={"wide"})
    assert found.args[0] is KV_IDX and found.args[1].dtype is Type.INT and found.args[1].op is Op.CAST


@pytest.mark.parametrize("name", LENGTHS)
def test_a_shift_is_cut_before_it_is_added(name):
    """But not one of 64 bits, which may wrap with the query."""
    (found,) = widen(make(Op.LESS_EQUAL, KV_IDX, add(Q_IDX, LENGTHS[name])), wide={"wide"})
    assert narrow_alone(found) is (name == "narrow")


@pytest.mark.parametrize("name", LENGTHS)
def test_a_shift_is_cut_before_a_table_is_read_and_its_distances_are_seen(name):
    index = add(Q_IDX, mul(const(-1), KV_IDX), LENGTHS[name])
    (found,) = widen(make(Op.LOAD, H, index, arg="table", dtype=Type.FLOAT), wide={"wide"})
    assert found.args[1].dtype is Type.INT and narrow_alone(found) is (name == "narrow")
    assert place_of_read(found, ("heads", 41)) is ReadPlace.DIAGONAL
    for shift in (WIDE[0], WIDE[1], NARROW[1], -(2**40) - 1, 2**30 + 5, -7, 0, 12, 19):
        for q, k in ((0, 0), (3, 9), (2**26 - 1, 0), (0, 2**26 - 1)):
            if name == "wide" or fits((shift, shift), NARROW):
                values = {Q_IDX: q, KV_IDX: k, LENGTHS[name]: shift}
                changed = {v if v is not LENGTHS[name] else load_of(found, name): n for v, n in values.items()}
                before, after = in_64_bits(q - k + shift), evaluate(found.args[1], changed)
                assert after == before or not (0 <= before < 2**30 or 0 <= after < 2**30), (shift, q, k)


def load_of(expr, name):
    return next(n for n in topological(*expr.args) if n.op is Op.LOAD and n.name == name)


def test_a_shift_of_each_key_stays_as_it_is():
    index = add(Q_IDX, mul(const(-1), IDS["wide"]))
    (found,) = widen(make(Op.LOAD, H, index, arg="table", dtype=Type.FLOAT), wide={"wide"})
    assert found.args[1].dtype is Type.LONG


def test_ids_of_keys_are_compared_in_64_bits():
    (found,) = widen(make(Op.EQUAL, IDS["wide"], const(5)), wide={"wide"})
    assert [a.dtype for a in found.args] == [Type.LONG, Type.LONG]


def test_constants_are_of_64_bits():
    assert const(2**64 + 3).value == 3 and const(2**63).value == -(2**63) and in_64_bits(-1) == -1
    assert mul(const(2**40), const(2**40)) is const(0) and add(const(2**63 - 1), const(1)) is const(-(2**63))
    x = var("x", [Axis.KEY], Type.LONG)
    assert add(x, const(1, Type.LONG)).args[1].dtype is Type.LONG
