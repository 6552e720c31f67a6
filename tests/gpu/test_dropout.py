"""Dropout by compiled kernels: the pairs of the reference, whatever the tile, and seeds in CUDA graphs."""

import pytest
import torch

from attention_engine import AttentionEngine, library
from attention_engine.ir.chance import chance, threshold
from attention_engine.runtime.moved import Portion, call_portion
from tests import plain

pytestmark = pytest.mark.gpu

P, SEED, HEADS = 0.3, 2**40 + 12345, 4


def kept_pairs(length, b=0, p=P):
    i, h = torch.arange(length, device="cuda"), torch.arange(HEADS, device="cuda")
    seed = torch.tensor([SEED], device="cuda")
    return chance(seed, torch.full_like(seed, b), h[:, None, None], i[:, None], i) >= threshold(p)


def pairs_that_met_values(call, batch, length, dim, dtype=torch.float16, backward=True):
    """Which pairs (batch, heads, queries, keys) call(q, k, v) keeps, forward and backward.

    Values, or gradients, stand for `dim` keys, or queries, at a time: what is not 0 was kept."""
    q, k = torch.zeros(2, batch, length, HEADS, dim, device="cuda", dtype=dtype)
    seen = [[], []] if backward else [[]]
    for first in range(0, length, dim):
        hot, count = torch.zeros_like(q), min(dim, length - first)
        hot[:, first : first + count, :, :count] = torch.eye(count, device="cuda", dtype=dtype)[None, :, None]
        seen[0].append(call(q, k, hot).transpose(1, 2)[..., :count] != 0)
        if backward:
            v = torch.zeros_like(hot).requires_grad_()
            (dv,) = torch.autograd.grad(call(q, k, v), v, hot)
            seen[1].append(dv.permute(0, 2, 3, 1)[:, :, :count] != 0)
    return [torch.cat(parts, axis) for parts, axis in zip(seen, (-1, 2))]


# Each kind of kernel once, as compiling is what takes time: a group that makes bits in both directions (128), in the
# forward pass alone (64), none (256), TileLang's pipelines (96), fp32.
KINDS = [(64, torch.float16, False), (128, torch.bfloat16, True), (256, torch.float16, True),
         (32, torch.float32, False), (96, torch.float16, True)]  # fmt: skip
OF_GROUPS = [kind for kind in KINDS if kind[0] in (64, 128)]


def engine_of(causal, p=P):
    return AttentionEngine(mask_mod=library.causal if causal else None, dropout_p=p)


@pytest.mark.parametrize(("dim", "dtype", "causal"), KINDS, ids=str)
def test_kernels_drop_the_pairs_of_the_reference(dim, dtype, causal):
    length, engine = 3 * dim + 7, engine_of(causal)
    wanted = kept_pairs(length)
    if causal:
        wanted = wanted.tril()
    for found in pairs_that_met_values(lambda *given: engine(*given, dropout_seed=SEED), 1, length, dim, dtype):
        assert torch.equal(found[0], wanted)


@pytest.mark.parametrize("p", [0.001, 0.9985])
def test_whatever_the_probability(p):
    """Forward: numbers are compared alike in both directions."""
    engine = engine_of(False, p)
    (found,) = pairs_that_met_values(
        lambda *given: engine(*given, dropout_seed=SEED), 1, 260, 128, torch.bfloat16, backward=False
    )
    assert torch.equal(found[0], kept_pairs(260, p=p))


def test_packed_sequences_drop_the_pairs_of_their_own_places(dim=64):
    """Lengths that tiles don't divide."""
    length, engine = 203, engine_of(True)
    starts = torch.arange(4, device="cuda", dtype=torch.int32) * length

    def call(*given):
        found = engine(*(t.flatten(0, 1) for t in given), cu_seqlens_q=starts, dropout_seed=SEED)
        return found.unflatten(0, (3, length))

    for found in pairs_that_met_values(call, 3, length, dim):
        for b in range(3):
            assert torch.equal(found[b], kept_pairs(length, b).tril())


