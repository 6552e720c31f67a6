"""What an engine means where options are left out, beside scaled_dot_product_attention and plain torch in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.errors import UnknownOption
from attention_engine.library import OnlineIdentity, OnlineSigmoid, causal, softcap
from tests.plain import attention
from tests.runtime.engines import BACKENDS, DIM, build, close, exactly, qkv

LEFT_OUT = {"score_mod": None, "mask_mod": None, "online_func": None}


def plain(inputs, kind="softmax", score=None, causal=False):
    """o and the gradients of q, k and v of a weighted sum, in float64."""
    leaves = exactly(inputs)
    if kind == "identity":
        q, k, v = (t.transpose(1, 2) for t in leaves)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        o = (score(q @ k.mT, 0, 0, 0, 0).tril() @ v).transpose(1, 2)
    else:
        o = attention(*leaves, kind, score=score, causal=causal)
    return [o, *torch.autograd.grad(o.cos().sum(), leaves)]


def ours(engine, inputs):
    o = engine(*inputs)
    return [o, *torch.autograd.grad(o.double().cos().sum(), inputs)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_but_metas_is_the_attention_that_everybody_means(backend):
    inputs = qkv(21)
    engine = build(**LEFT_OUT, backend=backend)
    close(ours(engine, inputs), plain(inputs), 2e-5)
    q, k, v = (t.transpose(1, 2) for t in inputs)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    close([engine(*inputs)], [sdpa], 2e-5)
    assert engine.scale == DIM**-0.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.5, -0.3, 1, 0.0])
def test_a_scale_multiplies_the_products_before_the_score_mod(backend, scale):
    inputs = qkv(21)
    engine = build(**LEFT_OUT, scale=scale, backend=backend)
    close(ours(engine, inputs), plain(inputs, score=lambda s, *_: s * scale), 2e-5)
    capped = build(score_mod=softcap(2.0), mask_mod=causal, scale=scale, backend=backend)
    score = lambda s, *_: 2.0 * torch.tanh(s * scale / 2.0)  # noqa: E731
    close(ours(capped, inputs), plain(inputs, score=score, causal=True), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_mod_scales_itself(backend):
    inputs = qkv(21)
    engine = build(score_mod=softcap(2.0), mask_mod=None, backend=backend)
    close(ours(engine, inputs), plain(inputs, score=lambda s, *_: 2.0 * torch.tanh(s / 2.0)), 2e-5)
    assert engine.scale == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_scores_are_weights_by_name(backend):
    inputs = qkv(21)
    engine = build(score_mod=None, mask_mod=causal, online_func=OnlineIdentity(), backend=backend)
    close(ours(engine, inputs), plain(inputs, "identity", lambda s, *_: s * DIM**-0.5), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_normaliser_gets_scaled_scores_too(backend):
    inputs = qkv(21)
    close(ours(build(score_mod=None, mask_mod=None, online_func=OnlineSigmoid(), backend=backend), inputs),
          plain(inputs, "sigmoid"), 2e-5)  # fmt: skip


@pytest.mark.parametrize("scale", [True, "0.5", math.nan, math.inf, -math.inf, torch.tensor(0.5), 1j])
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    with pytest.raises(UnknownOption, match=r"scale is .* Give a finite number"):
        build(scale=scale)


@pytest.mark.parametrize("value", [0, -1e9, float("-inf"), "inf", "0.0", True])
def test_a_mask_value_that_means_nothing_is_refused(value):
    with pytest.raises(UnknownOption, match="mask_value is"):
        build(mask_value=value)


def test_the_scale_is_shown():
    metas = (meta_tensor(1, 2, 3, 16),) * 3
    engine = AttentionEngine(metas)
    assert "online_func=OnlineSoftmax(), scale=0.25" in repr(engine)
    assert engine.program().startswith("# q . k is scaled by 0.25 = dim ** -0.5\n")
    assert AttentionEngine(metas, scale=3).program().startswith("# q . k is scaled by 3.0\n")
    assert (
        AttentionEngine(metas, None, softcap(2.0))
        .program()
        .startswith("# q . k comes unscaled: score_mod scales itself\n")
    )


def test_a_copy_keeps_the_scale():
    inputs = qkv(9)
    engine = build(**LEFT_OUT, scale=0.7)
    assert torch.equal(copy.deepcopy(engine)(*inputs), engine(*inputs))
    assert not torch.equal(build(**LEFT_OUT)(*inputs), engine(*inputs))
