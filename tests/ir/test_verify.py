"""What is valid of expressions, programs, backward passes and mods: each law, and something that breaks it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given

from attention_engine import CustomIO
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.expr import Axis, Op, Type, VarKind, const, make, var
from attention_engine.ir.linear import X
from attention_engine.ir.program import (
    DELTA,
    KV_IDX,
    OUTPUT,
    PRODUCT,
    Q_IDX,
    SCORE,
    WEIGHT,
    WEIGHT_GRADIENT,
    B,
    Backward,
    Program,
    State,
    final_gradient,
    final_variable,
    row_variable,
    state_variable,
)
from attention_engine.ir.verify import (
    InvalidIR,
    checked,
    verify_backward,
    verify_linear,
    verify_mod_gradient,
    verify_nodes,
    verify_program,
)
from attention_engine.passes.derive_backward import derive_backward
from attention_engine.passes.differentiate import differentiate
from attention_engine.passes.maths import analyse
from attention_engine.passes.mods import differentiate_mod
from attention_engine.passes.simplify import simplify
from attention_engine.passes.strength import lighten, open_pairs, split_casts, use_exp2
from attention_engine.passes.widths import widen
from tests.expressions import FLOATS, INTS, expressions
from tests.programs import EXAMPLES, MASKS, Example, OnlineSoftmax

F, G = FLOATS[:2]
I, J = INTS[:2]
TRUE = make(Op.LESS, I, J)
LONG = var("long", [Axis.QUERY], Type.LONG)
ENTRY = var("entry", [Axis.CHANNEL])
FLOAT = Type.FLOAT

BROKEN = {
    "add of float and int": make(Op.ADD, F, I),
    "mul of float and int": make(Op.MUL, I, F),
    "maximum of float and int": make(Op.MAXIMUM, F, I),
    "less of float and int": make(Op.LESS, F, I),
    "equal of bool and int": make(Op.EQUAL, TRUE, I),
    "where of float and int": make(Op.WHERE, TRUE, F, I),
    "add of int and long": make(Op.ADD, I, LONG),
    "bitwise_left_shift of int and long": make(Op.SHIFT_LEFT, LONG, I),
    "operand 0 of add is of type bool": make(Op.ADD, TRUE, TRUE),
    "operand 0 of recip is of type int": make(Op.RECIP, I),
    "operand 0 of exp is of type bool": make(Op.EXP, TRUE),
    "operand 0 of floor is of type int": make(Op.FLOOR, I),
    "operand 0 of floordiv is of type float": make(Op.FLOORDIV, F, G),
    "operand 0 of bitwise_and is of type float": make(Op.BIT_AND, F, G),
    "operand 1 of pow is of type int": make(Op.POW, F, I),
    "operand 0 of abs is of type bool": make(Op.ABS, TRUE),
    "operand 0 of and is of type int": make(Op.AND, I, J),
    "operand 0 of not is of type float": make(Op.NOT, F),
    "operand 0 of where is of type int": make(Op.WHERE, I, F, G),
    "operand 0 of reduce is of type int": make(Op.REDUCE, J, arg="sum"),
    "operand 0 of load is of type float": make(Op.LOAD, F, arg="x", dtype=FLOAT),
    "add is of type int": make(Op.ADD, F, G, dtype=Type.INT),
    "less is of type float": make(Op.LESS, F, G, dtype=FLOAT),
    "there is no reduction 'mean'": make(Op.REDUCE, F, arg="mean"),
    "a reduction over keys of what differs by channel": make(Op.REDUCE, ENTRY, arg="sum"),
    "a share of 2.0 in a tie's gradient": make(Op.MAXIMUM, F, G, arg=2.0),
    "exp has no datum, as 1 would be": make(Op.EXP, F, arg=1),
    "a constant of type float holds 1": make(Op.CONST, arg=1, dtype=FLOAT),
    "a constant of type int holds True": make(Op.CONST, arg=True, dtype=Type.INT),
    "a constant of type bool holds 0": make(Op.CONST, arg=0, dtype=Type.BOOL),
    "32 bits have no room for 2147483648": const(2**31),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_node_that_its_operation_can_not_be_is_refused(law):
    inside = make(Op.DETACH, BROKEN[law])
    with pytest.raises(InvalidIR) as error:
        verify_nodes("x", inside)
    first, at, within, blame = str(error.value).split("\n")
    assert first == f"x: {law}"
    assert at == f"  at: {BROKEN[law]}"
    assert within == f"  in: {inside}"
    assert blame == "  This is a mistake in attention_engine, not in your function."


@pytest.mark.parametrize(("node", "law", "shown"), [
    (make(Op.ADD, F), "add takes 2 operands, not 1", "add(var)"),
    (make(Op.MUL, F, F, G), "mul takes 2 operands, not 3", "mul(var, var, var)"),
    (make(Op.EXP, F, G), "exp takes 1 operands, not 2", "exp(var, var)"),
])  # fmt: skip
def test_a_node_of_other_operands_is_refused_and_printed(node, law, shown):
    with pytest.raises(InvalidIR) as error:
        verify_nodes("x", make(Op.DETACH, node))
    assert str(error.value).split("\n")[:3] == [f"x: {law}", f"  at: {shown}", f"  in: detach({shown})"]


@given(expressions())
def test_expressions_stay_valid_through_every_pass(expr):
    def valid(*roots):
        verify_nodes("x", *roots)
        return roots

    valid(expr)
    made = valid(*widen(*simplify(expr)))
    for change in (use_exp2, open_pairs, split_casts, lighten):
        made = valid(*change(*made))
    if expr.dtype is FLOAT:
        valid(*widen(*differentiate(expr, FLOATS)))


# ---- programs

SOFTMAX = EXAMPLES["softmax"].trace(MASKS["causal"])
HAND = EXAMPLES["softmax by hand"].trace()
UNKNOWN, SUM = var("unknown", [Axis.QUERY]), make(Op.REDUCE, SCORE, arg="sum")
STATE, FINAL, ARRIVING = state_variable("m"), final_variable("lse"), final_gradient("lse")
READ = make(Op.LOAD, Q_IDX, arg="no such", dtype=FLOAT)


def with_update(update, initial=0.0):
    return replace(SOFTMAX, states=(*SOFTMAX.states, State("n", initial, update)))


NO_PROGRAM: dict[str, tuple[str, Program]] = {
    "a score of another's variable": ("score: reads score (given", replace(SOFTMAX, score=SCORE * 2.0)),
    "a score that reads a state": ("score: reads state.m (state", replace(SOFTMAX, score=PRODUCT + STATE)),
    "a score of integers": ("score: is of type int, not float", replace(SOFTMAX, score=KV_IDX)),
    "a score by channels": ("score: differs along channel", replace(SOFTMAX, score=OUTPUT)),
    "a score that reduces": (
        "score: reduces a row", replace(SOFTMAX, score=PRODUCT + make(Op.REDUCE, PRODUCT, arg="max"))
    ),
    "a score of an undeclared input": (
        "score: reads the custom input 'no such', which is not declared", replace(SOFTMAX, score=PRODUCT + READ)
    ),
    "a mask that is no condition": ("mask: is of type float, not bool", replace(SOFTMAX, mask=const(1.0))),
    "a mask that asks the score": (
        "mask: reads qk (given", replace(SOFTMAX, mask=make(Op.LESS, const(0.0), PRODUCT))
    ),
    "two states of one name": ("row states: m stands twice", replace(SOFTMAX, states=SOFTMAX.states[:1] * 2)),
    "two rows of one name": ("returned rows: lse stands twice", replace(SOFTMAX, finals=SOFTMAX.finals * 2)),
    "a state of pairs": ("next.n: differs along key", with_update(SCORE)),
    "a state that reads an unknown one": ("next.n: reads state.k (state", with_update(SUM + state_variable("k"))),
    "a state that reads a returned row": ("next.n: reads final.lse (final", with_update(SUM + FINAL)),
    "a state that reads the products": (
        "next.n: reads qk (given", with_update(make(Op.REDUCE, PRODUCT, arg="sum"))
    ),
    "a state that starts nowhere": ("state.n: starts at nan", with_update(SUM, math.nan)),
    "a state that starts at an integer": ("state.n: starts at 0", with_update(SUM, 0)),
    "weights of an unknown variable": ("weights: reads unknown", replace(SOFTMAX, weights=SCORE + UNKNOWN)),
    "a rescale of pairs": ("rescale: differs along key", replace(SOFTMAX, rescale=SCORE)),
    "an output of scores": ("output: differs along key", replace(SOFTMAX, output=OUTPUT * SCORE)),
    "an output that reduces": (
        "output: reduces a row", replace(SOFTMAX, output=OUTPUT * make(Op.REDUCE, const(1.0), arg="sum"))
    ),
    "a returned row of the output": (
        "final.lse: differs along channel", replace(SOFTMAX, finals=(("lse", OUTPUT),))
    ),
    "a returned row that reduces": ("final.lse: reads score", replace(SOFTMAX, finals=(("lse", SUM),))),
    "a forward of products": ("user.forward: reads qk", replace(HAND, forward=PRODUCT + FINAL)),
    "a forward of an unknown row": (
        "user.forward: reads final.k", replace(HAND, forward=SCORE + final_variable("k"))
    ),
    "a backward of scores": ("user.backward: reads score", replace(HAND, backward=SCORE * WEIGHT_GRADIENT)),
    "an index that is a float": (
        "score: reads b (given, float, of b)", replace(SOFTMAX, score=PRODUCT + var("b", [Axis.BATCH]))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_PROGRAM)
def test_what_is_no_program_is_refused(name):
    law, program = NO_PROGRAM[name]
    with pytest.raises(InvalidIR) as error:
        verify_program(program)
    assert str(error.value).startswith(law)


def test_captured_inputs_may_be_read_before_they_are_declared():
    program = replace(SOFTMAX, score=PRODUCT + READ)
    verify_program(program, ["no such"])


# ---- backward passes


class WithMaximum(OnlineSoftmax):
    """Softmax that returns its rows' maximum, which gets a gradient."""

    def __init__(self):
        super().__init__()
        self.final_rowscales["top"] = 0.0

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o, finals = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o, {**finals, "top": online_rowscales["m"]}


