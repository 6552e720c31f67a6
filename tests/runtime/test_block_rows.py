"""What rows find in each block of keys that lists name: beside float64 of plain torch, and what is refused."""

import copy

import pytest
import torch

from attention_engine import AttentionEngine, BlockList
from attention_engine.errors import OptionsClash, WrongBlockMask
from attention_engine.library import OnlineSigmoid, causal
from tests.runtime.engines import BACKENDS, HEADS, KV_HEADS, build, qkv, scaled
from tests.runtime.test_block_list import draw

Q_LEN, KV_LEN = 40, 70


def found_by_loops(scores, lists):
    """Maxima and sums of scores (batch, heads, queries, keys), -inf where a pair is masked: as the words say it."""
    batch, heads, queries, _ = scores.shape
    (q, kv), of_lists = lists.block_size, lists.indices.shape
    maxima = torch.full((batch, heads, queries, of_lists[3]), -torch.inf, dtype=torch.float64)
    sums = torch.zeros_like(maxima)
    counts = torch.full(of_lists[:3], of_lists[3]) if lists.counts is None else lists.counts
    for b in range(batch):
        for h in range(heads):
            for row in range(of_lists[2]):
                at = (b if of_lists[0] > 1 else 0, h * of_lists[1] // heads, row)
                for n in range(int(counts[at])):
                    block = int(lists.indices[(*at, n)])
                    pairs = scores[b, h, row * q : (row + 1) * q, block * kv : (block + 1) * kv]
                    top = pairs.amax(-1)
                    maxima[b, h, row * q : (row + 1) * q, n] = top
                    shifted = (pairs - torch.where(top == -torch.inf, 0.0, top)[:, None]).exp()
                    sums[b, h, row * q : (row + 1) * q, n] = shifted.sum(-1)
    return maxima, sums


def scores_of(q, k, factor=0.25, added=None, is_causal=True):
    """All scores in float64."""
    q, k = (t.detach().double().transpose(1, 2) for t in (q, k))
    found = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * factor
    found = found if added is None else found + added
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return found.masked_fill(i < j, -torch.inf) if is_causal else found


def agree(found, want, within=2e-5):
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=within, atol=within)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, KV_HEADS), (1, HEADS)])
def test_each_row_meets_the_keys_of_each_listed_block(batch, heads, backend):
    q, k, _ = qkv(Q_LEN, KV_LEN)
    lists = BlockList(*draw(batch, heads, seed=heads), (16, 32))
    agree(build(backend=backend).block_rows(q, k, block_mask=lists), found_by_loops(scores_of(q, k), lists))


@pytest.mark.parametrize("size", [(4, 4), (32, 128), (64, 16)], ids=str)
def test_blocks_that_hold_no_tile_or_several(size):
    q, k, _ = qkv(Q_LEN, 300 if size[1] == 128 else KV_LEN, batch=1)
    rows, columns = -(-Q_LEN // size[0]), -(-k.shape[1] // size[1])
    lists = BlockList(draw(1, 1, rows, columns, least=columns)[0][..., :3].contiguous(), None, size)
    found = build(mask_mod=None).block_rows(q, k, block_mask=lists)
    agree(found, found_by_loops(scores_of(q, k, is_causal=False), lists))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_those_of_a_call_whatever_the_row_function(backend):
    """A declared and a captured bias, the other layout."""
    q, k, _ = qkv(Q_LEN, KV_LEN, batch=1)
    of_keys, of_heads = torch.linspace(-1, 1, KV_LEN), torch.linspace(-2, 2, HEADS)

    def biased(score, custom, b, h, q_idx, kv_idx):
        return score * 0.25 + custom["keys"][kv_idx] + of_heads[h]

    options = {"score_mod": biased, "online_func": OnlineSigmoid(), "layout": "bhsd", "backend": backend}
    engine = build({"keys": ("seq_len_kv",)}, **options)
    lists = BlockList(*draw(1, KV_HEADS, seed=5), (16, 32))
    turned = [t.transpose(1, 2) for t in (q, k)]
    found = engine.block_rows(*turned, keys=of_keys, block_mask=lists)
    added = of_keys.double() + of_heads.double()[:, None, None]
    agree(found, found_by_loops(scores_of(q, k, added=added), lists))
    assert not found.maxima.requires_grad and not found.sums.requires_grad


def test_every_block_without_lists_and_what_a_softmax_gives_it():
    q, k, v = qkv(Q_LEN, KV_LEN)
    engine = build(block_size=(16, 32))
    rows = engine.block_rows(q, k)
    assert rows.maxima.shape == (2, HEADS, Q_LEN, 3)
    _, returned = engine(q, k, v, return_rowscales=True)
    torch.testing.assert_close(rows.lse.logsumexp(-1), returned["lse"].detach(), rtol=1e-5, atol=1e-5)
    later = torch.arange(3) * 32 > torch.arange(Q_LEN)[:, None]
    assert bool((rows.maxima.isneginf() == later).all()) and bool(((rows.sums == 0) == later).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits(dtype):
    q, k, _ = qkv(Q_LEN, KV_LEN, dtype=dtype)
    lists = BlockList(*draw(1, 1, seed=2), (16, 32))
    agree(build(dtype=dtype).block_rows(q, k, block_mask=lists), found_by_loops(scores_of(q, k), lists), 1e-4)


def test_nothing_to_look_at():
    q, k, _ = qkv(Q_LEN, KV_LEN)
    none = BlockList(torch.zeros(1, 1, 3, 0, dtype=torch.int32), None, (16, 32))
    assert build().block_rows(q, k, block_mask=none).sums.shape == (2, HEADS, Q_LEN, 0)
    unlisted = BlockList(torch.zeros(1, 1, 3, 1, dtype=torch.int32), torch.zeros(1, 1, 3, dtype=torch.int32), (16, 32))
    rows = build().block_rows(q, k, block_mask=unlisted)
    assert bool(rows.maxima.isneginf().all()) and not rows.sums.any()


def test_an_engine_that_looked_at_blocks_is_copied_and_still_attends():
    q, k, v = qkv(Q_LEN, KV_LEN)
    engine = build(block_size=(16, 32))
    before = engine(q, k, v)
    rows = engine.block_rows(q, k)
    again = copy.deepcopy(engine)
    assert torch.equal(again(q, k, v), before) and torch.equal(again.block_rows(q, k).maxima, rows.maxima)


def test_what_is_refused():
    q, k, _ = qkv(Q_LEN, KV_LEN)
    with pytest.raises(WrongBlockMask, match="rows of blocks want lists"):
        build().block_rows(q, k, block_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(WrongBlockMask, match=r"give \(2 or 1, 4, 2 or 1, 3, any\)"):
        build().block_rows(q, k, block_mask=BlockList(torch.zeros(1, 1, 2, 1, dtype=torch.int32), None, (16, 32)))
    with pytest.raises(WrongBlockMask, match="twice"):
        build().block_rows(q, k, block_mask=BlockList(torch.zeros(1, 1, 3, 2, dtype=torch.int32), None, (16, 32)))
    fixed = AttentionEngine(mask_mod=causal, score_mod=scaled, block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    with pytest.raises(OptionsClash, match="rows of blocks are not looked at"):
        fixed.block_rows(q, k)
