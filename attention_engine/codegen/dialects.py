"""Kernels as text for other compilers than nvcc, as TileLang lowers and prints them: HIP, and the CuTe DSL.

Nothing of this needs those compilers, or a GPU: TileLang's wheel holds what prints HIP for AMD's GPUs, and Python for
CUTLASS's CuTe DSL. Only what compiles such text is asked for where a kernel is to run (`compile_hip`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from attention_engine.arch import Arch
from attention_engine.codegen.compile import CompiledKernel, LoweredKernel, load_tilelang
from attention_engine.codegen.patches import patched
from attention_engine.codegen.patches.proofs import with_quick_proofs
from attention_engine.codegen.tir_types import Function
from attention_engine.errors import NoHipCompiler, NotLowered
from attention_engine.plan.rules import DISABLE_WARP_SPECIALIZATION, FAST_MATH

Dialect: TypeAlias = Literal["hip", "cutedsl"]
NAMES = {"hip": "HIP", "cutedsl": "the CuTe DSL"}


@dataclass(frozen=True)
class Text:
    """A kernel in a dialect, and the bytes of shared memory that each of its blocks asks for."""

    text: str
    shared_bytes: int


def target_of(dialect: Dialect, arch: Arch) -> dict[str, Any]:
    """The target as TileLang takes it."""
    if dialect == "cutedsl":
        return {"kind": "cuda", "arch": arch.target, "keys": ["cuda", "gpu", "cutedsl"]}
    return {"kind": "hip", "mcpu": arch.target, "mtriple": "amdgcn-amd-amdhsa-hcc", "thread_warp_size": arch.warp}


def lower_as(dialect: Dialect, prim_func: Function, arch: Arch, configs: Mapping[str, object]) -> Text:
    """A kernel's text in a dialect. Raises NotLowered with TileLang's words where it refuses the kernel."""
    load_tilelang()
    from tilelang import tvm
    from tilelang.backend.module import BackendContext, get_backend
    from tilelang.engine.lower import lower_with_context

    backend = get_backend({"hip": "rocm", "cutedsl": "cutedsl"}[dialect])
    host = tvm.target.Target("c")
    target = tvm.target.Target(tvm.target.Target(target_of(dialect, arch)), host)
    context = BackendContext(backend, target, host, backend.execution_backends[0])
    try:
        with patched(), tvm.transform.PassContext(opt_level=3, config=_configs(configs)), target:
            spelled = in_words_of(dialect, prim_func)
            made = with_quick_proofs(lambda: lower_with_context(spelled, context))
    except Exception as error:
        raise NotLowered(NAMES[dialect], arch.name, _reason(error)) from error
    return Text(made.kernel_source, _shared_bytes(made.device_mod))


def _configs(configs: Mapping[str, object]) -> dict[str, Any]:
    """What TileLang is told, of what it is told for nvcc: rules of ours are on the CUDA text; no warps copy alone."""
    own = {name: value for name, value in configs.items() if not name.startswith("attention_engine.")}
    return {**own, FAST_MATH: bool(configs.get(FAST_MATH)), DISABLE_WARP_SPECIALIZATION: True}


def _shared_bytes(device_mod: Any) -> int:
    found = [function.attrs.get("dyn_shared_memory_buf", 0) for function in device_mod.functions.values()]
    return max((int(size) for size in found), default=0)


def _reason(error: Exception) -> str:
    """The last line of what TileLang says that holds words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no words'}"


# ---- what a dialect has no word for, in others


def in_words_of(dialect: Dialect, prim_func: Function) -> Any:
    """The kernel with what TileLang can't print in a dialect spelled in what it can."""
    from tilelang import tvm
    from tvm import tirx

    spelled = {tvm.ir.Op.get(name): spell for name, spell in OTHER_WORDS.items()}

    def rewritten(node: Any) -> Any:
        for op, spell in spelled.items():
            if isinstance(node.op, tvm.ir.Op) and node.op.same_as(op):
                return spell(node)
        return None

    function: Any = prim_func
    body = tirx.stmt_functor.ir_transform(function.body, None, rewritten, ["tirx.Call"])
    return function.with_body(body)


def _reciprocal(node: Any) -> Any:
    from tvm import tirx

    return tirx.FloatImm(node.dtype, 1.0) / node.args[0]


OTHER_WORDS: dict[str, Callable[[Any], Any]] = {"tl.fast_rcp": _reciprocal}


# ---- running


def find_hipcc() -> str | None:
    """AMD's compiler, as a shell finds it, or where ROCm installs it."""
    return shutil.which("hipcc") or shutil.which("/opt/rocm/bin/hipcc")


def compile_hip(prim_func: Function, arch: Arch, configs: Mapping[str, object]) -> CompiledKernel:
    """A kernel that runs on an AMD GPU. Raises NoHipCompiler where there is no ROCm; tried on no GPU so far."""
    if find_hipcc() is None:
        raise NoHipCompiler(arch.name)
    tilelang = load_tilelang()
    asked = {"target": target_of("hip", arch), "execution_backend": "tvm_ffi", "pass_configs": _configs(configs)}
    with patched():
        kernel = with_quick_proofs(lambda: tilelang.compile(in_words_of("hip", prim_func), **asked))
    symbol = str(prim_func.attrs["global_symbol"])
    lowered = LoweredKernel(prim_func, arch, kernel.get_kernel_source(), kernel.get_host_source(), (), symbol)
    return CompiledKernel(lowered, kernel.adapter.get_exportable_executable()[symbol])
