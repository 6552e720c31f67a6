"""Cheaper forms of what pairs compute: the same values, and the form that is cheaper."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Expr, Op, Type, const, make, topological
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.library import OnlineSoftmax, relative_bias
from attention_engine.passes.ends import find_ends
from attention_engine.passes.simplify import cast, simplify
from attention_engine.passes.strength import PARTS, open_pairs, split_casts
from attention_engine.reference.evaluate import Evaluator
from tests.expressions import agree

INDEX = st.integers(-4, 4)


@settings(max_examples=150)
@given(parts=st.lists(st.tuples(INDEX, INDEX, INDEX), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_split_indices_keep_the_value(parts, seed):
    total = functools.reduce(Expr.__add__, [Q_IDX * a + KV_IDX * b + c for a, b, c in parts])
    (expr,) = simplify(make(Op.SIN, cast(make(Op.MAXIMUM, total, make(Op.FLOORDIV, KV_IDX, const(2))), Type.FLOAT)))
    draw = random.Random(seed)
    values = {part: draw.randrange(100) for parts in PARTS.values() for part in parts}
    values |= {index: values[thread] + values[register] for index, (thread, register) in PARTS.items()}
    (split,) = split_casts(*open_pairs(expr))
    assert agree(evaluate(expr, values), evaluate(split, values)), f"{expr}\nbecame {split}"


def test_split_conversions_are_exact_in_fp32():
    (distance,) = simplify(cast(Q_IDX - KV_IDX, Type.FLOAT))
    (split,) = split_casts(distance)
    assert [n.op for n in topological(split)].count(Op.CAST) == 2
    generator = torch.Generator().manual_seed(0)

    def draw(limit):
        return torch.randint(0, limit, (100_000,), generator=generator, dtype=torch.int32)

    values = {PARTS[index][part]: draw(limit) for index in PARTS for part, limit in enumerate((2**23, 128))}
    found = Evaluator(values, {}, torch.float32, torch.device("cpu"))(split)
    q, kv = (sum(values[part] for part in PARTS[index]) for index in PARTS)
    assert found.dtype is torch.float32 and torch.equal(found.long(), (q - kv).long())


def distance_of(op: Op) -> Expr:
    d = Q_IDX - KV_IDX
    return cast(make(op, d) if op is Op.ABS else make(op, d, KV_IDX * 2), Type.FLOAT)


@pytest.mark.parametrize("op", [Op.ABS, Op.MAXIMUM, Op.MINIMUM])
def test_integers_become_floats_before_they_are_compared(op):
    (before,) = simplify(distance_of(op))
    (after,) = open_pairs(before)
    assert after.op is op and all(a.op is Op.CAST or a.op is Op.MUL for a in after.args)
    for q in range(4):
        values = {Q_IDX: q, KV_IDX: [0, 1, 2, 3, 4]}
        assert evaluate(after, values, 5) == evaluate(before, values, 5)


def score_of(score_mod):
    return trace(score_mod, None, OnlineSoftmax(), CustomIO({"table": ("heads", 41)})).score


@pytest.mark.parametrize("toward", [1, -1], ids=["query - key", "key - query"])
def test_far_from_the_diagonal_a_clamped_index_is_its_end(toward):
    def biased(score, custom, b, h, q_idx, kv_idx):
        return score * 0.5 + custom["table"][h, (toward * (q_idx - kv_idx) + 3).clamp(-20, 20) + 20]

    score = score_of(biased)
    ends = find_ends(score)
    assert ends is not None and (ends.least, ends.most) == (-20, 20)
    assert ends.factors() == (toward, -toward)
    (read,) = (n for n in topological(score) if n.op is Op.LOAD)
    for branch, entry in ((ends.below, 0), (ends.above, 40)):
        (load,) = (n for n in topological(branch) if n.op is Op.LOAD)
        assert load.args[0] is read.args[0] and load.args[1].value == entry
        assert {Q_IDX, KV_IDX}.isdisjoint(topological(branch))


def test_relative_bias_has_ends():
    assert find_ends(score_of(relative_bias("table", 20))) is not None


@pytest.mark.parametrize(
    "index",
    [
        lambda q, k: q - k,
        lambda q, k: (q - k).clamp(min=0),
        lambda q, k: (q // 2 - k).clamp(-20, 20),
        lambda q, k: q.clamp(0, 20),
        lambda q, k: (q - k).clamp(-20, 20) + (q + k).clamp(0, 3),
    ],
    ids=["no clamp", "one end", "no plain index", "of one side", "two clamps"],
)
def test_other_indices_have_none(index):
    assert find_ends(score_of(lambda s, custom, b, h, q, k: s + custom["table"][h, index(q, k)])) is None
