"""Symbolic gradients against torch's, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from attention_engine.ir.expr import LEAVES, Axis, Expr, Op, Type, const, make, topological, var
from attention_engine.ir.program import PRODUCT, SCORE
from attention_engine.passes.differentiate import GRADIENTS, differentiate, log_derivative, outside_reductions
from attention_engine.passes.simplify import simplify
from attention_engine.reference.evaluate import DTYPES, Evaluator
from tests.expressions import FLOATS, floats

X, Y, COLUMN, ROW, SLOPE = FLOATS
SIZES = {Axis.BATCH: 2, Axis.HEAD: 2, Axis.QUERY: 3, Axis.KEY: 4}


def tensors(*roots: Expr) -> dict[Expr, Tensor]:
    """A tensor for each variable, of its axes; floats ask for gradients."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for node in topological(*roots):
        if node.op is Op.VAR:
            shape = [n if a in node.axes else 1 for a, n in SIZES.items()]
            if node.dtype is Type.FLOAT:
                drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2
                values[node] = drawn.requires_grad_()
            else:
                values[node] = torch.randint(-4, 9, shape, generator=generator, dtype=DTYPES[node.dtype])
    return values


def evaluated(expr: Expr, values: dict[Expr, Tensor]) -> Tensor:
    return Evaluator(values, {}, torch.float64, torch.device("cpu"))(expr)


def away_from_kinks(expr: Expr, values: dict[Expr, Tensor]) -> bool:
    """No two operands of a comparison, a maximum or an absolute value so close that rounding decides the winner."""
    for node in topological(expr):
        if node.op in (Op.MAXIMUM, Op.MINIMUM, Op.LESS, Op.LESS_EQUAL) and node.args[0].dtype is Type.FLOAT:
            a, b = (evaluated(x, values) for x in node.args)
            if (a - b).abs().min() < 1e-9:
                return False
        if node.op is Op.ABS and evaluated(node.args[0], values).abs().min() < 1e-9:
            return False
    return True


def check_gradients(expr: Expr, values: dict[Expr, Tensor]) -> None:
    leaves = [v for v in values if v.dtype is Type.FLOAT]
    result = evaluated(expr, values)
    seed = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torchs = [None] * len(leaves)
    if result.requires_grad:
        torchs = torch.autograd.grad(result, [values[v] for v in leaves], seed, allow_unused=True)
    g = var("g", expr.axes)
    for leaf, expected, ours in zip(leaves, torchs, differentiate(expr, leaves, g), strict=True):
        full = torch.broadcast_to(
            evaluated(ours, {**values, g: seed}), torch.broadcast_shapes(seed.shape, values[leaf].shape)
        )
        found = full.sum_to_size(values[leaf].shape)  # a derivative has the root's axes: sum over what the leaf hasn't
        expected = torch.zeros_like(found) if expected is None else expected
        scale = max(1.0, full.abs().max().item())
        error = (found - expected).abs().max().item()
        assert error <= 1e-9 * scale, f"d {expr} / d {leaf} = {ours} is off by {error}"


@settings(max_examples=300)
@given(floats(smooth=True))
def test_gradients_agree_with_torch(expr):
    values = tensors(expr)
    assume(away_from_kinks(expr, values))
    assume(evaluated(expr, values).abs().max() < 1e6)
    check_gradients(expr, values)


def positive(e: Expr) -> Expr:
    return make(Op.SIN, e) + 2.5


