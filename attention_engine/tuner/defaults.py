"""The tile that each problem class gets where nothing was tuned: data/*.json, in the form of tune files.

A key there names a class: kernel, arch, dtype ("16-bit" or "float32"), the largest dim and dim_v that the tile serves,
and how it was found ("measured": a GPU's name, or "no": by what fits without spills).
"""

from __future__ import annotations

import functools
from pathlib import Path

from attention_engine.arch import Arch
from attention_engine.compiler import Maths, Target, Tiles
from attention_engine.errors import TileDoesNotFit
from attention_engine.ir.problem import Problem
from attention_engine.tuner.problems import KERNEL_NAMES, KernelName
from attention_engine.tuner.store import Entry, parse

FOLDER = Path(__file__).parent / "data"
ROOMY = 160 * 1024  # bytes of shared memory a block: A100, H100 and B200 have more, the others 99 KB


@functools.cache
def entries(family: str) -> tuple[Entry, ...]:
    """The default tiles of a family of GPUs."""
    path = FOLDER / f"{family}.json"
    return tuple(parse(path.read_text(), str(path)))


def family(target: Target) -> str:
    """Whose defaults a GPU runs with; the interpreter stands for Hopper."""
    if not isinstance(target, Arch) or target.has_wgmma:
        return "sm_90a"
    return "sm_80" if target.shared_memory_per_block > ROOMY else "sm_89"


def default_entry(kernel: KernelName, problem: Problem, target: Target) -> Entry:
    """The default of a kernel: of the classes that hold the problem, the one with the smallest dims."""
    dtype = "float32" if problem.dtype == "float32" else "16-bit"
    fitting = [
        entry for entry in entries(family(target))
        if (entry.key["kernel"], entry.key["dtype"]) == (kernel, dtype)
        and problem.dim <= entry.key["dim"] and problem.dim_v <= entry.key["dim_v"]
    ]  # fmt: skip
    if not fitting:
        raise TileDoesNotFit(
            f"head dims {problem.dim} and {problem.dim_v} in {problem.dtype} have no tile for {family(target)}.\n"
            '  Choose smaller head dims or a 16-bit dtype; backend="reference" runs any.'
        )
    return min(fitting, key=lambda entry: entry.key["dim"] + entry.key["dim_v"])


def default_tiles(problem: Problem, maths: Maths, target: Target) -> Tiles:
    """Tiles that fit the target and are good for the problem."""
    return Tiles(*(default_entry(kernel, problem, target).tile for kernel in KERNEL_NAMES))


def where_from(kernel: KernelName, problem: Problem, target: Target) -> str:
    """How the default of a kernel was found."""
    measured = default_entry(kernel, problem, target).key["measured"]
    return f"measured on {measured}" if measured != "no" else "chosen by what fits without spills, not measured"
