"""Kernels compile for every architecture without a GPU, and say what they take."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

tilelang = pytest.importorskip("tilelang")

import tilelang.language as T  # noqa: E402

from attention_engine import arch  # noqa: E402
from attention_engine.cli import doctor  # noqa: E402
from attention_engine.codegen import compile as codegen_compile  # noqa: E402
from attention_engine.codegen.patches import proofs  # noqa: E402
from attention_engine.errors import NoCudaCompiler, NoHostCompiler  # noqa: E402
from attention_engine.plan.rules import DISABLE_WARP_SPECIALIZATION  # noqa: E402

needs_nvcc = pytest.mark.skipif(codegen_compile.find_nvcc() is None, reason="needs nvcc")

REPORT = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function 'main_kernel' for 'sm_90a'
ptxas info    : Function properties for main_kernel
    16 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes stack frame, 72 bytes smem
"""
CUDA = """extern "C" __global__ void __launch_bounds__(384, 1) main_kernel(half* Q) {
  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
}
extern "C" __global__ void other_kernel(half* Q) {
  Q[0] = half(0);
}
"""
HOST = """
  (((TVMFFIAny*)stack_ffi_any)[2].v_int64) = ((int64_t)49152);
  if (TVMFFIFunctionCall(main_kernel_packed, (TVMFFIAny*) stack_ffi_any, 3, &result) != 0) {
  (((TVMFFIAny*)stack_ffi_any)[2].v_int64) = ((int64_t)99999);
  if (TVMFFIFunctionCall(other_kernel_packed, (TVMFFIAny*) stack_ffi_any, 3, &result) != 0) {
"""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """TileLang's disk cache in a fresh folder."""
    tilelang = codegen_compile.load_tilelang()
    before = tilelang.env.TILELANG_CACHE_DIR
    tilelang.env.TILELANG_CACHE_DIR = str(tmp_path_factory.mktemp("tilelang"))
    yield
    tilelang.env.TILELANG_CACHE_DIR = before


def test_a_report_is_read_in_full() -> None:
    assert codegen_compile.dynamic_shared_bytes(CUDA, HOST) == 49152
    got = codegen_compile.parse_resources(REPORT, 49152)
    assert (got.registers, got.spill_stores, got.spill_loads, got.shared_bytes) == (168, 24, 20, 49152 + 72)
    assert got.spills
    assert [note[:21] for note in got.notes] == ["ptxas info    : (C751"]


def causal_sum(rows: int = 256, dim: int = 32, tile: int = 64):
    """S += Q K^T + Q V^T over the tiles up to the diagonal: a loop of unknown extent, two copies and stages a step."""

    @T.prim_func
    def main(
        Q: T.Tensor((rows, dim), "float16"),
        K: T.Tensor((rows, dim), "float16"),
        V: T.Tensor((rows, dim), "float16"),
        S: T.Tensor((rows, tile), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, tile), threads=128) as block:
            q = T.alloc_shared([tile, dim], "float16")
            k = T.alloc_shared([tile, dim], "float16")
            v = T.alloc_shared([tile, dim], "float16")
            total = T.alloc_fragment([tile, tile], "float32")
            T.copy(Q[block * tile : (block + 1) * tile, :], q)
            T.clear(total)
            for step in T.Pipelined(block + 1, num_stages=2):
                T.copy(K[step * tile : (step + 1) * tile, :], k)
                T.gemm(q, k, total, transpose_B=True)
                T.copy(V[step * tile : (step + 1) * tile, :], v)
                T.gemm(q, v, total, transpose_B=True)
            T.copy(total, S[block * tile : (block + 1) * tile, :])

    return main


@needs_nvcc
@pytest.mark.slow  # test_tilelang_cannot_print_waits_of_unknown_counts reads the text of sm_80
@pytest.mark.parametrize("gpu", [arch.A100(), arch.RTX4090(), arch.H100()], ids=lambda gpu: gpu.target)
def test_a_dynamic_extent_with_two_stages_compiles(gpu: arch.Arch) -> None:
    lowered = codegen_compile.lower_kernel(causal_sum(), gpu)
    if gpu.has_tma:
        assert "tma_load" in lowered.cuda and "wgmma" in lowered.cuda
    else:
        counts = re.findall(r"cp_async_wait<(\d+)>", lowered.cuda)
        assert counts == ["3", "3", "3", "2", "1", "0"]  # the loop's two, then those of the drain
    resources = lowered.resources()
    assert 0 < resources.registers <= 255
    assert not resources.spills
    assert resources.shared_bytes >= 64 * 32 * 2 * 5  # q, and two stages of k and v
    assert resources.shared_bytes <= gpu.shared_memory_per_block


