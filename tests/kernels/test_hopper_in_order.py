"""Deterministic gradients by additions to dQ in order: numbers beside float64, which blocks wait, when they may."""

from __future__ import annotations

import pytest
import torch

from attention_engine import AttentionEngine
from attention_engine.errors import HazardInKernel
from attention_engine.library import OnlineSoftmax, causal_from, scale
from attention_engine.plan import units
from attention_engine.plan.attention_buffers import APART, MADE_BEFORE, TOGETHER
from attention_engine.plan.forms import HopperKeys, Tile
from attention_engine.plan.hopper import heads_alternate, starts_latest_first
from attention_engine.plan.units import start_apart
from attention_engine.runtime import op
from tests import plain
from tests.cases import Shape

ORDERS = {  # head dim, heads, how far on queries stand (None: no mask), queries and keys
    "full": (128, (2, 1), None, (170, 260)), "causal": (128, (2, 2), 0, (290, 290)),
    "head dim 64": (64, (2, 2), 0, (300, 280)), "queries that see nothing": (128, (2, 2), -140, (270, 300)),
    "head dim 32": (32, (2, 2), 0, (300, 260)), "keys that all see": (128, (2, 2), 100, (200, 300)),
    "head dim 64, queries that see nothing": (64, (2, 2), -140, (270, 300)),
    "head dim 64, keys that all see": (64, (3, 3), 100, (200, 300)),
    "grouped heads": (64, (4, 1), 0, (270, 280)), "grouped heads of a batch": (64, (4, 2), 0, (290, 290)),
    "grouped heads, queries that see nothing": (64, (4, 1), -140, (270, 300)),
    "heads that alternate": (128, (4, 2), 0, (330, 390)), "four that alternate": (128, (8, 4), 0, (170, 260)),
    "heads that alternate and start apart": (128, (4, 2), 0, (520, 510)),
    "heads that alternate, queries that see nothing": (128, (4, 2), -140, (270, 300)),
    "heads that alternate, keys that all see": (128, (4, 2), 100, (200, 300)),
}  # fmt: skip


