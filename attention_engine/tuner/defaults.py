"""The tile that each problem class gets where nothing was tuned: data/*.json, in the form of tune files.

A key there names a class: kernel, arch, dtype ("16-bit" or "float32"), the largest dim and dim_v that the tile serves,
and how it was found ("measured": a GPU's name, or "no": by what fits without spills).
"""

from __future__ import annotations

import functools
from pathlib import Path

from attention_engine.arch import Arch
from attention_engine.errors import TileDoesNotFit
from attention_engine.frontend.meta import Lengths
from attention_engine.ir.problem import Problem
from attention_engine.passes.maths import Maths
from attention_engine.plan.attention import Tiles
from attention_engine.plan.choice import OF_ANY_SEQUENCE, Choice, choose
from attention_engine.plan.forms import KERNEL_NAMES, KernelName, Tile
from attention_engine.plan.targets import Target
from attention_engine.tuner.entries import Entry, parse

FOLDER = Path(__file__).parent / "data"
ROOMY = 160 * 1024  # bytes of shared memory a block: A100, H100 and B200 have more, RTX cards 99 KB


@functools.cache
def entries(family: str) -> tuple[Entry, ...]:
    """The default tiles of a family of GPUs."""
    path = FOLDER / f"{family}.json"
    return tuple(parse(path.read_text(), str(path)))


def family(target: Target) -> str:
    """Whose defaults a GPU runs with; the interpreter stands for Hopper."""
    if not isinstance(target, Arch) or target.has_wgmma:
        return "sm_90a"
    if target.language == "hip":
        return "cdna"
    return "sm_80" if target.shared_memory_per_block > ROOMY else "sm_89"


def measured_on(target: Target) -> tuple[str, ...]:
    """The GPUs on which default tiles of its family were measured, by name; none where all were chosen by what fits."""
    found = dict.fromkeys(str(entry.key["measured"]) for entry in entries(family(target)))
    return tuple(name for name in found if name != "no")


def default_entry(kernel: KernelName, problem: Problem, target: Target) -> Entry:
    """The default of a kernel: of the classes that hold the problem, the one with the smallest dims."""
    dtype = "float32" if problem.dtype == "float32" else "16-bit"
    fitting = [
        entry for entry in entries(family(target))
        if (entry.key["kernel"], entry.key["dtype"]) == (kernel, dtype)
        and problem.dim <= entry.key["dim"] and problem.dim_v <= entry.key["dim_v"]
    ]  # fmt: skip
    if not fitting:
        raise TileDoesNotFit(problem.dim, problem.dim_v, problem.dtype, f"have no tile for {family(target)}")
    return min(fitting, key=lambda entry: entry.key["dim"] + entry.key["dim_v"])


def default_tiles(problem: Problem, maths: Maths | None, target: Target, hints: Lengths | None = None) -> Tiles:
    """Tiles that fit the target and are good for the problem; without maths, for kernels that run any.

    hints: batch, queries and keys that calls will likely have; those of a call change no default, or it would compile.
    """
    return _straight(problem, target) if maths is None else _choice(problem, maths, target, hints).tiles


def _choice(problem: Problem, maths: Maths, target: Target, hints: Lengths | None) -> Choice:
    return choose(problem, maths, target, _straight(problem, target), hints)


def _straight(problem: Problem, target: Target) -> Tiles:
    found = [default_entry(kernel, problem, target).tile for kernel in KERNEL_NAMES]
    return Tiles(*(tile for tile in found if isinstance(tile, Tile)))  # these tables hold no others


def where_from(
    kernel: KernelName, problem: Problem, maths: Maths, target: Target, hints: Lengths | None, runs: Tile
) -> str:  # fmt: skip
    """How the default of a kernel was found, and why it has its form; runs: that tile as a plan runs it."""
    measured = default_entry(kernel, problem, target).key["measured"]
    fits = "fits shared memory" if family(target) == "cdna" else "fits without spills"  # no compiler counted AMD's
    found = f"measured on {measured}" if measured != "no" else f"chosen by what {fits}, not measured"
    choice = _choice(problem, maths, target, hints)
    why = choice.why.get(kernel)
    if getattr(choice.tiles, kernel).within_sequences and not runs.within_sequences:
        why = OF_ANY_SEQUENCE
    return found if why is None else f"{found}; {why}"