@needs_nvcc
def test_a_compiled_kernel_shows_its_sources_and_is_found_again() -> None:
    program = causal_sum()
    kernel = codegen_compile.compile_kernel(program, arch.H100())
    assert "wgmma" in kernel.source("cuda")
    assert "T.gemm(" in kernel.source("tilelang")
    assert codegen_compile.dynamic_shared_bytes(kernel.lowered.cuda, kernel.lowered.host) >= 64 * 32 * 2 * 5
    q = torch.zeros(256, 32, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="device_type mismatch, expected cuda"):
        kernel(q, q, q, torch.zeros(256, 64))
    start = time.perf_counter()
    again = codegen_compile.compile_kernel(causal_sum(), arch.H100())
    assert time.perf_counter() - start < 1  # from the cache: no lowering, no nvcc
    assert again.source() == kernel.source()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert codegen_compile.find_nvcc() is None
    with pytest.raises(NoCudaCompiler, match=r"pip install 'tilelang\[nvcc\]'"):
        codegen_compile.ptxas_report("", arch.H100())


@needs_nvcc
def test_a_failed_compilation_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[Errno 2] No such file or directory: 'nvcc'")

    monkeypatch.setattr(codegen_compile.load_tilelang(), "compile", fail)
    with pytest.raises(RuntimeError, match="No such file"):
        codegen_compile.compile_kernel(None, arch.H100())
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(NoCudaCompiler):
        codegen_compile.compile_kernel(None, arch.H100())


@needs_nvcc
def test_a_missing_compiler_of_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("nvcc fatal : Failed to preprocess host compiler properties.")

    monkeypatch.setattr(codegen_compile.load_tilelang(), "compile", fail)
    monkeypatch.setattr("tilelang.contrib.cc.get_cplus_compiler", lambda: None)
    for ask in (
        lambda: codegen_compile.compile_kernel(None, arch.H100()),
        lambda: codegen_compile.ptxas_report("", arch.H100()),
    ):
        with pytest.raises(NoHostCompiler, match=r"install g\+\+ \(Debian and Ubuntu: apt-get install g\+\+\)"):
            ask()
    found = doctor.compiler()
    assert found.well is False and "install g++" in found.words


def test_nvcc_is_found_in_cuda_home_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert codegen_compile.find_nvcc() == compiler


def test_an_unknown_form_of_source_is_an_error() -> None:
    kernel = codegen_compile.LoweredKernel(None, arch.H100(), "cuda text", "host text")
    assert kernel.source() == "cuda text"
    with pytest.raises(ValueError, match="form='ptx' is neither 'tilelang' nor 'cuda'"):
        kernel.source("ptx")  # type: ignore[arg-type]


def test_the_wait_fix_is_for_targets_without_tma_pipelines() -> None:
    fixed = {gpu().target for gpu in arch.KNOWN_GPUS if codegen_compile.needs_wait_fix(gpu(), {})}
    assert fixed == {"sm_80", "sm_86", "sm_89", "sm_120a"}
    assert codegen_compile.needs_wait_fix(arch.H100(), {DISABLE_WARP_SPECIALIZATION: True})


def test_z3_is_as_before_after_a_kernel_was_lowered() -> None:
    z3 = pytest.importorskip("z3")
    z3.set_param("smt.relevancy", 1)
    try:
        with pytest.raises(KeyError), proofs.quick_proofs():
            assert {name: z3.get_param(name) for name in proofs.QUICK} == {
                "smt.arith.solver": "2",
                "smt.arith.propagation_mode": "0",
                "smt.arith.propagate_eqs": "false",
                "smt.relevancy": "0",
                "smt.arith.nl": "false",
                "smt.bv.enable_int2bv": "false",
            }
            raise KeyError
        assert z3.get_param("smt.relevancy") == "1"
        assert z3.get_param("smt.arith.propagate_eqs") == "true"
        assert z3.get_param("smt.arith.nl") == "true"
    finally:
        z3.set_param("smt.relevancy", 2)


def test_a_kernel_that_needs_a_longer_proof_is_lowered_with_all_of_z3() -> None:
    z3 = pytest.importorskip("z3")
    from tvm.error import InternalError

    solvers = []

    def lower() -> str:
        solvers.append(z3.get_param("smt.arith.solver"))
        if len(solvers) == 1:
            raise InternalError("(analyzer->CanProveEqual(a, b)) is false")
        return "lowered"

    assert proofs.with_quick_proofs(lower) == "lowered"
    assert solvers == ["2", "6"]


@pytest.mark.parametrize("sign", codegen_compile.FAILS_BY_SPECIALIZATION)
def test_what_fails_by_warp_specialization_is_made_without(sign):
    asked = []

    def make(configs):
        asked.append(dict(configs))
        if DISABLE_WARP_SPECIALIZATION not in configs:
            raise RuntimeError(f"tvm: {sign} and more")
        return "made"

    assert codegen_compile._specialized_if_possible(make, {"a": True}) == "made"
    assert asked == [{"a": True}, {"a": True, DISABLE_WARP_SPECIALIZATION: True}]


@pytest.mark.parametrize("configs", [None, {DISABLE_WARP_SPECIALIZATION: True}])
def test_other_failures_are_told(configs):
    def make(_):
        raise RuntimeError("out of luck" if configs is None else codegen_compile.FAILS_BY_SPECIALIZATION[0])

    with pytest.raises(RuntimeError):
        codegen_compile._specialized_if_possible(make, configs)
