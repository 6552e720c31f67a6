"""The tiles that the kernels of a linear attention get where nothing was tuned."""

from __future__ import annotations

from dataclasses import replace

from attention_engine.arch import Arch
from attention_engine.compiler import Target
from attention_engine.ir.linear import LinearProblem, LinearTile, LinearTiles

ROLES = ("output", "dq", "dk", "dv")
STEP = LinearTile(1, 0, 32, 128, 0)


def default_linear_tiles(problem: LinearProblem, target: Target) -> LinearTiles:
    """Tiles that fit the target and are good for the problem."""
    if problem.dtype == "float32":
        return _fp32(problem, target)
    if isinstance(target, Arch) and not target.has_wgmma:
        return _ampere(problem)
    return _hopper(problem)


def _fp32(problem: LinearProblem, target: Target) -> LinearTiles:
    """Each operand stands in shared memory twice (high and low part), so tiles are small; no pipeline.

    One walk holds q, k and the state whole: where those don't fit, chunks with the state in parts do.
    """
    room = target.shared_memory_per_block if isinstance(target, Arch) else 232448
    walk = 8 * (3 * 32 * max(problem.dim, 32) + 4 * 32 * 32)
    row = LinearTile(32, 32, 32, 64, 0, heads=8)
    plan = "auto" if walk <= room else "chunks"
    forward, states = LinearTile(32, problem.dim, 32, 128, 0), LinearTile(32, 64, 32, 128, 0)
    return LinearTiles(forward, states, STEP, dict.fromkeys(ROLES, row), plan)


def _ampere(problem: LinearProblem) -> LinearTiles:
    """Chosen by what fits without spills; not timed."""
    row = LinearTile(64, 32, 64, 128, 0, heads=8)
    return LinearTiles(
        LinearTile(64, problem.dim, 32, 128, 0), LinearTile(64, 64, 64, 128, 0), STEP, dict.fromkeys(ROLES, row)
    )


def _hopper(problem: LinearProblem) -> LinearTiles:
    """By what was fastest on an H100 (benchmarks/notes.md): where a state is small, several blocks on an SM hide each
    other's waits; where it fills the registers, warps of their own copy. Gradients are walked where states are large.
    """
    if problem.dim <= 128:
        forward = LinearTile(64, problem.dim, 64, 128, 0, blocks=3, specialize=False)
        states = LinearTile(64, 128, 64, 128, 2)
        row = LinearTile(64, 64, 128, 128, 0, heads=8, specialize=False)
        light = replace(row, blocks=3 if problem.dim_v <= 64 else 1)  # neither has rows of decays to sum
        rows = {"output": light, "dq": row, "dk": row, "dv": light}
        return LinearTiles(forward, states, STEP, rows)
    forward = LinearTile(64, problem.dim, 128, 256, 1, in_registers=False)
    narrow = replace(forward, outer=64)  # their state has v's dim for rows
    states = LinearTile(128, 128, 64, 256, 2)
    row = LinearTile(128, 64, 128, 256, 3, specialize=False)
    walks = {"dq": narrow, "dk": narrow, "dv": forward}
    return LinearTiles(forward, states, STEP, dict.fromkeys(ROLES, row), walks)
