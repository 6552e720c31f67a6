"""The tile that each problem class gets where nothing was tuned."""

from __future__ import annotations

from attention_engine.arch import Arch
from attention_engine.compiler import Maths, Target, Tiles
from attention_engine.ir.problem import Problem, Tile


def default_tiles(problem: Problem, maths: Maths, target: Target) -> Tiles:
    """Tiles that fit the target and are good for the problem."""
    wide = max(problem.dim, problem.dim_v)
    if problem.dtype == "float32":
        return _fp32(wide)
    if isinstance(target, Arch) and not target.has_wgmma:
        return _ampere(wide)
    return _hopper(problem)


def _fp32(wide: int) -> Tiles:
    side = 64 if wide <= 64 else 32
    tile = Tile(side, side, 128 if side == 64 else 64, 1)
    return Tiles(tile, tile, tile)


def _hopper(problem: Problem) -> Tiles:
    wide = max(problem.dim, problem.dim_v)
    if wide <= 128:
        return Tiles(Tile(128, 128, 256, 2), Tile(64, 128, 256, 2), Tile(128, 64, 256, 2))
    if wide <= 192:
        return Tiles(Tile(128, 96, 256, 2), Tile(64, 64, 128, 1), Tile(64, 64, 128, 1))
    return Tiles(Tile(128, 64, 256, 2), Tile(32, 64, 128, 1), Tile(64, 32, 128, 1))


def _ampere(wide: int) -> Tiles:
    if wide <= 64:
        return Tiles(Tile(128, 64, 128, 2), Tile(64, 64, 128, 1), Tile(64, 64, 128, 1))
    if wide <= 128:
        return Tiles(Tile(64, 64, 128, 1), Tile(32, 64, 128, 1), Tile(64, 32, 128, 1))
    return Tiles(Tile(64, 32, 128, 1), Tile(32, 32, 64, 1), Tile(32, 32, 64, 1))
