"""What messages advise is right: formulas have torch's values, and what they name exists."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from attention_engine import errors
from attention_engine.errors import did_you_mean, nearest
from attention_engine.frontend.advice import ADVICE, FORMULAS, way_out
from attention_engine.frontend.symbols import Symbol, wrap
from attention_engine.ir.program import SCORE, state_variable
from attention_engine.reference.evaluate import Evaluator

X = torch.tensor([-0.9, -0.41, -0.05, 0.3, 0.77], dtype=torch.float64)
B = torch.tensor([0.6, 0.2, 0.9, 0.35, 0.1], dtype=torch.float64)
OWN = {"weight": 0.25, "alpha": 1.5, "lambd": 0.2, "threshold": 0.1, "value": 2.0}
CALLS = {  # torch's own, where a name and an x alone do not call it
    "celu": lambda x, b: F.celu(x, alpha=1.5),
    "exp10": lambda x, b: 10**x,
    "hardshrink": lambda x, b: F.hardshrink(x, 0.2),
    "lerp": lambda x, b: torch.lerp(x, b, 0.25),
    "prelu": lambda x, b: F.prelu(x, torch.tensor(0.25, dtype=x.dtype)),
    "selu": lambda x, b: F.selu(x),
    "softshrink": lambda x, b: F.softshrink(x, 0.2),
    "tanhshrink": lambda x, b: F.tanhshrink(x),
    "threshold": lambda x, b: F.threshold(x, 0.1, 2.0),
    "logit": lambda x, b: torch.logit(b),
    "log10": lambda x, b: torch.log10(b),
    **{name: (lambda x, b, name=name: getattr(torch, name)(x, b)) for name in ("copysign", "fmod", "hypot", "xlogy")},
    "logaddexp": lambda x, b: torch.logaddexp(x, b),
}
OF_POSITIVES = ("logit", "log10")


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_has_the_values_of_the_function_that_it_stands_for(name):
    expected = CALLS.get(name, lambda x, b: getattr(torch, name)(x))(X, B)
    s, other = wrap(SCORE), wrap(state_variable("m"))
    x = other if name in OF_POSITIVES else s
    found = eval(FORMULAS[name], {"torch": torch, "math": math, "F": F, "x": x, "a": s, "b": other, **OWN})
    made = Evaluator({SCORE: X, state_variable("m"): B}, {}, torch.float64, torch.device("cpu"))(found.expr)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-7)  # constants are those of fp32


def test_what_has_advice_is_not_known():
    assert not set(Symbol.FUNCTIONS) & (ADVICE.keys() | FORMULAS.keys())


def test_unknown_names_get_the_nearest_three_at_most():
    assert nearest("Sigmod", Symbol.FUNCTIONS) == ["sigmoid", "logsigmoid", "log_sigmoid"]
    assert did_you_mean("bias", ["biases"]) == " Did you mean 'biases'?"
    assert did_you_mean("bias", ["bias1", "bias2"]) == " Did you mean 'bias2' or 'bias1'?"
    assert did_you_mean("bias", ["slopes"]) == did_you_mean(3, []) == ""
    assert way_out("mul_", Symbol.FUNCTIONS) == "Nothing is changed in place: use x = x.mul(...)."


def test_each_error_names_its_section_of_the_page():
    error = errors.BranchOnSymbol("here: what.")
    assert str(error) == "here: what." and error.__notes__ == ["  See docs/errors.md#branchonsymbol."]
    assert errors.message_of(error) == "BranchOnSymbol: here: what.\n  See docs/errors.md#branchonsymbol."
