"""Terms of rows leave the tile: what is left and what is taken out are the score together."""

from __future__ import annotations

import math
import random

import pytest

from attention_engine import CustomIO, OnlineFunc, SymbolScalar, Var
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Axis, Op, topological
from attention_engine.ir.program import KV_IDX, PRODUCT, Q_IDX
from attention_engine.library import OnlineSoftmax, causal
from attention_engine.passes.row_terms import (
    KV_FIRST,
    KV_PLACE,
    part_row_terms,
    reads_places_alone,
    terms_beside_product,
)
from attention_engine.passes.schedule import schedule_forward
from attention_engine.passes.steps import ReduceStep

AXES = {
    "slopes": ("heads",), "rows": ("batch", "heads", "seq_len"), "keys": ("batch", "heads", "seq_len_kv"),
    "table": ("heads", 9),
}  # fmt: skip
PARTED = {
    "alibi": lambda s, c, b, h, q, kv: s * 0.1 - c["slopes"] * (q - kv),
    "of keys": lambda s, c, b, h, q, kv: s * 0.1 + c["slopes"] * kv,
    "twice": lambda s, c, b, h, q, kv: s * 0.1 + 0.5 * c["slopes"] * (3 * q - 2 * kv + 7),
    "a number of each row": lambda s, c, b, h, q, kv: s * 0.1 + c["rows"],
    "both": lambda s, c, b, h, q, kv: s * 0.1 + c["rows"] - c["slopes"] * (q - kv) + q * 0.25,
}
WHOLE = {
    "nothing added": lambda s, c, b, h, q, kv: s * 0.1,
    "a number of each key": lambda s, c, b, h, q, kv: s * 0.1 + c["keys"],
    "how far": lambda s, c, b, h, q, kv: s * 0.1 - c["slopes"] * abs(q - kv),
    "a row's slope": lambda s, c, b, h, q, kv: s * 0.1 + c["rows"] * (q - kv),
    "one of both": lambda s, c, b, h, q, kv: s * 0.1 + c["keys"] - c["slopes"] * (q - kv),
    "a table": lambda s, c, b, h, q, kv: s * 0.1 + c["table"][h, q - kv],
    "not a sum": lambda s, c, b, h, q, kv: s * (q - kv) * 0.1,
    "its product again": lambda s, c, b, h, q, kv: s * 0.1 + (s * 0.1).tanh() * kv,
}


def traced(score_mod, online=None):
    return trace(score_mod, causal, online or OnlineSoftmax(), CustomIO(AXES))


def loads(*exprs):
    return {node for node in topological(*exprs) if node.op is Op.LOAD}


@pytest.mark.parametrize("name", PARTED)
def test_what_is_left_and_what_is_taken_out_are_the_score(name):
    score = traced(PARTED[name]).score
    of_pairs, of_row = part_row_terms(score)
    assert of_row is not None and Axis.KEY not in of_row.axes
    draw = random.Random(0)
    for _ in range(20):
        q, first, thread, register = (draw.randrange(n) for n in (9000, 9000, 8, 128))
        values = {node: draw.gauss(0, 1) for node in loads(score)} | {PRODUCT: draw.gauss(0, 3), Q_IDX: q}
        parted = values | {KV_FIRST: first, KV_PLACE[0]: thread, KV_PLACE[1]: register}
        want = evaluate(score, values | {KV_IDX: first + thread + register})
        assert math.isclose(evaluate(of_pairs, parted) + evaluate(of_row, parted), want, rel_tol=1e-12, abs_tol=1e-9)


FAR = ("a number of each row", "both")  # by a custom input of rows, whose digits a tile keeps only beside the others


@pytest.mark.parametrize("name", sorted(PARTED.keys() - FAR))
def test_a_tile_of_what_is_parted_holds_products_and_terms_of_places(name):
    schedule = schedule_forward(traced(PARTED[name]), parts_rows=True)
    read = {node for node in topological(schedule.score) if node.op is Op.VAR and node.axes & {Axis.QUERY, Axis.KEY}}
    assert PRODUCT in read and read <= {PRODUCT, *KV_PLACE}
    added = terms_beside_product(schedule.score)
    assert added is not None and reads_places_alone(added)
    assert all(step.source is None for step in schedule.steps if isinstance(step, ReduceStep))


@pytest.mark.parametrize("name", [*WHOLE, *FAR])
def test_other_scores_stay_whole(name):
    program = traced({**PARTED, **WHOLE}[name])
    assert schedule_forward(program, parts_rows=True) == schedule_forward(program)


@pytest.mark.parametrize(
    ("name", "starts"),
    [("nothing added", False), ("a number of each key", False), ("how far", True), ("a row's slope", False),
     ("a table", True), ("not a sum", False), ("its product again", False)],
)  # fmt: skip
def test_a_tile_may_start_with_all_that_a_score_adds_to_its_product(name, starts):
    score = schedule_forward(traced(WHOLE[name]), parts_rows=True).score
    added = terms_beside_product(score)
    assert (added is not None) is starts
    if added is not None:
        assert PRODUCT not in topological(added) and not reads_places_alone(added)
        draw = random.Random(0)
        values = {node: draw.gauss(0, 1) for node in topological(score) if node.op in (Op.LOAD, Op.VAR)}
        values |= {Q_IDX: 70, KV_IDX: 33, PRODUCT: 1.5}
        assert math.isclose(evaluate(added, values) + 1.5, evaluate(score, values), rel_tol=1e-12)


class Summed(OnlineFunc):
    """Its rows take the sum of their scores, which takes the terms of rows from every pair."""

    def __init__(self):
        super().__init__(online_rowscales={"total": SymbolScalar("total", Var("0.0"))})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores.sigmoid(), {"total": online_rowscales["total"] + scores.get_reduce("sum")}, 1.0

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["total"], {}


@pytest.mark.parametrize("name", ["alibi", "a number of each row"])
def test_a_sum_of_scores_keeps_the_terms_of_rows_in_the_tile(name):
    program = traced(PARTED[name], Summed())
    assert schedule_forward(program, parts_rows=True) == schedule_forward(program)
