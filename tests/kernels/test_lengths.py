"""Every length and every head dim, forward and backward, on the interpreter beside float64."""

import pytest
import torch

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.library import OnlineSoftmax, causal, sliding_window
from tests import plain

LENGTHS = (1, 2, 17, 63, 64, 65, 127, 128, 129, 200, 255, 257, 1000)
MASKS = {"full": None, "causal": causal, "window": sliding_window(70, 5)}
KEPT = {"full": None, "causal": lambda b, h, i, j: i >= j, "window": lambda b, h, i, j: (i - j <= 70) & (j - i <= 5)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOORS = {torch.float16: 2e-3, torch.bfloat16: 2e-3, torch.float32: 1e-5}  # eager is exact by chance for one key
DIMS = (16, 32, 40, 64, 80, 96, 128, 192, 256)
PAIRS = [(n, n) for n in LENGTHS[:-1]] + [
    (1, 257), (257, 1), (2, 129), (129, 2), (17, 200), (200, 17), (63, 128), (128, 63), (64, 255), (255, 64), (65, 127),
    (127, 65), (1000, 129), (130, 1000),
]  # fmt: skip


def holds(q_len, kv_len, heads, dims, mask, dtype, deterministic=False):
    """The rule of tests/plain.py for the output and all gradients."""
    (q_heads, kv_heads), (dim, dim_v) = heads, dims
    sizes = ((q_len, q_heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, dim_v))
    metas = [meta_tensor(1, h, n, d, dtype=dtype) for n, h, d in sizes]
    scale = dim**-0.5
    engine = AttentionEngine(
        metas,
        None,
        lambda score, custom, b, h, q_idx, kv_idx: score * scale,
        MASKS[mask],
        OnlineSoftmax(),
        backend="interpret",
        deterministic=deterministic,
    )
    inputs = [torch.randn(1, *size).to(dtype) for size in sizes]
    d_o = torch.randn(1, q_len, q_heads, dim_v).to(dtype)

    def made(run, kind):
        leaves = [t.to(kind).requires_grad_() for t in inputs]
        o = run(*leaves)
        gradients = torch.autograd.grad(o, leaves, d_o.to(o.dtype), allow_unused=True)
        zeros = (torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients))
        return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *zeros)))

    return plain.compare(
        made(engine, dtype),
        made(lambda q, k, v: plain.attention(q, k, v, "softmax", mask=KEPT[mask]), torch.float64),
        made(lambda q, k, v: plain.eager(q, k, v, "softmax", mask=KEPT[mask]), dtype),
        dtype,
        FLOORS[dtype],
    )


@pytest.mark.parametrize("lengths", PAIRS, ids=lambda lengths: "-".join(map(str, lengths)))
@pytest.mark.parametrize("mask", MASKS)
def test_every_length_keeps_the_rule(mask, lengths, record_property):
    number = PAIRS.index(lengths)
    dtype = DTYPES[(number + list(MASKS).index(mask)) % 3] if 1000 not in lengths else torch.float16
    found = holds(*lengths, (2, 1), (32, 48), mask, dtype, deterministic=number % 4 == 3)
    record_property(*plain.worst_ratio(found, f"lengths, {mask}"))


MIXED = [(d, d) for d in DIMS] + [(d, DIMS[-1 - n]) for n, d in enumerate(DIMS) if d != DIMS[-1 - n]]


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("dims", MIXED, ids=lambda dims: "-".join(map(str, dims)))
def test_every_head_dim_keeps_the_rule(dims, turn, record_property):
    dtype = DTYPES[(MIXED.index(dims) + turn) % 3]
    found = holds(65, 131, (2, 1), dims, "causal", dtype, deterministic=turn == 1)
    record_property(*plain.worst_ratio(found, f"head dims, {str(dtype)[6:]}"))


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
def test_every_group_of_heads_keeps_the_rule(group, deterministic):
    holds(65, 70, (2 * group, 2), (32, 32), "causal", torch.float16, deterministic)
