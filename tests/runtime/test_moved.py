"""Calls that hold a part of an attention: right at any start, with bounds where the whole has them."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, compiler, document_ids
from attention_engine.errors import OptionsClash
from attention_engine.ir.program import OF_KEYS, OF_QUERIES, QUERY_PLACES, STARTS
from attention_engine.library import and_masks, causal, sliding_window
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.moved import Portion, call_portion
from tests.cases import Shape
from tests.mask_cases import PAIRS
from tests.moved_cases import Rectangle, errors

WHOLE = Shape(2, 205, 205, 4, 2)
PART = Rectangle((1, 2, 61, 26), (1, 2, 139, 133))


@pytest.mark.parametrize(("score", "mask"), PAIRS, ids=map(", ".join, PAIRS))
def test_the_reference_keeps_the_rule(score, mask):
    assert errors(score, mask, WHOLE, PART, torch.float32, floor=1e-7, backend="reference")


@pytest.mark.parametrize(("score", "mask"), PAIRS, ids=map(", ".join, PAIRS))
def test_kernels_keep_the_rule(score, mask):
    assert errors(score, mask, WHOLE, PART, torch.float16, floor=1e-4, backend="interpret")


@pytest.mark.parametrize(("score", "mask"), [
    ("alibi", "causal"), ("of pairs", "causal"), ("of keys", "padding"), ("symmetric", "global"),
])  # fmt: skip
def test_starts_of_queries_alone_move_nothing_else(score, mask):
    """As where a rank holds all keys and some queries: inputs of heads and batches are read where they stand."""
    part = Rectangle((0, 0, 61, 0), (2, 4, 139, 205), ("seq_len",))
    assert errors(score, mask, WHOLE, part, torch.float16, floor=1e-4, kv_heads=2, backend="interpret")


def causal_with_rows(q, k, v, q_starts):
    """In float64, each batch's queries from their own place on."""
    at = q_starts.view(-1, 1, 1, 1) + torch.arange(q.shape[1]).view(1, 1, -1, 1)
    keep = at >= torch.arange(k.shape[1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~keep, -torch.inf).softmax(-1), v.double())


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_each_batch_may_start_elsewhere(backend):
    engine = AttentionEngine(mask_mod=causal, backend=backend)
    q, k, v = (torch.randn(3, n, 2, 32, requires_grad=True) for n in (70, 160, 160))
    starts = torch.tensor([[0, 0, 90, 0], [0, 0, 0, 0], [0, 0, 37, 0]], dtype=torch.int32)
    found = call_portion(engine, Portion(starts, ("seq_len",), {}), q, k, v, [])
    exact = causal_with_rows(q, k, v, starts[:, 2])
    assert (found - exact).abs().max() < 2e-6
    d_o = torch.randn_like(found)
    for mine, theirs in zip(*(torch.autograd.grad(o, (q, k, v), d_o.to(o)) for o in (found, exact)), strict=True):
        assert (mine - theirs).abs().max() < 1e-5


def of_documents(b, h, q_idx, kv_idx, custom):
    """Ids and limits of both sides, limits by heads, and keys that are read beside their own index too."""
    ids, keys, limits = custom["ids"], custom["keys"], custom["limits"]
    near = keys[kv_idx] | keys[(kv_idx - 1).max(0)]
    return (ids[b, q_idx] == ids[b, kv_idx]) & near & ((kv_idx <= limits[h, q_idx]) | (limits[h, kv_idx] == 30))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("first", [0, 16])
def test_listed_queries_read_copies_of_integers_at_their_own_index(backend, first):
    length, keys = 150, 170  # ids of keys behind the last query are 0
    axes = {"ids": ("batch", "seq_len"), "limits": ("heads", "seq_len"), "keys": ("seq_len_kv",)}
    ids = torch.cat([document_ids([0, 40, 9, 101]), document_ids([70, 80])])
    custom = [ids, torch.arange(length).repeat(2, 1) + torch.tensor([[0], [25]]), torch.rand(keys) < 0.7]
    engine = AttentionEngine(None, CustomIO(axes), None, of_documents, backend=backend)
    q, k, v = (torch.randn(2, n, 2, 16, requires_grad=True) for n in (length, keys, keys))
    places = torch.cat([torch.arange(20, 52), torch.arange(64, 96), torch.arange(110, 150)])
    sizes = {"batch": 2, "heads": 2, "seq_len": length, "seq_len_kv": keys}
    starts = torch.tensor([[0, 0, 0, first]], dtype=torch.int32)
    part = Portion(starts, ("seq_len", "seq_len_kv"), sizes, places.int(), keys_from=first)
    keep = torch.arange(keys) >= first
    whole = AttentionEngine(
        None, CustomIO({**axes, "keep": ("seq_len_kv",)}), None,
        lambda b, h, q_idx, kv_idx, custom: of_documents(b, h, q_idx, kv_idx, custom) & custom["keep"][kv_idx],
        backend="reference",
    )  # fmt: skip
    exact = whole(q, k, v, *custom, keep)[:, places]
    found = call_portion(engine, part, q[:, places], k[:, first:], v[:, first:], custom)
    assert (found - exact).abs().max() < 2e-6
    d_o = torch.randn_like(found)
    for mine, theirs in zip(*(torch.autograd.grad(o, (q, k, v), d_o) for o in (found, exact)), strict=True):
        assert (mine - theirs).abs().max() < 1e-5
    (attention,) = [ATTENTIONS[key] for key in engine._keys.values()]
    copies = {of + name for of in (OF_QUERIES, OF_KEYS) for name in ("ids", "limits")} | {OF_KEYS + "keys"}
    assert plan_tiles(attention.program.mask).reads - {STARTS, QUERY_PLACES} == copies | {"keys"}


