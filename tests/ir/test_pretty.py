"""A printed expression, read as Python, is the expression."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import assume, given, settings

from attention_engine.frontend.symbols import Symbol, SymbolicTensor, convert, lift, wrap
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Axis, Expr, Op, Type, VarKind, const, make, topological, var
from attention_engine.ir.pretty import formula, lines
from tests.expressions import FLOATS, INTS, agree, expressions, sample
from tests.programs import EXAMPLES, MASKS

X, Y, COLUMN, ROW, SLOPE = FLOATS
I, J, N = INTS


def reduction(kind: str):
    return lambda a: wrap(make(Op.REDUCE, convert(lift(a), Type.FLOAT), arg=kind))


NAMES: dict[str, Any] = {
    **Symbol.FUNCTIONS,
    **{f"row_{kind}": reduction(kind) for kind in ("sum", "max", "min")},
    **{name: value for name, value in (("inf", float("inf")), ("nan", float("nan")))},
    "bool": lambda a: wrap(convert(lift(a), Type.BOOL)),
}


def read(text: str, known: dict[str, Any]) -> Expr:
    """What Python makes of a formula; numbers in it become symbols first, so that ~True is no -2."""
    return lift(eval(text, {"__builtins__": {}}, {**NAMES, **known, "True": None}))


def variables(*roots: Expr) -> dict[str, Any]:
    return {n.name: wrap(n) for n in topological(*roots) if n.op is Op.VAR}


def holds_bool_constant(expr: Expr) -> bool:
    """Or a condition on constants alone, which Python works out itself."""
    truths = (n for n in topological(expr) if n.dtype is Type.BOOL)
    return any(all(below.op is not Op.VAR for below in topological(n)) for n in truths)


@settings(max_examples=300)
@given(expressions())
def test_a_formula_read_as_python_has_the_same_value(expr):
    assume(not holds_bool_constant(expr))  # ~True is -2 to Python
    text = formula(expr)
    assume("..." not in text)
    again = read(text, variables(expr))
    values = sample(expr)
    assert agree(evaluate(convert(again, expr.dtype), values, 5), evaluate(expr, values, 5)), (
        f"{text}\nwas read as {again}"
    )


@settings(max_examples=300)
@given(expressions())
def test_lines_read_as_python_have_the_same_value(expr):
    assume(not holds_bool_constant(expr))
    known = variables(expr)
    for line in lines([("result", expr), ("again", expr)]):
        assert "..." not in line
        name, text = line.split(" = ", 1)
        known[name] = wrap(read(text, known))
    values = sample(expr)
    for result in (known["result"], known["again"]):
        assert agree(evaluate(convert(result.expr, expr.dtype), values, 5), evaluate(expr, values, 5))


class Fields(dict):
    """state.m and the like."""

    __getattr__ = dict.__getitem__


class Table:
    """A custom input: slopes[h]."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, indices: Any) -> SymbolicTensor:
        listed = indices if isinstance(indices, tuple) else (indices,)
        return wrap(make(Op.LOAD, *map(lift, listed), arg=self.name, dtype=Type.FLOAT))


@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_printed_program_read_as_python_is_the_program(name, mask):
    program = EXAMPLES[name].trace(MASKS[mask])
    start, *rest = [line for line in str(program).splitlines()]
    assert start == "# before the first tile"
    known: dict[str, Any] = {c: Table(c) for c in program.custom}
    for node in topological(*(e for _, e in program.named())):
        if node.op is Op.VAR:
            *group, last = node.name.split(".")
            (known.setdefault(group[0], Fields()) if group else known)[last] = wrap(node)
    body = rest[rest.index("# each tile, then the end of the row") + 1 :]
    results = {}
    for line in body:
        left, text = line.split(" = ", 1)
        results[left] = read(text, known)
        *group, last = left.split(".")
        (known.setdefault(group[0], Fields()) if group else known).setdefault(last, wrap(results[left]))
    for left, expr in program.named():
        float_nodes = [n for n in topological(expr, results[left]) if n.op is Op.VAR or n.op is Op.LOAD]
        values = {n: [3] * 4 if n.dtype is Type.INT else [0.3, 0.7, 1.1, -0.4] for n in float_nodes}
        values = {n: v if Axis.KEY in n.axes else v[0] for n, v in values.items()}
        assert agree(evaluate(convert(results[left], expr.dtype), values, 4), evaluate(expr, values, 4), 1e-6), left


