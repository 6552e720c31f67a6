"""flex_attention and its masks: torch's meaning, few engines, and messages of who comes from there."""

from __future__ import annotations

import math
import re
from functools import cached_property

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from attention_engine import AttentionEngine, compiler, errors, library
from attention_engine.flex import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)
from attention_engine.flex import engines as flex_engines
from attention_engine.runtime.attentions import ATTENTIONS

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def fresh():
    flex_engines.FINDER._built.cache_clear()
    flex_engines.FINDER._plain.clear()


def made():
    return flex_engines.FINDER._built.cache_info().misses


def qkv(batch=2, heads=4, kv_heads=4, queries=40, keys=40, dim=8, dtype=DOUBLE):
    make = torch.Generator().manual_seed(0)
    shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys)]
    return [torch.randn(batch, h, n, dim, generator=make, dtype=DOUBLE).to(dtype) for h, n in shapes]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def mask_of(mask_mod=causal, queries=40, keys=40, **more):
    return create_block_mask(mask_mod, None, None, queries, keys, **more)


def of_torch(*given, **more):
    with torch.no_grad():
        return torchs.flex_attention(*given, **more)


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is")


# ---- torch's meaning


@pytest.mark.parametrize("grouped", [False, True])
def test_it_is_torchs_flex_attention(grouped):
    given = qkv(kv_heads=2 if grouped else 4, queries=33, keys=47)
    slopes = torch.linspace(0.1, 0.4, 4, dtype=DOUBLE)

    def score(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < 9

    more = dict(scale=0.3, enable_gqa=grouped)
    theirs = torchs.create_block_mask(window, None, None, 33, 47, device="cpu", BLOCK_SIZE=16)
    want, rows = of_torch(*given, score, theirs, return_aux=torchs.AuxRequest(lse=True), **more)
    for mask in (mask_of(window, 33, 47), theirs):
        found, lse = flex_attention(*given, score, mask, return_lse=True, **more)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(lse, rows.lse)


@pytest.mark.parametrize("turn", ["contiguous", "transposed", "expanded", "sliced"])
def test_strides_are_honoured(turn):
    q, k, v = qkv()
    kept = [t.clone() for t in (q, k, v)]
    if turn == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif turn == "expanded":
        k = kept[1] = k[:, :1].expand(-1, 4, -1, -1)
    elif turn == "sliced":
        q = torch.cat([q, q], -1)[..., : q.shape[-1]]
    torch.testing.assert_close(flex_attention(q, k, v, None, mask_of()), of_torch(*kept, None, torchs.create_block_mask(
        causal, None, None, 40, 40, device="cpu")))  # fmt: skip


def test_rows_are_returned_as_they_are_asked_for():
    given = qkv()
    scores = (given[0] @ given[1].mT) * given[0].shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -math.inf)
    o, rows = flex_attention(*given, None, mask_of(), return_aux=AuxRequest(lse=True, max_scores=True))
    torch.testing.assert_close(rows.lse, scores.logsumexp(-1))
    torch.testing.assert_close(rows.max_scores, scores.amax(-1))
    assert torch.equal(o, flex_attention(*given, None, mask_of()))
    _, rows = flex_attention(*given, None, mask_of(), return_aux=torchs.AuxRequest(max_scores=True))
    assert rows.lse is None and rows.max_scores is not None
    o, rows = flex_attention(*given, return_aux=AuxRequest())
    assert rows == (None, None) and torch.is_tensor(o)
    with pytest.raises(errors.OptionsClash, match="return_lse and return_aux are both given"):
        flex_attention(*given, return_lse=True, return_aux=AuxRequest(lse=True))


def test_the_lse_has_a_gradient_and_the_largest_score_none():
    q, k, v = (t.requires_grad_() for t in qkv())
    _, rows = flex_attention(q, k, v, return_aux=AuxRequest(True, True))
    want = ((q @ k.mT) * q.shape[-1] ** -0.5).logsumexp(-1)
    found, exact = (torch.autograd.grad(x.square().sum(), [q, k], retain_graph=True) for x in (rows.lse, want))
    torch.testing.assert_close(found, exact)
    nothing = torch.autograd.grad(rows.max_scores.sum(), [q, k], allow_unused=True)
    assert all(d is None or not d.any() for d in nothing)