def test_parts_drop_the_pairs_of_the_whole(dim=128):
    """Queries of the second sequence from 131 on, in one call; its rows are finished, and see all keys."""
    length, start, engine = 300, 131, engine_of(True)
    part = Portion(
        torch.tensor([[1, 0, start, 0]], device="cuda", dtype=torch.int32), ("batch", "seq_len"),
        {"batch": 2, "seq_len": length},
    )  # fmt: skip

    def call(q, k, v):
        found = call_portion(engine, part, q[:, start:], k, v, [], dropout_seed=SEED)
        return torch.cat([torch.zeros_like(q[:, :start]), found], 1)

    wanted = kept_pairs(length, b=1).tril()
    wanted[:, :start] = False
    for found in pairs_that_met_values(call, 1, length, dim):
        assert torch.equal(found[0], wanted)


def by_head(b, h, q_idx, kv_idx):
    """A mask that no bounds describe, and that differs between heads."""
    return q_idx + 30 * h >= 2 * kv_idx - q_idx % 7


@pytest.mark.parametrize(("dim", "p"), [(64, 0.7), (128, 0.1)])
def test_lists_of_tiles_and_heads_that_share_keys(dim, p):
    """Items of one step and of many, two batches; values are 1: a row of the output says how many pairs were kept. And
    gradients of values, which add up what all queries of all heads kept."""
    length = 700
    engine = AttentionEngine(mask_mod=by_head, dropout_p=p)
    i, h, b = (torch.arange(n, device="cuda") for n in (length, HEADS, 2))
    place = b[:, None, None, None], h[:, None, None], i[:, None], i
    seen = by_head(*place).expand(2, -1, -1, -1)
    numbers = chance(torch.tensor([SEED], device="cuda"), *place)
    q = torch.zeros(2, length, HEADS, dim, device="cuda", dtype=torch.float16)
    k = torch.zeros(2, length, 1, dim, device="cuda", dtype=torch.float16)
    v = torch.ones_like(k).requires_grad_()
    o = engine(q, k, v, dropout_seed=SEED)
    kept, of_row = seen & (numbers >= threshold(p)), seen.sum(-1) * (1 - p)
    counts = o[..., 0].transpose(1, 2).double() * of_row
    assert (counts - kept.sum(-1)).abs().max() < 0.5
    arriving = torch.randn(o.shape[:3], device="cuda", generator=torch.Generator("cuda").manual_seed(0)).half()
    (dv,) = torch.autograd.grad(o, v, arriving[..., None].expand_as(o).contiguous())
    weights = torch.where(kept, arriving.transpose(1, 2).double()[..., None] / of_row[..., None], 0.0)
    assert (dv[:, :, 0, 0].double() - weights.sum((1, 2))).abs().max() < 0.02


@pytest.mark.parametrize(("dim", "dtype", "causal"), OF_GROUPS, ids=str)
def test_outputs_and_gradients_keep_the_rule(dim, dtype, causal, monkeypatch):
    """By kernels that stand compiled: those of the pairs above."""
    shape = (1, 500, HEADS, dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator).to("cuda", dtype) for _ in range(4))
    factors = kept_pairs(500).double() / (1 - P)
    weigh = plain.WEIGHTS["softmax"]
    monkeypatch.setitem(plain.WEIGHTS, "softmax", lambda x, keep: ((w := weigh(x, keep))[0] * factors, w[1]))
    engine = engine_of(causal)

    def results(attend, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        o = attend(*leaves)
        found = torch.autograd.grad(o, leaves, tensors[3])
        return {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), found, strict=True))}

    ours = results(lambda *given: engine(*given, dropout_seed=SEED), q, k, v, do)
    exact = results(
        lambda *given: plain.attention(*given, "softmax", causal=causal), *(t.double() for t in (q, k, v, do))
    )
    eager = results(lambda *given: plain.eager(*given, "softmax", causal=causal), q, k, v, do)
    plain.compare(ours, exact, eager, dtype)


def test_seeds_in_graphs():
    engine = engine_of(False)
    q, k, v = torch.randn(3, 1, 200, HEADS, 64, device="cuda", dtype=torch.float16)
    seed = torch.tensor([1], device="cuda")
    with torch.no_grad():
        for _ in range(2):
            engine(q, k, v), engine(q, k, v, dropout_seed=seed)
        given, drawn = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(given):
            by_tensor = engine(q, k, v, dropout_seed=seed)
        with torch.cuda.graph(drawn):
            by_generator = engine(q, k, v)
        seed.fill_(9)
        given.replay()
        assert torch.equal(by_tensor, engine(q, k, v, dropout_seed=9))
        drawn.replay()
        first = by_generator.clone()
        drawn.replay()
        assert not torch.equal(by_generator, first)
