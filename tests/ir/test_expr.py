"""Expressions: one object for one structure, in every thread and process; walks that neither repeat nor recurse."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from attention_engine.ir.expr import (
    Axis,
    Expr,
    Op,
    Type,
    Variable,
    VarKind,
    as_expr,
    const,
    count_uses,
    is_const,
    is_finite_const,
    make,
    rebuild,
    substitute,
    topological,
    transform,
    var,
)
from tests.expressions import FLOATS, INTS, expressions
from tests.programs import EXAMPLES

X, Y, COLUMN, ROW, SLOPE = FLOATS
I, J, N = INTS


def chain(length: int) -> Expr:
    expr = X
    for _ in range(length):
        expr = make(Op.SIN, expr)
    return expr


def copied(expr: Expr) -> Expr:
    """The same structure, built again."""
    done: dict[Expr, Expr] = {}
    for node in topological(expr):
        done[node] = make(node.op, *(done[a] for a in node.args), arg=node.arg, dtype=node.dtype)
    return done[expr]


@given(expressions())
def test_equal_expressions_are_one_object(expr):
    assert copied(expr) is expr


def test_what_differs_is_another_object():
    different = [
        const(1), const(1.0), const(True), const(0.0), const(-0.0), X, Y, var("x", [Axis.KEY]),
        var("x", X.axes, Type.INT), X + Y, Y + X, X * Y, make(Op.REDUCE, X, arg="sum"), make(Op.REDUCE, X, arg="max"),
        make(Op.LOAD, I, arg="a", dtype=Type.FLOAT), make(Op.LOAD, I, arg="a", dtype=Type.INT),
        make(Op.LOAD, I, arg="b", dtype=Type.FLOAT), make(Op.CAST, I, arg=Type.FLOAT), make(Op.CAST, I, arg=Type.BOOL),
    ]  # fmt: skip
    assert len({id(e) for e in different}) == len(different) == len({e.digest for e in different})


def test_many_threads_build_one_object():
    found: list[list[Expr]] = []
    start = threading.Barrier(8)

    def build() -> None:
        start.wait()
        found.append([make(Op.SIN, X + float(n)) for n in range(300)])

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for nodes in found:
        assert all(a is b for a, b in zip(nodes, found[0], strict=True))


def test_an_expression_that_nobody_holds_is_forgotten():
    from attention_engine.ir import expr as module

    digest = make(Op.SIN, X + 123.25).digest
    gc.collect()
    assert digest not in module._nodes


NAMES = ["m", "_0", "row0", "qk", "tile", "state.m", "final.m", "m:bhq", "", "b", "b float", "reduced0", "a\nb"]


def test_no_name_of_a_users_makes_one_variable_of_two():
    """States, returned rows and their gradients have any name; what the package names beside them is another."""
    ours = [name for name in NAMES if "." not in name]
    kinds = [VarKind.STATE, VarKind.FINAL, VarKind.ARRIVING]
    made = [var(name, axes, kind=kind) for kind in kinds for name in NAMES for axes in ([], [Axis.QUERY])]
    made += [var(name, axes, kind=VarKind.ROW) for name in ours for axes in ([], [Axis.QUERY])]
    assert len(set(made)) == len({node.digest for node in made}) == len(made)


@pytest.mark.parametrize("name", ["state.m", "final.lse", "a."])
def test_a_name_that_the_package_gives_is_none_of_a_users(name):
    with pytest.raises(ValueError, match="has no dot"):
        var(name, [Axis.QUERY], kind=VarKind.MADE)


def test_variables_of_two_kinds_are_not_written_alike():
    held = var("row0", [Axis.QUERY], kind=VarKind.ROW)
    with pytest.raises(ValueError, match="two variables are written alike"):
        var("row0", [Axis.QUERY], kind=VarKind.MADE)
    assert (held.kind, held.name, held.arg) == (
        VarKind.ROW, "row0", Variable(VarKind.ROW, "row0", frozenset({Axis.QUERY}))
    )  # fmt: skip


def test_a_variable_says_its_kind_and_the_name_that_it_was_given():
    state = var("a.b", [Axis.QUERY], kind=VarKind.STATE)
    assert (state.kind, state.bare_name, state.name) == (VarKind.STATE, "a.b", "state.a.b")
    assert const(1.0).kind is None


def test_an_expression_is_never_written_on():
    with pytest.raises(AttributeError, match="an expression is never written on: op"):
        X.op = Op.ADD


def test_copies_and_pickles_are_the_same_object():
    expr = make(Op.WHERE, make(Op.LESS, I, J), X * Y, make(Op.LOAD, N, arg="slopes", dtype=Type.FLOAT))
    assert copy.deepcopy({"e": expr})["e"] is copy.copy(expr) is expr
    assert pickle.loads(pickle.dumps(expr)) is expr


PROGRAM = """
from tests.programs import EXAMPLES, causal
from attention_engine.ir.expr import *
x = var("x", [Axis.KEY, Axis.QUERY, Axis.BATCH])
print(make(Op.EXP, x * 0.1 + 1e-30).digest)
for example in EXAMPLES.values():
    print(example.trace(causal).fingerprint)
