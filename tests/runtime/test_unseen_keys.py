"""Keys that a condition of the mask hides from all queries and heads: what stands in them, NaN too, is harmless."""

import pytest
import torch

from attention_engine import where
from attention_engine.library import OnlineRelu, OnlineSigmoid, OnlineSoftmax
from tests import plain
from tests.runtime.engines import BACKENDS, build, close

BATCH, HEADS, KV_HEADS, DIM, DIM_V = 2, 4, 2, 16, 24
both = pytest.mark.parametrize("backend", BACKENDS)
FUNCTIONS = {"softmax": OnlineSoftmax, "sigmoid": OnlineSigmoid, "relu": OnlineRelu}
JUNK = (torch.nan, torch.inf, -torch.inf)


def by_length(b, h, q_idx, kv_idx, custom):
    return kv_idx < custom["real"][b]


def causal_by_length(b, h, q_idx, kv_idx, custom):
    return (kv_idx <= q_idx + 40) & (kv_idx < custom["real"][b])


def by_flag(b, h, q_idx, kv_idx, custom):
    return custom["flag"][b, kv_idx] != 0


def none_but(b, h, q_idx, kv_idx, custom):
    """Neither alternative sees an unflagged key: a condition of both."""
    real = custom["flag"][b, kv_idx] != 0
    return ((q_idx >= kv_idx) & real) | ~((h > 1) | ~real)


def by_number(b, h, q_idx, kv_idx):
    return kv_idx < 50


LENGTHS = torch.tensor([37, 90], dtype=torch.int32)
FLAGS = (torch.arange(90) * 7 % 5 > 1).int().expand(BATCH, 90).contiguous()
BEHIND = torch.arange(90) < LENGTHS[:, None]
MASKS = {
    "length": (by_length, {"real": ("batch",)}, [LENGTHS], BEHIND),
    "causal and length": (causal_by_length, {"real": ("batch",)}, [LENGTHS], BEHIND),
    "flags": (by_flag, {"flag": ("batch", "seq_len_kv")}, [FLAGS], FLAGS != 0),
    "alternatives": (none_but, {"flag": ("batch", "seq_len_kv")}, [FLAGS], FLAGS != 0),
    "number": (by_number, {}, [], (torch.arange(90) < 50).expand(BATCH, 90)),
}


def tensors(queries, seen, dtype):
    """q, k, v with junk in the keys and values that nobody sees, and the same with zeros there."""
    generator = torch.Generator().manual_seed(0)
    keys = seen.shape[1]
    sizes = ((queries, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, DIM_V))
    q, k, v = (torch.randn(BATCH, *size, generator=generator).to(dtype) for size in sizes)
    junk = torch.tensor(JUNK)[torch.arange(keys) % 3].to(dtype)[None, :, None, None]
    dirty = [torch.where(seen[..., None, None], t, junk) for t in (k, v)]
    clean = [torch.where(seen[..., None, None], t, torch.zeros((), dtype=dtype)) for t in (k, v)]
    return [q, *dirty], [q, *clean]


def plainly(kind, mask, clean, custom, d_o):
    """In float64, with zeros where nobody looks: a masked pair takes no part."""
    exact = [t.double().requires_grad_() for t in clean]
    named = dict(zip(("real", "flag"), custom)) if len(custom) > 1 else {"real": custom[0], "flag": custom[0]}
    keep = (lambda b, h, i, j: mask(b, h, i, j, named)) if custom[0] is not None else mask
    o = plain.attention(*exact, kind, mask=keep, score=plain.scaled(0.25))
    return [o.detach(), *torch.autograd.grad(o, exact, d_o.double())]


def agree(found, right, dtype):
    tolerance = 3e-5 if dtype is torch.float32 else 4e-3
    size = [t.abs().max().clamp(min=1) for t in right]
    close([t.double() / s for t, s in zip(found, size)], [t / s for t, s in zip(right, size)], tolerance)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_of_zeros(name, deterministic, dtype, backend):
    mask, axes, custom, seen = MASKS[name]
    kind = ("softmax", "sigmoid", "relu")[list(MASKS).index(name) % 3]
    dirty, clean = tensors(71, seen, dtype)
    d_o = torch.randn(BATCH, 71, HEADS, DIM_V, generator=torch.Generator().manual_seed(1)).to(dtype)
    right = plainly(kind, mask, clean, custom or [None], d_o)
    engine = build(axes, dtype=dtype, mask_mod=mask, online_func=FUNCTIONS[kind](), backend=backend,
                   deterministic=deterministic)  # fmt: skip
    leaves = [t.requires_grad_() for t in dirty]
    o = engine(*leaves, *custom)
    found = [o.detach(), *torch.autograd.grad(o, leaves, d_o)]
    agree(found, right, dtype)
    for gradient in found[2:]:
        assert (gradient.masked_select(~seen[..., None, None]) == 0).all()


@both
def test_gradients_of_custom_inputs(backend):
    """Sums of rows, of keys and along diagonals read the same pairs."""
    dirty, clean = tensors(71, BEHIND, torch.float32)
    slopes, table, bias = torch.rand(HEADS), torch.randn(HEADS, 200), torch.randn(BATCH, 90)
    every = torch.randn(71, 90)

    def score(s, custom, b, h, q_idx, kv_idx):
        near = custom["table"][h, q_idx - kv_idx + 95] + custom["bias"][b, kv_idx]
        return s * custom["slopes"][h] + near + custom["every"][q_idx, kv_idx]

    axes = {"slopes": ("heads",), "table": ("heads", 200), "bias": ("batch", "seq_len_kv"),
            "every": ("seq_len", "seq_len_kv"), "real": ("batch",)}  # fmt: skip
    given = [slopes, table, bias, every]
    exact = [t.double().requires_grad_() for t in (*clean, *given)]
    *first, s, t, c, e = exact
    want = plain.attention(
        *first, "softmax", mask=lambda b, h, i, j: j < LENGTHS[b],
        score=lambda x, b, h, i, j: x * s[h] + t[h, i - j + 95] + c[b, j] + e[i, j],
    )  # fmt: skip
    leaves = [t.requires_grad_() for t in (*dirty, *given)]
    engine = build(axes, score_mod=score, mask_mod=by_length, backend=backend)
    o = engine(*leaves, LENGTHS)
    d_o = torch.randn_like(o)
    right = [want.detach(), *torch.autograd.grad(want, exact, d_o.double())]
    agree([o.detach(), *torch.autograd.grad(o, leaves, d_o)], right, torch.float32)


@both
def test_a_score_of_minus_infinity_by_the_key_is_such_a_condition(backend):
    def score(s, custom, b, h, q_idx, kv_idx):
        return where(kv_idx < custom["real"][b], s * 0.25, -torch.inf)

    dirty, clean = tensors(33, BEHIND, torch.float32)
    d_o = torch.randn(BATCH, 33, HEADS, DIM_V)
    right = plainly("softmax", by_length, clean, [LENGTHS], d_o)
    leaves = [t.requires_grad_() for t in dirty]
    o = build({"real": ("batch",)}, score_mod=score, mask_mod=None, backend=backend)(*leaves, LENGTHS)
    agree([o.detach(), *torch.autograd.grad(o, leaves, d_o)], right, torch.float32)
