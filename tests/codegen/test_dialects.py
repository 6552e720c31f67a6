"""Kernels as text for other compilers than nvcc: HIP and the CuTe DSL. Nothing here compiles or runs them."""

import ast
import inspect
import re

import pytest
import torch

from attention_engine import AttentionEngine, LinearAttentionEngine, arch, meta_tensor
from attention_engine.errors import NoDevice, NoHipCompiler, NotLowered, UnknownOption
from attention_engine.ir.expr import Op
from attention_engine.library import OnlineSoftmax, causal, scale
from attention_engine.tuner.defaults import default_tiles

pytest.importorskip("tilelang")
from attention_engine.codegen import dialects
from attention_engine.kernels import splice

SLOW = pytest.mark.slow  # TileLang takes ten seconds and more for each


def engine(**options):
    metas = [meta_tensor(1, heads, 256, 64, dtype=torch.float16) for heads in (4, 2, 2)]
    return AttentionEngine(metas, None, scale(0.125), causal, OnlineSoftmax(), **options)


@pytest.mark.parametrize("kernel", [
    pytest.param("forward", marks=SLOW), pytest.param("backward", marks=SLOW), "preprocess", "postprocess",
])  # fmt: skip
def test_hip_text_of_softmax_causal(kernel, golden):
    text = engine().source(kernel, form="hip", device=arch.MI300X())
    assert text == golden
    assert "#include <hip/hip_runtime.h>" in text and f"{kernel}_kernel(" in text
    assert ("__builtin_amdgcn_mfma_f32_16x16x16f16" in text) is (kernel in ("forward", "backward"))
    assert not re.search("tma_|wgmma|cp_async|__shfl_sync|asm", text), "instructions of NVIDIA's"


@SLOW
def test_an_older_amd_gpu_gets_the_same_kernels():
    """Both have MFMA products of 16 x 16 x 16 and wavefronts of 64."""
    texts = [engine().source("forward", form="hip", device=gpu()) for gpu in arch.AMD_GPUS]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kernel", [
    pytest.param("forward", marks=SLOW), pytest.param("backward", marks=SLOW), "postprocess",
])  # fmt: skip
def test_cute_text_of_softmax_causal(kernel, golden):
    text = engine(device=arch.A100()).source(kernel, form="cutedsl")
    assert text == golden
    ast.parse(text)  # it is Python
    assert text.startswith("@cute.kernel") and ("ptx_mma" in text) is (kernel != "postprocess")


def test_cute_takes_kernels_in_straight_lines_on_hopper_too():
    kernels = engine(device=arch.H100())._kernels("cutedsl", device=arch.H100().in_straight_lines())
    assert not kernels.tiles.forward.hopper and not kernels.tiles.backward.hopper


def test_each_language_has_its_gpus():
    with pytest.raises(UnknownOption, match="form is 'hip', and the GPU is H100"):
        engine(device=arch.H100()).source("forward", form="hip")
    with pytest.raises(UnknownOption, match="form is 'cuda', and the GPU is MI300X"):
        engine().source("forward", form="cuda", device=arch.MI300X())
    with pytest.raises(NoDevice, match=re.escape("AttentionEngine(..., device=attention_engine.arch.MI300X())")):
        engine().source("forward", form="hip")


def test_running_on_an_amd_gpu_wants_rocm(monkeypatch):
    monkeypatch.setattr(dialects, "find_hipcc", lambda: None)
    with pytest.raises(NoHipCompiler, match="nothing can be compiled for MI300X"):
        engine().compile_for(arch.MI300X())


def test_with_rocm_a_kernel_is_compiled_and_run(monkeypatch):
    """As far as can be shown without: TileLang is asked for this GPU, and its function is what runs."""
    tilelang = pytest.importorskip("tilelang")
    ran, asked = [], {}

    class Made:
        adapter = type("", (), {"get_exportable_executable": lambda self: {"backward_postprocess": ran.append}})()

        def get_kernel_source(self):
            return "text"

        def get_host_source(self):
            return "host"

    def compiled(function, **options):
        asked.update(options)
        return Made()

    monkeypatch.setattr(dialects, "find_hipcc", lambda: "hipcc")
    monkeypatch.setattr(tilelang, "compile", compiled)
    kernel = engine()._all_kernels(arch.MI300X())["postprocess"].compiled
    assert asked["target"]["mcpu"] == "gfx942" and asked["target"]["thread_warp_size"] == 64
    kernel("a tensor")
    assert ran == ["a tensor"] and kernel.source() == "text"


def test_what_tilelang_refuses_is_said_in_its_words(monkeypatch):
    monkeypatch.setattr(dialects, "in_words_of", lambda *_: 1 / 0)
    with pytest.raises(NotLowered, match="can't lower this kernel to HIP for MI300X: ZeroDivisionError: division"):
        engine().source("postprocess", form="hip", device=arch.MI300X())


def test_hip_has_no_word_for_a_quick_reciprocal():
    """Which TileLang refuses to print: the day it does print one, `OTHER_WORDS` can go."""
    import tilelang.language as T

    @T.prim_func
    def halves(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                x[i] = T.fast_rcp(x[i])

    assert "1.000000e+00f / x" in dialects.lower_as("hip", halves, arch.MI300X(), {}).text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialects, "in_words_of", lambda _, function: function)
        with pytest.raises(NotLowered, match="fast_rcp"):
            dialects.lower_as("hip", halves, arch.MI300X(), {})


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_amd_gpus_have_whole_rows_for_each_wavefront(dim):
    metas = [meta_tensor(1, 2, 256, dim, dtype=torch.float16)] * 3
    problem = AttentionEngine(metas, device=arch.MI300X())._kernels("hip").problem
    tiles = default_tiles(problem, None, arch.MI300X())
    for tile, rows in (
        (tiles.forward, tiles.forward.q),
        (tiles.backward, tiles.backward.kv),
        (tiles.queries, tiles.queries.q),
    ):
        assert rows % (16 * (tile.threads // arch.MI300X().warp)) == 0


def test_linear_attention_in_hip():
    metas = (meta_tensor(1, 2, 256, 64, dtype=torch.float16),) * 3
    text = LinearAttentionEngine(metas).source("sums of 64", form="hip", device=arch.MI300X())
    assert "#include <hip/hip_runtime.h>" in text


OF_INTEGERS = {Op.FLOORDIV, Op.MOD, Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT}
OF_OTHERS = {Op.AND, Op.OR, Op.NOT, Op.CHANCE, Op.WHERE}  # of conditions, or of more operands


@SLOW
@pytest.mark.parametrize("dialect", ["hip", "cutedsl"])
@pytest.mark.parametrize("op", [op for op in splice.TILELANG if op not in OF_OTHERS], ids=lambda op: op.name)
def test_every_operation_lowers(op, dialect):
    import tilelang.language as T

    spell, count = splice.TILELANG[op], len(inspect.signature(splice.TILELANG[op]).parameters)
    dtype = "int32" if op in OF_INTEGERS else "float32"

    @T.prim_func
    def each(x: T.Tensor((64,), dtype), y: T.Tensor((64,), dtype), z: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                z[i] = T.cast(spell(x[i]) if count == 1 else spell(x[i], y[i]), "float32")

    gpu = arch.MI300X() if dialect == "hip" else arch.A100()
    assert "z" in dialects.lower_as(dialect, each, gpu, {}).text
