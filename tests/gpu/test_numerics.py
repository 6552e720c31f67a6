"""Nine attentions on a GPU: outputs and gradients as near to float64 as eager PyTorch in the same dtype.

A run ends with the worst ratio of each attention and dtype. Most of the time is compiling: `-n 12` on many cores.
"""

import itertools

import pytest
import torch

from tests import plain
from tests.cases import CASES, Case, Shape, errors

pytestmark = pytest.mark.gpu

CAUSAL = {"full": False, "causal": True}
HEADS = {"heads_equal": (4, 4), "group_of_4": (8, 2)}
DIMS = {"dim_64": (64, 64), "dim_128": (128, 128), "dim_40_96": (40, 96)}
BETWEEN = {f"dim_{dim}": (dim, dim) for dim in (16, 32, 48, 80, 96, 112, 160)}  # of some, tiles hold more columns
LENGTHS = {1000: 2, 2048: 1}  # length: batch
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# relu's slope jumps at 0: whether one of 16 million fp32 scores falls on its other side is luck, for eager too.
DRAWS = {"relu": 16}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_keep_the_rule(dtype, heads, dims, name, record_property):
    """Every variant runs, also after one that fails; the failures are told together."""
    failures, found = [], []
    for variant in itertools.product(CAUSAL, [heads], [dims], LENGTHS):
        where = " ".join(map(str, variant))
        try:
            found += _run(CASES[name], DTYPES[dtype], *variant)
        except AssertionError as failure:
            failures.append(f"{where}: {failure}")
    record_property(*plain.worst_ratio(found, f"{name:14} {dtype}"))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["softmax", "softcap", "relu"])
@pytest.mark.parametrize("dims", BETWEEN)
def test_head_dims_between_the_usual_ones_keep_the_rule(dims, name):
    """Both directions, grouped and not: one run each."""
    for causal, heads, dtype in (("full", "heads_equal", "float16"), ("causal", "group_of_4", "bfloat16")):
        assert _run(CASES[name], DTYPES[dtype], causal, heads, dims, 1000)


def _run(case: Case, dtype: torch.dtype, causal: str, heads: str, dims: str, length: int) -> list[plain.Error]:
    shape = Shape(LENGTHS[length], length, length, *HEADS[heads], *{**DIMS, **BETWEEN}[dims])
    return errors(case, shape, dtype, CAUSAL[causal], device="cuda", backend="tilelang", draws=DRAWS.get(case.name, 1))