"""


def test_digests_and_fingerprints_are_the_same_in_every_process(capsys):
    exec(PROGRAM, {})  # in this process, whose strings hash with another seed
    first = capsys.readouterr().out
    assert len(set(first.split())) == len(EXAMPLES) + 1  # and each program has its own
    root, seed = Path(__file__).resolve().parents[2], "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == first


def test_types_follow_from_the_operands():
    assert (X + Y).dtype is Type.FLOAT
    assert (I + J).dtype is (I * 2).dtype is (-I).dtype is Type.INT
    assert make(Op.LESS, X, Y).dtype is make(Op.NOT, make(Op.LESS, I, J)).dtype is Type.BOOL
    assert make(Op.WHERE, make(Op.LESS, X, Y), I, J).dtype is Type.INT
    assert make(Op.CAST, I, arg=Type.FLOAT).dtype is Type.FLOAT
    assert as_expr(2, Type.FLOAT) is const(2.0)


def test_axes_are_the_union_of_the_operands_and_a_reduction_leaves_the_row():
    assert (ROW + COLUMN).axes == X.axes
    assert (SLOPE * 2.0).axes == {Axis.HEAD}
    assert const(1.0).axes == frozenset()
    assert make(Op.REDUCE, COLUMN, arg="sum").axes == {Axis.BATCH, Axis.HEAD, Axis.QUERY}
    assert make(Op.LOAD, I, J, arg="bias", dtype=Type.FLOAT).axes == {Axis.QUERY, Axis.KEY}


def test_constants_are_told_from_the_rest():
    assert is_const(const(2.0), 2) and is_const(const(2.0)) and not is_const(X) and not is_const(const(2.0), 3)
    assert is_finite_const(const(2.0)) and not is_finite_const(const(float("inf"))) and not is_finite_const(X)
    assert X.name == "x" and make(Op.LOAD, N, arg="slopes", dtype=Type.FLOAT).name == "slopes"


def test_shared_nodes_are_visited_once_operands_first():
    shared = make(Op.SIN, X)
    order = topological(shared + shared * Y, shared)
    assert len(order) == len(set(order)) == 5
    assert all(order.index(a) < order.index(n) for n in order for a in n.args)


def test_a_tower_of_squares_is_walked_once_a_node():
    expr = X
    for _ in range(200):
        expr = expr * expr
    assert len(topological(expr)) == 201


def test_a_chain_of_10000_operations_is_walked_without_recursion():
    expr = chain(10_000)
    assert len(topological(expr)) == 10_001
    assert copied(expr) is expr
    assert substitute(substitute(expr, {X: Y}), {Y: X}) is expr
    assert count_uses(expr)[X] == 1
    del expr
    gc.collect()  # taking it down doesn't recurse either


def test_the_insides_of_closed_operations_are_left_out():
    total = make(Op.REDUCE, make(Op.EXP, X), arg="sum")
    assert topological(total + ROW, closed=frozenset({Op.REDUCE})) == [total, ROW, total + ROW]


def test_substitution_replaces_every_use_and_searches_no_replacement():
    expr = make(Op.SIN, X) + X * Y
    assert substitute(expr, {X: Y, Y: X}) is make(Op.SIN, Y) + Y * X
    assert substitute(expr, {make(Op.SIN, X): ROW}) is ROW + X * Y
    assert substitute(expr, {}) is expr


def test_a_read_keeps_its_type_when_its_index_changes():
    load = make(Op.LOAD, I, arg="lengths", dtype=Type.FLOAT)
    assert rebuild(load, (J,)).dtype is Type.FLOAT
    assert substitute(make(Op.CAST, I, arg=Type.FLOAT), {I: J}) is make(Op.CAST, J, arg=Type.FLOAT)


def test_transform_sees_each_node_once_with_its_operands_changed():
    seen = []

    def change(node: Expr) -> Expr:
        seen.append(node)
        return Y if node is X else node

    shared = make(Op.SIN, X)
    assert transform([shared + shared], change) == [make(Op.SIN, Y) + make(Op.SIN, Y)]
    assert len(seen) == 3


def test_uses_are_counted_with_the_roots():
    shared = make(Op.SIN, X)
    assert count_uses(shared + shared, shared) == {X: 1, shared: 3, shared + shared: 1}


def test_a_fingerprint_tells_programs_apart():
    one, other = EXAMPLES["softmax"].trace(), EXAMPLES["softmax one"].trace()
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == EXAMPLES["softmax"].trace().fingerprint


def test_a_name_of_two_lines_makes_no_other_programs_fingerprint():
    program = EXAMPLES["softmax"].trace()
    (name, row), other = program.finals[0], make(Op.EXP, program.finals[0][1])
    two = replace(program, finals=((name, row), ("b", other)))
    one = replace(program, finals=((f"{name} {row.digest}\nfinal.b", other),))
    assert one.fingerprint != two.fingerprint
