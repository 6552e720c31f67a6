"""Pairs that scores leave out, and rows far from 0, in the hand-placed kernels for Hopper, in the simulator."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO
from attention_engine.library import OnlineSoftmax, causal
from tests.kernels.test_hopper_interpret import forward_tile, kernels, key_tile, ran  # noqa: F401 - a fixture
from tests.runtime.test_absent_pairs import NEVER, gradients, metas, plainly, softmax, tensors

DIM, QUERIES, KEYS = 64, 150, 140


def padded_score(score, custom, b, h, q_idx, kv_idx):
    return score * 0.1 + custom["pad"]


@pytest.mark.parametrize("pad", [NEVER, -1e9, torch.finfo(torch.float32).min])
def test_keys_padded_by_a_number(pad, kernels):  # noqa: F811
    """The first 70 keys: causal rows that see no others are left empty, or the mean of v."""
    kernels.update(forward=forward_tile(192, threads=384), backward=key_tile(64))
    q, k, v = tensors(torch.float16, QUERIES, KEYS, DIM)
    with torch.no_grad():
        k[:, :70] = 0  # what torch adds to -1e9 would round away
    padding = torch.zeros(KEYS)
    padding[:70] = pad
    engine = AttentionEngine(
        metas(torch.float16, DIM), CustomIO({"pad": ("seq_len_kv",)}), padded_score, causal, OnlineSoftmax(),
        backend="interpret",
    )  # fmt: skip
    found = gradients(engine(q, k, v, padding), (q, k, v))
    kept = torch.ones(QUERIES, KEYS).tril() > 0
    right = plainly(softmax, lambda x, p: x * 0.1 + p, q, k, v, padding, keep=kept)
    for mine, exact in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=4e-3, rtol=1e-2)
    assert ran("forward") and ran("backward")
