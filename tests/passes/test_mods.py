"""What is known of mods: derivatives beside autograd, and which mods are a factor of their row."""

import pytest
import torch

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import GRADIENT, X
from attention_engine.passes.differentiate import ONE
from attention_engine.passes.mods import differentiate_mod, row_factor
from attention_engine.reference.evaluate import Evaluator
from attention_engine.reference.linear import token_indices

IO = CustomIO({"dt": ("batch", "heads", "seq_len"), "s": ("heads",)})
FACTORS = {
    "scaled": lambda x, c: x * 0.125, "per_head": lambda x, c: x * c["s"], "quotient": lambda x, c: 2 * x / c["dt"],
    "both": lambda x, c: c["s"] * (x * c["dt"].exp()), "negative": lambda x, c: -x,
}  # fmt: skip
OTHERS = {
    "shifted": lambda x, c: x + c["dt"], "square": lambda x, c: x * x, "floor": lambda x, c: x.floor(),
    "relu": lambda x, c: x.relu() * c["s"], "constant": lambda x, c: c["s"] * 1.0, "detached": lambda x, c: x.detach(),
    "times_itself": lambda x, c: x * x.sigmoid(), "sum": lambda x, c: x * c["s"] + x * x,
}  # fmt: skip
VALUES = {
    "x": torch.linspace(-2, 2, 2 * 3 * 5 * 4, dtype=torch.float64).view(2, 3, 5, 4) + 0.01,
    "dt": torch.linspace(0.5, 1, 30, dtype=torch.float64).view(2, 3, 5),
    "s": torch.linspace(1, 2, 3, dtype=torch.float64),
}


def evaluate(expr, x, custom, gradient=None):
    given = {**token_indices(2, 3, 5, x.device), X: x}
    if gradient is not None:
        given[GRADIENT] = gradient
    return Evaluator(given, custom, torch.float64, x.device)(expr)


@pytest.mark.parametrize("name", FACTORS)
def test_a_product_with_numbers_of_the_row_is_a_factor(name):
    mod = trace_mods({"v": FACTORS[name]}, IO).v
    factor = row_factor(mod)
    assert factor is not None
    x, custom = VALUES["x"], {n: VALUES[n] for n in ("dt", "s")}
    torch.testing.assert_close(evaluate(factor, x, custom) * x, evaluate(mod, x, custom))


def test_no_mod_is_a_factor_of_1():
    assert row_factor(X) is ONE


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_a_factor(name):
    assert row_factor(trace_mods({"v": OTHERS[name]}, IO).v) is None


@pytest.mark.parametrize("name", [*FACTORS, *OTHERS])
def test_gradients_agree_with_autograd(name):
    program = trace_mods({"v": {**FACTORS, **OTHERS}[name]}, IO)
    leaves = {n: x.clone().requires_grad_() for n, x in VALUES.items()}
    custom = {n: leaves[n] for n in ("dt", "s")}
    gradient = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    found = differentiate_mod(program, "v")
    out = evaluate(program.v, leaves["x"], custom).expand(gradient.shape)
    expected = dict.fromkeys(leaves)
    if out.requires_grad:
        expected = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), gradient, allow_unused=True)))
    with torch.no_grad():
        ours = evaluate(found.x, VALUES["x"], custom, gradient)
        torch.testing.assert_close(ours.expand(gradient.shape), _or_zero(expected["x"], gradient))
        for read, expr in found.reads:
            each = evaluate(expr, VALUES["x"], custom, gradient).expand(gradient.shape)
            total = each.sum(3) if read.name == "dt" else each.sum((0, 2, 3))
            torch.testing.assert_close(total, _or_zero(expected[read.name], total))
    assert {r.name for r, _ in found.reads} == {n for n in ("dt", "s") if f" {n}[" in f" {program.v}".replace("(", " ")}


def _or_zero(gradient, like):
    return torch.zeros_like(like) if gradient is None else gradient