def test_a_row_that_keeps_no_pair_is_0():
    given = [t.requires_grad_() for t in qkv()]
    o, rows = flex_attention(*given, None, mask_of(lambda b, h, q, k: (q > 20) & (k > 3)), return_aux=AuxRequest(1, 1))
    for row in (rows.lse, rows.max_scores):
        assert (row[:, :, :21] == -math.inf).all() and row[:, :, 21:].isfinite().all()
    assert not o[:, :, :21].any()
    assert all(d.isfinite().all() for d in torch.autograd.grad(o.sum(), given))


def test_another_normaliser_takes_the_place_of_softmax():
    q, k, v = qkv()
    x = (q @ k.mT) * q.shape[-1] ** -0.5
    found = flex_attention(q, k, v, online_func=library.OnlineSigmoid())
    torch.testing.assert_close(found, x.sigmoid() @ v)
    _, lse = flex_attention(q, k, v, return_lse=True, online_func=library.OnlineSoftmaxOne())
    torch.testing.assert_close(lse, torch.cat([x, torch.zeros_like(x[..., :1])], -1).logsumexp(-1))
    with pytest.raises(errors.OptionsClash, match=r"online_func returns no row of that name\. It returns: none"):
        flex_attention(q, k, v, return_lse=True, online_func=library.OnlineSigmoid())


def test_weights_are_dropped_beside_functions():
    q, k, _ = qkv(queries=200, keys=200)
    v, mask = torch.eye(200, dtype=DOUBLE).expand(2, 4, -1, -1), mask_of(causal, 200, 200)
    whole = flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s), mask)
    o = flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s), mask, dropout_p=0.5)
    kept = o != 0
    assert 0.49 < kept.double().sum() / (whole != 0).double().sum() < 0.51
    torch.testing.assert_close(o, torch.where(kept, whole * 2, 0.0))


# ---- few engines


def test_functions_made_anew_are_one_engine():
    given, before = qkv(dtype=torch.float32), len(ATTENTIONS)
    for n in range(1000):
        slopes = torch.full((4,), 0.001 * n)
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40)
        o = flex_attention(*given, lambda s, b, h, q, k: s - slopes[h] * (q - k), mask)  # noqa: B023
    assert made() == 1 and len(ATTENTIONS) <= before + 1
    x = (given[0] @ given[1].mT) * 8**-0.5 - 0.999 * (torch.arange(40)[:, None] - torch.arange(40))
    x = x.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -math.inf)
    torch.testing.assert_close(o, x.softmax(-1) @ given[2])


def test_a_thousand_lambdas_compile_each_kernel_once(monkeypatch):
    """With gradients, each step with functions made anew; what would compile is noted, and does nothing."""
    compiled = []

    def compile_nothing(kernel):
        compiled.append(kernel.builder)
        return lambda *_: None

    silent = cached_property(compile_nothing)
    silent.__set_name__(compiler.Kernel, "compiled")
    monkeypatch.setattr(compiler.Kernel, "compiled", silent)
    q, k, v = (t.detach().requires_grad_() for t in qkv(dtype=torch.float16))
    for n in range(1000):
        length, slopes = 8 + n % 32, torch.full((4,), 0.001 * n)
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length)
        given = [t[:, :, :length] for t in (q, k, v)]
        o = flex_attention(*given, lambda s, b, h, q, k: s - slopes[h] * (q - k), mask,  # noqa: B023
                           kernel_options={"backend": "interpret"})  # fmt: skip
        o.sum().backward()
    assert made() == 1 and compiled and sorted(set(compiled)) == sorted(compiled)


def test_other_lengths_are_no_other_engine():
    for n in (8, 17, 40):
        docs = torch.arange(n) // 5
        given = qkv(queries=n, keys=n, dtype=torch.float32)
        found = flex_attention(*given, None, mask_of(lambda b, h, q, k: docs[q] == docs[k], n, n))  # noqa: B023
        bias = torch.where(docs[:, None] == docs, 0.0, -math.inf)
        torch.testing.assert_close(found, ((given[0] @ given[1].mT) * 8**-0.5 + bias).softmax(-1) @ given[2])
    assert made() <= 3  # captured shapes tell recipes apart
    assert len({e.engine._program.fingerprint for e in flex_engines.FINDER._plain.values()}) == 1


