"""The only caller of TileLang's compiler: a PrimFunc to CUDA source, its resources, and a callable."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from attention_engine import folders, settings
from attention_engine.arch import Arch
from attention_engine.codegen.patches import (
    descriptors,
    extremes,
    fences,
    headers,
    matrices,
    patched,
    printed,
    wait_groups,
)
from attention_engine.codegen.patches.later import imported_later
from attention_engine.codegen.patches.proofs import with_quick_proofs
from attention_engine.codegen.tir_types import Function, Printed
from attention_engine.collector import seldom_collected
from attention_engine.errors import NoCudaCompiler, NoHostCompiler
from attention_engine.plan.rules import (
    DISABLE_WARP_SPECIALIZATION,
    FAST_MATH,
    HELD_BARRIERS,
    HELD_THREADS,
    NO_CONTRACTION,
    ONE_CHAIN,
    STORED_MATRICES,
    UNIFORM_GROUPS,
    WHOLE_DESCRIPTORS,
)

Made = TypeVar("Made")
FAILS_BY_SPECIALIZATION = ("[ThreadSync] Cannot lower", "(C7602)")


@dataclass(frozen=True)
class Resources:
    """What one block of a kernel takes, as ptxas reports it; of several kernels, the largest of each."""

    registers: int  # per thread, before setmaxnreg
    spill_stores: int  # bytes per thread
    spill_loads: int
    shared_bytes: int  # static and dynamic, per block
    notes: tuple[str, ...] = ()  # ptxas's advisories C75xx, such as serialised wgmma

    @property
    def spills(self) -> bool:
        """Whether registers went to memory."""
        return self.spill_stores > 0 or self.spill_loads > 0


@dataclass(frozen=True)
class LoweredKernel:
    """A kernel as CUDA source, with no machine code yet: enough to read it and to weigh it."""

    prim_func: Printed
    arch: Arch
    cuda: str
    host: str  # the C code that launches it
    flags: tuple[str, ...] = ()  # for nvcc, beside those of every kernel
    symbol: str = ""  # the name of the host function

    def source(self, form: Literal["tilelang", "cuda"] = "cuda") -> str:
        """The kernel as text: the TileLang program, or the CUDA made of it."""
        match form:
            case "tilelang":
                return self.prim_func.script()
            case "cuda":
                return self.cuda
        raise ValueError(f"form={form!r} is neither 'tilelang' nor 'cuda'")

    @property
    def launch_shared_bytes(self) -> int:
        """The shared memory that a launch asks for, per block; exact, and without nvcc."""
        return dynamic_shared_bytes(self.cuda, self.host)

    def resources(self) -> Resources:
        """Registers, spills and shared memory, from ptxas and the launch code; needs nvcc and no GPU, takes seconds."""
        return parse_resources(
            ptxas_report(self.cuda, self.arch, self.flags), dynamic_shared_bytes(self.cuda, self.host)
        )


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that runs: `kernel(*tensors)` in the order of the PrimFunc's parameters, outputs among them.

    The call goes to the current torch stream of the tensors' device and returns before the GPU is done. `run` is
    the bare function, without this object's method call around it.
    """

    lowered: LoweredKernel
    run: Callable[..., None] = field(repr=False)
    library: Path | None = None  # where TileLang keeps it as a shared library

    def __call__(self, *tensors: Any) -> None:
        """Launch the kernel."""
        self.run(*tensors)

    def source(self, form: Literal["tilelang", "cuda"] = "cuda") -> str:
        """The kernel as text: the TileLang program, or the CUDA made of it."""
        return self.lowered.source(form)


def compile_kernel(
    prim_func: Function, arch: Arch, *, pass_configs: Mapping[str, object] | None = None
) -> CompiledKernel:
    """Compile a PrimFunc for a GPU, which need not be here; TileLang's disk cache spares the work of another process.

    All tensors, outputs too, are parameters that the caller allocates. Raises NoCudaCompiler where nvcc is needed
    and missing, NoHostCompiler where the C++ compiler is that nvcc works with.
    """
    tilelang = load_tilelang()
    headers.begin(arch.target, bool((pass_configs or {}).get(FAST_MATH)))

    def compiled(given: Mapping[str, object]) -> CompiledKernel:
        configs, rewriting, flags = _prepare(arch, given)
        with patched(), rewriting, seldom_collected(), warnings.catch_warnings():
            # TileLang would have each copy say that it is no bulk copy; we say it of a whole kernel.
            warnings.filterwarnings("ignore", "`tl.disable_tma_lower` is deprecated", DeprecationWarning)
            kernel = with_quick_proofs(
                lambda: tilelang.compile(
                    prim_func,
                    target=tilelang_target(arch),
                    execution_backend="tvm_ffi",
                    pass_configs=configs,
                    compile_flags=flags or None,
                )
            )
        symbol = str(prim_func.attrs["global_symbol"])
        lowered = LoweredKernel(
            prim_func, arch, kernel.get_kernel_source(), kernel.get_host_source(), nvcc_flags(configs, flags), symbol
        )
        library = _library(kernel)
        if library is None:  # TileLang keeps nothing: it links the kernel once more, to load it
            return CompiledKernel(lowered, kernel.adapter.get_exportable_executable()[symbol])
        return CompiledKernel(lowered, load_library(library)[symbol], library)

    try:
        return _specialized_if_possible(compiled, pass_configs)
    except RuntimeError as error:
        if find_nvcc() is None:
            raise NoCudaCompiler from error
        if find_host_compiler() is None:
            raise NoHostCompiler from error
        raise


