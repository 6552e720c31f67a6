"""Blocks over keys of one query head each, in the warp simulator: each query head reads a copy of its key head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, compiler
from attention_engine.library import OnlineSoftmax, and_masks, causal, document, relative_bias, scale
from attention_engine.plan.attention_buffers import DK_PARTS
from attention_engine.plan.few_key_heads import may_have_a_head_each
from attention_engine.plan.forms import HopperKeys, Tile
from attention_engine.runtime import op
from tests.cases import CASES, Shape, errors, ran_with_few_key_heads

TILES = {64: 128, 80: 64, 128: 80}  # by head dim, queries of a tile over keys


@pytest.fixture
def copied(chosen_tiles, monkeypatch):
    """Chooses kernels whose blocks have one query head each, of a head dim."""
    monkeypatch.setattr(compiler, "suits_a_head_each", lambda plan, *_: may_have_a_head_each(plan))
    return lambda dim: chosen_tiles.update(backward=Tile(TILES[dim], 128, 256, 2, HopperKeys()))


def check_gradients(shape, custom=(), wants=(), rows=None, keys=None, **options):
    """Those of q, k, v and of what `wants` them, beside float64, by one kernel of few key heads. rows, keys: where
    packed sequences start."""
    tensors = shape.tensors(torch.float16, "cpu", 0)
    packed = {} if rows is None else {"cu_seqlens_q": rows, "cu_seqlens_k": keys}

    def gradients(backend, dtype):
        q, k, v, do = (tensors[n][0 if packed else slice(None)].to(dtype) for n in ("q", "k", "v", "do"))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        engine = AttentionEngine(backend=backend, **{"score_mod": scale(0.1), "mask_mod": causal, **options})
        return torch.autograd.grad(engine(*leaves, *custom, **packed), [*leaves, *wants], do)

    for mine, true in zip(gradients("interpret", torch.float16), gradients("reference", torch.float64), strict=True):
        assert (mine.double() - true).norm() < 3e-3 * true.norm()
    assert ran_with_few_key_heads() == 1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [((4, 1), 64), ((6, 2), 64), ((3, 1), 80), ((4, 2), 128)])
def test_gradients_of_key_heads_are_the_sums_of_their_copies(heads, dim, is_causal, copied):
    copied(dim)
    shape = Shape(2, 200, 270, *heads, dim, dim)
    assert errors(CASES["softmax"], shape, torch.float16, causal=is_causal, backend="interpret", floor=2e-3)
    assert ran_with_few_key_heads() == 1


def test_calls_that_have_enough_blocks_launch_the_usual_kernel(copied, monkeypatch):
    copied(64)
    monkeypatch.setattr(compiler, "suits_a_head_each", lambda plan, batch, *_: batch == 1)
    engine = AttentionEngine(None, None, scale(0.1), causal, OnlineSoftmax(), backend="interpret")
    for batch, made in ((3, 0), (1, 1)):
        shape = Shape(batch, 140, 140, 2, 1, 64, 64)
        tensors = shape.tensors(torch.bfloat16, "cpu", 0)
        leaves = [tensors[n].requires_grad_() for n in "qkv"]
        found = torch.autograd.grad(engine(*leaves), leaves, tensors["do"])
        assert [g.shape for g in found] == [x.shape for x in leaves] and found[1].dtype is torch.bfloat16
        assert ran_with_few_key_heads() == made


def test_custom_inputs_of_query_heads_have_their_gradients(copied):
    copied(64)
    table = torch.randn(2, 301, requires_grad=True)
    biased = {"custom_io": CustomIO({"table": ("heads", 301)}), "score_mod": relative_bias("table", 150, 0.1)}
    check_gradients(Shape(1, 150, 150, 2, 1, 64, 64), [table], [table], **biased)


def test_documents_are_listed_for_copies_too(copied):
    copied(128)
    documents = torch.arange(300).div(90, rounding_mode="floor").expand(2, 300).to(torch.int32).contiguous()
    masked = {"custom_io": CustomIO({"d": ("batch", "seq_len")}), "mask_mod": and_masks(causal, document("d"))}
    check_gradients(Shape(2, 300, 300, 4, 1, 128, 128), [documents], **masked)


@pytest.mark.parametrize("starts_of_keys", [None, [0, 60, 190, 230, 260]])
def test_packed_sequences_have_blocks_of_one_head_too(starts_of_keys, copied, chosen_tiles):
    copied(128)
    chosen_tiles.update(backward=Tile(64, 128, 256, 2, HopperKeys(persistent=True, within_sequences=True)))
    rows = torch.tensor([0, 40, 200, 200, 230], dtype=torch.int32)
    keys = None if starts_of_keys is None else torch.tensor(starts_of_keys, dtype=torch.int32)
    check_gradients(Shape(1, 230, 230 if keys is None else 260, 4, 1, 128, 128), rows=rows, keys=keys)


def test_deterministic_gradients_of_few_key_heads_are_the_same_bits_in_every_batch(copied):
    copied(128)
    shape = Shape(2, 200, 260, 4, 1, 128, 128)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    engine = AttentionEngine(None, None, scale(0.1), causal, OnlineSoftmax(), backend="interpret", deterministic=True)
    found = []
    for first in (0, 1, 0):
        leaves = [tensors[n][first:].clone().requires_grad_() for n in "qkv"]
        found.append(torch.autograd.grad(engine(*leaves), leaves, tensors["do"][first:].contiguous()))
    for both, last, again in zip(*found, strict=True):
        assert torch.equal(both, again) and torch.equal(both[-1:], last)
    assert ran_with_few_key_heads() == 1
    (made,) = [k.of_few_key_heads for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    assert made.plan.tiles.backward.in_order


def test_gradients_that_blocks_of_a_sequence_add_to_stay_in_fp32(copied):
    copied(64)
    shape = Shape(1, 140, 140, 2, 1, 64, 64)
    q, k, v, _ = shape.tensors(torch.float16, "cpu", 0).values()
    engine = AttentionEngine(None, None, scale(0.1), None, OnlineSoftmax(), backend="interpret")
    engine(q, k, v)
    (kernels,) = [k for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    problem, tiles = kernels.problem, kernels.tiles
    for in_blocks, dtype in ((False, "float16"), (True, "float32")):
        maths = replace(kernels.maths, in_blocks=in_blocks, whole_rows=True)
        plan = compiler.Kernels(maths, problem, tiles, "interpret", False).of_call(1, 140, 140).plan
        dtypes = {
            a.place: a.dtype
            for launch in (plan.over_keys, plan.add_parts)
            for a in launch.arguments
            if hasattr(a, "dtype")
        }
        assert (dtypes[DK_PARTS], dtypes["dk"]) == ("float32", dtype)