def test_numbers_and_code_tell_engines_apart():
    given = qkv()
    for factor in (0.5, 0.25, 0.5):
        found = flex_attention(*given, lambda s, b, h, q, k: s * factor)  # noqa: B023
        torch.testing.assert_close(found, flex_attention(*given, scale=8**-0.5 * factor))
    assert made() == 4


def test_one_tensor_in_two_places_is_told_from_two():
    given, first, second = qkv(), torch.rand(4, dtype=DOUBLE), torch.rand(4, dtype=DOUBLE)

    def run(a, b):
        return flex_attention(*given, lambda s, batch, h, q, k: s * a[h] + b[h] * (q - k))

    for pair in ((first, first), (first, second), (second, first), (second, second)):
        flex_engines.FINDER._plain.clear()
        want = run(*(t.clone() for t in pair))
        torch.testing.assert_close(run(*pair), want)
        torch.testing.assert_close(run(*pair), want)


def test_what_is_read_as_a_number_now_is_read_again():
    given, cap = qkv(), torch.tensor([[2.0]], dtype=DOUBLE, requires_grad=True)

    def run():
        return flex_attention(*given, lambda s, b, h, q, k: cap * torch.tanh(s / cap))

    for value in (2.0, 3.0):
        with torch.no_grad():
            cap.fill_(value)
        want = flex_attention(*given, lambda s, b, h, q, k: value * torch.tanh(s / value))  # noqa: B023
        torch.testing.assert_close(run(), want)
    assert torch.autograd.grad(run().sum(), cap)[0].shape == (1, 1)


# ---- masks


def test_a_block_mask_says_what_torchs_says():
    docs = torch.arange(96) // 20

    def mask(b, h, q_idx, kv_idx):
        return (docs[q_idx] == docs[kv_idx]) & (q_idx >= kv_idx + h)

    ours = create_block_mask(mask, 2, 3, 96, 64, device="cpu", BLOCK_SIZE=(16, 32), _compile=True)
    theirs = torchs.create_block_mask(mask, 2, 3, 96, 64, device="cpu", BLOCK_SIZE=(16, 32))
    assert ours.shape == theirs.shape and ours.numel() == theirs.numel()
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert ours.sparsity() == pytest.approx(theirs.sparsity())
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE and ours.to("cpu").shape == ours.shape
    blocks = [x for x in (theirs.kv_num_blocks, theirs.kv_indices, theirs.full_kv_num_blocks, theirs.full_kv_indices)]
    listed = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=(16, 32), mask_mod=mask, seq_lengths=(96, 64))
    assert torch.equal(listed.to_dense(), theirs.to_dense())
    given = qkv(heads=3, kv_heads=3, queries=96, keys=64)
    torch.testing.assert_close(flex_attention(*given, None, listed), flex_attention(*given, None, ours))


def test_a_long_mask_costs_nothing():
    mask = create_block_mask(causal, None, None, 1 << 24, 1 << 24)
    assert mask.numel() == 1 << 48
    assert re.fullmatch(
        rf"BlockMask\(shape=\(1, 1, {1 << 24}, {1 << 24}\), BLOCK_SIZE=\(128, 128\), "
        r"mask_mod=test_flex\.py:\d+: causal\)", repr(mask),
    )  # fmt: skip


def test_a_mask_prints_its_blocks():
    assert str(create_block_mask(causal, None, None, 48, 48, BLOCK_SIZE=16)) == (
        "BlockMask(shape=(1, 1, 48, 48), sparsity=33.33%,\n(0, 0)\n██    \n████  \n██████\n)"
    )
    assert "░░" in create_block_mask(causal, None, None, 4096, 4096).to_string(grid_size=10)
    assert "... and 4 more" in create_block_mask(causal, 2, 4, 48, 48).to_string()
    assert "<svg" in mask_of()._repr_html_()


