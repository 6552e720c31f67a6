"""Linear attention on a GPU: outputs, states and gradients as near to float64 as plain PyTorch in the same dtype.

A run ends with the worst ratio of each case and dtype. Most of the time is compiling: `-n 8` on many
cores; a process takes up to 7 GB of the GPU's memory for plain PyTorch in float64.
"""

from dataclasses import replace

import pytest
import torch

from attention_engine.runtime.attentions import ATTENTIONS
from tests import plain
from tests.linear_cases import CASES, Shape, engine_for, engine_results, errors

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DIMS = {"dim_64": (64, 64), "dim_128_64": (128, 64), "dim_256_512": (256, 512), "dim_40_96": (40, 96)}
GROUPS = {"one_group": (1, 1, 8), "four_groups": (4, 4, 8), "own_heads": (8, 8, 8)}
LENGTHS = (1, 17, 63, 64, 65, 200, 1000, 2048)


def groups_of(name, dims):
    """One kind of groups for each case and dims: all kinds meet all dims, in a third of the kernels to compile."""
    return GROUPS[list(GROUPS)[(list(CASES).index(name) + list(DIMS).index(dims)) % len(GROUPS)]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_keep_the_rule(dtype, dims, name, record_property):
    """Every length runs, also after one that fails; the failures are told together.

    A gradient of eight numbers, one for each head, has an error that is mostly luck: 40 draws have it at 0.56 and 0.70
    of plain torch's, one draw at up to 1.5. So there are draws enough for 48 numbers or more.
    """
    failures, found = [], []
    few = ("heads",) in CASES[name].axes.values()
    for length in LENGTHS:
        shape = Shape(1 if length > 200 else 2, length, *groups_of(name, dims), *DIMS[dims])
        draws = 4 if length <= 200 else 6 if few else 1
        try:
            found += errors(CASES[name], shape, DTYPES[dtype], device="cuda", backend="tilelang", draws=draws)
        except AssertionError as failure:
            failures.append(f"length {length}: {failure}")
    record_property(*plain.worst_ratio(found, f"linear {name} {dtype}"))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["mamba2", "gla_mods"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_are_alike_bit_for_bit(dtype, name):
    """No sum is taken in an order that varies; a wait that is missing would show here too."""
    shape = Shape(2, 1000, 1, 2, 8, 128, 64)
    engine = engine_for(CASES[name], shape, DTYPES[dtype], backend="tilelang")
    inputs = shape.inputs(CASES[name], DTYPES[dtype], "cuda")
    first = engine_results(engine, inputs)
    for _ in range(5):
        again = engine_results(engine, inputs)
        assert all(torch.equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("name", ["plain", "mamba2", "scaled_keys"])
def test_warps_that_copy_a_head_ahead_change_no_bit(name):
    """dq and dk of heads that share q and k: as in step, and in every run alike."""
    case, shape = CASES[name], Shape(2, 1000, 1, 1, 8, 128, 64)
    engine, inputs = engine_for(case, shape, torch.bfloat16), shape.inputs(case, torch.bfloat16, "cuda")
    ahead = engine_results(engine, inputs)
    again = engine_results(engine, inputs)
    tensors, custom = [inputs[n] for n in ("q", "k", "v", "decay")], [inputs[n] for n in case.axes]
    program_kernels = ATTENTIONS[engine._check(*tensors, inputs["initial_state"], custom)].program_kernels
    tiles = program_kernels.kernels(*tensors, custom).tiles
    assert all(tiles.rows[role].specialize for role in ("dq", "dk"))
    stepping = {role: replace(tiles.rows[role], stages=0, specialize=False, blocks=1) for role in ("dq", "dk")}
    program_kernels.tiles = replace(tiles, rows={**tiles.rows, **stepping})
    program_kernels._kernels.clear()
    try:
        in_step = engine_results(engine, inputs)
    finally:
        program_kernels.tiles = None
        program_kernels._kernels.clear()
    for key, value in ahead.items():
        assert torch.equal(value, in_step[key]) and torch.equal(value, again[key]), key


@pytest.mark.parametrize("name", ["mamba2", "gla"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_the_chunked_form(dtype, name):
    shape = Shape(2, 40, 1, 2, 4, 128, 64)
    case = CASES[name]
    engine = engine_for(case, shape, DTYPES[dtype], backend="tilelang")
    inputs = shape.inputs(case, DTYPES[dtype], "cuda")
    whole = engine(*(inputs[n] for n in ("q", "k", "v", "decay", *case.axes)))
    state, outputs = None, []
    for t in range(shape.length):
        one = [inputs[n][:, t] for n in ("q", "k", "v", "decay")]
        custom = [inputs[n][:, :, t : t + 1] if inputs[n].ndim == 3 else inputs[n] for n in case.axes]
        o, state = engine.step(*one, *custom, state=state)
        outputs.append(o)
    off = (torch.stack(outputs, 1).float() - whole.float()).abs().mean() / whole.float().abs().mean()
    assert off <= {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
