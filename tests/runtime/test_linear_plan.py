"""Which kernels a linear attention's calls launch, and that what is launched fits the GPU."""

from dataclasses import replace

import pytest

from attention_engine import CustomIO, arch
from attention_engine.compiler import LinearKernels
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import LinearProblem
from attention_engine.plan.linear import walk_shared_bytes
from attention_engine.tuner.linear import default_linear_tiles
from tests.linear_cases import CASES

H100 = arch.H100()
DTYPES = ("float32", "bfloat16")


def kernels(name, dims, dtype, gpu=H100):
    case = CASES[name]
    custom = tuple((n, "float32", axes) for n, axes in case.axes.items())
    problem = LinearProblem(8, 8, 8, *dims, dtype, custom=custom)
    program = trace_mods(case.mods, CustomIO(case.axes))
    return LinearKernels(program, problem, default_linear_tiles(program, problem, gpu), gpu)


# what TileLang asked for at the launch of these walks, with a first and a last state
LAUNCHED = {
    ("plain", (256, 512), "float32", "output"): 225664,
    ("shifted", (40, 96), "float32", "output"): 98688,
    ("shifted", (256, 512), "float32", "output"): 295296,
    ("plain", (256, 512), "bfloat16", "output"): 173056,
    ("plain", (256, 512), "bfloat16", "dq"): 222208,
    ("shifted", (256, 512), "bfloat16", "output"): 254976,
    ("shifted", (256, 512), "bfloat16", "dq"): 296960,
    ("shifted", (256, 512), "bfloat16", "dv"): 239616,
}


@pytest.mark.parametrize("walk", LAUNCHED, ids=str)
def test_a_walks_memory_is_known_beforehand(walk):
    name, dims, dtype, role = walk
    made = kernels(name, dims, dtype)
    tile = made.tiles.forward if role == "output" else made.tiles.walks[role]
    found = walk_shared_bytes(made.program, made.problem, role, tile)
    assert 0 <= found - LAUNCHED[walk] <= 2048


@pytest.mark.parametrize("dtype", DTYPES)
def test_walks_that_do_not_fit_go_by_chunks(dtype):
    """A mod that bends q and k keeps them twice: on an H100 such a walk of wide heads was refused at its launch."""
    plain, shifted = (kernels(name, (256, 512), dtype) for name in ("plain", "shifted"))
    assert "forward walk" in plain.of_forward(8, 2048)
    assert set(shifted.of_forward(8, 2048)) >= {"forward states", "forward output"}
    found = shifted.of_backward(8, 2048, frozenset(["s", "dt", "c"]))
    assert not any("walk" in name for name in found)


def test_gradients_that_need_their_own_tensor_go_by_chunks_unless_a_plan_says_walk():
    made = kernels("mamba2", (256, 512), "bfloat16")
    assert "backward walk dv" in made.of_backward(8, 2048, frozenset())
    assert "backward dv" in made.of_backward(8, 2048, frozenset(["dt"]))
    walking = LinearKernels(made.program, made.problem, replace(made.tiles, plan="walk"), H100)
    assert "backward walk dv" in walking.of_backward(8, 2048, frozenset(["dt"]))


def test_wide_fp32_heads_go_by_chunks():
    assert "forward output" in kernels("plain", (512, 64), "float32").of_forward(8, 2048)
    assert "forward walk" in kernels("plain", (256, 64), "float32").of_forward(8, 2048)
