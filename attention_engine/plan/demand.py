"""What a tile takes at least of a block, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from attention_engine.ir.problem import Problem, padded
from attention_engine.plan.forms import HopperKeys, KernelName, Tile
from attention_engine.plan.hopper import pairs_in_turn


@dataclass(frozen=True)
class Demand:
    """What a tile takes at least: bytes of shared memory a block, fp32 accumulator registers a thread."""

    shared_bytes: int
    registers: int


def demand(kernel: KernelName, problem: Problem, tile: Tile) -> Demand:
    """The least that a tile takes; the compiler adds to it."""
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    size = {"float32": 4}.get(problem.dtype, 2) * (2 if problem.splits else 1)
    held = 1 if problem.dtype == "float32" else 2  # weights in registers beside the scores, two a register
    pairs, stages = tile.q * tile.kv, max(tile.stages, 1)
    match kernel:
        case "forward":
            shared = (tile.q * dim + stages * tile.kv * (dim + dim_v)) * size
            sums = tile.q * dim_v + pairs + (pairs // held if held > 1 else 0)
        case "backward":
            hopper = isinstance(tile.form, HopperKeys)
            in_turn = hopper and pairs_in_turn(problem, tile)
            in_memory = (hopper and tile.shared_weights) or in_turn
            handed = 4 if in_memory else 1  # tiles of pairs: weights and gradients of two steps, or gradients
            shared = (tile.kv * (dim + dim_v) + stages * tile.q * (dim + dim_v) + handed * pairs) * size
            shared += pairs * size if tile.skewed_sums else 0
            sums = tile.kv * (dim + dim_v) + (3 * pairs // 2 if in_turn else 2 * pairs)  # one of two packed, in turn
        case "queries":
            shared = (tile.q * (dim + dim_v) + stages * tile.kv * (dim + dim_v)) * size
            sums = tile.q * dim + 2 * pairs
        case _:
            assert_never(kernel)
    return Demand(shared, sums // tile.threads)
