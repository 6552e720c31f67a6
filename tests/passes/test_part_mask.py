"""Masks in parts of one side: put together they are the mask, and what is left reads nothing by one side alone."""

import pytest

from attention_engine import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Axis, Op, Type, substitute, topological
from attention_engine.library import and_masks, causal, document, padding, tree
from attention_engine.passes.part_mask import part_mask

AXES = {
    "documents": ("batch", "seq_len"), "lengths": ("batch",), "flags": ("heads", "seq_len_kv"), "places": ("seq_len",),
    "tree": ("batch", 5, 5), "context": ("batch",), "heights": ("seq_len",), "pairs": ("seq_len", "seq_len_kv"),
}  # fmt: skip
TYPES = {"flags": Type.BOOL, "heights": Type.FLOAT}
MASKS = {
    "documents": (and_masks(causal, document()), 1, 1),
    "flags of keys": (lambda b, h, q, kv, c: c["flags"][h, kv], 0, 1),
    "places of a table": (lambda b, h, q, kv, c: (c["places"][q] >= kv) & (kv < c["lengths"][b]), 1, 0),
    "heights": (lambda b, h, q, kv, c: (c["heights"][q] > c["heights"][kv]) | (c["pairs"][q, kv] > 0), 1, 1),
    "a read of a read": (lambda b, h, q, kv, c: c["documents"][b, c["places"][kv] + 1] == q, 0, 1),
}
WHOLE = {"causal": causal, "lengths": padding(), "tree": tree("tree", "context"), "none": None}


def traced(mask):
    return trace(None, mask, None, CustomIO(AXES), dict.fromkeys(AXES, Type.INT) | TYPES).mask


@pytest.mark.parametrize("name", MASKS)
def test_parts_make_the_mask(name):
    made, queries, keys = MASKS[name]
    mask = traced(made)
    parted = part_mask(mask)
    assert (len(parted.of_queries), len(parted.of_keys)) == (queries, keys)
    assert substitute(parted.mask, dict(parted.parts)) is mask
    left = [n for n in topological(parted.mask) if n.op is Op.LOAD]
    assert all(n.axes >= {Axis.QUERY, Axis.KEY} or not n.axes & {Axis.QUERY, Axis.KEY} for n in left)
    assert all(v.dtype is e.dtype and v.axes == e.axes for v, e in parted.parts)


@pytest.mark.parametrize("name", WHOLE)
def test_masks_that_read_nothing_by_one_side_stay_whole(name):
    assert part_mask(traced(WHOLE[name])) is None
