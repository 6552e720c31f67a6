"""A Hopper forward kernel reads what a mask asks of a query or a key once a row, and once a key of a partial tile."""

import pytest
import torch

pytest.importorskip("tilelang")

from attention_engine import AttentionEngine, CustomIO, arch
from attention_engine.codegen.simulator.roles import Turns
from attention_engine.errors import HazardInKernel
from attention_engine.kernels.hopper.forward_form import ForwardForm
from attention_engine.library import OnlineSoftmax, and_masks, causal, document, scale
from attention_engine.runtime import op
from tests import plain
from tests.cases import Shape
from tests.kernels.test_hopper_interpret import forward_tile, kernels  # noqa: F401

FORMS = {
    "grid": {}, "persistent": {"persistent": True}, "queries ahead": {"persistent": True, "queries_ahead": True},
}  # fmt: skip
Q, KV = 200, 300
PLACES = torch.arange(Q).flip(0) * 3 // 2  # where its queries stand
IDS = torch.stack([torch.arange(KV) // 70, torch.arange(KV) // 110])  # of int64
HEIGHTS = torch.arange(KV) * 7 % 11 / 11
FLAGS = torch.arange(KV) % 5 > 0
AXES = {"places": ("seq_len",), "ids": ("batch", "seq_len_kv"), "heights": ("seq_len_kv",), "flags": ("seq_len_kv",)}


def of_all_kinds(b, h, q_idx, kv_idx, custom):
    place = custom["places"][q_idx]
    near = (custom["ids"][b, place] == custom["ids"][b, kv_idx]) | (custom["heights"][kv_idx] > 0.8)
    return near & (place >= kv_idx) & custom["flags"][kv_idx]


def kept(b, h, i, j):
    place = PLACES[i]
    near = (IDS[b, place] == IDS[b, j]) | (HEIGHTS[j] > 0.8)
    return near & (place >= j) & FLAGS[j]


def attend(kernels, form):  # noqa: F811
    """The output by a kernel of this form, and how to ask for it again; the tensors."""
    op.ATTENTIONS.clear()
    kernels.update(forward=forward_tile(128, 64, **FORMS[form]))
    shape = Shape(2, Q, KV, 2, 1, 64, 64)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    given = shape.meta(torch.float16), CustomIO(AXES), scale(0.1), of_all_kinds, OnlineSoftmax()
    engine = AttentionEngine(*given, backend="interpret")
    return lambda: engine(*(tensors[n] for n in "qkv"), PLACES, IDS, HEIGHTS, FLAGS), tensors


@pytest.mark.parametrize("form", FORMS)
def test_masks_that_read_numbers_of_all_kinds(form, kernels):  # noqa: F811
    run, tensors = attend(kernels, form)
    want = plain.attention(*(tensors[n] for n in "qkv"), "softmax", score=plain.scaled(0.1), mask=kept)
    torch.testing.assert_close(run().double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("length", [252, 255])
def test_a_tile_of_which_only_the_last_keys_are_not_there(length, kernels):  # noqa: F811
    op.ATTENTIONS.clear()
    kernels.update(forward=forward_tile(128, 64))
    shape = Shape(1, length, length, 1, 1, 64, 64)
    tensors = [shape.tensors(torch.float16, "cpu", 0)[n] for n in "qkv"]
    tensors[2].fill_(1)  # so is the output, and less if a key that is not there had a weight
    documents = torch.zeros(1, length, dtype=torch.int32)
    given = shape.meta(torch.float16), CustomIO({"documents": ("batch", "seq_len")}), scale(0.1), document()
    o = AttentionEngine(*given, backend="interpret")(*tensors, documents)
    torch.testing.assert_close(o, torch.ones_like(o), rtol=1e-3, atol=0)


def test_warps_that_are_late_find_what_their_tile_has(kernels, monkeypatch):  # noqa: F811
    run, _ = attend(kernels, "queries ahead")
    expected = run()
    for late in range(4):
        monkeypatch.setattr(Turns, "late", late)
        assert torch.equal(run(), expected), late


def test_as_many_places_as_stages_would_be_too_few(kernels, monkeypatch):  # noqa: F811
    """Keys of the step after the next may come before a warp has asked its mask."""
    monkeypatch.setattr(ForwardForm, "places_of_keys", property(lambda form: form.tile.stages))
    run, _ = attend(kernels, "queries ahead")
    with pytest.raises(HazardInKernel, match="of_keys"):
        run()


def test_no_pair_reads_memory():
    metas = Shape(1, 512, 512, 2, 2, 128, 128).meta(torch.float16)
    mask = and_masks(causal, document())
    made = AttentionEngine(metas, CustomIO({"documents": ("batch", "seq_len")}), None, mask, device=arch.H100())
    text = made.source("forward")
    assert text.count("custom_documents[") == 2
