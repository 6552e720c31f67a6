"""python -m attention_engine doctor: one line for each thing that kernels need, ok or what to do."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import attention_engine
from attention_engine import folders
from attention_engine.arch import Arch, detect
from attention_engine.cli.terminal import GREEN, RED, YELLOW, coloured
from attention_engine.errors import AttentionEngineError, NoCudaCompiler, NoHipCompiler, NoHostCompiler

NEVER_RUN = "Nobody ran these kernels on one before: see engine.check(), and docs/limits.md"


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is well (None: not here, and nothing needs it), and what to know or do."""

    what: str
    well: bool | None
    words: str

    @property
    def state(self) -> str:
        """In a word or two."""
        return {True: "ok", False: "NOT ok", None: "none"}[self.well]

    def __str__(self) -> str:
        colour = {True: GREEN, False: RED, None: YELLOW}[self.well]
        return f"{self.what:12} {coloured(self.state, colour)}: {self.words}"


def versions() -> Finding:
    """Python and the packages that kernels are made with."""
    import torch

    try:
        tilelang = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", False, "TileLang is missing. pip install tilelang==0.1.15")
    words = f"Python {platform.python_version()}, torch {torch.__version__}, TileLang {tilelang}{_bytecode()}"
    return Finding("packages", True, words)


def _bytecode() -> str:
    """What to do where Python reads TileLang's source anew in each process: as after uv, or pip --no-compile, where
    nothing writes bytecode later."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None or Path(importlib.util.cache_from_source(spec.origin)).exists():
        return ""
    folder = Path(spec.origin).parent
    if not sys.dont_write_bytecode and os.access(folder, os.W_OK):
        return ""
    return f" without bytecode: its import takes a second more. python -m compileall -q {folder}"


def gpu() -> Finding:
    """The GPU, and whether there are kernels for it."""
    import torch

    if not torch.cuda.is_available():
        build = "has no CUDA" if torch.version.cuda is None else f"is for CUDA {torch.version.cuda}"
        return Finding("GPU", None, f"torch sees none (this build {build}). The reference runs; kernels only compile")
    try:
        arch = detect()
    except AttentionEngineError as error:
        return Finding("GPU", False, str(error))
    from attention_engine.tuner.defaults import measured_on

    known = measured_on(arch)
    tiles = f"measured on {', '.join(known)}" if known else f"chosen by what fits. {NEVER_RUN}"
    words = f"{torch.cuda.get_device_name()}, as {arch.name} ({arch.target}); its default tiles were {tiles}"
    return Finding("GPU", True, words)


def driver() -> Finding:
    """The driver's version."""
    import torch

    if not torch.cuda.is_available():
        return Finding("driver", None, "no GPU to drive")
    if torch.version.hip is not None:
        return Finding("driver", True, f"ROCm {torch.version.hip} in torch")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("driver", None, f"nvidia-smi did not say ({error}); torch can use the GPU all the same")
    return Finding("driver", True, f"{done.stdout.splitlines()[0].strip()}, CUDA {torch.version.cuda} in torch")


def limits() -> Finding:
    """What a kernel may use."""
    import torch

    arch = _arch()
    whose = arch.name if torch.cuda.is_available() else f"{arch.name}'s, as no GPU is here"
    words = (
        f"{whose}: {arch.shared_memory_per_block} bytes of shared memory a block, {arch.registers_per_sm} "
        f"registers an SM, {arch.sm_count} SMs"
    )
    return Finding("limits", True, words)


