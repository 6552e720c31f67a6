"""Mods of a linear attention, traced: what becomes of x, and what is refused."""

import pytest

from attention_engine.errors import UnknownCustomInput, WrongArity, WrongResult
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.mods import trace_mods
from attention_engine.frontend.symbols import wrap
from attention_engine.ir.expr import Op, const, make
from attention_engine.ir.linear import X
from attention_engine.ir.program import Q_IDX, B, H
from attention_engine.passes.simplify import simplify

IO = CustomIO({"dt": ("batch", "heads", "seq_len"), "at_key": ("seq_len_kv",)})


def test_no_mod_leaves_a_tensor_as_it_is():
    program = trace_mods({}, IO)
    assert {e for _, e in program.named()} == {X} and program.decays


def test_a_mod_is_noted_as_its_expression():
    program = trace_mods({"v": lambda x, custom: x * custom["dt"], "q": lambda x: (x * 2).exp()}, IO)
    dt = make(Op.LOAD, B, H, Q_IDX, arg="dt")
    expected = simplify(wrap(X).expr * make(Op.LOAD, B, H, Q_IDX, arg="dt", dtype=X.dtype))
    assert program.v is expected[0] and program.loads("v")[0].args == dt.args
    assert program.q is simplify(make(Op.EXP, X * const(2.0)))[0]


def test_tokens_of_keys_are_tokens():
    program = trace_mods({"k": lambda x, custom: x + custom["at_key"]}, IO)
    assert program.loads("k")[0].args == (Q_IDX,)


def test_without_a_decay_its_x_is_0():
    assert not trace_mods({}, IO, decay_given=False).decays
    constant = trace_mods({"decay": lambda x: x - 0.5}, IO, decay_given=False)
    assert constant.decay is const(-0.5) and constant.decays


def test_equal_mods_have_equal_fingerprints():
    one, other, third = (
        trace_mods({"q": mod}, IO) for mod in (lambda x: x * 0.5, lambda y: 0.5 * y, lambda x: x * 0.25)
    )
    assert one.fingerprint == other.fingerprint != third.fingerprint


def test_a_mod_that_returns_nothing_is_refused():
    with pytest.raises(WrongResult, match=r"test_mods.py:\d+: .*returned NoneType. v_mod returns .* `return` missing"):
        trace_mods({"v": lambda x, custom: None}, IO)


def test_a_mod_that_reduces_is_refused():
    with pytest.raises(WrongResult, match="elementwise"):
        trace_mods({"k": lambda x, custom: custom["at_key"].get_reduce("sum") + x}, IO)


def test_a_mod_of_three_arguments_is_refused():
    with pytest.raises(WrongArity, match="takes 3 arguments"):
        trace_mods({"k": lambda x, custom, more: x}, IO)


def test_an_unknown_custom_input_is_refused():
    with pytest.raises(UnknownCustomInput, match="'dt'"):
        trace_mods({"v": lambda x, custom: x * custom["delta"]}, IO)
