"""Calls with a cache that passed every check once: launched again as they were, from memory that nobody else writes."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, library
from attention_engine.library import causal
from attention_engine.runtime import cached, gpu


@pytest.fixture
def checked(monkeypatch):
    """A list that has an entry for each call that was checked."""
    found: list = []
    monkeypatch.setattr(cached, "check_caches", lambda *given: found.append(given))
    return found


def tensors(batch: int, queries: int = 1, keys: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, queries, 4, 32).half()
    return q, *torch.randn(2, batch, keys, 2, 32).half()


def engine_of(layout: str = "bshd") -> AttentionEngine:
    slopes = CustomIO({"slopes": ("heads",)})
    return AttentionEngine(None, slopes, library.alibi(0.1), causal, layout=layout, backend="interpret")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("heads_first", [False, True])
def test_layouts_and_named_inputs(parts, heads_first, checked):
    engine, slopes = engine_of("bhsd" if heads_first else "bshd"), torch.rand(4)
    for round_ in range(3):
        q, k, v = tensors(2, 2)
        lengths = torch.randint(1, 40, (2,), dtype=torch.int32)
        expected = engine_of().with_cache(q, k, v, slopes, kv_lengths=lengths, num_splits=parts)
        given = [t.transpose(1, 2).contiguous() for t in (q, k, v)] if heads_first else (q, k, v)
        checked.clear()
        found = engine.with_cache(*given, kv_lengths=lengths, num_splits=parts, slopes=slopes)
        assert torch.equal(found.transpose(1, 2) if heads_first else found, expected)
        assert bool(checked) is (round_ == 0)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_one_tensor_as_keys_and_values(layout, checked):
    engine, slopes, lengths = engine_of(layout), torch.rand(4), torch.tensor([40, 3], dtype=torch.int32)
    for round_ in range(3):
        q, k, other = (t if layout == "bshd" else t.transpose(1, 2).contiguous() for t in tensors(2))
        checked.clear()
        found = engine.with_cache(q, k, k, slopes, kv_lengths=lengths)
        assert bool(checked) is (round_ == 0)
        assert torch.equal(found, engine.with_cache(q, k, k.clone(), slopes, kv_lengths=lengths))
        assert not torch.equal(found, engine.with_cache(q, k, other, slopes, kv_lengths=lengths))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("page", [0, 16])
def test_inputs_of_the_queries_of_the_call(page, given, checked):
    """Each is read at its own row, so that the kernel must know where queries start."""

    def engine(backend: str) -> AttentionEngine:
        heat = CustomIO({"heat": ("batch", "seq_len")})
        return AttentionEngine(None, heat, lambda s, custom, b, h, i, j: s * custom["heat"], causal, backend=backend)

    ours, table = engine("interpret"), torch.tensor([[2, 0, 1], [5, 4, 3]], dtype=torch.int32) if page else None
    for round_ in range(3):
        q, k, v = tensors(2, 3, 48)
        if page:
            k, v = (t.reshape(6, 16, 2, 32) for t in (k, v))
        lengths, heat = torch.randint(4, 40, (2,), dtype=torch.int32), torch.rand(2, 3) + 0.5
        call = {"kv_lengths": lengths, "page_table": table, "num_splits": 2, "q_starts": lengths - 4 if given else None}
        checked.clear()
        found = ours.with_cache(q, k, v, heat, **call)
        assert bool(checked) is (round_ == 0)
        torch.testing.assert_close(found, engine("reference").with_cache(q, k, v, heat, **call), rtol=2e-3, atol=2e-3)


def test_packed_queries(checked):
    engine, slopes = engine_of(), torch.rand(4)
    _, k, v = tensors(3)
    for counts in ([1, 0, 4], [2, 2, 1], [0, 5, 0]):
        q, lengths = torch.randn(5, 4, 32).half(), torch.randint(5, 40, (3,), dtype=torch.int32)
        cu = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        call = {"kv_lengths": lengths, "cu_seqlens_q": cu, "num_splits": 2, "return_rowscales": True}
        expected, expected_rows = engine_of().with_cache(q, k, v, slopes, **call)
        checked.clear()
        out = torch.empty_like(q)
        for _ in range(2):
            found, rows = engine.with_cache(q, k, v, slopes, **call, out=out)
        assert torch.equal(found, expected) and torch.equal(rows["lse"], expected_rows["lse"]) and found is out
        assert len(checked) == (counts == [1, 0, 4])


def test_calls_of_several_shapes_take_turns(checked):
    engine, slopes = engine_of(), torch.rand(4)
    calls = [tensors(2), tensors(3), tensors(3, 2)]
    for round_ in range(2):
        checked.clear()
        for q, k, v in calls:
            lengths = torch.full((len(q),), 33, dtype=torch.int32)
            engine.with_cache(q, k, v, slopes, kv_lengths=lengths, num_splits=2)
        assert len(checked) == (0 if round_ else 3)


def test_outputs_are_allocated_on_the_gpu_of_the_call(monkeypatch):
    """torch's quickest allocation knows the current GPU alone."""
    monkeypatch.setattr(torch, "empty_strided", lambda *asked, **more: "of any GPU")
    monkeypatch.setitem(gpu.EMPTY, "cuda", lambda *asked: asked)
    make = gpu.maker((2, 3), torch.float16, torch.device("cuda:1"))
    for current, expected in ((1, ((2, 3), (3, 1), torch.float16)), (0, "of any GPU")):
        monkeypatch.setattr(gpu, "current_gpu", lambda current=current: current)
        assert make() == expected
