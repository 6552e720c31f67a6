"""The very kernels of each GPU, with its tiles and forms, on a CPU: right by the rule of tests/plain.py.

Here an engine plans for a GPU, and the interpreter runs what would be compiled there. What that can't show: that the
GPU's compiler and its warps do what the tile program says.
"""

from contextlib import contextmanager
from functools import cached_property

import pytest
import torch

from attention_engine import arch
from attention_engine.compiler import Kernel
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.cached import CachedAttention
from attention_engine.runtime.linear_program_kernels import LinearProgramKernels
from attention_engine.runtime.program_kernels import ProgramKernels
from tests import cached_cases, linear_cases, mask_cases
from tests.cases import CASES, Shape, engine_for, errors
from tests.plain import worst_ratio

pytest.importorskip("tilelang")
from attention_engine.codegen.interpreter import Interpreter
from attention_engine.tuner.defaults import default_tiles

# One of each family of tiles, of each kind of instructions. H100's run in test_soak.py and in test_hopper_interpret.py.
GPUS = (arch.A100, arch.RTX4090, arch.B200, arch.RTX5090, arch.MI300X)
DTYPE_OF_DIM = {64: torch.float16, 128: torch.bfloat16}
RAN = []  # kernels of a test


@pytest.fixture(params=GPUS, ids=lambda gpu: gpu.__name__)
def gpu(request, monkeypatch):
    with planned_for(request.param(), monkeypatch) as made:
        yield made


@contextmanager
def planned_for(made, monkeypatch):
    """Engines plan for this GPU, and know of no call that was planned for another."""
    before = dict(ATTENTIONS)
    ATTENTIONS.clear()
    RAN.clear()
    for owner in (ProgramKernels, LinearProgramKernels, CachedAttention):
        monkeypatch.setattr(owner, "target", lambda *_: made)
    monkeypatch.setattr(Kernel, "begin", lambda _: None)
    interpreted = cached_property(_interpret)
    interpreted.__set_name__(Kernel, "compiled")
    monkeypatch.setattr(Kernel, "compiled", interpreted)
    yield made
    ATTENTIONS.clear()
    ATTENTIONS.update(before)


def _interpret(kernel):
    RAN.append(kernel)
    return Interpreter(kernel.prim_func)


@pytest.mark.parametrize("dim", DTYPE_OF_DIM)
@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, dim, gpu, record_property):
    """Both directions, lengths that are no whole tiles, heads in groups."""
    shape = Shape(1, 131, 131, 2, 1, dim, dim)
    found = errors(CASES[name], shape, DTYPE_OF_DIM[dim], True, backend="interpret", draws=1)
    record_property(*worst_ratio(found, f"{gpu.name:8} {name:14} {dim}"))


@pytest.mark.parametrize("dim", DTYPE_OF_DIM)
@pytest.mark.parametrize("mask", ["two-sided window", "documents", "padding"])
def test_masks_keep_the_rule(mask, dim, gpu):
    """Two bounds, lists of tiles, keys that nobody sees: some GPUs have other tiles for these."""
    assert mask_cases.errors("scaled", mask, Shape(2, 131, 131, 2, 1, dim, dim), DTYPE_OF_DIM[dim], backend="interpret")


def test_kernels_are_those_of_their_gpu(gpu):
    """What the others rely on: Hopper's under another name would be right, too."""
    engine = engine_for(CASES["softmax"], Shape(1, 8, 8, 2, 2, 128, 128), torch.float16, True, backend="interpret")
    q, k, v = (torch.zeros(1, 8, 2, 128, dtype=torch.float16, requires_grad=True) for _ in range(3))
    engine(q, k, v).sum().backward()
    kernels = engine._kernels("tilelang", device=gpu)
    assert kernels.tiles == default_tiles(kernels.problem, None, gpu) and not kernels.tiles.forward.hopper
    ran = {kernel.builder.rsplit(".", 1)[1]: kernel for kernel in RAN}
    assert {"forward", "preprocess", "backward", "postprocess"} <= ran.keys()
    assert {kernel.target for kernel in RAN} == {gpu}
    assert ran["forward"].source("tilelang") == kernels.forward.source("tilelang")


@pytest.mark.parametrize("dim", DTYPE_OF_DIM)
def test_decoding_keeps_the_rule(dim, gpu):
    shape = cached_cases.Shape((70, 3, 129), dim=dim, page=16)
    assert cached_cases.errors("softmax", shape, DTYPE_OF_DIM[dim], backend="interpret")


@pytest.mark.parametrize("dim", DTYPE_OF_DIM)
@pytest.mark.parametrize("name", ["plain", "mamba2", "scaled_keys", "shifted", "gla"])
def test_linear_attention_keeps_the_rule(name, dim, gpu):
    shape, case = linear_cases.Shape(1, 150, dim=dim, dim_v=dim), linear_cases.CASES[name]
    draws = 4 if case.axes else 1  # a gradient of a number for each head is two numbers: eager's may be lucky
    assert linear_cases.errors(case, shape, DTYPE_OF_DIM[dim], backend="interpret", draws=draws)
