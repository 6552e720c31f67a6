"""The tiles that the kernels of a linear attention get where nothing was tuned."""

from __future__ import annotations

from dataclasses import replace

from attention_engine.arch import Arch
from attention_engine.compiler import Target
from attention_engine.ir.linear import LinearProblem, LinearTile, LinearTiles
from attention_engine.ir.problem import padded

ROLES = ("output", "dq", "dk", "dv")
STEP = LinearTile(1, 0, 32, 128, 0)


def default_linear_tiles(problem: LinearProblem, target: Target) -> LinearTiles:
    """Tiles that fit the target and are good for the problem."""
    if problem.dtype == "float32":
        return _fp32(problem)
    if isinstance(target, Arch) and not target.has_wgmma:
        return _ampere(problem)
    return _hopper(problem)


def _fp32(problem: LinearProblem) -> LinearTiles:
    """Each operand stands in shared memory twice (high and low part), so tiles are small; no pipeline."""
    row = LinearTile(32, 32, 32, 64, 0, heads=8)
    forward, states = LinearTile(32, problem.dim, 32, 128, 0), LinearTile(32, 64, 32, 128, 0)
    return LinearTiles(forward, states, STEP, dict.fromkeys(ROLES, row))


def _ampere(problem: LinearProblem) -> LinearTiles:
    """Chosen by what fits without spills; not timed."""
    row = LinearTile(64, 32, 64, 128, 0, heads=8)
    return LinearTiles(
        LinearTile(64, problem.dim, 32, 128, 0), LinearTile(64, 64, 64, 128, 0), STEP, dict.fromkeys(ROLES, row)
    )


def _hopper(problem: LinearProblem) -> LinearTiles:
    """By what was fastest on an H100 at head dims 128/64 and 256/512 (benchmarks/notes.md).

    Where a state is small, several blocks on an SM hide each other's waits; where it fills the registers, warps of
    their own copy, and gradients are walked. Dims that aren't whole tiles are not copied by TMA, and walk in step.
    """
    whole = padded(problem.dim) == problem.dim and padded(problem.dim_v) == problem.dim_v
    return _narrow(problem, whole) if problem.dim <= 128 else _wide(problem, whole)


def _narrow(problem: LinearProblem, whole: bool) -> LinearTiles:
    forward = LinearTile(64, problem.dim, 64, 128, 1, blocks=2)
    states = LinearTile(64, 128, 64, 128, 2, blocks=3 if whole else 1)
    row = LinearTile(64, 64, 128, 128, 0, heads=40, specialize=False)
    light = replace(row, heads=1, blocks=4 if problem.dim_v <= 64 else 1)  # neither has rows of decays to sum
    rows = {"output": light, "dq": row, "dk": row, "dv": light}
    return LinearTiles(forward if whole else _in_step(forward), states, STEP, rows)


def _wide(problem: LinearProblem, whole: bool) -> LinearTiles:
    forward = LinearTile(64, problem.dim, 128, 256, 1, in_registers=False)
    states = LinearTile(128, 128, 64, 128, 2)
    row = LinearTile(128, 64, 128, 256, 3, heads=8, specialize=False)
    rows = dict.fromkeys(ROLES, row)
    if not whole:
        return LinearTiles(_in_step(forward), states, STEP, rows)
    across = {"dq": replace(forward, outer=64), "dk": replace(forward, outer=64)}  # their state has v's dim for rows
    return LinearTiles(forward, states, STEP, rows, {"dv": forward, **(across if problem.dim_v <= 512 else {})})


def _in_step(tile: LinearTile) -> LinearTile:
    return replace(tile, stages=0, specialize=False)
