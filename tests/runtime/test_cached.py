"""Attention to a cache by the reference and by the kernels, tile by tile on a CPU, against plain torch in float64."""

import functools
import random
import re

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, library, meta_tensor
from attention_engine import errors as errors_of
from attention_engine.library import causal
from attention_engine.plan import cached as plan
from attention_engine.runtime import cached, cached_inputs
from attention_engine.runtime.cached_shown import cached_kernels
from tests.cached_cases import CASES, DRAFTS, Shape, errors, in_pages
from tests.plain import worst_ratio

LENGTHS = (200, 77, 6, 64, 128, 0, 65)
DRAFTED = (200, 77, 6, 64, 129)


def shape_of(name: str, queries: int, page: int) -> Shape:
    if name == "tree":
        return Shape(DRAFTED, DRAFTS, page=page)
    return Shape(LENGTHS, queries, page=page)


def test_there_are_thirty_programs():
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", CASES)
def test_the_reference_keeps_the_rule(name):
    assert errors(name, shape_of(name, 3, 16), torch.float32, "reference")
    assert errors(name, shape_of(name, 1, 0), torch.bfloat16, "reference")


@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, record_property):
    found = errors(name, shape_of(name, 1, 0), torch.float16, "interpret", 1)
    found += errors(name, shape_of(name, 5, 16), torch.bfloat16, "interpret", 3)
    record_property(*worst_ratio(found, name))


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 129])
def test_lengths_on_and_beside_the_ends_of_tiles_and_pages(length, page):
    shape = Shape((length, 130 - length), 2, page=page)
    assert errors("softmax", shape, torch.float16, "interpret", 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 40), (6, 1, 96), (8, 2, 128)])
def test_heads_dims_and_dtypes(heads, kv_heads, dim, dtype):
    shape = Shape((70, 3, 129), 2, heads, kv_heads, dim)
    for name in ("softmax", "alibi", "sigmoid"):
        assert errors(name, shape, dtype, "interpret", 2)


@pytest.mark.parametrize("name", ["softmax", "sink", "window"])
def test_more_rows_than_a_tile_has(name):
    shape = Shape((70, 40), 16, 16, 2, 32)  # 128 rows a key head
    assert errors(name, shape, torch.float16, "interpret", 2)


def test_bits_depend_neither_on_neighbours_nor_on_pages():
    torch.manual_seed(0)
    engine = AttentionEngine(mask_mod=causal, backend="interpret")
    q = torch.randn(3, 1, 4, 64).half()
    k, v = torch.randn(2, 3, 200, 2, 64).half()
    lengths = torch.tensor([200, 130, 64], dtype=torch.int32)
    for parts in (1, 3):
        alone = [
            engine.with_cache(q[n : n + 1], k[n : n + 1], v[n : n + 1], kv_lengths=lengths[n : n + 1], num_splits=parts)
            for n in range(3)
        ]
        together = engine.with_cache(q, k, v, kv_lengths=lengths, num_splits=parts)
        assert torch.equal(together, torch.cat(alone))
        state = torch.get_rng_state()
        in_k, table = in_pages(k, lengths.tolist(), 16)
        torch.set_rng_state(state)  # values lie in the same pages
        in_v, _ = in_pages(v, lengths.tolist(), 16)
        paged = engine.with_cache(q, in_k, in_v, kv_lengths=lengths, page_table=table, num_splits=parts)
        assert torch.equal(paged, together)


def test_what_a_table_and_a_length_say_wrongly_touches_nothing_else(monkeypatch):
    """Pages that are not there read as 0; a length past the cache ends with the cache. On a GPU nobody looks before."""
    monkeypatch.setattr(cached_inputs, "check_places", lambda call: None)
    engine = AttentionEngine(backend="interpret")
    q, cache = torch.randn(1, 1, 2, 32).half(), torch.randn(3, 16, 2, 32).half()
    table = torch.tensor([[1, 77, -1]], dtype=torch.int32)
    o = engine.with_cache(q, cache, cache, kv_lengths=torch.tensor([1000], dtype=torch.int32), page_table=table)
    assert o.isfinite().all()


def test_no_length_batch_or_number_of_parts_makes_another_kernel():
    engine = AttentionEngine(mask_mod=causal, backend="interpret")
    draw = random.Random(0)
    for _ in range(8):
        batch, queries, most = draw.randrange(1, 5), draw.randrange(1, 5), draw.randrange(5, 100)
        q, k = torch.randn(batch, queries, 4, 32).half(), torch.randn(batch, most, 2, 32).half()
        lengths = torch.tensor([draw.randrange(most + 1) for _ in range(batch)], dtype=torch.int32)
        engine.with_cache(q, k, k, kv_lengths=lengths, num_splits=draw.randrange(1, 9))
    (attention,) = engine._cached.values()
    (kernels,) = attention._kernels.values()
    assert len(kernels._made) <= 3


