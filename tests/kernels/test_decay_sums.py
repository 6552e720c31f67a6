"""Sums of decays of a chunk in fp32: differences of large sums keep their digits, in results and gradients."""

import math

import pytest
import torch

from attention_engine import LinearAttentionEngine, meta_tensor
from attention_engine.ir.linear import DECAY_LIMIT
from attention_engine.kernels.linear.common import LOG2_E
from attention_engine.kernels.linear.token.decays import unit_of
from tests import plain_linear

LENGTH, HEADS, DIM = 130, 2, 16
DECAYS = {
    "weak": lambda r: -0.1 * r,
    "of a chunk -64": lambda r: -2 * r,
    "of a chunk -1000": lambda r: -32 * r,
    "some forget": lambda r: torch.where(r < 0.3, -40.0, -0.5),
    "mixed": lambda r: -r.frac() * torch.tensor([0.1, 1.0, 1.0, 20.0, 1e4])[torch.randint(0, 5, r.shape)],
}


def results(attend, tensors, gradients, dtype):
    """The output, the last state, and gradients of all tensors."""
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    made = attend(*leaves)
    found = torch.autograd.grad(made, leaves, [g.to(dtype) for g in gradients])
    return [t.detach().double() for t in (*made, *found)]


@pytest.mark.parametrize("name", DECAYS)
def test_strong_decays_are_as_exact_as_weak_ones(name):
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(1, LENGTH, HEADS, DIM) for _ in range(4))
    decay = DECAYS[name](torch.rand(1, LENGTH, HEADS))
    state, d_last = (torch.randn(1, HEADS, DIM, DIM) for _ in range(2))
    engine = LinearAttentionEngine([meta_tensor(1, HEADS, LENGTH, DIM, dtype=torch.float32)] * 3, backend="interpret")

    def ours(q, k, v, a, state):
        return engine(q, k, v, a, initial_state=state, output_final_state=True)

    given, arriving = (q, k, v, decay, state), (d_o, d_last)
    found = results(ours, given, arriving, torch.float32)
    exact = results(plain_linear.recurrence, given, arriving, torch.float64)
    for what, a, b in zip(("o", "last", "dq", "dk", "dv", "d_decay", "d_state"), found, exact, strict=True):
        error = ((a - b).abs().mean() / b.abs().mean()).item()
        assert error < {"d_decay": 1e-6, "d_state": 2e-6}.get(what, 3e-7), (what, error)


@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_a_chunks_whole_parts_are_summed_exactly(chunk):
    unit, most = unit_of(chunk), -DECAY_LIMIT * LOG2_E * chunk
    assert math.log2(unit).is_integer() and most / unit <= 2**24
    assert unit <= 2**-9
