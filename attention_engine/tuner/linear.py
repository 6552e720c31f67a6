"""The tiles that the kernels of a linear attention get where nothing was tuned."""

from __future__ import annotations

from attention_engine.arch import Arch
from attention_engine.compiler import Target
from attention_engine.ir.linear import LinearProblem, LinearTile, LinearTiles

ROLES = ("output", "dq", "dk", "dv")


def default_linear_tiles(problem: LinearProblem, target: Target) -> LinearTiles:
    """Tiles that fit the target and are good for the problem."""
    if problem.dtype == "float32":
        return _fp32(problem)
    if isinstance(target, Arch) and not target.has_wgmma:
        return _ampere(problem)
    return _hopper(problem)


def _same(forward: LinearTile, states: LinearTile, row: LinearTile) -> LinearTiles:
    return LinearTiles(forward, states, LinearTile(1, 0, 32, 128, 0), dict.fromkeys(ROLES, row))


def _fp32(problem: LinearProblem) -> LinearTiles:
    """Each operand stands in shared memory twice (high and low part), so tiles are small; no pipeline."""
    forward = LinearTile(32, problem.dim, 32, 128, 0)
    return _same(forward, LinearTile(32, 64, 32, 128, 0), LinearTile(32, 32, 32, 64, 0, heads=8, specialize=False))


def _ampere(problem: LinearProblem) -> LinearTiles:
    """Chosen by what fits without spills; not timed."""
    return _same(
        LinearTile(64, problem.dim, 32, 128, 0),
        LinearTile(64, 64, 64, 128, 0),
        LinearTile(64, 32, 64, 128, 0, heads=8, specialize=False),
    )


def _hopper(problem: LinearProblem) -> LinearTiles:
    return _same(
        LinearTile(64, problem.dim, 64, 128, 1),
        LinearTile(64, 128, 64, 128, 2),
        LinearTile(64, 64, 128, 128, 0, heads=8, specialize=False),
    )