def test_masks_are_joined():
    def dense(mask_mod):
        return create_block_mask(mask_mod, None, None, 12, 12, BLOCK_SIZE=1).to_dense().bool()

    def even(b, h, q_idx, kv_idx):
        return kv_idx % 2 == 0

    assert torch.equal(dense(and_masks(causal, even)), dense(causal) & dense(even))
    assert torch.equal(dense(or_masks(causal, even)), dense(causal) | dense(even))
    assert dense(noop_mask).all() and dense(and_masks()).all() and not dense(or_masks()).any()
    assert torch.equal(dense(torchs.and_masks(causal, even)), dense(and_masks(causal, even)))
    assert torch.equal(dense(torchs.or_masks(causal, even)), dense(or_masks(causal, even)))
    with pytest.raises(errors.NotAFunction, match=r"a BlockMask was given .* Give block_mask.mask_mod"):
        and_masks(causal, mask_of())


def test_a_part_of_a_mask_says_the_same_of_it():
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx % (h + 2) <= b)

    whole = create_block_mask(mask, 3, 4, 64, 64, BLOCK_SIZE=16)
    part = whole[1:3, 2, 1:3]
    assert part.shape == (2, 1, 32, 64)
    assert torch.equal(part.to_dense(), whole.to_dense()[1:3, 2:3, 1:3])
    assert whole[-1].shape == (1, 4, 64, 64)
    given = qkv(batch=2, heads=1, kv_heads=1, queries=32, keys=64)
    shifted = create_block_mask(lambda b, h, q, k: mask(b + 1, h + 2, q + 16, k), 2, 1, 32, 64)
    torch.testing.assert_close(flex_attention(*given, None, part), flex_attention(*given, None, shifted))
    for n in range(1, 4):  # as a decoding step moves on
        flex_attention(*[t[:, :, :16] if t.shape[2] == 32 else t for t in given], None, whole[1:3, 2, n])
    assert made() == 2
    with pytest.raises(errors.BadInput, match=r"indexed by 7, where nothing is"):
        whole[7]


def test_torchs_lists_of_blocks_count_where_they_say_something_else():
    indices = torch.tensor([[[[0, 1, 2], [2, 0, 1], [1, 0, 2]]]], dtype=torch.int32)
    counts, given = torch.tensor([[[1, 2, 1]]], dtype=torch.int32), qkv(queries=48, keys=48)
    full = torch.tensor([[[0, 0, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1, 2]] * 3]], dtype=torch.int32)
    theirs = torchs.BlockMask.from_kv_blocks(counts, indices, *full, BLOCK_SIZE=16, mask_mod=causal)
    kinds = torch.tensor([[1, 0, 0], [1, 0, 1], [2, 1, 0]]).repeat_interleave(16, 0).repeat_interleave(16, 1)
    kept = (kinds == 2) | ((kinds == 1) & torch.ones(48, 48, dtype=torch.bool).tril())
    x = (given[0] @ given[1].mT * 8**-0.5).masked_fill(~kept, -math.inf)
    want = torch.where(kept.any(-1, keepdim=True), x.softmax(-1), 0.0) @ given[2]
    torch.testing.assert_close(flex_attention(*given, None, theirs), want)
    listed = BlockMask.from_kv_blocks(counts, indices, *full, BLOCK_SIZE=16, mask_mod=causal)
    torch.testing.assert_close(flex_attention(*given, None, listed), want)


# ---- messages


