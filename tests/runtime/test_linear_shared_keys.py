"""Linear attention: keys and values with a batch of 1 serve every batch of the queries."""

import pytest
import torch

from attention_engine import LinearAttentionEngine, meta_tensor
from tests import plain_linear
from tests.runtime.engines import BACKENDS, close

BATCH, HEADS, DIM, DIM_V = 3, 4, 16, 24
both = pytest.mark.parametrize("backend", BACKENDS)


def build(backend, layout="bshd", dtype=torch.float32):
    sizes = ((2, DIM), (2, DIM), (HEADS, DIM_V))
    return LinearAttentionEngine([meta_tensor(None, h, None, d, dtype=dtype) for h, d in sizes], backend=backend,
                                 layout=layout)  # fmt: skip


def tensors(shared, channels=False, length=70, dtype=torch.float32):
    """q, k, v, decay, tokens first; the shared ones with a batch of 1."""
    torch.manual_seed(0)
    sizes = {"q": (2, DIM), "k": (2, DIM), "v": (HEADS, DIM_V)}
    made = [torch.randn(1 if n in shared else BATCH, length, *size).to(dtype) for n, size in sizes.items()]
    decay = -torch.rand(BATCH, length, HEADS, *((DIM,) if channels else ()))
    return [*made, decay.to(dtype)]


def plainly(q, k, v, decay):
    k, v = (t.expand(BATCH, *t.shape[1:]) for t in (k, v))
    return plain_linear.recurrence(q, k, v, decay, q.new_zeros(BATCH, HEADS, DIM, DIM_V))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("shared", "layout", "channels"), [("kv", "bshd", False), ("k", "bhsd", False),
                                                            ("v", "bshd", False), ("kv", "bhsd", True)])  # fmt: skip
def test_their_gradients_are_sums(shared, layout, channels, dtype, backend):
    made = tensors(shared, channels, dtype=dtype)
    exact = [t.double().requires_grad_() for t in made]
    want = plainly(*exact)
    d_o, d_last = (torch.randn_like(t) for t in want)
    swap = (lambda t: t) if layout == "bshd" else (lambda t: t.transpose(1, 2))
    leaves = [swap(t).contiguous().requires_grad_() for t in made]
    o, last = build(backend, layout, dtype)(*leaves, output_final_state=True)
    found = torch.autograd.grad([o, last], leaves, [swap(d_o).to(o.dtype), d_last.to(last.dtype)])
    right = [*want, *torch.autograd.grad(want, exact, [d_o, d_last])]
    scale = [t.abs().max().clamp(min=1) for t in right]
    found = [swap(o.detach()), last.detach(), *(swap(t) for t in found)]
    tolerance = 3e-5 if dtype is torch.float32 else 4e-3
    close([t.double() / s for t, s in zip(found, scale)], [t.detach() / s for t, s in zip(right, scale)], tolerance)


@both
def test_a_step_takes_them(backend):
    q, k, v, decay = tensors("kv", length=1)
    o, state = build(backend).step(q, k, v, decay)
    close([o, state], list(plainly(*(t.double() for t in (q, k, v, decay)))), 3e-5)
    one, _ = build(backend).step(*(t[:, 0] for t in (q, k, v, decay)))
    close([one], [o[:, 0]], 1e-6)


@both
def test_check_takes_them(backend):
    assert build(backend).check(*tensors("kv", length=9)).ok


def test_other_batches_are_refused():
    q, k, v, decay = tensors("", length=9)
    with pytest.raises(ValueError, match="but k and v may have one batch for all"):
        build("reference")(q, k[:2], v, decay)