def test_output_and_layout():
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 3, 4, 32), torch.randn(2, 2, 50, 2, 32)
    lengths = torch.tensor([50, 20], dtype=torch.int32)
    engine, turned = (AttentionEngine(mask_mod=causal, layout=layout) for layout in ("bshd", "bhsd"))
    expected = engine.with_cache(q, k, v, kv_lengths=lengths)
    out = torch.empty_like(expected)
    assert engine.with_cache(q, k, v, kv_lengths=lengths, out=out) is out and torch.equal(out, expected)
    found = turned.with_cache(*(t.transpose(1, 2) for t in (q, k, v)), kv_lengths=lengths)
    assert torch.equal(found.transpose(1, 2), expected)


def test_captured_tensors_are_read_at_places():
    """A table of as many entries as there are queries is no tensor of the call's rows."""
    table = torch.randn(3)
    engine = AttentionEngine(score_mod=lambda s, custom, b, h, q_idx, kv_idx: s + table[q_idx - kv_idx])
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 9, 2, 16)
    lengths = torch.tensor([9], dtype=torch.int32)
    found = engine.with_cache(q, k, k, kv_lengths=lengths)
    places = torch.arange(6, 9)[:, None] - torch.arange(9)
    bias = torch.where((places >= 0) & (places < 3), table[places.clamp(0, 2)], 0.0)
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) + bias).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("bhqk,bkhd->bqhd", weights, k))