WRONG = {
    "lengths": (lambda q, k, v: flex_attention(q, k, v, None, mask_of(causal, 32, 48)), errors.WrongBlockMask,
                "block_mask was made for 32 queries and 48 keys, and this call has 40 queries and 40 keys.\n  Make one "
                "for these lengths, which costs nothing: create_block_mask(mask_mod, B, H, 40, 40)."),
    "batch": (lambda q, k, v: flex_attention(q, k, v, None, create_block_mask(causal, 3, 2, 40, 40)),
              errors.WrongBlockMask, "block_mask was made for batch 3 and 2 heads, and this call has batch 2 and 4 "
              "heads. Give 1 (or None) where the mask doesn't depend on it."),
    "function": (lambda q, k, v: flex_attention(q, k, v, None, causal), errors.WrongBlockMask,
                 "block_mask is a function. Make a mask of it: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."),
    "tensor": (lambda q, k, v: flex_attention(q, k, v, None, torch.ones(40, 40, dtype=torch.bool)),
               errors.WrongBlockMask, "block_mask is Tensor. Give create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN).\n"
               "  A tensor over pairs is read in a mask_mod: lambda b, h, q_idx, kv_idx: mask[b, h, q_idx, kv_idx]."),
    "heads": (lambda q, k, v: flex_attention(q, k[:, :2], v[:, :2]), errors.HeadsDoNotGroup,
              "query has 4 heads and key 2. Say enable_gqa=True, where query heads share key heads."),
    "rank": (lambda q, k, v: flex_attention(q[0], k, v), errors.WrongRank, None),
    "tile": (lambda q, k, v: flex_attention(q, k, v, kernel_options={"BLOCK_M": 64}), errors.UnknownOption,
             "kernel_options['BLOCK_M'] chooses a tile of FlexAttention's Triton kernels. Leave it out: the problem "
             "chooses tiles.\n  An AttentionEngine with tune=True measures them."),
    "triton": (lambda q, k, v: flex_attention(q, k, v, kernel_options={"bwd_USE_TMA": True}), errors.UnknownOption,
               "kernel_options['bwd_USE_TMA'] is for FlexAttention's Triton kernels. Leave it out."),
    "backend": (lambda q, k, v: flex_attention(q, k, v, kernel_options={"BACKEND": "FLASH"}), errors.UnknownOption,
                None),
    "option": (lambda q, k, v: flex_attention(q, k, v, kernel_options={"determinstic": True}), errors.UnknownOption,
               None),
    "custom": (lambda q, k, v: flex_attention(q, k, v, lambda score, custom, b, h, q, k: score), errors.WrongArity,
               None),
    "mask as score": (lambda q, k, v: flex_attention(q, k, v, causal), errors.WrongArity, None),
    "score as mask": (lambda q, k, v: create_block_mask(lambda s, b, h, q, k: s, 1, 1, 4, 4), errors.WrongArity, None),
    "branch": (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s if i > j else s * 2),
               errors.BranchOnSymbol, None),
    "write order": (lambda q, k, v: mask_of(compute_dq_write_order=True), errors.NotYetSupported, None),
    "a float": (lambda q, k, v: create_block_mask(causal, None, None, 40.0, 40), errors.BadInput,
                "Q_LEN is 40.0. Give an integer, at least 0: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."),
    "below 0": (lambda q, k, v: create_block_mask(causal, None, None, 40, -40), errors.BadInput,
                "KV_LEN is -40. Give an integer, at least 0: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."),
    "batch, a text": (lambda q, k, v: create_block_mask(causal, "2", None, 40, 40), errors.BadInput,
                      "B is '2'. Give an integer, at least 1, or None for 1: create_block_mask(mask_mod, B, H, Q_LEN, "
                      "KV_LEN)."),
    "blocks of 0": (lambda q, k, v: mask_of(BLOCK_SIZE=(16, 0)), errors.BadInput, None),
    "three sizes": (lambda q, k, v: mask_of(BLOCK_SIZE=(16, 16, 16)), errors.BadInput,
                    "BLOCK_SIZE is (16, 16, 16). Give one number, or two: (of queries, of keys)."),
    "rows": (lambda q, k, v: flex_attention(q, k, v, return_aux=True), errors.UnknownOption,
             "return_aux is True. Give AuxRequest(lse=True), or return_lse=True."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told(name):
    call, error, message = WRONG[name]
    with pytest.raises(error) as caught:
        call(*qkv())
    if message is not None:
        assert str(caught.value) == message


def test_what_holds_anyway_is_taken():
    given = qkv()
    options = {"ROWS_GUARANTEED_SAFE": True, "fwd_BLOCKS_ARE_CONTIGUOUS": True, "BACKEND": "AUTO", "PRESCALE_QK": False,
               "FORCE_USE_FLEX_ATTENTION": True, "deterministic": True}  # fmt: skip
    assert torch.equal(flex_attention(*given, kernel_options=options), flex_attention(*given))


# ---- compiled


class Block(torch.nn.Module):
    """Attention whose functions are made in each step, of parameters, numbers and tensors made on the way."""

    def __init__(self):
        super().__init__()
        self.bias, self.cap = torch.nn.Parameter(torch.linspace(-1, 1, 4 * 81).view(4, 81)), 5.0

    def forward(self, q, k, v, docs, mask=None):
        table, shift = self.bias.exp(), q.shape[2]

        def score(score, b, h, q_idx, kv_idx):
            return torch.tanh(score / self.cap) * self.cap + table[h, q_idx - kv_idx + 40] + self.bias[0][h]

        if mask is None:
            mask = create_block_mask(
                and_masks(causal, lambda b, h, i, j: docs[i] == docs[j]), None, None, shift, k.shape[2]
            )
        o, rows = flex_attention(q, k, v, score, mask, return_aux=AuxRequest(True, True))
        return o, rows.lse, rows.max_scores


@pytest.mark.parametrize("given", ["inside", "ours", "torchs"])
def test_it_compiles_whole(given):
    torch._dynamo.reset()
    block, graphs = Block(), []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for n in (24, 31, 40):
        docs = torch.arange(n) // 7
        q, k, v = (t.requires_grad_() for t in qkv(queries=n, keys=n, dtype=torch.float32))
        mask = None
        if given == "ours":
            mask = mask_of(lambda b, h, i, j: docs[i] == docs[j], n, n)  # noqa: B023
        elif given == "torchs":
            same = lambda b, h, i, j, docs=docs: docs[i] == docs[j]  # noqa: E731
            mask = torchs.create_block_mask(same, None, None, n, n, device="cpu", BLOCK_SIZE=16)
        both = []
        for run in (block, compiled):
            o, lse, most = run(q, k, v, docs, mask)
            both.append([o, lse, most, *torch.autograd.grad((o.square().sum() + lse.sum()), [q, k, v, block.bias])])
        torch.testing.assert_close(*both)
    assert given != "inside" or len(graphs) == 2  # one for a length, one for all


def test_a_normaliser_and_options_reach_the_compiled_call():
    torch._dynamo.reset()
    given, online = qkv(dtype=torch.float32), library.OnlineSoftmaxOne()

    def run(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * 0.5, mask_of(), return_lse=True, online_func=online,
                              kernel_options={"deterministic": True})  # fmt: skip

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(*given), run(*given))


