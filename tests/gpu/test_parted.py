"""Parts of rows by compiled kernels, merged: as exact as a whole call."""

import itertools

import pytest
import torch

from attention_engine import AttentionEngine, library

pytestmark = pytest.mark.gpu

FUNCTIONS = {"softmax": library.OnlineSoftmax, "sigmoid": library.OnlineSigmoid, "retention": library.OnlineRetention}
CUTS = (0, 1000, 1000, 2500, 2501, 4096)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_are_as_exact_as_a_call(name, dtype):
    q = torch.randn(2, 100, 8, 128, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, 4096, 2, 128, device="cuda", dtype=dtype)
    engine = AttentionEngine(mask_mod=library.causal, online_func=FUNCTIONS[name](), scale=0.1)
    options = {"mask_mod": library.causal_from(3996), "online_func": FUNCTIONS[name](), "scale": 0.1}
    exact = AttentionEngine(**options, backend="reference")(q.double(), k.double(), v.double())
    whole = AttentionEngine(**options)(q, k, v)
    parts = [engine.partial(q, k[:, a:b], v[:, a:b], q_starts=3996, kv_starts=a) for a, b in itertools.pairwise(CUTS)]
    merged = engine.merge(parts)
    ours, theirs = ((o.double() - exact).norm() / exact.norm() for o in (merged, whole))
    assert merged.dtype is dtype and ours <= 1.1 * theirs + 1e-6
