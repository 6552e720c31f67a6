"""flash_attn_with_kvcache by flash-attn's documented meaning, in plain torch."""

import itertools
import math

import pytest
import torch

from attention_engine.errors import NotYetSupported, UnknownOption, WrongCache
from attention_engine.serving import flash_attn_with_kvcache, kv_cache
from attention_engine.serving.kv_cache import append


def plain(q, k, v, lengths, scale, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Request by request in float64: (output, log of the sum of exponentials)."""
    outputs, sums = [], []
    for b, length in enumerate(lengths.tolist()):
        of_k, of_v = (t[b, :length].double().repeat_interleave(q.shape[2] // t.shape[2], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[b].double(), of_k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(q.shape[1])[:, None] + length - q.shape[1], torch.arange(length)
        if slopes is not None:
            of_heads = (slopes if slopes.ndim == 1 else slopes[b]).double()
            scores = scores - of_heads[:, None, None] * (i - j).abs()
        left, right = (math.inf if n < 0 else n for n in window)
        keep = (i - j <= left) & (j - i <= (0 if causal else right))
        scores = scores.masked_fill(~keep, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), of_v))
        sums.append(scores.logsumexp(-1))
    return torch.stack(outputs), torch.stack(sums)


OPTIONS = {
    "plain": {}, "causal": {"causal": True}, "window": {"window_size": (20, 0)}, "both ways": {"window_size": (9, 5)},
    "left alone": {"window_size": (9, -1)}, "right alone": {"window_size": (-1, 3)},
    "causal window": {"causal": True, "window_size": (20, 7)}, "softcap": {"causal": True, "softcap": 2.0},
    "scale": {"causal": True, "softmax_scale": 0.3}, "slopes": {"causal": True, "alibi_slopes": torch.rand(4)},
    "slopes of requests": {"alibi_slopes": torch.rand(3, 4)}, "parts": {"causal": True, "num_splits": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("paged", [False, True])
def test_options_mean_what_they_mean_in_flash_attn(name, paged):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(3, 4, 4, 32), torch.randn(2, 3, 64, 2, 32)
    lengths = torch.tensor([40, 64, 4], dtype=torch.int32)
    options = OPTIONS[name]
    renamed = {"window_size": "window", "softmax_scale": "scale", "alibi_slopes": "slopes"}
    asked = {renamed.get(n, n): value for n, value in options.items() if n != "num_splits"}
    expected = plain(q, k, v, lengths, **{"scale": 32**-0.5, **asked})
    caches, table = (k, v), None
    if paged:
        order = torch.randperm(12)
        caches = [torch.empty(12, 16, 2, 32) for _ in range(2)]
        for cache, whole in zip(caches, (k, v), strict=True):
            cache[order] = whole.view(12, 16, 2, 32)
        table = order.view(3, 4).to(torch.int32)
    found = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=table, return_softmax_lse=True, **options
    )
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact.to(ours.dtype), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_written_behind_the_old_ones(paged):
    torch.manual_seed(1)
    k, v = torch.randn(2, 2, 32, 2, 16)
    q, (new_k, new_v) = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 3, 2, 16)
    lengths, table = torch.tensor([15, 20], dtype=torch.int32), None
    whole = [t.clone() for t in (k, v)]
    for cache, new in zip(whole, (new_k, new_v), strict=True):
        for b, length in enumerate(lengths.tolist()):
            cache[b, length : length + 3] = new[b]
    caches = [k, v]
    if paged:
        table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
        caches = [t.view(4, 16, 2, 16)[[1, 2, 3, 0]].clone() for t in (k, v)]
    found = flash_attn_with_kvcache(q, *caches, new_k, new_v, cache_seqlens=lengths, block_table=table, causal=True)
    expected, _ = plain(q, *whole, lengths + 3, 16**-0.5, causal=True)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=2e-6)
    for cache, exact in zip(caches, whole, strict=True):
        held = cache if table is None else cache[table.long()].view(2, 32, 2, 16)
        assert torch.equal(held, exact)


def test_lengths_are_a_number_or_all_there_is_room_for():
    q, (k, v) = torch.randn(2, 1, 2, 16), torch.randn(2, 2, 20, 2, 16)
    for given, length in ((7, 7), (None, 20)):
        expected, _ = plain(q, k, v, torch.tensor([length, length]), 0.25)
        torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, cache_seqlens=given), expected.float())


REFUSED = {"rotary_cos": torch.ones(4, 8), "rotary_sin": torch.ones(4, 8), "rotary_interleaved": False,
           "cache_batch_idx": torch.zeros(2), "cache_leftpad": torch.zeros(2)}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name):
    q, k = torch.randn(2, 1, 2, 16), torch.randn(2, 20, 2, 16)
    with pytest.raises(NotYetSupported, match=f"doesn't serve {name}"):
        flash_attn_with_kvcache(q, k, k, **{name: REFUSED[name]})


def test_mistakes_have_names():
    q, k = torch.randn(2, 1, 2, 16), torch.randn(2, 20, 2, 16)
    with pytest.raises(WrongCache, match="k and v are added to the caches together"):
        flash_attn_with_kvcache(q, k, k, k[:, :1])
    with pytest.raises(UnknownOption, match="window_size is 5"):
        flash_attn_with_kvcache(q, k, k, window_size=5)
    with pytest.raises(WrongCache, match="new keys or values have shape"):
        append(k, k[:, :1, :1], torch.zeros(2, dtype=torch.int32))
    with pytest.raises(WrongCache, match="k_cache and v_cache are one tensor, in which v would be written over k"):
        flash_attn_with_kvcache(q, k, k, k[:, :1], k[:, 1:2], cache_seqlens=3)
    for given in (5.0, [5, 9], True):
        with pytest.raises(WrongCache, match=r"cache_seqlens is .* Give an integer, or int32 \(batch,\)"):
            flash_attn_with_kvcache(q, k, k, cache_seqlens=given)
    with pytest.raises(WrongCache, match=r"cache_seqlens is torch\.int64\. Give int32: cache_seqlens.to"):
        flash_attn_with_kvcache(q, k, k, cache_seqlens=torch.tensor([5, 9]))
    with pytest.raises(TypeError, match="qv"):
        flash_attn_with_kvcache(q, k, k, qv=q)


def test_keys_beyond_a_cache_and_for_no_page_are_written_nowhere():
    """A table's -1 is no page: as an index it is the last one, which is another request's."""
    cache, new, lengths = torch.zeros(2, 20, 2, 16), torch.ones(2, 3, 2, 16), torch.tensor([4, 18], dtype=torch.int32)
    with pytest.raises(WrongCache) as caught:
        append(cache, new, lengths)
    assert str(caught.value) == (
        "request 1 gets keys at the places 18 to 20, and has room for 0 to 19. Make the cache longer, or let the "
        "request end."
    )
    pages, table = torch.zeros(3, 16, 2, 16), torch.tensor([[0, -1], [1, -1]], dtype=torch.int32)
    with pytest.raises(WrongCache) as caught:
        append(pages, new, torch.tensor([4, 14], dtype=torch.int32), table)
    assert str(caught.value) == (
        "request 1 gets a key at the place 16, for which its table names the page -1 of 3. Give the request a page "
        "before."
    )
    assert not cache.any() and not pages.any()


def test_a_page_that_is_not_there_is_an_index_out_of_bounds_where_nobody_looks(monkeypatch):
    """As on a GPU: -1 was the last page, another request's."""
    monkeypatch.setattr(kv_cache, "_check_room", lambda *_: None)
    pages, new = torch.zeros(3, 4, 1, 8), torch.ones(2, 1, 1, 8)
    with pytest.raises(IndexError):
        kv_cache.append(pages, new, torch.tensor([0, 4], dtype=torch.int32), torch.tensor([[0, 1], [1, -1]]).int())
    assert not pages[2].any()


def test_equal_options_share_an_engine():
    from attention_engine.serving.engines import ENGINES

    ENGINES.clear()
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 20, 2, 16)
    for length, causal in itertools.product((3, 9, 20), (False, True)):
        flash_attn_with_kvcache(q, k, k, cache_seqlens=length, causal=causal)
    assert len(ENGINES) == 2