def test_autocast_is_followed_in_a_compiled_call():
    torch._dynamo.reset()
    given, seen = [t.requires_grad_() for t in qkv(dtype=torch.float32)], []

    def run(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            o = flex_attention(q, k, v, lambda s, b, h, i, j: s * 0.5, mask_of())
        seen.append(o.dtype)
        return o

    found, want = torch.compile(run, fullgraph=True, backend="aot_eager")(*given), run(*given)
    assert torch.equal(found, want) and set(seen) == {torch.bfloat16}
    found, want = (torch.autograd.grad(o.float().square().sum(), given) for o in (found, want))
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_a_compiler_may_leave_all_numbers_open(dropout_p):
    torch._dynamo.reset()
    q, k, v = (t.requires_grad_() for t in qkv(dtype=torch.float32))
    v = torch.ones_like(v)

    def run(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * 0.5, mask_of(noop_mask), dropout_p=dropout_p)

    o = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")(q, k, v)
    assert (o - 1).abs().mean() < 0.2 and bool(((o - 1).abs() > 1e-3).any()) is (dropout_p > 0)
    assert len(torch.autograd.grad(o.square().sum(), [q, k])) == 2


def scaled_by(factor):
    return lambda s, b, h, i, j: s * factor


def near(width):
    return lambda b, h, i, j: abs(i - j) < width


def test_a_compiler_sees_that_functions_hold_other_numbers():
    torch._dynamo.reset()
    given = qkv(dtype=torch.float32)
    compiled = torch.compile(
        lambda q, k, v, score, mask, scale: flex_attention(q, k, v, score, mask, scale), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    for factor, width, scale in ((0.5, 7, 0.1), (0.25, 9, 0.2), (3, 9, 0.3), (torch.tensor([2.0]), 20, None)):
        more = scaled_by(factor), mask_of(near(width)), scale
        torch.testing.assert_close(compiled(*given, *more), flex_attention(*given, *more))


def test_an_engine_takes_a_block_mask():
    given = qkv()
    engine = AttentionEngine(block_mask=mask_of(), layout="bhsd")
    torch.testing.assert_close(engine(*given), flex_attention(*given, None, mask_of()))
    with pytest.raises(errors.OptionsClash, match="a BlockMask is given beside another mask"):
        AttentionEngine(mask_mod=causal, block_mask=mask_of())
