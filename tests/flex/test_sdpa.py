"""scaled_dot_product_attention: torch's meaning, gradients too; and what of a program's calls goes where."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attention_engine
from attention_engine import errors
from attention_engine.flex import engines
from attention_engine.integrations.sdpa import patch, slower

DOUBLE = torch.float64
Q, K = (2, 4, 9, 8), (2, 4, 13, 8)


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


def bools(*shape: int) -> Tensor:
    return torch.rand(*shape) > 0.3


def infinite(*shape: int) -> Tensor:
    return torch.where(bools(*shape), made(*shape).detach(), -torch.inf).requires_grad_()


CALLS = {  # shapes of q, k and v; the mask; options
    "plain": (Q, K, K, None, {}),
    "other value dim": (Q, K, (2, 4, 13, 5), None, {}),
    "scale": (Q, K, K, None, {"scale": 0.3}),
    "causal": (K, K, K, None, {"is_causal": True}),
    "causal, more keys": (Q, K, K, None, {"is_causal": True}),
    "causal, more queries": (K, Q, Q, None, {"is_causal": True}),
    "grouped": (Q, (2, 2, 13, 8), (2, 2, 13, 8), None, {"enable_gqa": True}),
    "one head": (Q, (2, 1, 13, 8), (2, 1, 13, 8), None, {}),
    "one batch": (Q, (1, 4, 13, 8), (1, 4, 13, 8), None, {}),
    "bool": (Q, K, K, (bools, (2, 4, 9, 13)), {}),
    "bool of pairs": (Q, K, K, (bools, (9, 13)), {}),
    "bool of keys": (Q, K, K, (bools, (2, 1, 1, 13)), {}),
    "bool, grouped": (Q, (2, 2, 13, 8), (2, 2, 13, 8), (bools, (4, 9, 13)), {"enable_gqa": True}),
    "float": (Q, K, K, (made, (2, 4, 9, 13)), {}),
    "float of heads": (Q, K, K, (made, (4, 9, 13)), {"scale": 0.5}),
    "float of queries": (Q, K, K, (made, (2, 1, 9, 1)), {}),
    "float of one batch": (Q, K, K, (made, (1, 4, 9, 13)), {}),
    "float with -inf": (Q, K, K, (infinite, (9, 13)), {}),
    "three dimensions": ((4, 9, 8), (4, 13, 8), (4, 13, 8), (made, (9, 13)), {}),
    "five dimensions": ((3, *Q), (3, *K), (3, *K), (made, (3, 1, 1, 9, 13)), {}),
    "four dimensions for five": ((3, *Q), (3, *K), (3, *K), (made, (2, 1, 9, 13)), {}),
    "two dimensions": ((9, 8), (13, 8), (13, 8), None, {"is_causal": True}),
}


def arguments(name: str, dtype: torch.dtype = DOUBLE) -> tuple[list[Tensor], dict[str, object], list[Tensor]]:
    torch.manual_seed(0)
    *shapes, mask, options = CALLS[name]
    qkv = [made(*shape).detach().to(dtype).requires_grad_() for shape in shapes]
    attn_mask = None if mask is None else mask[0](*mask[1])
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.detach().to(dtype).requires_grad_()
    inputs = [t for t in (*qkv, attn_mask) if t is not None and t.requires_grad]
    return qkv, {"attn_mask": attn_mask, **options}, inputs


def both(ours, name):
    qkv, options, inputs = arguments(name)
    results = []
    for run in (ours, F.scaled_dot_product_attention):
        o = run(*qkv, **options)
        weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
        results.append([o.detach(), *torch.autograd.grad((o * weights).sum(), inputs)])
    return results


@pytest.mark.parametrize("name", CALLS)
def test_it_is_torchs(name):
    torch.testing.assert_close(*both(attention_engine.scaled_dot_product_attention, name))


@pytest.mark.parametrize("name", ["causal, more keys", "bool, grouped", "float of heads", "five dimensions"])
def test_it_compiles_whole(name):
    torch._dynamo.reset()
    compiled = torch.compile(attention_engine.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*both(compiled, name))


def test_a_row_that_keeps_no_pair_is_0():
    kept = bools(9, 13)
    kept[3] = False
    qkv, _, _ = arguments("plain")
    o = attention_engine.scaled_dot_product_attention(*qkv, kept)
    assert not o[:, :, 3].any() and all(d.isfinite().all() for d in torch.autograd.grad(o.sum(), qkv))


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_drops_weights(compiled):
    q, k = (torch.randn(1, 2, n, 8, dtype=DOUBLE, requires_grad=True) for n in (200, 150))
    v = torch.eye(150, dtype=DOUBLE).expand(1, 2, -1, -1)  # the output is the weights
    whole, run = F.scaled_dot_product_attention(q, k, v), attention_engine.scaled_dot_product_attention
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    first, second = (run(q, k, v, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(run(q, k, v, dropout_p=0.25), first) and not torch.equal(first, second)
    kept = first != 0
    assert 0.74 < kept.double().mean() < 0.76
    torch.testing.assert_close(first, torch.where(kept, whole / 0.75, 0.0))
    found, exact = (
        torch.autograd.grad(x.square().sum(), [q, k]) for x in (first, torch.where(kept, whole / 0.75, 0.0))
    )
    torch.testing.assert_close(found, exact)


def test_other_masks_are_no_other_engine():
    engines.FINDER._built.cache_clear()
    engines.FINDER._plain.clear()
    qkv, _, _ = arguments("plain")
    for _ in range(20):
        attention_engine.scaled_dot_product_attention(*qkv, made(2, 4, 9, 13))
    assert engines.FINDER._built.cache_info().misses == 1


WRONG = {
    "dropout": (dict(dropout_p=1.0), errors.UnknownOption, r"dropout_p is 1\.0\. Give a number from 0 up to"),
    "causal and mask": (dict(attn_mask=torch.ones(9, 13).bool(), is_causal=True), errors.OptionsClash,
                        "attn_mask and is_causal=True are both given"),
    "shape": (dict(attn_mask=torch.ones(9, 12).bool()), errors.WrongCustomShape,
              r"attn_mask has shape \(1, 1, 9, 12\)\. It broadcasts to"),
    "dtype": (dict(attn_mask=torch.ones(9, 13).int()), errors.WrongCustomDtype,
              r"attn_mask is torch\.int32\. Give bool"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told(name):
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        attention_engine.scaled_dot_product_attention(*arguments("plain")[0], **options)
    with pytest.raises(errors.HeadsDoNotGroup, match="Say enable_gqa=True"):
        attention_engine.scaled_dot_product_attention(*arguments("grouped")[0])


def test_a_patched_program_is_served_where_that_is_faster():
    torchs, given = F.scaled_dot_product_attention, arguments("plain", torch.float32)[0]
    want = torchs(*given)
    with patch() as log:
        assert torch.equal(F.scaled_dot_product_attention(*given), want)
    assert F.scaled_dot_product_attention is torchs
    assert (log.count("torch"), log.count("attention_engine")) == (1, 0)
    (kind,) = log.kinds
    assert (kind.reason, kind.query, kind.key, kind.mask) == ("on a CPU torch's is faster", Q, K, None)
    with patch(everywhere=True) as log:
        for _ in range(2):
            torch.testing.assert_close(F.scaled_dot_product_attention(*given), want)
        F.scaled_dot_product_attention(*given, dropout_p=1.0)
        F.scaled_dot_product_attention(given[0][0, 0], given[1][0, 0], given[2][0, 0])
    assert (log.count("torch"), log.count("attention_engine")) == (2, 2)
    reasons = {kind.reason for kind in log.kinds}
    assert {"", "no heads"} < reasons and any(r.startswith("UnknownOption: dropout_p is 1.0.") for r in reasons)
    assert "     2  attention_engine  q (2, 4, 9, 8)  k (2, 4, 13, 8)  float32  ()" in str(log)


def test_a_patch_ends_with_an_error():
    torchs = F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), patch():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is torchs


def test_a_patched_module_compiles():
    torch._dynamo.reset()
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 7, 16, requires_grad=True)
    want = layer(x)
    with patch(everywhere=True):
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), want)


def test_what_is_faster_by_torch():
    half = torch.empty(1, 1, 1, 64, device="meta", dtype=torch.float16)
    assert slower(half, half) == "on a CPU torch's is faster"
