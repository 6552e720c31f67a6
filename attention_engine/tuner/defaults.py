"""The tile that each problem class gets where nothing was tuned."""

from __future__ import annotations

from dataclasses import replace

from attention_engine.arch import Arch
from attention_engine.compiler import Maths, Target, Tiles
from attention_engine.ir.problem import Problem, Tile
from attention_engine.passes.read_places import plan_custom_sums


def default_tiles(problem: Problem, maths: Maths, target: Target) -> Tiles:
    """Tiles that fit the target and are good for the problem."""
    wide = max(problem.dim, problem.dim_v)
    if problem.dtype == "float32":
        return _fp32(wide, target)
    if isinstance(target, Arch) and not target.has_wgmma:
        return _ampere(wide, target)
    plain = _hopper(problem)
    return _specialised(problem, maths, plain) if isinstance(target, Arch) and target.has_wgmma else plain


def _fp32(wide: int, target: Target) -> Tiles:
    """Each operand stands in shared memory twice (high and low part), so tiles are small; no pipeline."""
    roomy = not isinstance(target, Arch) or target.shared_memory_per_block > 160 * 1024
    if wide <= 64:
        return Tiles(Tile(64, 32, 128, 0) if roomy else Tile(32, 32, 64, 0), Tile(32, 32, 64, 0), Tile(32, 32, 64, 0))
    if wide <= 128:
        side = Tile(32, 32, 64, 0) if roomy else Tile(16, 16, 32, 0)
        return Tiles(Tile(32, 16, 64, 0), side, side)
    small = Tile(16, 16, 32, 0)
    return Tiles(Tile(32, 16, 64, 0) if roomy else small, small, small)


def _hopper(problem: Problem) -> Tiles:
    dim, dim_v = problem.dim, problem.dim_v
    if max(dim, dim_v) <= 128:
        return Tiles(Tile(128, 128, 256, 2), Tile(64, 128, 256, 2), Tile(128, 64, 256, 2))
    if dim <= 192 and dim_v <= 128:
        return Tiles(Tile(128, 128, 256, 2), Tile(64, 64, 256, 2, shared_weights=True), Tile(128, 64, 256, 2))
    return Tiles(Tile(128, 64, 256, 2), Tile(64, 64, 256, 2, shared_weights=True), Tile(128, 32, 256, 2))


def _specialised(problem: Problem, maths: Maths, plain: Tiles) -> Tiles:
    """The kernels with a group of warps that copies, where there are such; which tiles don't spill is tested."""
    from attention_engine.kernels import backward_hopper, forward_hopper

    tiles = plain
    if forward_hopper.fits(problem, maths.forward_schedule):
        q, kv = FORWARD[problem.dim, problem.dim_v]
        tiles = replace(tiles, forward=Tile(q, kv, 2 * q, 2, specialised=True))
    schedule = maths.backward_schedule
    axes = {name: axes for name, _, axes in problem.custom}
    summed = plan_custom_sums(schedule.pair_gradients if schedule else (), axes, ordered=False)
    if schedule and backward_hopper.fits(problem, schedule, summed):
        light, heavy = BACKWARD[problem.dim, problem.dim_v]
        q = light if backward_hopper.is_light(schedule, summed) else heavy
        tiles = replace(tiles, backward=Tile(q, 128, 256, 2, specialised=True))
    return tiles


# Queries and keys of a tile, by head dims; 64 queries for each warpgroup.
FORWARD = {(64, 64): (192, 128), (128, 128): (128, 128), (192, 128): (128, 128), (128, 256): (128, 96),
           (256, 256): (128, 80)}  # fmt: skip
# Queries of a tile over keys: of pair maths that need few registers, and of others.
BACKWARD = {(64, 64): (128, 64), (128, 128): (80, 64), (128, 64): (80, 64), (64, 128): (64, 64)}


def _ampere(wide: int, target: Arch) -> Tiles:
    """Chosen by what fits without spills; not timed."""
    roomy = target.shared_memory_per_block > 160 * 1024
    if wide <= 64:
        return Tiles(
            Tile(128, 64, 128, 2) if roomy else Tile(64, 64, 128, 2), Tile(64, 64, 128, 2), Tile(64, 64, 128, 2)
        )
    if wide <= 128:
        forward, queries = Tile(128, 64 if roomy else 32, 256, 2), Tile(64, 64 if roomy else 32, 128, 2)
        return Tiles(forward, Tile(64 if roomy else 32, 64, 256, 2, shared_weights=True), queries)
    forward = Tile(128, 32, 256, 2) if roomy else Tile(64, 32, 128, 1)
    return Tiles(forward, Tile(32, 32, 256, 2 if roomy else 1, shared_weights=True), Tile(32, 32, 64, 1))
