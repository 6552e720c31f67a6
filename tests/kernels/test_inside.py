"""Reads of custom inputs: guarded, but for indices that are known to lie inside an axis of that very length."""

import pytest

from attention_engine.ir.expr import Op, Type, const, make
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX, Q_IDX, H
from attention_engine.passes.simplify import add

pytest.importorskip("tilelang")
import tilelang.language as T
from tvm import tirx

from attention_engine.kernels.common import Place, Sizes, build, reader
from attention_engine.kernels.inside import where_inside
from attention_engine.plan import attention_buffers

ONE = const(1, Type.INT)
PROBLEM = Problem(2, 2, 32, 32, "float16")


def read(index, length, inside):
    buffer = tirx.decl_buffer([length], "float32")
    return reader({"custom_x": buffer}, inside)("x", [index], Type.FLOAT)


def is_guarded(value):
    return "if_then_else" in str(value)


def test_an_index_is_guarded_unless_it_lies_in_an_axis_of_that_length():
    i, j, n, m = tirx.Var("i", "int32"), tirx.Var("j", "int32"), T.dynamic("n"), T.dynamic("m")
    assert is_guarded(read(i, n, ()))
    assert not is_guarded(read(i, n, ((i, n),))) and not is_guarded(read(i, 16, ((i, 16),)))
    assert is_guarded(read(i, n, ((i, m),))) and is_guarded(read(i, 8, ((i, 16),)))
    assert is_guarded(read(j, n, ((i, n),))) and is_guarded(read(i + 1, n, ((i, n),)))


def test_a_place_inside_knows_its_query_and_key_alone():
    sizes, q, kv = Sizes(PROBLEM), tirx.Var("q", "int32"), tirx.Var("kv", "int32")
    of_keys, of_queries = (tirx.decl_buffer([length], "float32") for length in (sizes.kv, sizes.q))
    for inside in ((), ((Q_IDX, sizes.q), (KV_IDX, sizes.kv))):
        place = Place(0, 0, {}, reader({"custom_keys": of_keys, "custom_queries": of_queries}), inside=inside)
        found = place.splice(q, kv, {}).read
        assert is_guarded(found("keys", [kv], Type.FLOAT)) is (inside == ())
        assert is_guarded(found("queries", [q], Type.FLOAT)) is (inside == ())
        assert is_guarded(found("keys", [q], Type.FLOAT)) and is_guarded(found("queries", [kv], Type.FLOAT))


@pytest.mark.parametrize(
    ("index", "axis", "asked"),
    [
        (KV_IDX, "seq_len_kv", "kv_length // 2 < kv_length"), (KV_IDX, "seq_len", "kv_length // 2 < q_length"),
        (Q_IDX, "seq_len", "q_length // 2 < q_length"), (Q_IDX, "seq_len_kv", "q_length // 2 < kv_length"),
        (H, "heads", None), (add(KV_IDX, ONE), "seq_len_kv", None), (KV_IDX, 300, None),
    ],
)  # fmt: skip
def test_tiles_that_may_reach_past_the_end_of_an_axis_keep_their_guards(index, axis, asked):
    """The text stands twice, one with guards, where an index is a pair's own query or key."""
    problem = Problem(2, 2, 32, 32, "float16", custom=(("x", "float32", (axis,)),))
    sizes, found = Sizes(problem), []
    custom = sizes.declare(attention_buffers.custom_inputs(problem))
    parameters = {"k": T.Tensor([sizes.batch, sizes.q, sizes.kv], "float16"), **custom}
    length = {"seq_len": sizes.q, "seq_len_kv": sizes.kv}.get(axis)

    @T.macro
    def body(buffers):
        with T.Kernel(1, threads=32):
            place = Place(0, 0, {}, reader(buffers))
            corners = (0, 0), (sizes.q // 2, sizes.kv // 2)
            read = make(Op.LOAD, index, arg="x", dtype=Type.FLOAT)
            where_inside(place, sizes, corners, [read], {}, lambda at: found.append(at.inside))

    text = build("reads", parameters, body).script()
    assert found == ([((index, length),), ()] if asked else [()])
    assert asked is None or asked in text
