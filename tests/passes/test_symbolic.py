"""Independence: shown by sympy where it holds, refuted by numbers where it does not."""

import pytest

from attention_engine.ir.expr import Op, const, make
from attention_engine.ir.program import SCORE, row_variable
from attention_engine.passes import symbolic
from attention_engine.passes.symbolic import is_independent

ROW = row_variable("m")


def plus(a, b):
    return make(Op.ADD, a, b)


def times(a, b):
    return make(Op.MUL, a, b)


SIGMOID = make(Op.SIGMOID, SCORE)
SQUARE = times(plus(SCORE, ROW), plus(SCORE, ROW))
FREE = {
    "not there": ROW,
    "a quotient": times(times(SCORE, ROW), make(Op.RECIP, SCORE)),
    "a sigmoid's two forms": times(SIGMOID, plus(const(1.0), make(Op.EXP, times(const(-1.0), SCORE)))),
    "a difference of logs, of positive numbers alone": plus(
        make(Op.LOG, times(SCORE, ROW)), times(const(-1.0), make(Op.LOG, SCORE))
    ),
}
BOUND = {
    "itself": SCORE,
    "tanh over a sum": times(make(Op.TANH, SCORE), make(Op.RECIP, plus(SCORE, ROW))),
    "a small part": plus(ROW, times(const(1e-6), SCORE)),
    "a root of what may be negative": make(Op.SQRT, SQUARE),
}


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_change_is_proved(name):
    assert is_independent(FREE[name], SCORE)


@pytest.mark.parametrize("name", BOUND)
def test_what_changes_needs_no_proof(name, monkeypatch):
    monkeypatch.setattr(symbolic.sympy, "simplify", None)
    assert not is_independent(BOUND[name], SCORE)
