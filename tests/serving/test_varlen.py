"""flash_attn_varlen_func: flash-attn's options beside plain torch, sequence by sequence, gradients too."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_engine.errors import NotATensor, NotYetSupported, UnknownOption, WrongCache, WrongCustomShape
from attention_engine.serving import flash_attn_varlen_func
from tests import plain
from tests.packed_cases import drawn, starts

LENGTHS, KEY_LENGTHS = (9, 0, 30, 5), (12, 4, 30, 11)
SLOPES = drawn(4, seed=4).abs()
OPTIONS = {
    "plain": {}, "causal": {"causal": True}, "scaled": {"softmax_scale": 0.5, "causal": True},
    "a window": {"window_size": (4, 2)}, "left alone": {"window_size": (4, -1)},
    "causal window": {"window_size": (6, 3), "causal": True}, "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "alibi of sequences": {"alibi_slopes": SLOPES * torch.arange(1, 5)[:, None]},
}  # fmt: skip


def tensors():
    sizes = ((sum(LENGTHS), 4, 16), (sum(KEY_LENGTHS), 2, 16), (sum(KEY_LENGTHS), 2, 16))
    return [drawn(*size, seed=n).requires_grad_() for n, size in enumerate(sizes)]


def right(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    out, rows, at, at_k = [], [], 0, 0
    scale = 0.25 if softmax_scale is None else softmax_scale
    left, after = window_size[0], 0 if causal else window_size[1]
    for n, (queries, keys) in enumerate(zip(LENGTHS, KEY_LENGTHS)):
        late = keys - queries

        def score(s, b, h, i, j, n=n, late=late):
            s = softcap * torch.tanh(s * scale / softcap) if softcap else s * scale
            if alibi_slopes is None:
                return s
            slopes = alibi_slopes if alibi_slopes.ndim == 1 else alibi_slopes[n]
            return s - slopes.double()[h] * (i + late - j).abs()

        def mask(b, h, i, j, late=late):
            behind = i + late - j
            return (behind <= (left if left >= 0 else 1000)) & (behind >= -(after if after >= 0 else 1000))

        one = q[None, at : at + queries], k[None, at_k : at_k + keys], v[None, at_k : at_k + keys]
        if queries:
            o, lse = plain.attention(*one, "softmax", score=score, mask=mask, return_lse=True)
            out.append(o[0])
            rows.append(lse[0])
        at, at_k = at + queries, at_k + keys
    return torch.cat(out), torch.cat(rows, 1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_mean_what_they_mean_in_flash_attn(options):
    qkv = tensors()
    cu, cu_k = starts(LENGTHS), starts(KEY_LENGTHS)
    o, lse, none = flash_attn_varlen_func(*qkv, cu, cu_k, 30, 30, return_attn_probs=True, **options)
    want, rows = right(*qkv, **options)
    assert none is None and lse.shape == (4, sum(LENGTHS)) and torch.allclose(lse.double(), rows, atol=1e-5)
    assert torch.allclose(o.double(), want, atol=1e-5)
    arriving = drawn(*o.shape, seed=9)
    found, exact = (torch.autograd.grad(x, qkv, arriving.to(x.dtype)) for x in (o, want))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, exact))


def test_the_signature_is_flash_attns():
    names = (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap "
        "alibi_slopes deterministic return_attn_probs block_table"
    )
    assert list(inspect.signature(flash_attn_varlen_func).parameters) == names.split()


def test_dropout_drops_and_torchs_generator_repeats_it():
    qkv, cu, cu_k = tensors(), starts(LENGTHS), starts(KEY_LENGTHS)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(flash_attn_varlen_func(*qkv, cu, cu_k, 30, 30, dropout_p=0.5))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_keys_in_pages_are_those_of_rows():
    q, k, v = (t.detach() for t in tensors())
    cu, cu_k = starts(LENGTHS), starts(KEY_LENGTHS)
    pages, table = [torch.full((9, 16, 2, 16), torch.nan) for _ in range(2)], torch.full((4, 2), -1, dtype=torch.int32)
    free = iter((5, 2, 7, 0, 8))
    for n, keys in enumerate(KEY_LENGTHS):
        for at in range(0, keys, 16):
            table[n, at // 16] = page = next(free)
            for to, rows in zip(pages, (k, v)):
                some = rows[int(cu_k[n]) + at : int(cu_k[n]) + min(at + 16, keys)]
                to[page, : len(some)] = some
    o, lse, _ = flash_attn_varlen_func(
        q, *pages, cu, cu_k, 30, 30, causal=True, return_attn_probs=True, block_table=table
    )  # fmt: skip
    want, rows, _ = flash_attn_varlen_func(q, k, v, cu, cu_k, 30, 30, causal=True, return_attn_probs=True)
    assert torch.allclose(o, want, atol=1e-5) and torch.allclose(lse, rows, atol=1e-5)


def test_what_is_not_served_is_refused_by_name():
    qkv, cu, cu_k = tensors(), starts(LENGTHS), starts(KEY_LENGTHS)
    with pytest.raises(NotYetSupported, match="return_attn_probs with dropout_p"):
        flash_attn_varlen_func(*qkv, cu, cu_k, 30, 30, dropout_p=0.1, return_attn_probs=True)


WRONG = {
    "a window of one number": ({"window_size": 5}, UnknownOption, "window_size is 5. Give two numbers of keys, (left, "
                               "right); -1 is any number."),
    "a learned scale": ({"softmax_scale": torch.tensor(0.1, requires_grad=True)}, UnknownOption,
                        "softmax_scale is a tensor of shape () and torch.float32. Give a finite number, or None: "
                        "dim ** -0.5.\n  A learned scale belongs to the queries: q * scale, and softmax_scale=1.0."),
    "a scale that is none": ({"softmax_scale": float("nan")}, UnknownOption, None),
    "softcap below 0": ({"softcap": -1.0}, UnknownOption, "softcap is -1.0. Give a finite number above 0, or 0.0: "
                        "scores stay."),
    "softcap None": ({"softcap": None}, UnknownOption, None),
    "a text": ({"causal": "False"}, UnknownOption, "causal is 'False'. Give True or False."),
    "deterministic": ({"deterministic": 1}, UnknownOption, "deterministic is 1. Give True or False."),
    "dropout": ({"dropout_p": None}, UnknownOption, None),
    "slopes": ({"alibi_slopes": [1.0, 0.5]}, WrongCustomShape, "alibi_slopes is [1.0, 0.5]. Give fp32 (heads,) or "
               "(sequences, heads)."),
    "no starts": ({"cu_seqlens_k": None}, NotATensor, "cu_seqlens_k is NoneType. Give int32 (sequences + 1): where "
                  "each sequence begins, and where the last ends."),
    "a table of int64": ({"block_table": torch.zeros(4, 2, dtype=torch.int64)}, WrongCache,
                         "block_table is torch.int64. Give int32: block_table.to(torch.int32)."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told_under_flash_attns_names(name):
    options, error, message = WRONG[name]
    q, k, v = tensors()
    with pytest.raises(error) as caught:
        flash_attn_varlen_func(
            q, k, v, **{"cu_seqlens_q": starts(LENGTHS), "cu_seqlens_k": starts(KEY_LENGTHS), **options}
        )
    assert message is None or str(caught.value) == message


@pytest.mark.parametrize("options", [{}, {"softmax_scale": 0.2, "softcap": 2.0, "window_size": (9, 3)}], ids=str)
@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile_follows_a_call_whole(dynamic, options):
    torch._dynamo.reset()
    qkv, cu, cu_k = tensors(), starts(LENGTHS), starts(KEY_LENGTHS)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_varlen_func, backend=backend, fullgraph=True, dynamic=dynamic)
    found, wanted = (run(*qkv, cu, cu_k, 30, 30, causal=True, **options) for run in (compiled, flash_attn_varlen_func))
    assert torch.allclose(found, wanted, atol=1e-6)
    ours, theirs = (torch.autograd.grad(o.sum(), qkv) for o in (found, wanted))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs))
