"""Mods of a linear attention, traced: what becomes of x, and what is refused."""

import pytest
import torch

from attention_engine.errors import UnknownCustomInput, UnsupportedOperation, WrongArity, WrongResult
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


ENTRY = "A mod of a linear attention sees one entry of its tensor: do it with the whole tensor, before the call."
OF_SEVERAL = {
    "x.sum()": (lambda x, custom: x - x.sum(), ENTRY),
    "x.softmax(-1)": (lambda x, custom: x.softmax(-1), f"symbolic values have no `softmax`. {ENTRY}"),
    "x.norm()": (lambda x, custom: x / x.norm(), f"symbolic values have no `norm`. {ENTRY}"),
    "x.cumsum(0)": (lambda x, custom: x.cumsum(0), f"symbolic values have no `cumsum`. {ENTRY}"),
    "x.exp(dim=0)": (lambda x, custom: x.exp(dim=0), f"exp with dim= has no meaning in a mod. {ENTRY}"),
    "normalize(x)": (lambda x, custom: torch.nn.functional.normalize(x), "torch.normalize has no meaning in a mod. "
                     "A mod sees one entry of its tensor. Write it in functions that a mod knows: the page below lists "
                     "them."),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_what_reads_several_entries_is_told_of_no_pairs_and_rows(name):
    mod, message = OF_SEVERAL[name]
    with pytest.raises(UnsupportedOperation) as caught:
        trace_mods({"k": mod}, IO)
    assert str(caught.value).split(": ", 1)[1] == message


def test_a_tensor_in_the_place_of_a_result_is_told_how_to_be_read():
    rates = torch.ones(2)
    with pytest.raises(WrongResult) as caught:
        trace_mods({"decay": lambda x, custom: -rates}, IO)
    assert str(caught.value).endswith(
        "<lambda> returned Tensor. decay_mod returns a symbolic value, or a number.\n"
        "  A tensor has an entry for each token or head: declare it, CustomIO({'s': ('heads',)}), and write "
        "custom['s']."
    )


def test_an_unknown_custom_input_is_refused():
    with pytest.raises(UnknownCustomInput, match="'dt'"):
        trace_mods({"v": lambda x, custom: x * custom["delta"]}, IO)