SPELLINGS = [
    (X - Y, "x - y"),
    (X - (Y - ROW), "x - (y - row)"),
    (-(X * Y), "-(x * y)"),
    (X / (Y * ROW), "x / (y * row)"),
    (X / Y / ROW, "x / y / row"),
    (const(1.0) / X, "1 / x"),
    (X + const(-2.0), "x + -2"),
    ((X + Y) * ROW, "(x + y) * row"),
    (make(Op.AND, make(Op.LESS, I, J), make(Op.LESS, J, N)), "(i < j) & (j < n)"),
    (make(Op.OR, make(Op.AND, make(Op.LESS, I, J), make(Op.LESS, J, N)), make(Op.NOT, make(Op.LESS, I, N))),
     "(i < j) & (j < n) | ~(i < n)"),
    (make(Op.EQUAL, make(Op.LESS, I, J), make(Op.LESS, J, N)), "(i < j) == (j < n)"),
    (make(Op.LESS, I + 1, J * 2), "i + 1 < j * 2"),
    (make(Op.MOD, I - J, const(3)), "(i - j) % 3"),
    (make(Op.FLOORDIV, I, const(4)) * 2, "i // 4 * 2"),
    (make(Op.REDUCE, make(Op.EXP, X), arg="sum"), "row_sum(exp(x))"),
    (make(Op.CAST, I, arg=Type.FLOAT), "float(i)"),
    (make(Op.LOAD, N, I + J, arg="table", dtype=Type.FLOAT), "table[n, i + j]"),
    (make(Op.LOAD, arg="alone", dtype=Type.FLOAT), "alone[()]"),
    (const(-float("inf")), "-inf"),
    (const(0.1), "0.1"),
    (const(True), "True"),
]  # fmt: skip


@pytest.mark.parametrize(("expr", "text"), SPELLINGS, ids=[text for _, text in SPELLINGS])
def test_the_spelling_of(expr, text):
    assert str(expr) == text


def test_what_is_used_twice_is_named_once():
    shared = make(Op.EXP, X)
    assert lines([("a", shared * shared)]) == ["v0 = exp(x)", "a = v0 * v0"]
    assert lines([("a", shared * shared), ("b", shared)]) == ["b = exp(x)", "a = b * b"]  # by the result that it is
    assert lines([("a", shared), ("b", shared)]) == ["a = exp(x)", "b = a"]
    assert lines([("d_t[h]", shared), ("b", shared + 1)]) == ["v0 = exp(x)", "d_t[h] = v0", "b = v0 + 1"]


def test_a_sign_and_a_divisor_are_spelled_at_each_use():
    assert lines([("a", X - ROW), ("b", Y - ROW)]) == ["a = x - row", "b = y - row"]
    assert lines([("a", X / ROW), ("b", Y / ROW)]) == ["a = x / row", "b = y / row"]
    total = ROW + Y
    assert lines([("a", X / total), ("b", Y / total)]) == ["v0 = row + y", "a = x / v0", "b = y / v0"]
    assert lines([("a", X + const(-2.0) * Y)]) == ["a = x - 2 * y"]


def test_a_result_that_is_a_variable_stands_before_what_follows():
    assert lines([("a", X), ("b", make(Op.EXP, Y))]) == ["a = x", "b = exp(y)"]


def test_a_chain_of_5000_operations_is_printed_without_recursion():
    expr = X
    for _ in range(5000):
        expr = make(Op.SIN, expr)
    assert len(repr(expr)) < 400 and "..." in repr(expr)
    known: dict[str, Any] = variables(expr)
    for line in lines([("result", expr)]):
        name, text = line.split(" = ", 1)
        assert len(line) < 400
        known[name] = wrap(read(text, known))
    assert known["result"].expr is expr


def test_a_tower_of_squares_is_printed_in_a_moment():
    expr = X
    for _ in range(100):
        expr = make(Op.SIN, expr * expr)
    start = time.perf_counter()
    assert len(repr(expr)) < 2000
    assert len(lines([("result", expr)])) <= 101
    assert time.perf_counter() - start < 1


def test_a_variable_of_any_name_is_spelled_by_it():
    assert str(var("m", [Axis.QUERY], kind=VarKind.STATE)) == "state.m"