C = make(Op.LESS, X, Y)
EACH = {
    Op.ADD: X + Y, Op.MUL: X * Y, Op.RECIP: make(Op.RECIP, positive(X)),
    Op.FLOORDIV: make(Op.CAST, make(Op.FLOORDIV, var("i", [Axis.QUERY], Type.INT), const(2)), arg=Type.FLOAT) * X,
    Op.MOD: make(Op.CAST, make(Op.MOD, var("i", [Axis.QUERY], Type.INT), const(3)), arg=Type.FLOAT) * X,
    Op.POW: make(Op.POW, positive(X), Y), Op.MAXIMUM: make(Op.MAXIMUM, X, Y), Op.MINIMUM: make(Op.MINIMUM, X, Y),
    Op.EXP: make(Op.EXP, X), Op.EXP2: make(Op.EXP2, X), Op.LOG: make(Op.LOG, positive(X)),
    Op.LOG2: make(Op.LOG2, positive(X)), Op.LOG1P: make(Op.LOG1P, positive(X)), Op.SQRT: make(Op.SQRT, positive(X)),
    Op.RSQRT: make(Op.RSQRT, positive(X)), Op.TANH: make(Op.TANH, X), Op.SIGMOID: make(Op.SIGMOID, X),
    Op.ERF: make(Op.ERF, X), Op.SIN: make(Op.SIN, X), Op.COS: make(Op.COS, X), Op.ABS: make(Op.ABS, X),
    Op.EXPM1: make(Op.EXPM1, X), Op.SOFTPLUS: make(Op.SOFTPLUS, X), Op.ATAN: make(Op.ATAN, X),
    Op.ROUND: make(Op.ROUND, X * 3.0) * Y,
    **{op: make(Op.CAST, make(op, var("i", [Axis.QUERY], Type.INT), const(1)), arg=Type.FLOAT) * X
       for op in (Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT)},
    Op.CHANCE: X * make(Op.CAST, make(Op.CHANCE, const(5, Type.LONG), *[var("i", [Axis.QUERY], Type.INT)] * 4),
                        arg=Type.FLOAT) * 1e-9,
    Op.FLOOR: make(Op.FLOOR, X) * Y, Op.WHERE: make(Op.WHERE, C, X * X, Y),
    Op.LESS: make(Op.WHERE, C, X, Y), Op.LESS_EQUAL: make(Op.WHERE, make(Op.LESS_EQUAL, X, Y), X, Y),
    Op.EQUAL: make(Op.WHERE, make(Op.EQUAL, X, Y), X, Y),
    Op.AND: make(Op.WHERE, make(Op.AND, C, make(Op.LESS, X, ROW)), X, Y),
    Op.OR: make(Op.WHERE, make(Op.OR, C, make(Op.LESS, X, ROW)), X, Y),
    Op.NOT: make(Op.WHERE, make(Op.NOT, C), X, Y), Op.CAST: make(Op.CAST, C, arg=Type.FLOAT) * X,
    Op.DETACH: make(Op.DETACH, X * X) * X,
}  # fmt: skip


@pytest.mark.parametrize("op", EACH, ids=lambda op: op.value)
def test_the_gradient_of_each_operation_agrees_with_torch(op):
    assert op in {n.op for n in topological(EACH[op])}
    check_gradients(EACH[op], tensors(EACH[op]))


def test_every_operation_has_a_gradient_and_is_tried():
    assert set(GRADIENTS) == set(Op) - LEAVES
    assert set(EACH) == set(GRADIENTS) - {Op.LOAD, Op.REDUCE}  # the two that derive_backward has a law for


@pytest.mark.parametrize("op", [Op.MAXIMUM, Op.MINIMUM])
def test_a_tie_is_shared_as_torch_shares_it(op):
    values = {v: torch.tensor([[[[1.0, 2.0, 3.0]]]], dtype=torch.float64, requires_grad=True) for v in (X, Y)}
    check_gradients(make(op, X, Y), values)


@pytest.mark.parametrize("share", [None, 0.0, 1.0])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("op", [Op.MAXIMUM, Op.MINIMUM])
def test_a_tie_is_shared_with_a_number_as_with_a_value(op, swapped, share):
    """Half to each, or all to one operand: in either order, the form of the number and in the reference."""
    at = [-1.0, 0.0, 1.0]
    values = {X: torch.tensor([[[at]]], dtype=torch.float64, requires_grad=True), Y: torch.zeros(1, 1, 1, 3).double()}
    values[Y].requires_grad_()
    for other in (const(0.0), Y):
        expr = make(op, other, X, arg=share) if swapped else make(op, X, other, arg=share)
        tie = 0.5 if share is None else share if not swapped else 1.0 - share
        (slope,) = differentiate(expr, [X])
        assert evaluated(slope, values).flatten().tolist() == ([0, tie, 1] if op is Op.MAXIMUM else [1, tie, 0])
        check_gradients(expr, values)


def test_the_exponent_of_0_and_the_base_of_0_to_the_0_have_the_gradient_0():
    """As torch's own; beyond it, a second derivative for the exponent is 0 there too."""
    base, exponent = torch.tensor([0.0, 0.0, 0.0, 2.0]).double(), torch.tensor([0.5, 0.0, 3.0, 0.0]).double()
    values = {X: base.requires_grad_(), Y: exponent.requires_grad_()}
    power = make(Op.POW, X, Y)
    slopes = [evaluated(e, values) for e in differentiate(power, [X, Y])]
    expected = torch.autograd.grad((base**exponent).sum(), (base, exponent))
    assert [s.tolist() for s in slopes] == [e.tolist() for e in expected]
    (ours,) = torch.autograd.grad(evaluated(power, values).sum(), exponent, create_graph=True)
    assert torch.equal(ours, expected[1])
    (again,) = torch.autograd.grad(ours.sum(), exponent)
    assert again.tolist() == [0, 0, 0, pytest.approx(math.log(2) ** 2)]
    (slope,) = torch.autograd.grad(slopes[1].sum(), exponent)
    assert slope.tolist() == again.tolist()


