"""The yardstick itself: against torch's own attention, against hand-made values, and shown to be able to fail."""

import pytest
import torch
import torch.nn.functional as F

from tests import plain

NOTHING = {"softmax": -torch.inf, "softmax_one": 0.0}  # the log of an empty row's sum


def qkv(heads=4, kv_heads=2, q_len=9, kv_len=9, dtype=torch.float64):
    return (
        torch.randn(2, q_len, heads, 8, dtype=dtype),
        torch.randn(2, kv_len, kv_heads, 8, dtype=dtype),
        torch.randn(2, kv_len, kv_heads, 5, dtype=dtype),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_is_torchs(causal):
    q, k, v = qkv()
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(plain.attention(q, k, v, "softmax", causal=causal), want.transpose(1, 2))


@pytest.mark.parametrize("kind", plain.WEIGHTS)
def test_rows_with_nothing_kept_give_zero_and_no_gradient(kind):
    q, k, v = (x.requires_grad_() for x in qkv())
    o = plain.attention(q, k, v, kind, mask=lambda b, h, i, j: i != 3)
    o.sum().backward()
    assert (o[:, 3] == 0).all() and (o[:, 4] != 0).any()
    assert (q.grad[:, 3] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_very_negative_scores_are_rows(dtype):
    """Those far from all keys under ALiBi: exp of -scores has no number."""
    x, keep = torch.tensor([[-5000.0, -4999.0], [3.0, 2.0]], dtype=dtype), torch.tensor(True)
    weights, lse = plain.softmax(x, keep)
    torch.testing.assert_close(weights, x.softmax(-1))
    torch.testing.assert_close(lse, x.logsumexp(-1))
    weights, lse = plain.softmax_one(x, keep)
    torch.testing.assert_close(weights, torch.cat([x, torch.zeros_like(x[:, :1])], 1).softmax(-1)[:, :2])
    torch.testing.assert_close(lse, torch.cat([x, torch.zeros_like(x[:, :1])], 1).logsumexp(-1))


@pytest.mark.parametrize("kind", ["softmax", "softmax_one"])
def test_the_lse_is_the_log_of_the_row_sum(kind):
    q, k, v = qkv(heads=2)
    _, lse = plain.attention(q, k, v, kind, return_lse=True, mask=lambda b, h, i, j: i > 0)
    x = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    want = x.exp().sum(-1) + (kind == "softmax_one")
    torch.testing.assert_close(lse[:, :, 1:], want.log()[:, :, 1:])
    assert (lse[:, :, 0] == NOTHING[kind]).all()


@pytest.mark.parametrize(
    "kind, weights",
    [
        ("sigmoid", [0.5, 1 / (1 + 2.718281828459045)]),
        ("relu", [0.0, 0.0]),
        ("softmax_one", [1 / (2 + 0.36787944117144233), 0.36787944117144233 / (2 + 0.36787944117144233)]),
        ("retention", [0.0, -1.0]),
    ],
)
def test_weights_of_a_row_made_by_hand(kind, weights):
    x = torch.tensor([[[[0.0, -1.0]]]], dtype=torch.float64)
    got, _ = plain.WEIGHTS[kind](x, torch.ones_like(x, dtype=torch.bool))
    torch.testing.assert_close(got.flatten(), torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("kind", [kind for kind in plain.WEIGHTS if kind != "retention"])  # its normaliser is detached
def test_gradients_are_the_functions_own(kind):
    q, k, v = (x.requires_grad_() for x in qkv(q_len=4, kv_len=4))
    assert torch.autograd.gradcheck(lambda *x: plain.attention(*x, kind, causal=True), (q, k, v))


def test_sigmoid_bias_and_alibi_slopes_get_gradients():
    q, k, v = qkv(q_len=4, kv_len=4)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s: plain.attention(q, k, v, "softmax", score=plain.alibi(0.3, s), causal=True), (slopes,)
    )
    assert torch.autograd.gradcheck(lambda b: plain.attention(q, k, v, "sigmoid", score=plain.biased(0.3, b)), (bias,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", plain.WEIGHTS)
def test_eager_is_near_the_exact_one_in_its_dtype(kind, dtype):
    q, k, v = (x.to(dtype) for x in qkv())
    eager = plain.eager(q, k, v, kind, causal=True)
    assert eager.dtype == dtype
    off = (eager.double() - plain.attention(q, k, v, kind, causal=True)).abs().mean()
    assert 0 < off < 4 * torch.finfo(dtype).eps


def test_the_decay_of_a_head_is_its_power():
    s, h = torch.ones(1, 2, 3, 3, dtype=torch.float64), torch.arange(2).view(1, 2, 1, 1)
    i, j = torch.arange(3).view(1, 1, 3, 1), torch.arange(3).view(1, 1, 1, 3)
    x = plain.decayed(1.0)(s, i, h, i, j)
    assert x[0, 0, 2].tolist() == [(31 / 32) ** 2, 31 / 32, 1.0] and x[0, 1, 2, 1] == 63 / 64


# ---- the rule can fail


def test_compare_refuses_what_is_a_fifth_further_off_than_eager():
    exact = {"o": torch.zeros(10)}
    eager = {"o": torch.full((10,), 1e-3)}
    plain.compare({"o": torch.full((10,), 1.09e-3)}, exact, eager, torch.float16)
    with pytest.raises(AssertionError, match=r"o +1\.200e-03 +1\.000e-03 +1\.200 +\(0,\)  <-- too far"):
        plain.compare({"o": torch.full((10,), 1.2e-3)}, exact, eager, torch.bfloat16)


def test_compare_allows_ten_times_in_fp32_and_no_more():
    exact, eager = {"o": torch.zeros(4)}, {"o": torch.full((4,), 1e-7)}
    plain.compare({"o": torch.full((4,), 9e-7)}, exact, eager, torch.float32)
    with pytest.raises(AssertionError, match="too far"):
        plain.compare({"o": torch.full((4,), 1.1e-6)}, exact, eager, torch.float32)


def test_compare_refuses_one_nan():
    exact = {"o": torch.zeros(2, 3)}
    ours = {"o": torch.zeros(2, 3)}
    ours["o"][1, 2] = torch.nan
    with pytest.raises(AssertionError, match=r"\(1, 2\)  1 NaN"):
        plain.compare(ours, exact, {"o": torch.ones(2, 3)}, torch.float32)


def test_compare_refuses_a_missing_gradient():
    with pytest.raises(AssertionError, match="dq"):
        plain.compare(
            {"o": torch.zeros(1)},
            {"o": torch.zeros(1), "dq": torch.zeros(1)},
            {"o": torch.zeros(1), "dq": torch.zeros(1)},
            torch.float32,
        )
