"""The fifty score functions and masks of FlexAttention's kind on a GPU, and the tiny transformer beside torch's."""

from __future__ import annotations

import pytest
import torch

from attention_engine import flex
from tests.flex.cases import CASES, Sizes
from tests.flex.check import errors_of
from tests.flex.transformer import PLAIN, losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, dtype):
    errors_of(CASES[name], Sizes(queries=256, keys=256, dim=64), dtype, "auto", "cuda")


@pytest.mark.parametrize("compiled", [None, {"fullgraph": True}], ids=["eager", "compiled"])
def test_a_transformer_trains_with_one_changed_import(compiled):
    found = losses(flex, 8, torch.float32, "cuda", compiled)
    assert found == pytest.approx(losses(PLAIN, 8, torch.float32, "cuda"), rel=1e-4)
