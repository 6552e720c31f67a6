"""Masks and custom inputs through the kernels, tile by tile on a CPU; tests/gpu/test_masks.py is its twin."""

import random
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_engine import AttentionEngine, CustomIO, document_ids, meta_tensor
from attention_engine.errors import BadInput
from attention_engine.library import OnlineSoftmax, and_masks, causal, document, prefix_lm, scale
from attention_engine.plan.forms import padded_rows
from attention_engine.runtime import attention_op, op
from tests.cases import Shape
from tests.mask_cases import PAIRS, errors
from tests.plain import worst_ratio

SHAPES = [Shape(2, 139, 139, 2, 1, 32, 32), Shape(2, 133, 133, 2, 2, 32, 64)]  # never a whole tile


@pytest.mark.parametrize(("score", "mask"), PAIRS, ids=map(", ".join, PAIRS))
def test_kernels_keep_the_rule(score, mask, record_property):
    shape = SHAPES[0 if mask == "of the head" else list(PAIRS).index((score, mask)) % 2]  # heads that share keys
    found = errors(score, mask, shape, torch.float16, backend="interpret")
    assert {"o", "dq", "dk", "dv"} <= {error.name for error in found}
    record_property(*worst_ratio(found, f"{score}, {mask}"))


HEADS, DIM = 2, 32


def packed_engine(**options):
    metas = (meta_tensor(None, HEADS, None, DIM, dtype=torch.float16),) * 3
    mask = and_masks(causal, document())
    options = {"backend": "interpret", **options}
    return AttentionEngine(
        metas, CustomIO({"documents": ("batch", "seq_len")}), scale(0.2), mask, OnlineSoftmax(), **options
    )


def tensors(batch, length):
    return [torch.randn(batch, length, HEADS, DIM, dtype=torch.float16, requires_grad=True) for _ in range(3)]


def test_two_hundred_packed_batches_compile_once(monkeypatch):
    """What is compiled is counted where a PrimFunc becomes a callable; the callables themselves do nothing here."""
    made = []

    class Silent:
        def __init__(self, prim_func):
            made.append(str(prim_func.attrs["global_symbol"]))

        def __call__(self, *arguments):
            pass

    monkeypatch.setattr("attention_engine.codegen.interpreter.Interpreter", Silent)
    kept = dict(op.ATTENTIONS)
    op.ATTENTIONS.clear()
    try:
        engine, draw = packed_engine(), random.Random(0)
        for _ in range(200):
            batch, length = draw.randrange(1, 4), draw.randrange(1, 700)
            cuts = sorted(draw.randrange(length + 1) for _ in range(draw.randrange(9)))
            lengths = [b - a for a, b in zip([0, *cuts], [*cuts, length])]
            ids = document_ids(lengths).expand(batch, -1).contiguous()
            inputs = tensors(batch, length)
            torch.autograd.grad(engine(*inputs, ids).sum(), inputs)
    finally:  # no other test may meet callables that do nothing
        op.ATTENTIONS.clear()
        op.ATTENTIONS.update(kept)
    kernels = ["backward", "backward_postprocess", "backward_preprocess", "forward", "tile_map", "tile_map"]
    assert sorted(made) == kernels  # each once; maps for two shapes of tiles


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation makes, inside the package's own operations too."""

    largest = 0
    insides: ClassVar = {op.FORWARD: attention_op.forward, op.BACKWARD: attention_op.backward}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.insides:
            with self:
                return self.insides[function](*args)
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return made


def test_no_tensor_has_the_size_of_the_pairs():
    length = 768
    ids = document_ids([7, 340, 1, 80, 340])
    attention, inputs = packed_engine(), tensors(1, length)
    with Allocations() as seen:
        o = attention(*inputs, ids)
        torch.autograd.grad(o.sum(), inputs)
    rounded = padded_rows(length, 128)
    assert seen.largest <= HEADS * rounded * DIM < length**2 / 10
    dense = packed_engine(backend="reference")
    with Allocations() as seen:
        dense(*inputs, ids)
    assert seen.largest >= length**2  # the count sees what it is to see


def test_a_map_is_never_stale():
    engine, inputs = packed_engine(), [t.detach() for t in tensors(1, 300)]
    ids, other = document_ids([150, 150]), document_ids([20, 280])
    before, after = engine(*inputs, ids), engine(*inputs, other)
    assert not torch.equal(before, after)
    ids.copy_(other)
    assert torch.equal(engine(*inputs, ids), after)
    ids.data.copy_(document_ids([150, 150]))  # no version number tells of it
    assert torch.equal(engine(*inputs, ids), before)
    with torch.inference_mode():
        same = document_ids([150, 150])
        assert torch.equal(engine(*inputs, same), before)
        same.copy_(other)
        assert torch.equal(engine(*inputs, same), after)


def test_maps_of_index_masks_are_kept_for_their_lengths():
    metas = (meta_tensor(None, HEADS, None, DIM, dtype=torch.float16),) * 3
    engine = AttentionEngine(metas, None, scale(0.2), prefix_lm(9), OnlineSoftmax(), backend="interpret")
    exact = AttentionEngine(metas, None, scale(0.2), prefix_lm(9), OnlineSoftmax(), backend="reference")
    for length in (140, 40, 140, 200):
        q, k, v = (t.detach() for t in tensors(1, length))
        torch.testing.assert_close(
            engine(q, k, v).double(), exact(q.double(), k.double(), v.double()), atol=2e-3, rtol=2e-3
        )
    key = engine._key("interpret", (), engine._variant(None, DIM), ())
    assert len(op.ATTENTIONS[key].program_kernels._kept.found) == 3


def test_maps_of_engines_alike_but_for_their_heads_are_apart():
    """Such engines share kernels: what is kept of one has too few heads for the other."""

    def by_head(b, h, q_idx, kv_idx):
        return (q_idx // 64 + kv_idx // 64 + h) % 3 > 0

    for heads in (1, 3, 1):
        make = torch.Generator().manual_seed(heads)
        q, k, v = (torch.randn(1, 200, heads, DIM, generator=make).half().requires_grad_() for _ in range(3))
        found = []
        for backend in ("interpret", "reference"):
            metas = (meta_tensor(1, heads, None, DIM, dtype=torch.float16),) * 3
            engine = AttentionEngine(metas, None, scale(0.2), by_head, OnlineSoftmax(), backend=backend)
            wide = [t.detach() if backend == "interpret" else t.detach().double() for t in (q, k, v)]
            leaves = [t.requires_grad_() for t in wide]
            o = engine(*leaves)
            found.append([o, *torch.autograd.grad(o.sum(), leaves)])
        for ours, exact in zip(*found, strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=4e-3, rtol=4e-3)


WRONG_LENGTHS = {
    "floats": (([1.5, 2],), "lengths of documents are [1.5, 2]. Give integers: document_ids([5, 3])."),
    "rows": (([[5, 3]],), "lengths of documents are [[5, 3]]. Give integers: document_ids([5, 3])."),
    "below 0": (([-1, 2],), "documents of lengths [-1, 2] don't fit 1 tokens. Give lengths of at least 0."),
    "too few tokens": (([5, 3], 6), "documents of lengths [5, 3] don't fit 6 tokens. Give a total of at least 8."),
}


@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_lengths_that_are_none_are_told(name):
    given, message = WRONG_LENGTHS[name]
    with pytest.raises(BadInput) as caught:
        document_ids(*given)
    assert str(caught.value) == message


def test_a_row_may_hold_no_document():
    assert document_ids([]).shape == (1, 0) and document_ids([], 3).tolist() == [[0, 0, 0]]
