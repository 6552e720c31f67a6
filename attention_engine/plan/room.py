"""How many queries a tile of the kernel over keys has, that its pairs find room in registers."""

from __future__ import annotations

from dataclasses import replace

from attention_engine.ir.problem import Problem
from attention_engine.passes.row_values import reads_of_one_side
from attention_engine.passes.schedule import BackwardSchedule, keeps_products
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import pairs_in_turn

# Of 240 registers a thread, how many dK, dV, fp32 tiles of pairs and what those read may take, and how many one table
# takes. Compiled for sm_90a at head dims 128, tiles and tables: bytes spilled with 64, 48 and 32 queries: 3 and 2, 108,
# 0; 3 and 3, 356, 28, 0; 3 and 4, 88, 40, 12; 3 and 5, 560, 32, 12; 2 and 5, 72, 0, 24; 2 and 3, none.
ROOM, TABLE, FEWER = 224, 9, (48, 32)


def queries_with_room(problem: Problem, schedule: BackwardSchedule, tile: Tile) -> int:
    """How many queries a tile over keys has, that its pairs find room beside dK and dV: fewer where its warpgroups have
    their own keys, later formulas read the products too, or pairs read many tables by their query or key alone."""
    sums = tile.kv * sum(problem.tile_dims) // tile.threads
    tiles = 3 if keeps_products(schedule) else 2
    exprs = [schedule.weights, schedule.product_gradient, *([schedule.mask] if schedule.mask else [])]
    tables = TABLE * len(reads_of_one_side(exprs))

    def fits(queries: int) -> bool:
        return sums + tiles * queries * tile.kv // tile.threads + tables <= ROOM

    if tile.shared_weights or pairs_in_turn(problem, tile) or fits(tile.q):
        return tile.q
    return next((queries for queries in FEWER if queries < tile.q and fits(queries)), FEWER[-1])


def of_any_sequence(problem: Problem, schedule: BackwardSchedule, tile: Tile) -> Tile:
    """That tile for blocks that may hold several of the packed sequences: pairs then read whose they are."""
    listed = tile.in_form(within_sequences=False, by_heads=False)
    return replace(listed, q=queries_with_room(problem, schedule, listed))
