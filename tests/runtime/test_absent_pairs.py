"""Pairs that a score of -inf leaves out, rows that it leaves empty, and rows far from 0, beside plain torch."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, meta_tensor, where
from attention_engine.library import OnlineIdentity, OnlineRelu, OnlineRetention, OnlineSigmoid, OnlineSoftmax, causal
from tests import plain
from tests.runtime.engines import BACKENDS

QUERIES, KEYS, DIM = 70, 90, 16
NEVER = -torch.inf
BIASED = CustomIO({"b": ("seq_len", "seq_len_kv")})


def biased(score, custom, b, h, q_idx, kv_idx):
    return score * 0.3 + custom["b"]


def softmax(x, keep):
    """torch's own, and 0 for a row that keeps nothing."""
    some = keep.any(-1, keepdim=True)
    return torch.where(some, x.masked_fill(~keep & some, NEVER), 0.0).softmax(-1) * some


FUNCTIONS = {
    "softmax": (OnlineSoftmax, softmax),
    "sigmoid": (OnlineSigmoid, lambda x, keep: plain.sigmoid(x, keep)[0]),
    "relu": (OnlineRelu, lambda x, keep: plain.relu(x, keep)[0]),
    "retention": (OnlineRetention, lambda x, keep: plain.retention(x, keep)[0]),
    "identity": (OnlineIdentity, lambda x, keep: torch.where(keep, x, 0.0)),
}


def tensors(dtype=torch.float32, queries=QUERIES, keys=KEYS, dim=DIM):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, 1, dim, generator=generator).to(dtype).requires_grad_() for n in (queries, keys, keys)]


def metas(dtype=torch.float32, dim=DIM):
    return (meta_tensor(1, 1, None, dim, dtype=dtype),) * 3


def plainly(weights, score, q, k, v, *others, keep=None):
    """The output and gradients in float64: scores from products, -inf where a pair is left out."""
    leaves = [t.detach().double().requires_grad_(t.requires_grad) for t in (q, k, v, *others)]
    x = score(torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]), *leaves[3:])
    seen = (x != NEVER) if keep is None else keep & (x != NEVER)
    w = weights(torch.where(seen, x, 0.0), seen.expand(x.shape))
    return gradients(torch.einsum("bhqk,bkhd->bqhd", w, leaves[2]), leaves)


def gradients(o, leaves):
    """The output, and gradients by a loss that weighs every entry differently and leaves the last query out."""
    loss = (o.double() * torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape))[:, :-1].sum()
    return [o.detach(), *torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])]


def agree(found, exact, tolerance=3e-5):
    for mine, right in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, atol=tolerance, rtol=tolerance)


