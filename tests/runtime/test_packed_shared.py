"""Tables of packed sequences that several calls share."""

import pytest
import torch

from attention_engine import AttentionEngine, library
from attention_engine.ir.program import PLACES
from attention_engine.runtime import packed, packed_shared

ROWS = 48


@pytest.fixture
def made(monkeypatch):
    """How often tables were made, on a CPU as where its tensors could share them."""
    packed_shared._LATEST.clear()
    times, make = [], packed.make_tables
    monkeypatch.setattr(packed_shared, "_counts_writes", lambda starts: not starts.is_inference())
    monkeypatch.setattr(packed, "make_tables", lambda *given: times.append(1) or make(*given))
    yield times
    packed_shared._LATEST.clear()


def starts(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def tensors():
    torch.manual_seed(0)
    return [torch.randn(ROWS, 2, 16, requires_grad=True) for _ in range(3)]


def layer():
    """An engine of its own that has seen the shapes: the first call of them shares where kernels make tables."""
    engine = AttentionEngine(mask_mod=library.causal)
    engine(*tensors(), cu_seqlens_q=starts(0, 1, ROWS))
    return engine


def alone(engine, q, k, v, cu):
    """The same, sequence by sequence."""
    parts = [engine(q[None, a:z], k[None, a:z], v[None, a:z])[0] for a, z in zip(cu.tolist(), cu.tolist()[1:])]
    return torch.cat(parts)


def test_layers_that_are_given_the_same_starts_make_one_set_of_tables(made):
    first, second, cu = layer(), layer(), starts(0, 20, ROWS)
    made.clear()
    for engine in (first, second, first):
        qkv = tensors()
        o = engine(*qkv, cu_seqlens_q=cu)
        o.sum().backward()
        assert torch.allclose(o, alone(engine, *qkv, cu), atol=1e-6)
    assert len(made) == 1


def test_starts_that_were_written_make_others(made):
    engine, cu, qkv = layer(), starts(0, 20, ROWS), tensors()
    made.clear()
    engine(*qkv, cu_seqlens_q=cu)
    for middle in (7, 30):
        cu[1] = middle
        assert torch.allclose(engine(*qkv, cu_seqlens_q=cu), alone(engine, *qkv, cu), atol=1e-6)
    assert len(made) == 3


def test_other_starts_with_the_same_numbers_make_their_own(made):
    engine, qkv = layer(), tensors()
    made.clear()
    for _ in range(2):
        engine(*qkv, cu_seqlens_q=starts(0, 20, ROWS))
    assert len(made) == 2


def test_starts_of_keys_count_too(made):
    engine, qkv, cu, of_k = layer(), tensors(), starts(0, 20, ROWS), starts(0, 20, ROWS)
    engine(*qkv, cu_seqlens_q=cu, cu_seqlens_k=of_k)
    made.clear()
    for _ in range(2):
        engine(*qkv, cu_seqlens_q=cu, cu_seqlens_k=of_k)
    of_k[1] = 25
    engine(*qkv, cu_seqlens_q=cu, cu_seqlens_k=of_k)
    assert len(made) == 2


@pytest.mark.parametrize("why", ["nothing follows", "a graph is captured", "writes are not counted"])
def test_calls_make_tables_of_their_own_where(why, made, monkeypatch):
    engine, cu, qkv = layer(), starts(0, 20, ROWS), tensors()
    made.clear()
    if why == "a graph is captured":
        monkeypatch.setattr(packed_shared, "is_capturing", lambda device: True)
    if why == "writes are not counted":
        with torch.inference_mode():
            cu = starts(0, 20, ROWS)
    with torch.set_grad_enabled(why != "nothing follows"):
        for _ in range(2):
            engine(*qkv, cu_seqlens_q=cu)
    assert len(made) == 2 and not packed_shared._LATEST


def test_what_is_made_of_shared_tables_is_made_once(made):
    cu = starts(0, 20, ROWS)
    tables = packed_shared.share_tables((cu,), (ROWS, ROWS), lambda: (torch.zeros(3), torch.zeros(2, 5)))
    launched = []

    def make():
        launched.append(1)
        return {"list": torch.zeros(1)}

    for places in (tables[1], tables[1], tables[1].clone(), tables[1].clone()):
        packed_shared.share_results({f"custom_{PLACES}": places}, "a kernel", make)
    packed_shared.share_results({f"custom_{PLACES}": tables[1]}, "another", make)
    assert len(launched) == 4


def test_few_sets_of_tables_are_held(made):
    engine, qkv = layer(), tensors()
    for _ in range(10):
        engine(*qkv, cu_seqlens_q=starts(0, 20, ROWS))
    assert len(packed_shared._LATEST) == packed_shared.MOST
