"""The hand-placed kernels for Hopper clear keys and values that nobody sees, in the warp simulator."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO
from attention_engine.library import OnlineSigmoid, OnlineSoftmax, and_masks, causal_from, padding, scale
from tests import plain
from tests.cases import Shape
from tests.kernels.test_hopper_interpret import KERNELS, PERSISTENT, kernels, key_tile, ran  # noqa: F401

LENGTHS = torch.tensor([150, 90], dtype=torch.int32)  # one ends inside its second tile, one inside its first


def flagged(b, h, q_idx, kv_idx, custom):
    return custom["flag"][b, kv_idx]


def below(b, h, q_idx, kv_idx):
    return kv_idx < 100


MASKS = {
    "length": (padding(), {"lengths": ("batch",)}, [LENGTHS], lambda j: j < LENGTHS[:, None]),
    "causal and length": (
        and_masks(causal_from(30), padding()), {"lengths": ("batch",)}, [LENGTHS], lambda j: j < LENGTHS[:, None]
    ),
    "flags": (
        flagged, {"flag": ("batch", "seq_len_kv")}, None, lambda j: (j * 7 % 5 > 1).expand(2, j.shape[0]).contiguous()
    ),
    "number": (below, {}, [], lambda j: (j < 100).expand(2, j.shape[0])),
}  # fmt: skip


def agree(shape, name, online, kind):
    """Outputs and gradients with NaN in what nobody sees, beside float64 with zeros there."""
    mask, axes, custom, seen_of = MASKS[name]
    seen = seen_of(torch.arange(shape.kv_len))
    custom = [seen] if custom is None else custom
    tensors = shape.tensors(torch.float16, "cpu", 0)
    hole = ~seen[..., None, None]
    dirty = {n: t.masked_fill(hole, torch.nan) if n in "kv" else t for n, t in tensors.items()}
    clean = {n: t.masked_fill(hole, 0) if n in "kv" else t for n, t in tensors.items()}

    def keep(b, h, i, j):
        kept = seen[:, None, None, :] & (i >= i)
        return kept & (i + 30 >= j) if "causal" in name else kept

    def results(run, tensors, dtype):
        leaves = [tensors[n].to(dtype).requires_grad_() for n in "qkv"]
        o = run(*leaves)
        return dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, tensors["do"].to(o.dtype)))))

    engine = AttentionEngine(shape.meta(torch.float16), CustomIO(axes), scale(0.1), mask, online, backend="interpret")
    given = {"score": plain.scaled(0.1), "mask": keep}
    return plain.compare(
        results(lambda *qkv: engine(*qkv, *custom), dirty, torch.float16),
        results(lambda q, k, v: plain.attention(q, k, v, kind, **given), clean, torch.float64),
        results(lambda q, k, v: plain.eager(q, k, v, kind, **given), clean, torch.float16), torch.float16, 2e-3,
    )  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [n for n in KERNELS if n in ("forward-64", "forward-128", "backward-128-light",
                                                              "backward-192-128-light", "backward-256")])  # fmt: skip
def test_of_a_grid(name, mask, kernels):  # noqa: F811
    dims, forward, backward = KERNELS[name]
    kernels.update({k: t for k, t in (("forward", forward), ("backward", backward)) if t})
    sigmoid = list(MASKS).index(mask) % 2 and not backward  # two warpgroups that start apart
    online, kind = (OnlineSigmoid(), "sigmoid") if sigmoid else (OnlineSoftmax(), "softmax")
    assert agree(Shape(2, 140, 203, 2, 1, *dims), mask, online, kind)
    assert ran(name.split("-")[0])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["64", "128", "128-ahead", "192-128"])
def test_of_persistent_blocks(name, mask, kernels):  # noqa: F811
    dims, tile = PERSISTENT[name]
    kernels.update(forward=tile.in_form(persistent=True))
    assert agree(Shape(2, 290, 203, 2, 1, *dims), mask, OnlineSoftmax(), "softmax")
    assert ran("forward")


@pytest.mark.parametrize("mask", MASKS)
def test_of_persistent_blocks_over_keys(mask, kernels):  # noqa: F811
    kernels.update(backward=key_tile(64, persistent=True))
    assert agree(Shape(2, 140, 203, 4, 2, 128, 128), mask, OnlineSoftmax(), "softmax")
    assert ran("backward")