def test_the_gradient_of_abs_at_0_is_0():
    check_gradients(make(Op.ABS, X), {X: torch.zeros(1, 1, 1, 2, dtype=torch.float64, requires_grad=True)})


def test_an_inner_node_can_be_a_target():
    total = make(Op.REDUCE, make(Op.EXP, X), arg="sum")
    assert differentiate(X / total, [total])[0] is simplify(-(X / total / total))[0]


def test_a_deep_chain_is_differentiated_without_recursion():
    expr = X
    for n in range(2000):
        expr = make(Op.MAXIMUM, expr, Y * (0.001 * n))
    values = tensors(expr)
    for leaf, slope in zip((X, Y), differentiate(expr, [X, Y]), strict=True):
        (expected,) = torch.autograd.grad(evaluated(expr, values).sum(), values[leaf])
        assert torch.allclose(evaluated(slope, values), expected, rtol=1e-9)


def test_a_shared_value_is_differentiated_once():
    """2 ** 40 paths, 80 nodes."""
    expr = X
    for _ in range(40):
        expr = make(Op.SIN, expr) + make(Op.COS, expr)
    (slope,) = differentiate(expr, [X])
    assert len(topological(slope)) < 1000


# ---- d log(weight) / d rho

TOTAL = make(Op.REDUCE, make(Op.EXP, SCORE), arg="sum")
SQUARES = make(Op.REDUCE, SCORE * SCORE, arg="sum")
LOGARITHMS = [
    (make(Op.EXP, SCORE) / TOTAL, TOTAL, const(-1.0) / TOTAL),
    (SCORE / make(Op.SQRT, SQUARES), SQUARES, const(-0.5) / SQUARES),
    (make(Op.EXP, SCORE - TOTAL), TOTAL, const(-1.0)),
    (SCORE * TOTAL, TOTAL, const(1.0) / TOTAL),
    (SCORE, TOTAL, const(0.0)),
    (make(Op.WHERE, make(Op.LESS, const(0.0), SCORE), SCORE / TOTAL, const(0.0)), TOTAL, const(-1.0) / TOTAL),
    (make(Op.EXP, SCORE) / make(Op.DETACH, TOTAL), TOTAL, const(0.0)),
]


@pytest.mark.parametrize(("weight", "target", "expected"), LOGARITHMS, ids=lambda e: str(e))
def test_the_logarithmic_derivative(weight, target, expected):
    found = log_derivative(simplify(weight)[0], target, SCORE)
    assert found is not None
    values = tensors(SCORE) | {target: torch.rand(2, 2, 3, 1, dtype=torch.float64) + 1}
    assert torch.allclose(evaluated(found, values), evaluated(expected, values), rtol=1e-12)
    assert SCORE not in outside_reductions(found)


@pytest.mark.parametrize(
    "weight",
    [
        make(Op.SIGMOID, SCORE - TOTAL),
        make(Op.SIGMOID, SCORE - TOTAL) / TOTAL,
        SCORE + TOTAL,
        make(Op.EXP, SCORE * TOTAL),
    ],
    ids=lambda e: str(e),
)
def test_a_weight_that_is_no_product_of_score_and_row_has_no_logarithmic_derivative(weight):
    assert log_derivative(simplify(weight)[0], TOTAL, SCORE) is None


def test_a_hidden_product_is_proved_by_sympy():
    """exp(x) / (exp(x) + exp(x) * R) is 1 / (1 + R), which no rule here sees."""
    e = make(Op.EXP, SCORE)
    found = log_derivative(make(Op.RECIP, e + e * TOTAL) * e, TOTAL, SCORE)
    assert found is not None
    values = tensors(SCORE) | {TOTAL: torch.rand(2, 2, 3, 1, dtype=torch.float64) + 1}
    assert torch.allclose(evaluated(found, values), -1 / (1 + values[TOTAL]))


def test_the_product_is_not_a_variable_of_the_score():
    assert log_derivative(make(Op.EXP, PRODUCT), SCORE, SCORE) is not None
