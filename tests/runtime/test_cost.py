"""engine.cost(): the pairs that a mask keeps, and the FLOPs and bytes that follow."""

import re

import pytest
import torch

from attention_engine import arch, create_mask, document_ids, library
from attention_engine.runtime import cost
from tests.runtime.engines import build, qkv

BATCH, Q_LEN, KV_LEN = 2, 33, 70


def of_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx % (h + 2) == 0)


@pytest.mark.parametrize("together", [1, 1 << 24])
@pytest.mark.parametrize("mask", [None, library.causal, library.sliding_window(9, 4), of_head])
def test_kept_pairs_are_counted(mask, together, monkeypatch):
    monkeypatch.setattr(cost, "MOST_AT_ONCE", together)
    q, k, v = qkv(Q_LEN, KV_LEN, batch=BATCH)
    found = build(mask_mod=mask).cost(q, k, v)
    heads = q.shape[2]
    kept = BATCH * heads * Q_LEN * KV_LEN if mask is None else int(
        create_mask(mask, BATCH, heads, Q_LEN, KV_LEN).expand(BATCH, heads, -1, -1).sum())  # fmt: skip
    dim, dim_v = q.shape[3], v.shape[3]
    assert found.pairs == kept
    assert (found.forward_flops, found.backward_flops) == (2 * kept * (dim + dim_v), 2 * kept * (3 * dim + 2 * dim_v))
    moved = q.element_size() * (q.numel() + k.numel() + v.numel() + q.numel() // dim * dim_v)
    assert (found.forward_bytes, found.backward_bytes) == (moved, 2 * moved)


def test_masks_of_tensors_and_blocks_count_too():
    q, k, v = qkv(12, 12, batch=1)
    ids = document_ids([5, 1, 6])
    engine = build({"ids": (1, "seq_len")}, mask_mod=lambda b, h, i, j, c: c["ids"][0, i] == c["ids"][0, j])
    assert engine.cost(q, k, v, ids).pairs == q.shape[2] * (25 + 1 + 36)
    blocks = torch.tensor([[[[1, 0, 1]]]], dtype=torch.int8)
    assert build(mask_mod=None, block_size=(16, 4)).cost(q, k, v, block_mask=blocks).pairs == q.shape[2] * 12 * 8


def test_the_layout_changes_nothing():
    q, k, v = qkv(Q_LEN, KV_LEN)
    other = build(layout="bhsd").cost(*(t.transpose(1, 2) for t in (q, k, v)))
    assert other == build().cost(q, k, v)


def test_a_cost_prints_with_units_and_the_bound_of_a_gpu():
    q, k, v = qkv(64, 64, batch=1, dtype=torch.float16)
    found = build(dtype=torch.float16).cost(q, k, v, device=arch.H100())
    assert found.share == found.pairs / found.all_pairs and found.all_pairs == 4 * 64 * 64
    seconds = found.bounds("forward")
    assert seconds["compute"] == pytest.approx(found.forward_flops / 989e12)
    assert seconds["memory"] == pytest.approx(found.forward_bytes / 3.35e12)
    text = repr(found)
    assert text.startswith("8 320 of 16 384 pairs kept (50.8 %)\n") and text.endswith("products and 3.35 TB/s")
    flops, intensity = f"{found.forward_flops / 1000:.4g} kFLOP", found.forward_flops / found.forward_bytes
    assert flops in text and f"{intensity:.1f} FLOP/B" in text
    assert re.search(r"\nat least +[\d.]+ ns \(memory\) +[\d.]+ ns \(memory\)\n", text)
    slow = build().cost(*(t.float() for t in (q, k, v)), device=arch.H100())
    assert slow.bounds("forward")["compute"] == pytest.approx(6 * seconds["compute"])


def test_without_a_gpu_a_cost_says_how_to_name_one():
    assert "no GPU is here; give one" in repr(build().cost(*qkv(5))) or torch.cuda.is_available()
