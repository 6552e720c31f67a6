"""Masks in parts of one side: put together they are the mask, and what is left reads nothing by one side alone."""

import itertools
import random

import pytest

from attention_engine import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Axis, Op, Type, substitute, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.library import and_masks, causal, document, padding, tree
from attention_engine.passes.part_mask import part_mask

AXES = {
    "documents": ("batch", "seq_len"), "lengths": ("batch",), "flags": ("heads", "seq_len_kv"), "places": ("seq_len",),
    "tree": ("batch", 5, 5), "context": ("batch",), "heights": ("seq_len",), "pairs": ("seq_len", "seq_len_kv"),
    "stamps": ("seq_len",),
}  # fmt: skip
TYPES = dict.fromkeys(AXES, Type.INT) | {"flags": Type.BOOL, "heights": Type.FLOAT, "stamps": Type.LONG}
# Each with how many first and last keys it has, and how many parts that queries say, and keys.
MASKS = {
    "documents": (and_masks(causal, document()), (0, 1, 1, 1)),
    "flags of keys": (lambda b, h, q, kv, c: c["flags"][h, kv], (0, 0, 0, 1)),
    "a place of a table": (lambda b, h, q, kv, c: (c["places"][q] >= kv) & (kv < c["lengths"][b]), (0, 2, 1, 0)),
    "a window there": (
        lambda b, h, q, kv, c: ~(kv > c["places"][q] + 3) & (kv >= c["places"][q] - 2) & (2 * kv > 3), (1, 1, 2, 0)
    ),
    "sums of 32 bits": (lambda b, h, q, kv, c: (c["places"][q] + q < kv) & (kv != q), (1, 0, 1, 0)),
    "int64": (lambda b, h, q, kv, c: (c["stamps"][q] > kv) & (kv - 4 <= c["stamps"][q]), (0, 2, 2, 0)),
    "a sum that would wrap": (lambda b, h, q, kv, c: kv + 2**40 <= c["stamps"][q], (0, 0, 1, 0)),
    "heights": (
        lambda b, h, q, kv, c: (c["heights"][q] > c["heights"][kv]) | (c["pairs"][q, kv] > 0), (0, 0, 1, 1)
    ),
    "a read of a read": (lambda b, h, q, kv, c: c["documents"][b, c["places"][kv] + 1] == q, (0, 0, 0, 1)),
}  # fmt: skip
WHOLE = {"causal": causal, "lengths": padding(), "tree": tree("tree", "context"), "none": None}


def value_of(node, place):
    """What a variable or a read is at a pair: the same for the same indices, often near others, at times far away."""
    if node in place:
        return place[node]
    at = [place[v] for v in (B, H, Q_IDX, KV_IDX) if v in topological(node)]
    chance = random.Random(f"{node} {at}")
    match node.dtype:
        case Type.BOOL:
            return chance.random() < 0.5
        case Type.FLOAT:
            return float(chance.randrange(4))
        case Type.LONG:
            return chance.choice([0, 1, 2, 3, 4, 5, -7, 2**40 + 3, 2**63 - 1, -(2**63)])
        case _:
            return chance.choice([0, 1, 2, 3, 4, 5, -7, 2**31 - 1, -(2**31)])


def evaluated(expr, place):
    reads = {n: value_of(n, place) for n in topological(expr) if n.op in (Op.LOAD, Op.VAR)}
    return evaluate(expr, reads)


@pytest.mark.parametrize("name", MASKS)
def test_parts_make_the_mask(name):
    made, counts = MASKS[name]
    mask = trace(None, made, None, CustomIO(AXES), TYPES).mask
    parted = part_mask(mask)
    assert (len(parted.first), len(parted.last), len(parted.of_queries), len(parted.of_keys)) == counts
    whole = dict(parted.parts)
    met = set()
    for q, kv in itertools.product(range(6), repeat=2):
        place = {B: 1, H: 2, Q_IDX: q, KV_IDX: kv}
        found = all(evaluated(substitute(e, whole), place) <= kv for e in parted.first)
        found &= all(evaluated(substitute(e, whole), place) >= kv for e in parted.last)
        found &= parted.rest is None or evaluated(substitute(parted.rest, whole), place)
        assert found == evaluated(mask, place), place
        met.add(found)
    assert met == {False, True}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_left_reads_nothing_by_one_side_alone(name):
    parted = part_mask(trace(None, MASKS[name][0], None, CustomIO(AXES), TYPES).mask)
    limits, rest = (*parted.first, *parted.last), [] if parted.rest is None else [parted.rest]
    assert not any(Axis.KEY in e.axes or e.dtype is not Type.INT for e in limits)
    reads = [n for n in topological(*limits, *rest) if n.op is Op.LOAD]
    assert all(len(n.axes & {Axis.QUERY, Axis.KEY}) != 1 for n in reads)
    assert all(v.dtype is e.dtype and v.axes == e.axes for v, e in parted.parts)


@pytest.mark.parametrize("name", WHOLE)
def test_masks_that_read_nothing_by_one_side_stay_whole(name):
    assert part_mask(trace(None, WHOLE[name], None, CustomIO(AXES), TYPES).mask) is None
