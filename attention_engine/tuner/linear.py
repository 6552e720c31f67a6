"""The tiles that the kernels of a linear attention get where nothing was tuned."""

from __future__ import annotations

from dataclasses import replace

from attention_engine.arch import Arch
from attention_engine.ir.linear import ROLES, LinearProblem, LinearProgram, LinearTile, LinearTiles, heads_a_block
from attention_engine.ir.problem import padded
from attention_engine.passes.mods import row_factor
from attention_engine.plan.targets import Target

STEP = LinearTile(1, 0, 32, 128, 0)


def default_linear_tiles(program: LinearProgram, problem: LinearProblem, target: Target) -> LinearTiles:
    """Tiles that fit the target and are good for the problem."""
    if problem.dtype == "float32":
        return _fp32(problem)
    if isinstance(target, Arch) and not target.has_wgmma:
        return _ampere(program, problem, target)
    return _hopper(program, problem)


def _fp32(problem: LinearProblem) -> LinearTiles:
    """Each operand stands in shared memory twice (high and low part), so tiles are small; no pipeline."""
    row = LinearTile(32, 32, 32, 64, 0, heads=8)
    forward, states = LinearTile(32, problem.dim, 32, 128, 0), LinearTile(32, 64, 32, 128, 0)
    return LinearTiles(forward, states, STEP, dict.fromkeys(ROLES, row))


def _ampere(program: LinearProgram, problem: LinearProblem, target: Arch) -> LinearTiles:
    """Chosen by what fits without spills; not timed.

    Compiled for sm_100a and sm_120a at head dims 128, walks with operands in registers, in chunks of 64, spill 16 to 64
    bytes. In chunks of 32 from shared memory they have 177 to 210 registers. Where a mod bends tensors, each stands in
    shared memory as it came too, and 64 KB have room for half the columns of a state.
    """
    row = LinearTile(64, 32, 64, 128, 0, heads=8)
    forward = LinearTile(64, problem.dim, 32, 128, 0)
    if 64 < padded(problem.dim) <= 128:
        forward = LinearTile(32, problem.dim, 32, 128, 0, in_registers=False)
    half = _bends(program) and target.shared_memory_per_block <= 64 * 1024
    states = LinearTile(64, 64, 32 if half else 64, 128, 0)
    return LinearTiles(forward, states, STEP, dict.fromkeys(ROLES, row))


def _hopper(program: LinearProgram, problem: LinearProblem) -> LinearTiles:
    """By what was fastest on an H100 at head dims 128/64 and 256/512 (benchmarks/notes.md).

    Where a state is small, several blocks on an SM hide each other's waits, and warps of their own copy where heads
    share q or k; where it fills the registers, they copy always, and gradients are walked. Dims that aren't whole tiles
    are not copied by TMA, and walk in step.
    """
    whole = padded(problem.dim) == problem.dim and padded(problem.dim_v) == problem.dim_v
    return _narrow(program, problem, whole) if problem.dim <= 128 else _wide(problem, whole)


def _narrow(program: LinearProgram, problem: LinearProblem, whole: bool) -> LinearTiles:
    forward = LinearTile(64, problem.dim, 64, 128, 1, blocks=2)
    states = LinearTile(64, 128, 64, 128, 2, blocks=3 if whole else 1)
    row = LinearTile(64, 64, 128, 128, 0, heads=40, specialize=False)
    light = replace(row, heads=1, blocks=4 if problem.dim_v <= 64 else 1)  # neither has rows of decays to sum
    if not whole:
        return LinearTiles(_in_step(forward), states, STEP, {"output": light, "dq": row, "dk": row, "dv": light})
    ahead = _ahead(program, problem, row)
    return LinearTiles(forward, states, STEP, {"output": light, "dq": ahead, "dk": ahead, "dv": light})


def _ahead(program: LinearProgram, problem: LinearProblem, row: LinearTile) -> LinearTile:
    """The tile of dq and dk with warps that copy two heads ahead, where one loop over heads holds all products.

    Elsewhere as it is: where q or k is copied for each head, or a mod bends a tensor, which then stands in shared
    memory as it came too, two blocks don't fit an SM or registers spill.
    """
    loops = problem.dim_v <= row.inner and heads_a_block(problem, ROLES["dq"], row) > 1
    if not loops or _bends(program) or problem.q_heads != problem.k_heads:
        return row
    return replace(row, stages=2, specialize=True, blocks=2)


def _bends(program: LinearProgram) -> bool:
    """Is a mod more than a factor of each token?"""
    return any(row_factor(program.mod(name)) is None for name in ("q", "k", "v"))


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