def compiler() -> Finding:
    """nvcc and the C++ compiler that it works with, or AMD's hipcc."""
    from attention_engine.codegen.compile import find_host_compiler, find_nvcc

    if (arch := _arch()).language == "hip":
        from attention_engine.codegen.dialects import find_hipcc

        hipcc = find_hipcc()
        return Finding("hipcc", hipcc is not None, hipcc or str(NoHipCompiler(arch.name)))
    nvcc = find_nvcc()
    if nvcc is None:
        return Finding("nvcc", False, str(NoCudaCompiler()))
    done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    release = next((line.strip() for line in done.stdout.splitlines() if "release" in line), "of unknown version")
    if find_host_compiler() is None:
        return Finding("nvcc", False, f"{nvcc}, {release}. {NoHostCompiler()}")
    return Finding("nvcc", True, f"{nvcc}, {release}")


def cache() -> Finding:
    """The folders of compiled kernels."""
    from attention_engine.codegen.cache import entries

    found = folders.kernel_folders()
    held = [entry for entry in entries() if entry.folder not in found.shipped]
    words = f"{found}; {len(held)} kernels, {sum(e.size for e in held) / 2**20:.1f} MB"
    if found.passed_over:
        return Finding("cache", False, f"{words}. Set ATTENTION_ENGINE_CACHE_DIR to a folder that is yours.")
    return Finding("cache", True, words)


def shipped() -> Finding:
    """The wheels of compiled kernels that are installed."""
    from attention_engine.shipping.installed import installed

    found = list(installed())
    if not found:
        return Finding("shipped", None, "no wheel of compiled kernels is installed; each is compiled when first called")
    return Finding("shipped", all(wheel.well for wheel in found), "; ".join(map(str, found)))


def kernel() -> Finding:
    """A tiny attention: compiled, and run where there is a GPU."""
    import torch

    from attention_engine import AttentionEngine, meta_tensor
    from attention_engine.library import OnlineSoftmax, causal, scale

    here = torch.cuda.is_available()
    metas = (meta_tensor(1, 2, 128, 64, dtype="float16"),) * 3
    engine = AttentionEngine(metas, None, scale(0.125), causal, OnlineSoftmax(), device=None if here else _arch())
    start = time.perf_counter()
    try:
        if not here:
            engine.source("forward", form="cuda")
            return Finding("kernel", True, f"compiled for {_arch().target} in {time.perf_counter() - start:.1f} s")
        q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.float16, device="cuda") for _ in range(3))
        found = engine(q, k, v)
        torch.cuda.synchronize()
    except (AttentionEngineError, RuntimeError, OSError) as error:
        return Finding("kernel", False, f"{type(error).__name__}: {_telling_line(str(error))}")
    seconds = time.perf_counter() - start
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
    off = (found.transpose(1, 2).double() - exact).abs().mean().item()
    well = off < 1e-3
    words = f"ran on the GPU {seconds:.1f} s after it was asked for, {off:.1e} from float64"
    return Finding("kernel", well, words if well else f"{words}. Please report this.")


def _telling_line(said: str) -> str:
    """The line of an error that says what is wrong. nvcc's stands behind the whole text of a kernel."""
    lines = said.splitlines()
    return next((line for line in lines if re.search(r"\b(error|fatal)\b *:", line)), lines[0])


def _arch() -> Arch:
    import torch

    from attention_engine.arch import H100

    return detect() if torch.cuda.is_available() else H100()


CHECKS: tuple[Callable[[], Finding], ...] = (versions, gpu, driver, limits, compiler, cache, shipped, kernel)


def findings() -> Iterator[Finding]:
    """All of them, in order."""
    for check in CHECKS:
        yield check()


def add_options(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="the findings as JSON, and nothing else on standard output")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; 1 where something is not ok."""
    if not args.json:
        bad = 0
        for finding in findings():
            print(finding, flush=True)
            bad += finding.well is False
        return 1 if bad else 0
    with contextlib.redirect_stdout(sys.stderr):  # what compilers say is none of it
        found = list(findings())
    well = all(finding.well is not False for finding in found)
    listed = [{"what": f.what, "state": f.state, "words": f.words} for f in found]
    print(json.dumps({"well": well, "version": attention_engine.__version__, "findings": listed}, indent=2))
    return 0 if well else 1
