"""The tiles that the kernels of per-channel decay get."""

from __future__ import annotations

from dataclasses import replace

from attention_engine.arch import Arch
from attention_engine.ir.linear import LinearProblem, LinearTile, LinearTiles
from attention_engine.plan.targets import Target
from attention_engine.tuner.linear import STEP

ROLES = ("sums", "scores", "output", "dv", "gradients")


def default_channel_tiles(problem: LinearProblem, target: Target) -> LinearTiles:
    """Chosen by what fits without spills; not timed. All kernels share one chunk length, a power of two.

    In fp32 each operand stands in shared memory twice (high and low part), so tiles are small. Without wgmma operands
    take registers too: the kernel with the most sums gets narrower ones.
    """
    chunk, width, threads = (32, 32, 64) if problem.dtype == "float32" else (64, 64, 128)
    tile = LinearTile(chunk, width, width, threads, 0, specialize=False)
    narrow = isinstance(target, Arch) and not target.has_wgmma
    gradients = replace(tile, outer=32) if narrow else tile
    return LinearTiles(tile, tile, STEP, {**dict.fromkeys(ROLES, tile), "gradients": gradients})
