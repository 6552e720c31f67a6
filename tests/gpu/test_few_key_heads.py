"""Few key heads on a GPU: each query head reads a copy of its key head, at the sizes for which that is done."""

from __future__ import annotations

import pytest
import torch

from attention_engine import AttentionEngine
from attention_engine.library import OnlineSoftmax, causal, scale
from attention_engine.runtime.attentions import ATTENTIONS
from tests import plain
from tests.cases import CASES, Shape, errors, ran_with_few_key_heads

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def of_this_test_alone():
    """Kernels that others made are not counted."""
    ATTENTIONS.clear()
    yield
    ATTENTIONS.clear()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "heads", "batch", "length", "dim", "dtype"),
    [
        ("softmax", (8, 1), 1, 4000, 128, torch.bfloat16), ("softmax", (8, 2), 1, 2048, 64, torch.float16),
        ("softcap", (8, 1), 2, 1111, 128, torch.bfloat16), ("relu", (6, 2), 1, 1500, 96, torch.bfloat16),
    ],
)  # fmt: skip
def test_gradients_keep_the_rule(name, heads, batch, length, dim, dtype, deterministic, is_causal, record_property):
    shape = Shape(batch, length, length, *heads, dim, dim)
    found = errors(CASES[name], shape, dtype, is_causal, device="cuda", deterministic=deterministic)
    record_property(*plain.worst_ratio(found, f"{name} {heads} {dim}"))
    assert ran_with_few_key_heads() == 1


def test_deterministic_gradients_are_the_same_bits_in_every_batch():
    engine = AttentionEngine(None, None, scale(0.1), causal, OnlineSoftmax(), deterministic=True)
    tensors = Shape(3, 2500, 2500, 8, 1, 128, 128).tensors(torch.bfloat16, "cuda", 0)

    def gradients(first):
        leaves = [tensors[n][first:].clone().requires_grad_() for n in "qkv"]
        return torch.autograd.grad(engine(*leaves), leaves, tensors["do"][first:].contiguous())

    for together, again, alone in zip(gradients(0), gradients(0), gradients(2), strict=True):
        assert torch.equal(together, again) and torch.equal(together[-1:], alone)
    assert ran_with_few_key_heads() == 1
