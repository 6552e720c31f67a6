"""What kernels are made for: a GPU, or the interpreter."""

from __future__ import annotations

from attention_engine.arch import H100, Arch

Target = Arch | str  # an architecture, or "interpret"
INTERPRETED = H100()  # what the interpreter stands for
INTERPRETED_PLACES = 3  # blocks that the interpreter's GPU runs at once: few, so that each has several work items


def places_of(target: Target) -> int:
    """How many blocks of a kernel that fills an SM run at once."""
    return target.sm_count if isinstance(target, Arch) else INTERPRETED_PLACES


def as_arch(target: Target) -> Arch:
    """The GPU whose limits count."""
    return target if isinstance(target, Arch) else INTERPRETED