def _specialized_if_possible(
    make: Callable[[Mapping[str, object]], Made], pass_configs: Mapping[str, object] | None
) -> Made:  # fmt: skip
    """What `make` makes with these configs; without TileLang's warp specialization where TileLang 0.1.15 or ptxas
    fails by it: a barrier would stand among some threads of a warp, or a thread has fewer registers than a product."""
    configs = pass_configs or {}
    try:
        return make(configs)
    except RuntimeError as error:
        if DISABLE_WARP_SPECIALIZATION in configs or not any(sign in str(error) for sign in FAILS_BY_SPECIALIZATION):
            raise
    return make({**configs, DISABLE_WARP_SPECIALIZATION: True})


def load_library(library: Path) -> Any:
    """A compiled kernel's functions by name, of its shared library."""
    import tvm_ffi

    return tvm_ffi.load_module(str(library))


def _library(kernel: Any) -> Path | None:
    """The shared library that TileLang keeps of a kernel, if its cache is on."""
    folder = getattr(kernel, "_tilelang_cache_path", None)
    return _if_file(Path(folder) / "executable.so") if folder else None


def lower_kernel(prim_func: Function, arch: Arch, *, pass_configs: Mapping[str, object] | None = None) -> LoweredKernel:
    """The CUDA source of a PrimFunc, without nvcc: for tests, and to reject a candidate before it is compiled."""
    tilelang = load_tilelang()
    from tilelang import tvm

    target, context = tvm.target.Target(tilelang_target(arch)), tvm.transform.PassContext

    def lowered(given: Mapping[str, object]) -> LoweredKernel:
        configs, rewriting, flags = _prepare(arch, given)
        with patched(), rewriting, seldom_collected(), context(opt_level=3, config=configs), target:
            artifact = with_quick_proofs(lambda: tilelang.lower(prim_func, target=target, enable_host_codegen=True))
        return LoweredKernel(
            prim_func, arch, artifact.kernel_source, artifact.host_mod.inspect_source(), nvcc_flags(configs, flags)
        )

    return _specialized_if_possible(lowered, pass_configs)


def _prepare(
    arch: Arch, pass_configs: Mapping[str, object] | None
) -> tuple[dict[str, Any], AbstractContextManager[None], list[str]]:
    """What TileLang is told, what is done to the text that it prints, and the flags for nvcc."""
    configs = dict(pass_configs or {})
    asked = (
        UNIFORM_GROUPS, ONE_CHAIN, HELD_BARRIERS, HELD_THREADS, STORED_MATRICES, WHOLE_DESCRIPTORS, NO_CONTRACTION
    )  # fmt: skip
    *asked_of_text, apart = (bool(configs.pop(rule, False)) for rule in asked)
    uniform, one_chain, held, threads, matrices_stored, whole = asked_of_text
    flags = [
        *work_arounds(arch, configs),
        *(printed.UNIFORM_FLAGS if uniform else []),
        *(printed.ONE_CHAIN_FLAGS if one_chain else []),
        *(printed.HELD_FLAGS if held else []),
        *(printed.THREAD_FLAGS if threads else []),
        *(matrices.FLAGS if matrices_stored else []),
        *(descriptors.FLAGS if whole else []),
        *(["--fmad=false"] if apart else []),
    ]
    return configs, printed.rewriting(*asked_of_text), flags


def tilelang_target(arch: Arch) -> dict[str, str]:
    """The target as TileLang takes it; always the same words, since they are part of its cache key."""
    return {"kind": "cuda", "arch": arch.target}


def work_arounds(arch: Arch, pass_configs: Mapping[str, object]) -> list[str]:
    """Flags for nvcc that say which of our changes to TileLang a kernel was made with."""
    waits = wait_groups.FLAGS if needs_wait_fix(arch, pass_configs) else []
    of_three = extremes.FLAGS if extremes.has_such(arch.target) else []
    return [*waits, *printed.FLAGS, *(fences.FLAGS if arch.has_wgmma else []), *of_three]