def test_calls_alike_keep_copies_and_lists_of_tiles(monkeypatch):
    """Of tensors that are unwritten, as who makes the portion knows: another `made` begins anew."""
    listed, run = [], compiler.Kernel.__dict__["run"].func

    def noted(kernel):
        return lambda *given: listed.append(kernel.builder) or run(kernel)(*given)

    monkeypatch.setattr(compiler.Kernel, "run", property(noted))
    ids = document_ids([70, 80])
    engine = AttentionEngine(
        None, CustomIO({"ids": ("batch", "seq_len")}), None,
        lambda b, h, q_idx, kv_idx, custom: custom["ids"][b, q_idx] == custom["ids"][b, kv_idx], backend="interpret",
    )  # fmt: skip
    q, k, v = (torch.randn(1, 150, 2, 16, requires_grad=True) for _ in range(3))
    places, starts = torch.cat([torch.arange(20, 52), torch.arange(64, 96)]).int(), torch.zeros(1, 4, dtype=torch.int32)
    sizes = {"batch": 1, "heads": 2, "seq_len": 150, "seq_len_kv": 150}

    def results(unwritten, made):
        part = Portion(starts, ("seq_len",), sizes, places, unwritten=unwritten, made=made)
        o = call_portion(engine, part, q[:, places], k, v, [ids])
        return [o, *torch.autograd.grad(o.sum(), (q, k, v))]

    def lists():
        found = listed.count("tile_map.tile_map")
        listed.clear()
        return found

    first, made = results((), {}), {}
    assert lists() == 2
    for wanted in (2, 0, 0):
        assert all(torch.equal(a, b) for a, b in zip(results(("ids",), made), first, strict=True))
        assert lists() == wanted
    results(("ids",), {})
    assert lists() == 2
    ids[:, 60:80] = 1
    found = results(("ids",), {})
    assert lists() == 2 and not torch.equal(found[0], first[0])


def test_no_start_compiles_anything_and_bounds_stay_bounds():
    engine = AttentionEngine(mask_mod=and_masks(causal, sliding_window(40, 0)), backend="interpret")
    q, k, v = torch.randn(3, 1, 96, 2, 32)
    for first in (0, 17, 1000):
        starts = torch.tensor([[0, 0, first, first]], dtype=torch.int32)
        found = call_portion(engine, Portion(starts, ("seq_len", "seq_len_kv"), {}), q, k, v, [])
        torch.testing.assert_close(found, engine(q, k, v))  # a window knows distances alone
    (key,) = (key for asked, key in engine._keys.items() if asked[-1] is not None)
    (kernels,) = ATTENTIONS[key].program_kernels._kernels.values()
    assert not kernels.plan.tile_plan.mapped and all(bound.starts for bound in kernels.plan.tile_plan.bounds.bounds)


def test_a_call_without_starts_reads_none():
    engine = AttentionEngine(mask_mod=causal, backend="interpret")
    engine(*torch.randn(3, 1, 20, 2, 32))
    assert STARTS not in engine._program.custom and STARTS not in engine.source("forward")


def test_a_block_mask_that_is_a_tensor_is_refused():
    engine = AttentionEngine(block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    with pytest.raises(OptionsClash, match="Write it as a function"):
        call_portion(
            engine, Portion(torch.zeros(1, 4, dtype=torch.int32), ("seq_len",), {}), *torch.randn(3, 1, 8, 2, 16), []
        )


def test_what_functions_capture_is_whole():
    table = torch.randn(4, 70, dtype=torch.float64, requires_grad=True)
    engine = AttentionEngine(score_mod=lambda s, custom, b, h, q, k: s * table[h, q] + table[h, k])
    q, k, v = torch.randn(3, 1, 70, 4, 16, dtype=torch.float64)
    starts = torch.tensor([[0, 2, 30, 0]], dtype=torch.int32)
    mine = call_portion(engine, Portion(starts, ("heads", "seq_len"), {}), q[:, 30:, 2:], k[:, :, 2:], v[:, :, 2:], [])
    exact = engine(q, k, v)[:, 30:, 2:]
    torch.testing.assert_close(mine, exact)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), table)[0] for o in (mine, exact)))