@pytest.fixture
def memory_holds_nan():
    """What nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_holds_nan")
@pytest.mark.parametrize("name", ORDERS)
def test_deterministic_blocks_add_to_dq_in_order(name, chosen_tiles):
    dim, heads, offset, lengths = ORDERS[name]
    chosen_tiles.update(backward=Tile({128: 80, 64: 128, 32: 64}[dim], 128, 256, 2, HopperKeys()))
    shape = Shape(2, *lengths, *heads, dim, dim)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    leaves = [tensors[n].requires_grad_() for n in "qkv"]
    mask = None if offset is None else causal_from(offset)
    meta = shape.meta(torch.float16)
    engine = AttentionEngine(meta, None, scale(0.1), mask, OnlineSoftmax(), backend="interpret", deterministic=True)
    found = torch.autograd.grad(engine(*leaves), leaves, tensors["do"])
    (made,) = [k for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    text = made.backward.prim_func.script()
    assert text.count("set_max_nreg") == 2 and made.plan.tiles.backward.in_order and not made.plan.over_queries
    latest_first = starts_latest_first(made.plan.problem, made.plan.tiles.backward, made.plan.tile_plan)
    assert latest_first == (dim >= 64 and offset is not None and heads[0] == heads[1])  # then nobody waits
    assert heads_alternate(made.plan.problem, made.plan.tiles.backward, made.plan.tile_plan) == ("alternate" in name)
    assert ("T.if_then_else(kv_head % 2 == 0, -80, 80)" in text) == ("alternate" in name)  # even heads walk back
    assert (made.plan.numbers(2, *lengths)[APART] > 0) == (name.startswith("heads that alternate and"))
    zeroed = "workspace" in made.plan.preprocess(()).writes
    assert zeroed == ("see nothing" in name) != made.plan.tiles.backward.stores_first
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    keep = None if offset is None else (lambda b, h, i, j: i + offset >= j)
    o = plain.attention(*exact, "softmax", score=plain.scaled(0.1), mask=keep)
    for mine, true in zip(found, torch.autograd.grad(o, exact, tensors["do"].double()), strict=True):
        assert (mine.double() - true).norm() < 2e-3 * true.norm()


@pytest.mark.usefixtures("memory_holds_nan")
@pytest.mark.parametrize(("group", "keys"), [(1, 400), (2, 300)])
def test_blocks_of_a_head_start_their_walks_apart(group, keys, chosen_tiles, monkeypatch):
    chosen_tiles.update(backward=Tile(80, 128, 256, 2, HopperKeys()))
    monkeypatch.setattr("attention_engine.plan.units.start_apart", lambda *_: True)
    shape = Shape(2, 420, keys, 2, 2 // group, 128, 128)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    meta = shape.meta(torch.float16)
    engine = AttentionEngine(meta, None, scale(0.1), None, OnlineSoftmax(), backend="interpret", deterministic=True)
    found = []
    for first in (0, 1):  # the last of a batch, which the batch changes no bit of
        leaves = [tensors[n][first:].clone().requires_grad_() for n in "qkv"]
        gradients = torch.autograd.grad(engine(*leaves), leaves, tensors["do"][first:].contiguous())
        found.append([gradient[-1] for gradient in gradients])
    (made,) = [k for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    assert made.plan.numbers(2, 420, keys)[APART] == 1
    exact = [tensors[n][1:].double().requires_grad_() for n in "qkv"]
    o = plain.attention(*exact, "softmax", score=plain.scaled(0.1))
    true = torch.autograd.grad(o, exact, tensors["do"][1:].double())
    for together, alone, of_double in zip(*found, true, strict=True):
        assert torch.equal(together, alone)
        assert (alone.double() - of_double[-1]).norm() < 2e-3 * of_double.norm()


def test_a_ring_of_more_blocks_than_run_at_once_is_a_deadlock(chosen_tiles, monkeypatch):
    chosen_tiles.update(backward=Tile(80, 128, 256, 2, HopperKeys()))
    monkeypatch.setattr("attention_engine.plan.units.start_apart", lambda *_: True)
    monkeypatch.setattr("attention_engine.codegen.simulator.blocks.AT_ONCE", 2)
    shape = Shape(1, 250, 300, 1, 1, 128, 128)
    leaves = [shape.tensors(torch.float16, "cpu", 0)[n].requires_grad_() for n in "qkv"]
    meta = shape.meta(torch.float16)
    engine = AttentionEngine(meta, None, scale(0.1), None, OnlineSoftmax(), backend="interpret", deterministic=True)
    o = engine(*leaves)
    with pytest.raises(HazardInKernel, match=r"deadlock.*tickets"):
        o.backward(torch.ones_like(o))


def test_blocks_start_apart_where_all_of_two_heads_run_at_once():
    tile = Tile(80, 128, 256, 2, HopperKeys())
    assert all(start_apart(tile, keys, 132) for keys in (128, 1000, 1024, 2048, 8192, 66 * 128))
    assert not any(start_apart(tile, keys, 132) for keys in (3072, 66 * 128 + 1, 16384))


def test_who_makes_delta_changes_no_bit(chosen_tiles, monkeypatch):
    monkeypatch.setattr(units, "prepared_before", lambda *_: False)
    chosen_tiles.update(backward=Tile(80, 128, 256, 2, HopperKeys()))
    shape = Shape(3, 100, 130, 2, 2, 128, 128)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    meta = shape.meta(torch.float16)
    engine = AttentionEngine(
        meta, None, scale(0.1), causal_from(0), OnlineSoftmax(), backend="interpret", deterministic=True
    )
    found = []
    for first in (0, 2):  # the last of a batch, by the kernel before, or by blocks over keys
        leaves = [tensors[n][first:].clone().requires_grad_() for n in "qkv"]
        gradients = torch.autograd.grad(engine(*leaves), leaves, tensors["do"][first:].contiguous())
        found.append([gradient[-1] for gradient in gradients])
    (made,) = [k for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    several, one = (made.plan.numbers(batch, shape.q_len, shape.kv_len) for batch in (3, 1))
    assert made.plan.makes_delta and several[MADE_BEFORE] * several[TOGETHER] <= 2 * 2 <= 2 * one[MADE_BEFORE]
    for together, alone in zip(*found, strict=True):
        assert torch.equal(together, alone)
