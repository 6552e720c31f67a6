"""What engines show of calls with a cache: check, explain, source, resources, compile_for."""

import re

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, library, meta_tensor
from attention_engine.errors import NoMerge, WrongCache, WrongSequences
from attention_engine.plan import cached as plan
from attention_engine.runtime import cached
from tests.cached_cases import CASES, Entropic, in_pages

METAS = (meta_tensor(16, 32, 1, 128, dtype=torch.bfloat16), *(meta_tensor(16, 8, 8192, 128, dtype=torch.bfloat16),) * 2)
KINDS = ["one after the other", "in pages", "packed queries", "values are columns of keys", "long, heads first"]


def call(kind: str, dtype: torch.dtype):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(3, 2, 4, 32), torch.randn(2, 3, 80, 2, 32)
    lengths = torch.tensor([80, 33, 1], dtype=torch.int32)
    given = {"kv_lengths": lengths, "slopes": torch.rand(4)}
    layout = "bshd"
    if kind == "in pages":
        state = torch.get_rng_state()
        k, given["page_table"] = in_pages(k, lengths.tolist(), 16)
        torch.set_rng_state(state)
        v = in_pages(v, lengths.tolist(), 16)[0]
    elif kind == "packed queries":
        q, given["cu_seqlens_q"] = q.flatten(0, 1)[:5], torch.tensor([0, 3, 4, 5], dtype=torch.int32)
    elif kind == "values are columns of keys":
        v = None
    elif kind == "long, heads first":
        k, v = torch.randn(2, 3, 300, 2, 32)
        given["kv_lengths"] = torch.tensor([300, 150, 20], dtype=torch.int32)
        q, k, v, layout = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), "bhsd"
    return [t if t is None else t.to(dtype) for t in (q, k, v)], given, layout


def sloped(backend: str = "auto", **options) -> AttentionEngine:
    def score(s, custom, b, h, q_idx, kv_idx):
        return s - custom["slopes"] * (q_idx - kv_idx)

    io = CustomIO({"slopes": ("heads",)})
    return AttentionEngine(custom_io=io, score_mod=score, mask_mod=library.causal, backend=backend, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_check_holds_calls_with_a_cache_against_float64(kind):
    tensors, given, layout = call(kind, torch.float16)
    report = sloped(layout=layout).check(*tensors, **given)
    assert report.ok and report.backend == "interpret", report
    assert [row.name for row in report.rows] == ["o", "lse", "o in 3 parts", "lse in 3 parts"]
    assert all(row.error > 0 for row in report.rows)
    cut = kind == "long, heads first"
    assert ("on a part of the tensors: q of (3, 4, 2, 32), k of (3, 2, 300, 32)" in report.ran) == cut


def test_check_runs_other_backends_and_dtypes_too():
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "auto"), (torch.bfloat16, "interpret")):
        tensors, given, _ = call("in pages", dtype)
        assert sloped(backend).check(*tensors, **given).ok


def test_check_sees_a_wrong_kernel_of_caches(monkeypatch):
    right = cached.CachedAttention._by_kernels

    def spoiled(self, asked, out):
        o, rows = right(self, asked, out)
        return o * (1.01 if asked.parts == 3 else 1), rows

    monkeypatch.setattr(cached.CachedAttention, "_by_kernels", spoiled)
    tensors, given, _ = call("in pages", torch.float16)
    report = sloped().check(*tensors, **given)
    assert [row.name for row in report.rows if not row.ok(report.limit)] == ["o in 3 parts"]


def refuse(program):
    raise NoMerge("no formula")


def test_check_says_where_rows_are_not_cut(monkeypatch):
    monkeypatch.setattr(plan, "derive_merge", refuse)
    tensors, given, _ = call("one after the other", torch.float16)
    report = sloped().check(*tensors, **given)
    assert report.ok and [row.name for row in report.rows] == ["o", "lse"]
    assert "rows are not cut, as parts have no merge: no formula" in report.notes


def test_check_raises_what_a_call_raises():
    (q, k, v), given, _ = call("one after the other", torch.float16)
    with pytest.raises(WrongCache, match="kv_lengths has shape"):
        sloped().check(q, k, v, given["slopes"], kv_lengths=given["kv_lengths"][:2])


