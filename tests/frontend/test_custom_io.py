"""Custom inputs: what may be declared, and what a mod reads."""

from __future__ import annotations

import pytest

from attention_engine.errors import BadCustomInput, UnknownCustomInput
from attention_engine.frontend.custom_io import CustomInputs, CustomIO, CustomSpec
from attention_engine.frontend.symbols import SymbolicArray, wrap
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Axis, Op, Type, const, make, substitute
from attention_engine.ir.program import KV_IDX, PRODUCT, Q_IDX, B, H
from attention_engine.library import OnlineSoftmax
from tests.programs import EXAMPLES, with_alibi


def reads(axes: dict[str, tuple], types: dict[str, Type] | None = None) -> CustomInputs:
    return CustomInputs(CustomIO(axes), types or {})


def load(name: str, *indices, dtype: Type = Type.FLOAT):
    return make(Op.LOAD, *indices, arg=name, dtype=dtype)


def test_an_input_is_read_at_the_place_that_its_axes_name():
    custom = reads({"x": ("batch", "heads", "seq_len", "seq_len_kv"), "y": (1, "heads"), "z": (), "s": ("seq_len",)})
    zero = const(0)
    assert custom["x"].expr is load("x", B, H, Q_IDX, KV_IDX)
    assert custom["y"].expr is load("y", zero, H)
    assert custom["z"].expr is load("z")
    assert custom["s"].expr.axes == {Axis.QUERY}


def test_an_input_can_be_read_at_any_integer_expressions():
    custom = reads({"x": ("heads", 10)})
    q, kv = wrap(Q_IDX), wrap(KV_IDX)
    assert custom["x"][wrap(H), q - kv].expr is load("x", H, (q - kv).expr)
    assert custom["x"][0, 3].expr is load("x", const(0), const(3))
    assert reads({"t": (5,)})["t"][2].expr is load("t", const(2))


def test_input_tensors_is_another_name_for_the_same():
    custom = reads({"x": ("heads",)})
    assert custom.input_tensors["x"].expr is custom["x"].expr
    assert "x" in custom and "y" not in custom


def test_an_input_has_the_type_of_its_tensor():
    assert reads({"n": ("batch",)}, {"n": Type.INT})["n"].expr.dtype is Type.INT
    assert (reads({"n": ("batch",)}, {"n": Type.INT})["n"] > wrap(KV_IDX)).expr.op is Op.LESS


def test_an_input_of_the_key_can_be_reduced_and_one_of_the_head_cannot():
    custom = reads({"column": ("seq_len_kv",), "slopes": ("heads",)})
    assert isinstance(custom["column"].get_reduce("sum"), SymbolicArray)
    with pytest.raises(TypeError, match=r'get_reduce\("sum"\) on slopes\[h\], which is the same for every key'):
        custom["slopes"].get_reduce("sum")


def test_arithmetic_and_functions_work_on_inputs():
    custom = reads({"slopes": ("heads",)})
    slope = custom["slopes"]
    assert (-slope * 2 + slope.exp()).expr is (-load("slopes", H)) * 2.0 + make(Op.EXP, load("slopes", H))


def test_the_declaration_is_kept_and_nothing_writes_on_it():
    axes = {"slopes": ("heads",), "bias": [1, "seq_len"]}
    io = CustomIO(axes)
    before = dict(io.specs)
    assert list(io.specs) == ["slopes", "bias"]
    assert io.specs["bias"] == CustomSpec("bias", (1, "seq_len"))
    with pytest.raises(TypeError):
        io.specs["more"] = CustomSpec("more", ())
    programs = [trace(with_alibi, None, func, io) for func in (None, OnlineSoftmax())]
    assert dict(io.specs) == before and set(vars(io)) == {"specs", "in_order"}
    assert axes == {"slopes": ("heads",), "bias": [1, "seq_len"]}
    assert programs[0].fingerprint != programs[1].fingerprint
    assert programs[0].score is programs[1].score
    assert programs[0].custom == ("slopes", "bias")


def test_it_shows_itself_as_it_is_written():
    assert repr(CustomIO({"slopes": ("heads",)})) == "CustomIO({'slopes': ('heads',)})"
    assert repr(CustomIO()) == "CustomIO({})"


def test_a_program_holds_its_reads_once():
    program = EXAMPLES["alibi"].trace()
    assert program.loads() == [load("slopes", H)]
    assert substitute(program.score, {load("slopes", H): const(0.0), PRODUCT: const(1.0)}) is not program.score


def fails(error: type[Exception], function, message: str) -> None:
    with pytest.raises(error) as caught:
        function()
    assert str(caught.value) == f"test_custom_io.py:{function.__code__.co_firstlineno}: {message}"


DECLARE = (
    "Declare it, CustomIO({'slope': axes}), or give create_mask and show_mask slope=tensor."
    "\n  A tensor of your own needs neither: tensor[h, q_idx]."
)
NO_AXIS = "\n  Use a positive int, or one of 'batch', 'heads', 'seq_len', 'seq_len_kv'."
MISTAKES = [
    (lambda: CustomIO({"x": "heads"}), "custom input 'x': axes are 'heads'. Write a tuple: 'x': ('heads',)."),
    (lambda: CustomIO({"x": 3}), "custom input 'x': axes are 3. Write a tuple: 'x': (3,)."),
    (lambda: CustomIO({"x": ("head",)}), f"custom input 'x': 'head' is no axis. Did you mean 'heads'?{NO_AXIS}"),
    (lambda: CustomIO({"x": (0,)}), f"custom input 'x': 0 is no axis.{NO_AXIS}"),
    (lambda: CustomIO({"x": (True,)}), f"custom input 'x': True is no axis.{NO_AXIS}"),
    (lambda: CustomIO({"x": (2.0,)}), f"custom input 'x': 2.0 is no axis.{NO_AXIS}"),
    (
        lambda: reads({"x": ("heads", 10)})["x"] * 2,
        "custom input 'x' has an axis of length 10, which no loop runs over.\n"
        "  Read it at an index, custom['x'][..., ...], or name its loop where it is declared: CustomIO({'x': axes})\n"
        "  with 'batch', 'heads', 'seq_len', 'seq_len_kv'.",
    ),
    (
        lambda: reads({"x": ("heads", 10)})["x"][3],
        "custom input 'x' has 2 dimensions ('heads', 10), and is read with 1 index. Give one index for each dimension.",
    ),
    (
        lambda: reads({"x": (10,)})["x"][wrap(Q_IDX) / 2],
        "custom input 'x' is read at float(q_idx) / 2, which is a float. Write // instead of /, or x.to(int).\n"
        "  Indices are integers; so is what a custom input of integers holds.",
    ),
    (
        lambda: reads({"x": (10,)})["x"][1.5],
        "custom input 'x' is read at 1.5, which is a float. Write // instead of /, or x.to(int).\n"
        "  Indices are integers; so is what a custom input of integers holds.",
    ),
]


@pytest.mark.parametrize(("function", "message"), MISTAKES)
def test_a_bad_declaration_or_read_is_refused_at_the_users_line(function, message):
    fails(BadCustomInput, function, message)


def test_an_input_that_is_not_declared_is_refused_with_the_known_ones():
    custom, nothing = reads({"slopes": ("heads",), "bias": (1,)}), reads({})
    fails(UnknownCustomInput, lambda: custom["slope"], "no custom input is called 'slope'. Did you mean 'slopes'? "
          f"Declared: 'slopes', 'bias'.\n  {DECLARE}")  # fmt: skip
    fails(UnknownCustomInput, lambda: nothing["slope"], f"no custom input is called 'slope'. Declared: none. {DECLARE}")
