"""Kernels compiled by one nvcc call, without a GPU: headers are most of what a call of its own would take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from attention_engine.arch import Arch
from attention_engine.codegen.compile import LoweredKernel, Resources, parse_resources, ptxas_report


@dataclass(frozen=True)
class Made:
    """A kernel's CUDA text, and what ptxas and the launch say of it."""

    cuda: str
    used: Resources


def compile_together(lowered: Mapping[str, LoweredKernel], gpu: Arch) -> dict[str, Made]:
    """Kernels by any names that differ."""
    texts = {name: re.sub(r"\b\w+_kernel\b(?=\()", f"{name}_kernel", k.cuda) for name, k in lowered.items()}
    flags = sorted({flag for k in lowered.values() for flag in k.flags})
    report = ptxas_report("\n".join(texts.values()), gpu, flags)
    parts = dict(re.findall(r"entry function '(\w+)_kernel'(.*?)(?=Compiling entry|\Z)", report, re.DOTALL))
    assert parts.keys() == lowered.keys()
    lines = report.splitlines()
    for name in lowered:  # ptxas notes what it did to a kernel's products before it says that it compiles the kernel
        parts[name] = "\n".join([*(line for line in lines if f"'{name}_kernel'" in line), parts[name]])
    return {name: Made(k.cuda, parse_resources(parts[name], k.launch_shared_bytes)) for name, k in lowered.items()}


def assert_fits(name: str, made: Made, gpu: Arch) -> None:
    """No spills, no product that waits for itself (C7510 to C7519), and registers and shared memory that a GPU has."""
    used = made.used
    assert (used.spill_stores, used.spill_loads, used.notes) == (0, 0, ()), f"{name}: {used}"
    assert 0 < used.registers <= gpu.max_registers_per_thread
    assert used.shared_bytes <= gpu.shared_memory_per_block
