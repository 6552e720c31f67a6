"""Masks and custom inputs through the kernels, tile by tile on a CPU; tests/gpu/test_masks.py is its twin."""

import pytest
import torch

from tests.cases import Shape
from tests.mask_cases import PAIRS, errors
from tests.plain import worst_ratio

SHAPES = [Shape(2, 139, 139, 2, 1, 32, 32), Shape(2, 133, 133, 2, 2, 32, 64)]  # never a whole tile


@pytest.mark.parametrize(("score", "mask"), PAIRS, ids=map(", ".join, PAIRS))
def test_kernels_keep_the_rule(score, mask, record_property):
    shape = SHAPES[list(PAIRS).index((score, mask)) % 2]
    found = errors(score, mask, shape, torch.float16, backend="interpret")
    assert {"o", "dq", "dk", "dv"} <= {error.name for error in found}
    record_property(*worst_ratio(found, f"{score}, {mask}"))
