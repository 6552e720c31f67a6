"""Compiles the kernels of many attentions side by side, each in the cache as any other, and packs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attention_engine.arch import Arch
from attention_engine.codegen import cache
from attention_engine.codegen.compile import find_nvcc
from attention_engine.errors import KernelsNotBuilt, NoCudaCompiler
from attention_engine.shipping.programs import Case, compile_case
from attention_engine.shipping.wheel import write_wheel
from attention_engine.tuner.worker import call_all

SLOWEST = 1800.0  # seconds: a process that takes longer for one attention hangs


def build(
    arch: Arch, cases: Sequence[Case], out: Path, processes: int, version: str, tell: Callable[[str], None]
) -> Path:  # fmt: skip
    """The wheel of these attentions' kernels; what is compiled already is taken as it is.

    version: of this package. tell: is told how far it is. Raises NoCudaCompiler, and KernelsNotBuilt where an attention
    can't be compiled.
    """
    if find_nvcc() is None:
        raise NoCudaCompiler
    wanted: set[str] = set()
    failed: list[str] = []
    since = time.perf_counter()
    answers = call_all(compile_case, [(case, arch) for case in cases], processes, SLOWEST)
    for done, (number, answer) in enumerate(answers, start=1):
        name, words = cases[number].name, f"{answer}"
        if isinstance(answer, Exception):
            failed.append(f"{name}: {type(answer).__name__}: {answer}")
        else:
            wanted |= {*answer}
            words = f"{len(answer)} kernels"
        tell(f"[{done}/{len(cases)}, {time.perf_counter() - since:.0f} s] {name}: {words}")
    if failed:
        raise KernelsNotBuilt("\n  ".join([f"{len(failed)} of {len(cases)} attentions were not compiled:", *failed]))
    kept = {entry.digest: entry for entry in cache.entries() if entry.digest in wanted}
    if lacking := wanted - kept.keys():
        raise KernelsNotBuilt(f"{len(lacking)} kernels were compiled and not kept. python -m attention_engine doctor")
    return write_wheel(out, arch, list(kept.values()), version)