def holes(queries=QUERIES, keys=KEYS):
    """0, and -inf for a third of the pairs and for all of rows 0, 7 and the last."""
    generator = torch.Generator().manual_seed(1)
    bias = torch.zeros(queries, keys).masked_fill(torch.rand(queries, keys, generator=generator) < 0.3, NEVER)
    bias[[0, 7, -1]] = NEVER
    return bias


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bias_of_minus_infinity_leaves_a_pair_out(name, backend):
    function, weights = FUNCTIONS[name]
    inputs = (*tensors(), holes().requires_grad_())
    engine = AttentionEngine(metas(), BIASED, biased, None, function(), backend=backend)
    agree(gradients(engine(*inputs), inputs), plainly(weights, lambda x, b: x * 0.3 + b, *inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_choice_of_minus_infinity_leaves_a_pair_out(name, backend):
    """Of rows below 3 every pair, and of the others those with a key that is a multiple of 3."""
    function, weights = FUNCTIONS[name]
    inputs = tensors()
    engine = AttentionEngine(
        metas(), None, lambda s, c, b, h, qi, ki: where((qi >= 3) & (ki % 3 != 0), s * 0.3, float("-inf")), None,
        function(), backend=backend,
    )  # fmt: skip
    kept = (torch.arange(QUERIES)[:, None] >= 3) & (torch.arange(KEYS) % 3 != 0)
    agree(gradients(engine(*inputs), inputs), plainly(weights, lambda x: (x * 0.3).masked_fill(~kept, NEVER), *inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_left_empty_by_scores_return_an_lse_of_minus_infinity(backend):
    engine = AttentionEngine(metas(), BIASED, biased, causal, OnlineSoftmax(), backend=backend)
    inputs = (*tensors(), holes().requires_grad_())
    o, rows = engine(*inputs, return_rowscales=True)
    empty = torch.tensor([n in (0, 7, QUERIES - 1) for n in range(QUERIES)])
    lse = rows["lse"][0, 0]
    kept = ~empty & (holes().masked_fill(torch.ones(QUERIES, KEYS).triu(1) > 0, NEVER) > NEVER).any(1)
    assert (lse[~kept] == NEVER).all() and lse[kept].isfinite().all() and (o[0, ~kept] == 0).all()
    found = torch.autograd.grad(lse[kept].sum() + o.sum(), inputs)
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row(backend):
    """A query that is NaN, and a bias that is in one row."""
    q, k, v = tensors()
    bias = torch.zeros(QUERIES, KEYS)
    bias[5, 3] = torch.nan
    q.data[0, 9] = torch.nan
    engine = AttentionEngine(metas(), BIASED, biased, causal, OnlineSoftmax(), backend=backend)
    o = engine(q, k, v, bias)
    assert o[0].isnan().any(-1).any(-1).nonzero().flatten().tolist() == [5, 9]
    (dq,) = torch.autograd.grad(o[0, [4, 6, 8, 10]].sum(), q)
    assert dq[0, [4, 6, 8, 10]].isfinite().all()


FINFO = torch.finfo(torch.float32).min


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.3])
@pytest.mark.parametrize("pad", [-1e4, -1e7, -1e9, -1e30, FINFO])
def test_rows_that_are_far_from_zero(pad, scale, backend):
    """Rows padded whole are the mean of v, as torch says; the loss is of both. Products are whole numbers, or none."""
    q, k, v = tensors()
    with torch.no_grad():
        k.zero_()
    padding = torch.full((QUERIES, KEYS), pad)
    padding[QUERIES // 2 :, 3:50] = 0.0
    inputs = (q, k, v, padding.requires_grad_())
    engine = AttentionEngine(
        metas(), BIASED, lambda s, c, b, h, qi, ki: s * scale + c["b"], None, OnlineSoftmax(), backend=backend
    )
    agree(gradients(engine(*inputs), inputs), plainly(softmax, lambda x, p: x * scale + p, *inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_choice_of_a_constant_far_from_zero(backend):
    q, k, v = tensors()
    with torch.no_grad():
        k.zero_()
    engine = AttentionEngine(metas(), None, lambda s, c, b, h, qi, ki: where(qi > 9, s, -1e9), None, OnlineSoftmax(),
                             backend=backend)  # fmt: skip
    far = torch.arange(QUERIES)[:, None] <= 9
    agree(gradients(engine(q, k, v), (q, k, v)), plainly(softmax, lambda x: x.masked_fill(far, -1e9), q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("base", [0.0, 1e4, 1e6, 1e7])
def test_differences_of_places_far_from_zero(base, backend):
    """fp32 has the places, and so eager's scores, exactly."""
    q, k, v = tensors(keys=QUERIES)
    places = base + torch.arange(QUERIES).float()
    engine = AttentionEngine(
        metas(), CustomIO({"p": ("seq_len",)}), lambda s, c, b, h, qi, ki: s * 0.3 - (c["p"][qi] - c["p"][ki]), causal,
        OnlineSoftmax(), backend=backend,
    )  # fmt: skip
    kept = torch.ones(QUERIES, QUERIES).tril() > 0
    right = plainly(softmax, lambda x, p: x * 0.3 - (p[:, None] - p), q, k, v, places, keep=kept)
    agree(gradients(engine(q, k, v, places), (q, k, v)), right)