def test_explain_says_parts_grid_and_bytes():
    engine = AttentionEngine(METAS, mask_mod=library.causal, device=arch.H100())
    text = engine.explain(cache_page=64)
    assert "bfloat16, 16 requests of 1 queries and at most 8192 keys in pages of 64, on H100" in text
    assert "tiles: 64 rows (4 heads share a key head) x 64 keys, 160 threads, 3 stages" in text
    assert "parts: rows are not cut, as 128 blocks are work for 132 SMs" in text
    assert "grid: 1 x 8 x 16 = 128 blocks" in text
    assert "537 MB of keys and values" in text and "decode parts: not compiled yet" in text
    few = tuple(meta_tensor(1, m.heads, m.length, m.dim, dtype=torch.bfloat16) for m in METAS)
    text = AttentionEngine(few, mask_mod=library.causal, device=arch.H100()).explain(cache_page=0)
    (count,) = re.findall(r"parts: (\d+) of each row", text)
    assert 2 <= int(count) <= 20 and f"grid: {count} x 8 x 1 = {8 * int(count)} blocks" in text
    assert "33.6 MB of keys and values" in text
    text = AttentionEngine(few, mask_mod=library.causal).explain(cache_page=0)
    assert "decode: runs on the interpreter" in text


def parts(heads: tuple[int, int], batch: int, queries: int) -> str:
    metas = tuple(
        meta_tensor(batch, h, length, 128, dtype=torch.bfloat16)
        for h, length in ((heads[0], queries), (heads[1], 8192), (heads[1], 8192))
    )
    engine = AttentionEngine(metas, mask_mod=library.causal, online_func=Entropic(), device=arch.H100())
    return next(line for line in engine.explain(cache_page=0).splitlines() if line.startswith("parts:"))


def test_explain_says_who_joins_parts():
    assert "not cut" in parts((32, 8), 16, 1)
    itself = "the last block of a row's parts joins them"
    assert itself in parts((32, 8), 1, 1) and itself in parts((32, 8), 1, 2)
    assert "`combine` joins them" in parts((32, 8), 1, 3)  # 12 rows a block


def test_explain_says_why_rows_are_not_cut(monkeypatch):
    monkeypatch.setattr(plan, "derive_merge", refuse)
    engine = AttentionEngine(METAS, mask_mod=library.causal, device=arch.H100())
    assert "parts: rows are not cut, as parts have no merge: no formula" in engine.explain(cache_page=0)


def test_source_and_explain_take_shared_values_and_packed_queries():
    metas = [meta_tensor(None, h, None, d, dtype=torch.float16) for h, d in ((16, 96), (1, 96), (1, 64))]
    engine = AttentionEngine(tuple(metas), mask_mod=library.causal, online_func=Entropic())
    text = engine.source("decode", cache_page=16, cache_shared=True, packed="unlike")
    assert "cu_seqlens_q" in text and "page_table" in text and not re.search(r"\bv\b.*: T.Buffer", text)
    assert "tiles: 64 rows (16 heads share a key head)" in engine.explain(cache_page=0, cache_shared=True)


def test_starts_of_packed_sequences_may_be_int64_and_those_of_caches_not():
    """Libraries of linear attention give int64: converted. A decoding step would pay a kernel for it, each time."""
    q, starts = torch.randn(5, 2, 16), torch.tensor([0, 2, 5])
    engine = AttentionEngine(mask_mod=library.causal)
    assert starts.dtype is torch.int64
    assert torch.equal(engine(q, q, q, cu_seqlens_q=starts), engine(q, q, q, cu_seqlens_q=starts.int()))
    with pytest.raises(WrongSequences, match=r"cu_seqlens_q is torch.float32 of shape \(3,\). Give int32"):
        engine(q, q, q, cu_seqlens_q=starts.float())
    caches, lengths = torch.randn(2, 9, 2, 16), torch.tensor([9, 4])
    with pytest.raises(WrongCache, match=r"cu_seqlens_q is torch.int64 of shape \(3,\)"):
        engine.with_cache(q, caches, caches, kv_lengths=lengths.int(), cu_seqlens_q=starts)
    with pytest.raises(WrongCache, match=r"kv_lengths is torch.int64. Give int32: kv_lengths.to\(torch.int32\)"):
        engine.with_cache(q[:2, None], caches, caches, kv_lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel"), [
    ("softmax_one", "combine"), ("sink", "combine"), ("shared_softmax", "decode"), ("shared_entropy", "decode"),
])  # fmt: skip
def test_rows_of_several_values_and_narrow_shared_values_lower_for_hopper(name, kernel):
    """TileLang finds a layout for an epilogue that reads two values of a row, and for groups of four heads."""
    case = CASES[name]
    sizes = (32, 128), (8, 128), (8, case.dim_v or 128)
    metas = tuple(meta_tensor(None, heads, None, dim, dtype=torch.bfloat16) for heads, dim in sizes)
    score = case.score(128**-0.5) if case.score else None
    engine = AttentionEngine(
        metas, CustomIO(case.axes), score, case.mask, case.online(), scale=None if score is None else 1.0,
        device=arch.H100(),
    )  # fmt: skip
    assert "__global__" in engine.source(kernel, form="cuda", cache_page=64, cache_shared=bool(case.dim_v))
