"""A transformer written for FlexAttention trains with one changed import: the same losses, on a CPU too."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from attention_engine import flex
from tests.flex.transformer import PLAIN, losses


def test_it_trains_with_one_changed_import():
    found, want = losses(flex, 12, torch.float64), losses(PLAIN, 12, torch.float64)
    assert found == pytest.approx(want, rel=1e-9)
    assert found[-1] < found[0]
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        losses(torchs, 1, torch.float64)


@pytest.mark.slow
def test_it_trains_compiled_whole():
    torch._dynamo.reset()
    found = losses(flex, 4, torch.float32, compiled={"fullgraph": True, "backend": "aot_eager"})
    assert found == pytest.approx(losses(flex, 4, torch.float32), rel=1e-5)