TEMPERED, EXTREME = EXAMPLES["tempered"].trace(), Example(WithMaximum).trace()
OF_SOFTMAX, OF_TEMPERED, OF_EXTREME = map(derive_backward, (SOFTMAX, TEMPERED, EXTREME))
PAIR = make(Op.MUL, WEIGHT, WEIGHT_GRADIENT)
(TOP,) = OF_EXTREME.extremes

NO_BACKWARD: dict[str, tuple[str, Backward, Program]] = {
    "a saved row of scores": ("saved._0: reads score", replace(OF_SOFTMAX, saved=(("_0", SUM),)), SOFTMAX),
    "a saved row that is known too late": (
        "saved._0: reads delta", replace(OF_SOFTMAX, saved=(("_0", DELTA),)), SOFTMAX
    ),
    "a saved row by a returned one's name": (
        "saved.lse: a returned row has this name and is another", replace(OF_SOFTMAX, saved=(("lse", STATE),)), SOFTMAX
    ),
    "two saved rows of one name": (
        "rows that are given: lse stands twice", replace(OF_SOFTMAX, saved=OF_SOFTMAX.saved * 2), SOFTMAX
    ),
    "a row of what was not saved": (
        "row0: reads final._9", replace(OF_SOFTMAX, rows=(("row0", final_variable("_9")),)), SOFTMAX
    ),
    "a row of states": ("row0: reads state.m", replace(OF_SOFTMAX, rows=(("row0", STATE),)), SOFTMAX),
    "a row of pairs": ("row0: differs along key", replace(OF_SOFTMAX, rows=(("row0", PAIR),)), SOFTMAX),
    "a row of what arrives at no row": (
        "row0: reads dfinal.k", replace(OF_SOFTMAX, rows=(("row0", final_gradient("k")),)), SOFTMAX
    ),
    "two rows of one name": (
        "rows that pairs read: row0 stands twice", replace(OF_SOFTMAX, rows=OF_SOFTMAX.rows[:1] * 2), SOFTMAX
    ),
    "weights of a row that is not made": (
        "weight: reads row9 (row", replace(OF_SOFTMAX, weights=PRODUCT + row_variable("row9")), SOFTMAX
    ),
    "weights of a saved row": ("weight: reads final.lse", replace(OF_SOFTMAX, weights=PRODUCT + FINAL), SOFTMAX),
    "weights of scores that no one makes": ("weight: reads score", replace(OF_SOFTMAX, weights=SCORE), SOFTMAX),
    "weights of products beside a score": (
        "weight: reads qk", replace(OF_SOFTMAX, weights=PRODUCT, score=PRODUCT), SOFTMAX
    ),
    "a score of rows": ("score: reads row0", replace(OF_SOFTMAX, weights=SCORE, score=row_variable("row0")), SOFTMAX),
    "a gradient that reduces": (
        "d_qk: reduces a row", replace(OF_SOFTMAX, product_gradient=make(Op.REDUCE, PAIR, arg="sum")), SOFTMAX
    ),
    "a gradient of delta": ("d_qk: reads delta", replace(OF_SOFTMAX, product_gradient=PAIR * DELTA), SOFTMAX),
    "a gradient by channels": ("d_qk: differs along channel", replace(OF_SOFTMAX, product_gradient=OUTPUT), SOFTMAX),
    "a gradient of an extreme that there is not": (
        "d_qk: reads extreme0", replace(OF_SOFTMAX, product_gradient=PAIR * TOP.of_pair), SOFTMAX
    ),
    "a condition for a gradient": (
        "d_qk: is of type bool", replace(OF_SOFTMAX, product_gradient=make(Op.LESS, PAIR, WEIGHT)), SOFTMAX
    ),
    "a gradient of a read that there is not": (
        "d_no such[q_idx]: the program reads no such number",
        replace(OF_SOFTMAX, pair_gradients=((READ, PAIR),)), SOFTMAX,
    ),
    "a read's gradient of saved rows": (
        "d_heat[h]: reads final.lse",
        replace(OF_TEMPERED, pair_gradients=((OF_TEMPERED.pair_gradients[0][0], PAIR * FINAL),)), TEMPERED,
    ),
    "two gradients of one read": (
        "reads that have gradients: heat[h] stands twice",
        replace(OF_TEMPERED, pair_gradients=OF_TEMPERED.pair_gradients[:1] * 2), TEMPERED,
    ),
    "a row's gradient of pairs": (
        "d_heat[h]: differs along key",
        replace(OF_TEMPERED, pair_gradients=(), row_gradients=((OF_TEMPERED.pair_gradients[0][0], PAIR),)), TEMPERED,
    ),
    "an extreme of another number": (
        "extreme1: is number 0, a max", replace(OF_EXTREME, extremes=(replace(TOP, number=1),)), EXTREME
    ),
    "an extreme that is a sum": (
        "extreme0: is number 0, a sum", replace(OF_EXTREME, extremes=(replace(TOP, kind="sum"),)), EXTREME
    ),
    "an extreme of scores": (
        "extreme0: reads score", replace(OF_EXTREME, extremes=(replace(TOP, value=SCORE),)), EXTREME
    ),
    "a reason for a row that there is not": (
        "undifferentiated: no row 'k' is returned", replace(OF_SOFTMAX, undifferentiated=(("k", "so"),)), SOFTMAX
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_BACKWARD)
def test_what_is_no_backward_pass_is_refused(name):
    law, backward, program = NO_BACKWARD[name]
    with pytest.raises(InvalidIR) as error:
        verify_backward(backward, program)
    assert str(error.value).startswith(law)


def test_the_programs_that_are_broken_above_are_valid():
    for program, backward in ((SOFTMAX, OF_SOFTMAX), (TEMPERED, OF_TEMPERED), (EXTREME, OF_EXTREME)):
        verify_program(program)
        verify_backward(backward, program)
    verify_program(HAND)


# ---- linear attention

IO = CustomIO({"dt": ("batch", "heads", "seq_len")})
LINEAR = trace_mods({"v": lambda x, custom: x * custom["dt"]}, IO)
OF_V = differentiate_mod(LINEAR, "v")

NO_LINEAR = {
    "v: differs along key": replace(LINEAR, v=X * make(Op.CAST, KV_IDX, arg=FLOAT)),
    "q: reads o (given": replace(LINEAR, q=OUTPUT),
    "k: reduces a row": replace(LINEAR, k=make(Op.REDUCE, const(1.0), arg="sum")),
    "decay: is of type int": replace(LINEAR, decay=Q_IDX),
    "v: reads the custom input 'dt', which is not declared": replace(LINEAR, custom=()),
}


@pytest.mark.parametrize("law", NO_LINEAR)
def test_what_is_no_linear_attention_is_refused(law):
    verify_linear(LINEAR)
    with pytest.raises(InvalidIR) as error:
        verify_linear(NO_LINEAR[law])
    assert str(error.value).startswith(law)


NO_MOD_GRADIENT = {
    "d_v: reads o (given": replace(OF_V, x=OUTPUT),
    "d_v: gradients of other reads than the mod's": replace(OF_V, reads=()),
    "d_dt[b, h, q_idx]: differs along key": replace(OF_V, reads=((OF_V.reads[0][0], PAIR),)),
}


@pytest.mark.parametrize("law", NO_MOD_GRADIENT)
def test_what_are_no_gradients_of_a_mod_is_refused(law):
    verify_mod_gradient(OF_V, LINEAR, "v")
    with pytest.raises(InvalidIR) as error:
        verify_mod_gradient(NO_MOD_GRADIENT[law], LINEAR, "v")
    assert str(error.value).startswith(law)


# ---- when


def broken(program, *rest, **named):
    return replace(program, score=make(Op.ADD, PRODUCT, B))


@pytest.mark.parametrize("name", ["simplify", "widen"])
def test_tracing_checks_what_it_hands_on(name, monkeypatch):
    """Where a normal form had added an index to a score."""
    module = "attention_engine.frontend.tracing"
    real = {"simplify": simplify, "widen": widen}[name]

    def mixes(*roots, **named):
        return tuple(make(Op.ADD, r, KV_IDX) if r is PRODUCT else r for r in real(*roots, **named))

    monkeypatch.setattr(f"{module}.{name}", mixes)
    with pytest.raises(InvalidIR, match="score: add of float and int"):
        Example(OnlineSoftmax, None).trace()


def test_analysis_checks_what_passes_hand_on(monkeypatch):
    monkeypatch.setattr("attention_engine.passes.absent_pairs._take_out", lambda score: (OUTPUT, const(False)))
    with pytest.raises(InvalidIR, match="score: differs along channel"):
        analyse(SOFTMAX)


def test_nothing_is_checked_where_no_one_asks(monkeypatch):
    monkeypatch.delenv("ATTENTION_ENGINE_VERIFY")
    assert checked(verify_program, broken(SOFTMAX)).score is broken(SOFTMAX).score
    for off in ("0", ""):
        monkeypatch.setenv("ATTENTION_ENGINE_VERIFY", off)
        assert checked(verify_program, broken(SOFTMAX)) == broken(SOFTMAX)
    monkeypatch.setenv("ATTENTION_ENGINE_VERIFY", "1")
    with pytest.raises(InvalidIR, match="score: add of float and int"):
        checked(verify_program, broken(SOFTMAX))


def test_every_kind_of_variable_is_told_from_the_others():
    """A program reads none of what schedules and kernels make, by whatever name."""
    for kind in (VarKind.MADE, VarKind.BLOCK, VarKind.ROW, VarKind.CUT, VarKind.PLACE, VarKind.EXTREME,
                 VarKind.PART, VarKind.WHOLE):  # fmt: skip
        node = var(f"x{kind.value}", [Axis.QUERY], kind=kind)
        with pytest.raises(InvalidIR, match=f"weights: reads {node.name} \\({kind.value}, float, of q\\)"):
            verify_program(replace(SOFTMAX, weights=SCORE + node))