CALL = "engine.with_cache(q, k, v, **{{'kv_lengths': lengths, **dict({})}})"
WRONG = {
    "parts of 0": (", num_splits=0", errors_of.UnknownOption, "num_splits is 0. Give 1 to 128, or None"),
    "parts below 0": (", num_splits=-2", errors_of.UnknownOption, "num_splits is -2"),
    "parts that are True": (", num_splits=True", errors_of.UnknownOption, "num_splits is True"),
    "a table for keys in a row": (", page_table=table", errors_of.WrongCache, "a page has 9 keys"),
    "starts of another batch": (", q_starts=lengths[:1]", errors_of.WrongCache, "q_starts has shape"),
    "an output of another shape": (", out=k", errors_of.WrongCache, "out is torch.float32"),
    "more keys than places": (
        ", kv_lengths=lengths + 1",
        errors_of.WrongCache,
        "kv_lengths[0] is 10, and the cache has places for 0 to 9 keys of a request.",
    ),
    "keys below 0": (", kv_lengths=lengths - 4", errors_of.WrongCache, "kv_lengths[1] is -1, and the cache has places"),
    "flash-attn's name of a table": (", block_table=table", errors_of.CustomInputMissing, "calls it page_table."),
    "another argument": (", causal=True", errors_of.CustomInputMissing, "'causal' is no argument of a call"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_have_names(name):
    more, kind, words = WRONG[name]
    names = {
        "engine": AttentionEngine(), "q": torch.randn(2, 1, 2, 16), "k": torch.randn(2, 9, 2, 16),
        "v": torch.randn(2, 9, 2, 16), "lengths": torch.tensor([9, 3], dtype=torch.int32),
        "table": torch.zeros(2, 1, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(kind, match=re.escape(words)):
        eval(CALL.format(more.lstrip(", ")), names)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_page_that_is_not_there_has_a_name(backend):
    """Where its keys are needed: behind a request's length a table holds anything."""
    engine, q, pages = AttentionEngine(backend=backend), torch.randn(2, 1, 2, 16), torch.randn(3, 16, 2, 16)
    table, lengths = torch.tensor([[2, 1], [0, -1]], dtype=torch.int32), torch.tensor([20, 16], dtype=torch.int32)
    assert engine.with_cache(q, pages, pages, kv_lengths=lengths, page_table=table).isfinite().all()
    for wrong in (3, -1):
        table[0, 1] = wrong
        with pytest.raises(errors_of.WrongCache) as caught:
            AttentionEngine(backend=backend).with_cache(q, pages, pages, kv_lengths=lengths, page_table=table)
        assert str(caught.value) == (
            f"page_table[0, 1] is {wrong}, and request 0 has 20 keys in pages of 16. The cache has pages 0 to 2."
        )
    with pytest.raises(errors_of.WrongCache, match=r"page_table has shape \(2,\). Give \(batch, pages\)"):
        engine.with_cache(q, pages, pages, kv_lengths=lengths, page_table=table[0])


def test_wrong_tensors_have_names():
    engine, q, k = AttentionEngine(), torch.randn(2, 1, 2, 16), torch.randn(2, 9, 2, 16)
    lengths = torch.tensor([9, 3], dtype=torch.int32)
    with pytest.raises(errors_of.WrongCache, match="kv_lengths is"):
        engine.with_cache(q, k, k, kv_lengths=lengths.long())
    with pytest.raises(errors_of.WrongCache, match="q has batch 2 and k_cache 1"):
        engine.with_cache(q, k[:1], k[:1], kv_lengths=lengths)
    with pytest.raises(errors_of.WrongCache, match="q has head dim 16 and k_cache 8"):
        engine.with_cache(q, k[..., :8], k, kv_lengths=lengths)
    with pytest.raises(errors_of.WrongCache, match="2 query heads cannot share 3 key heads"):
        engine.with_cache(q, torch.randn(2, 9, 3, 16), torch.randn(2, 9, 3, 16), kv_lengths=lengths)
    with pytest.raises(errors_of.CacheNotDifferentiable, match="cu_seqlens_q"):
        engine.with_cache(q.requires_grad_(), k, k, kv_lengths=lengths)
    with torch.no_grad():
        assert engine.with_cache(q, k, k, kv_lengths=lengths).shape == (2, 1, 2, 16)
    blocks = AttentionEngine(block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    with pytest.raises(errors_of.OptionsClash, match="mask_mod"), torch.no_grad():
        blocks.with_cache(q, k, k, kv_lengths=lengths)


def test_rows_whose_parts_cannot_join_are_not_cut(monkeypatch):
    def refuse(_):
        raise errors_of.NoMerge("no formula")

    monkeypatch.setattr(plan, "derive_merge", refuse)
    torch.manual_seed(0)
    engine = AttentionEngine(backend="interpret")
    q, (k, v) = torch.randn(1, 1, 2, 16), torch.randn(2, 1, 300, 2, 16)
    lengths = torch.tensor([300], dtype=torch.int32)
    found = engine.with_cache(q, k, v, kv_lengths=lengths)
    torch.testing.assert_close(found, AttentionEngine()(q, k, v))
    with pytest.raises(errors_of.NoMerge, match="no formula"):
        engine.with_cache(q, k, v, kv_lengths=lengths, num_splits=2)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_call_that_was_seen_runs_as_one_that_was_not(parts, page, monkeypatch):
    """With other entries in the same shapes, a table that is a corner of another, an output that is given, rows."""
    torch.manual_seed(0)
    slopes = torch.rand(4)
    make = functools.partial(
        AttentionEngine, None, CustomIO({"slopes": ("heads",)}), library.alibi(0.1), causal, backend="interpret"
    )
    engine, out = make(), torch.empty(3, 2, 4, 32).half()
    checked: list = []
    monkeypatch.setattr(cached, "check_caches", lambda *_: checked.append(_))
    for round_ in range(4):
        q, cache = torch.randn(3, 2, 4, 32).half(), torch.randn(3, 96, 2, 32).half()
        lengths = torch.randint(0, 90, (3,), dtype=torch.int32)
        table = None
        if page:
            cache, table = in_pages(cache, lengths.tolist(), page)
            table = torch.cat([table, table], 1)[:, : table.shape[1]]
        call = {"kv_lengths": lengths, "page_table": table, "num_splits": parts, "return_rowscales": True}
        given = out if round_ > 1 else None
        checked.clear()
        found, rows = engine.with_cache(q, cache, cache.clone(), slopes, **call, out=given)
        assert (checked == []) is (round_ % 2 == 1)
        expected, expected_rows = make().with_cache(q, cache, cache, slopes, **call)
        assert torch.equal(found, expected) and torch.equal(rows["lse"], expected_rows["lse"])
        assert given is None or found is out


def test_a_seen_call_is_checked_where_its_tensors_differ():
    engine = AttentionEngine(backend="interpret")
    q, (k, v) = torch.randn(2, 1, 2, 32).half(), torch.randn(2, 2, 40, 2, 32).half()
    lengths = torch.tensor([9, 3], dtype=torch.int32)
    for _ in range(2):
        engine.with_cache(q, k, v, kv_lengths=lengths)
    with pytest.raises(errors_of.WrongCache, match="kv_lengths is"):
        engine.with_cache(q, k, v, kv_lengths=lengths.long())
    with pytest.raises(errors_of.CacheNotDifferentiable):
        engine.with_cache(q.clone().requires_grad_(), k, v, kv_lengths=lengths)
    assert engine.with_cache(q[:, :, :1], k[:, :, :1], v[:, :, :1], kv_lengths=lengths).shape == (2, 1, 1, 32)
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(*(engine.with_cache(q, t, v, kv_lengths=lengths) for t in (k, turned)))


def test_kernels_of_caches_are_shown_and_listed():
    metas = (meta_tensor(None, 4, None, 32, dtype=torch.float16),) * 3
    engine = AttentionEngine(metas, mask_mod=causal)
    of_parts = ["decode", "decode joined parts", "decode parts", "combine"]
    dealt = ["deal", "decode dealt parts", "combine dealt parts"]
    for name in of_parts:
        assert f"def {name.replace(' ', '_')}(" in engine.source(name)
    assert list(cached_kernels(engine, None, page=16)) == [*of_parts, *dealt]


PACKED = Shape((200, 77, 6, 64, 130, 0, 65), page=16, packed=(70, 1, 6, 0, 2, 3, 20))


@pytest.mark.parametrize("name", [name for name in CASES if name != "tree"])
def test_packed_queries_of_uneven_requests(name):
    """Chunks of prompts beside single tokens, a request with no query, one with no key."""
    assert errors(name, PACKED, torch.float32, "reference")
    if name in OF_EACH_KIND:
        for parts in (1, 3):
            assert errors(name, PACKED, torch.bfloat16, "interpret", parts)


OF_EACH_KIND = ("softmax", "window", "heat_of_queries", "alibi", "sink", "entropy", "sigmoid", "from_the_top")


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_packed_requests_of_which_none_has_a_query(backend):
    q, k = torch.randn(0, 2, 16), torch.randn(2, 9, 2, 16)
    lengths, cu = torch.tensor([9, 0], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    engine = AttentionEngine(backend=backend)
    o, rows = engine.with_cache(q, k, k, kv_lengths=lengths, cu_seqlens_q=cu, return_rowscales=True)
    assert o.shape == (0, 2, 16) and rows["lse"].shape == (2, 0)


def test_packed_queries_have_names_for_their_mistakes():
    engine, q, k = AttentionEngine(), torch.randn(5, 2, 16), torch.randn(2, 9, 2, 16)
    lengths, cu = torch.tensor([9, 3], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    assert engine.with_cache(q, k, k, kv_lengths=lengths, cu_seqlens_q=cu, out=torch.empty_like(q)).shape == q.shape
    with pytest.raises(errors_of.WrongCache, match="cu_seqlens_q is"):
        engine.with_cache(q, k, k, kv_lengths=lengths, cu_seqlens_q=cu.long())
    with pytest.raises(errors_of.WrongCache, match="q has batch 1 and k_cache 2"):
        engine.with_cache(q, k, k, kv_lengths=lengths, cu_seqlens_q=cu[:2])
    with pytest.raises(errors_of.WrongRank, match="rows, heads, dim"):
        engine.with_cache(q[None], k, k, kv_lengths=lengths, cu_seqlens_q=cu)
    for starts, message in (([0, 2, 6], "ends at row 6, and there are 5"), ([0, 3, 2], "goes back from 3 to 2")):
        with pytest.raises(errors_of.WrongSequences, match=message):
            engine.with_cache(q, k, k, kv_lengths=lengths, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_cache_whose_heads_and_keys_are_swapped_is_told_so(layout):
    engine, q = AttentionEngine(layout=layout), torch.randn(2, 4, 4, 16)
    k = torch.randn(2, 2, 9, 16) if layout == "bshd" else torch.randn(2, 9, 2, 16)
    with pytest.raises(errors_of.WrongCache, match=r"Key heads can be 1, 2, 4\. Heads and keys look swapped"):
        engine.with_cache(q, k, k, kv_lengths=torch.tensor([9, 3], dtype=torch.int32))


def test_dropout_is_refused_in_training():
    engine, q = AttentionEngine(dropout_p=0.5), torch.randn(1, 1, 2, 16)
    lengths = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(errors_of.OptionsClash, match="eval"):
        engine.with_cache(q, q, q, kv_lengths=lengths)
    assert torch.equal(engine.eval().with_cache(q, q, q, kv_lengths=lengths), q)