def needs_wait_fix(arch: Arch, pass_configs: Mapping[str, object]) -> bool:
    """Whether pipelines are built of cp.async groups, whose waits TileLang 0.1.15 cannot always print."""
    return not (arch.has_wgmma or arch.capability[0] == 10) or bool(pass_configs.get(DISABLE_WARP_SPECIALIZATION))


@functools.lru_cache(maxsize=1)
def load_tilelang() -> Any:
    """Import TileLang (after torch, whose libraries it shares) with our cache directory."""
    import torch  # noqa: F401

    folders.prepare_tilelang()
    with seldom_collected(), imported_later():
        import tilelang

    return tilelang


def find_nvcc() -> Path | None:
    """The CUDA compiler, in TileLang's own order: CUDA_HOME, PATH, the wheel nvidia-cuda-nvcc, /usr/local/cuda."""
    home = settings.cuda_home()
    if home is not None:
        return _if_file(home / "bin" / "nvcc")
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvcc":
            return _if_file(Path(str(file.locate())))
    return _if_file(Path("/usr/local/cuda/bin/nvcc"))


def find_host_compiler() -> str | None:
    """The C++ compiler that TileLang hands to nvcc: CXX, CC, or g++, clang++ or c++ on PATH."""
    load_tilelang()
    from tilelang.contrib.cc import get_cplus_compiler

    found: str | None = get_cplus_compiler()
    return found


def _if_file(path: Path) -> Path | None:
    return path if path.is_file() else None


def nvcc_flags(pass_configs: Mapping[str, object], flags: Sequence[str]) -> tuple[str, ...]:
    """The options with which TileLang compiles a kernel of these pass configs, beside those of every kernel."""
    fast = ["--use_fast_math"] if pass_configs.get(FAST_MATH) else []
    level = pass_configs.get("tl.ptxas_register_usage_level")
    usage = [] if level is None else [f"--ptxas-options=--register-usage-level={level}"]
    return (*fast, *usage, *flags)


def ptxas_report(cuda: str, arch: Arch, flags: Sequence[str] = ()) -> str:
    """What `nvcc -Xptxas -v` says of a source. Raises NoCudaCompiler, NoHostCompiler, or RuntimeError with
    nvcc's words."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise NoCudaCompiler
    if find_host_compiler() is None:
        raise NoHostCompiler
    less = headers.lessened(cuda, arch.target, headers.FAST in flags)
    if less is not None:
        with headers.without_runtime() as first:
            result = _asked_of_nvcc(nvcc, less, arch, [first, *flags])
    if less is None or result.returncode != 0:
        result = _asked_of_nvcc(nvcc, cuda, arch, flags)
    if result.returncode != 0:
        raise RuntimeError(f"nvcc failed for {arch.target}:\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def _asked_of_nvcc(nvcc: Path, cuda: str, arch: Arch, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    package = Path(load_tilelang().__file__).parent
    includes = [f"-I{package / 'src'}", f"-I{package / '3rdparty' / 'cutlass' / 'include'}"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(cuda)
        command = [str(nvcc), "--cubin", "-O3", "-w", "-std=c++20", f"-arch={arch.target}", *flags, *includes]
        command += ["-Xptxas", "-v", "-o", str(source.with_suffix(".cubin"))]
        keep = ["--keep", f"--keep-dir={folder}"] if extremes.has_such(arch.target) else []
        done = subprocess.run([*command, *keep, str(source)], capture_output=True, text=True, check=False)
        return (extremes.compiled(command, Path(folder)) if keep and done.returncode == 0 else None) or done


def parse_resources(report: str, dynamic_shared: int) -> Resources:
    """Resources from a ptxas report."""

    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, report)), default=0)

    notes = [line.strip() for line in report.splitlines() if re.search(r"\(C75\d\d\)", line)]
    return Resources(
        registers=largest(r"Used (\d+) registers"),
        spill_stores=largest(r"(\d+) bytes spill stores"),
        spill_loads=largest(r"(\d+) bytes spill loads"),
        shared_bytes=largest(r"(\d+) bytes smem") + dynamic_shared,
        notes=tuple(dict.fromkeys(notes)),
    )


def dynamic_shared_bytes(cuda: str, host: str) -> int:
    """The shared memory that the launch asks for: the last launch argument of a kernel that declares such memory."""
    sizes = [0]
    for chunk in cuda.split("__global__ void ")[1:]:
        name = re.match(r"(?:__launch_bounds__\([^)]*\) )?(\w+)\(", chunk)
        if name is None or "extern __shared__" not in chunk:
            continue
        for call in re.finditer(rf"TVMFFIFunctionCall\({name[1]}_packed, [^,]+, (\d+),", host):
            argument = rf"\[{int(call[1]) - 1}\]\.v_int64\) = \(\(int64_t\)(\d+)\);"
            found = re.findall(argument, host[: call.start()])
            sizes.append(int(found[-1]))
    return max(sizes)
