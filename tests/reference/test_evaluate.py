"""Expressions on tensors: what plain Python says of numbers, and torch's gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings

from attention_engine.ir.evaluate import LOWEST, evaluate
from attention_engine.ir.expr import LEAVES, Axis, Expr, Op, Type, const, make, topological
from attention_engine.reference.evaluate import DTYPES, TORCH, Evaluator, add_at
from tests.expressions import FLOATS, INTS, as_row, expressions, sample

X, Y, COLUMN, ROW, SLOPE = FLOATS
I, J, N = INTS
CPU = torch.device("cpu")


def on_tensors(expr: Expr, values, keep=None) -> torch.Tensor:
    tensors = {
        n: torch.tensor(v, dtype=DTYPES.get(n.dtype, torch.float64)).view(1, 1, 1, -1) for n, v in values.items()
    }
    return Evaluator(tensors, {}, torch.float64, CPU, keep)(expr)


@settings(max_examples=300)
@given(expressions())
def test_tensors_agree_with_numbers(expr):
    values = sample(expr)
    expected = torch.tensor(as_row(evaluate(expr, values, 5)), dtype=torch.float64)
    assume(expected.isfinite().all() and expected.abs().max() < 1e6)
    everywhere = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    found = on_tensors(expr, values, everywhere)
    assert torch.allclose(found.double().expand(1, 1, 1, 5).flatten(), expected, rtol=1e-9, atol=1e-9), f"{expr}"
    assert found.dtype is DTYPES.get(expr.dtype, torch.float64)


def test_every_operation_has_a_meaning():
    assert set(TORCH) == set(Op) - LEAVES - {Op.LOAD, Op.REDUCE, Op.CAST}


def test_a_reduction_takes_the_kept_pairs_alone():
    keep = torch.tensor([[[[True, False, True]], [[False, False, False]]]])
    values = {X: [3.0, 100.0, -1.0]}
    found = [on_tensors(make(Op.REDUCE, X, arg=k), values, keep).flatten().tolist() for k in ("sum", "max", "min")]
    assert found == [[2.0, 0.0], [3.0, LOWEST], [-1.0, -LOWEST]]


def test_a_reduction_over_no_key_is_neutral():
    values = {X: torch.zeros(1, 2, 3, 0, dtype=torch.float64)}
    for kind, neutral in (("sum", 0.0), ("max", LOWEST), ("min", -LOWEST)):
        found = Evaluator(values, {}, torch.float64, CPU)(make(Op.REDUCE, X, arg=kind))
        assert found.shape == (1, 2, 3, 1) and (found == neutral).all()


def test_infinite_constants_are_infinite():
    assert on_tensors(const(-float("inf")), {}).item() == -float("inf")
    assert on_tensors(const(float("nan")), {}).isnan()


def test_a_variable_without_a_value_is_an_error():
    with pytest.raises(KeyError, match="no value for a variable of x \\+ 1"):
        on_tensors(X + 1.0, {})


def test_an_expression_is_computed_once(monkeypatch):
    calls = []
    monkeypatch.setitem(TORCH, Op.SIN, lambda a: calls.append(1) or torch.sin(a))
    shared = make(Op.SIN, X)
    evaluator = Evaluator({X: torch.ones(1)}, {}, torch.float64, CPU)
    evaluator(shared * shared)
    evaluator(shared + 1.0)
    assert len(calls) == 1


def test_a_chain_of_5000_operations_is_evaluated_without_recursion():
    expr = X
    for _ in range(5000):
        expr = make(Op.SIN, expr)
    assert len(topological(expr)) == 5001
    assert 0 < on_tensors(expr, {X: [1.0]}).item() < 0.1


def load(*indices: Expr) -> Expr:
    return make(Op.LOAD, *indices, arg="table", dtype=Type.FLOAT)


def indices() -> Evaluator:
    values = {
        I: torch.arange(3).view(1, 1, 3, 1),
        J: torch.arange(4).view(1, 1, 1, 4),
        N: torch.arange(2).view(1, 2, 1, 1),
    }
    return Evaluator(values, {}, torch.float64, CPU)


def test_a_read_out_of_range_is_0():
    table = torch.tensor([1.0, 2.0, 3.0])
    evaluator = indices()
    evaluator.custom = {"table": table}
    found = evaluator(load(J - 1)).flatten().tolist()
    assert found == [0.0, 1.0, 2.0, 3.0]
    assert evaluator(load(J + 2)).flatten().tolist() == [3.0, 0.0, 0.0, 0.0]


def test_a_read_of_an_empty_input_is_0():
    evaluator = indices()
    evaluator.custom = {"table": torch.zeros(0)}
    assert (evaluator(load(J)) == 0).all()


def test_gradients_of_reads_are_added_where_they_were_read():
    gradient = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    total = add_at(torch.zeros(3, dtype=torch.float64), load(J - I), gradient, indices())
    expected = [sum(gradient[0, :, i, i + d].sum() for i in range(3) if i + d < 4) for d in range(3)]
    assert torch.allclose(total, torch.stack(expected))
    by_head = add_at(torch.zeros(2, dtype=torch.float64), load(N), gradient, indices())
    assert torch.allclose(by_head, gradient.sum((0, 2, 3)))
    alone = add_at(torch.zeros((), dtype=torch.float64), load(), gradient, indices())
    assert torch.allclose(alone, gradient.sum())


def test_runs_of_one_entry_are_summed_before_they_are_scattered():
    """A table that clamps a distance: most neighbours go to its ends; the length cuts a run."""
    gradient = torch.randn(2, 3, 1, 1000, dtype=torch.float64)
    clamped = make(Op.MINIMUM, make(Op.MAXIMUM, J - 500, const(0)), const(70))
    places = Evaluator({J: torch.arange(1000).view(1, 1, 1, -1)}, {}, torch.float64, CPU)
    total = add_at(torch.ones(71, dtype=torch.float64), load(clamped), gradient, places)
    expected = torch.ones(71, dtype=torch.float64)
    expected.index_add_(0, (torch.arange(1000) - 500).clamp(0, 70), gradient.sum((0, 1, 2)))
    assert torch.allclose(total, expected, rtol=1e-12)


def test_gradients_of_reads_of_an_empty_input_are_empty():
    gradient = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    assert add_at(torch.zeros(0, dtype=torch.float64), load(J), gradient, indices()).shape == (0,)


def test_variables_of_every_axis_broadcast():
    values = {
        ROW: torch.randn(2, 3, 4, 1), COLUMN: torch.randn(1, 1, 1, 5), SLOPE: torch.randn(1, 3, 1, 1),
    }  # fmt: skip
    found = Evaluator(values, {}, torch.float32, CPU)(ROW * COLUMN + SLOPE)
    assert found.shape == (2, 3, 4, 5)
    assert (ROW * COLUMN + SLOPE).axes == {Axis.BATCH, Axis.HEAD, Axis.QUERY, Axis.KEY}
