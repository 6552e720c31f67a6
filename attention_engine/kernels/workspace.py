"""The sums of dQ in memory: where each stands, which counters tell how far they are, and how they become rows of dQ."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.common import Buffers
from attention_engine.kernels.splice import hold_value, name_value, take_for_granted
from attention_engine.plan.forms import Tile

VECTOR = 4  # sums that a thread writes or reads at once
PREPARED, FINISHED = range(2)  # columns of the counters
PAUSE = 1000  # ns between looks at a counter


def take_sums_for_granted(buffers: Buffers, row: Any, first: Any, size: int) -> None:
    """Spares the guards of a tile's sums, from `first` on, and says that rows begin at whole vectors."""
    count, length = buffers["workspace"].shape
    take_for_granted(T.And(row >= 0, row < count))
    take_for_granted(T.And(first >= 0, first + size <= length))
    take_for_granted(length % VECTOR == 0)


def name_place(buffers: Buffers, row: Any, first: Any) -> Any:
    """Where a tile's sums begin among those of all rows: 29 instructions, which would else stand between the product dQ
    and its additions."""
    return name_value(T.cast(row, "int64") * buffers["workspace"].shape[1] + first)


def hold_place(buffers: Buffers, row: Any, first: Any) -> Any:
    """The same, worked out where this is called: ptxas does not put it off beyond a wait that follows. There it would
    stand between the wait and the additions, 100 clocks of each step."""
    return hold_value(T.cast(row, "int64") * buffers["workspace"].shape[1] + first)


def take_place_for_granted(buffers: Buffers, place: Any, size: int) -> None:
    """The same as `take_sums_for_granted` of a tile's place, under the name by which it is read."""
    count, length = buffers["workspace"].shape
    take_for_granted(T.And(place >= 0, place + size <= T.cast(count, "int64") * length))
    take_for_granted(place % VECTOR == 0)


@T.macro
def add_at(buffers: Buffers, place: Any, dq: Any, tile: Tile, dim: int, vectors: bool) -> None:
    """A tile's dQ is added to the sums from a place on, by atomics."""
    sums = _in_one_row(buffers["workspace"])
    for i, j in T.Parallel(int(dq.shape[0]), int(dq.shape[1])):
        query, d = (j, i) if transposes_dq(tile, dim) else (i, j)
        T.atomic_add(sums[place + workspace_offset(query, d, tile, dim, vectors)], dq[i, j])


@T.macro
def store_at(buffers: Buffers, place: Any, dq: Any, tile: Tile, dim: int, vectors: bool) -> None:
    """A tile's dQ becomes the sums from a place on."""
    sums = _in_one_row(buffers["workspace"])
    for i, j in T.Parallel(int(dq.shape[0]), int(dq.shape[1])):
        query, d = (j, i) if transposes_dq(tile, dim) else (i, j)
        sums[place + workspace_offset(query, d, tile, dim, vectors)] = dq[i, j]


def _in_one_row(sums: Any) -> Any:
    return T.view(sums, [T.cast(sums.shape[0], "int64") * sums.shape[1]])


def counter(buffers: Buffers, unit: Any, which: int) -> Any:
    """One of a unit's counters."""
    return buffers["counters"][1 + unit, which]


def dealt(buffers: Buffers) -> Any:
    """The counter of blocks that were begun."""
    return buffers["counters"][0, 0]


@T.macro
def wait_until_finished(buffers: Buffers, unit: Any) -> None:
    """Until a unit's blocks have added all to its sums."""
    while T.atomic_load(counter(buffers, unit, FINISHED), memory_order="acquire") < 0:
        T.call_extern("void", "__nanosleep", PAUSE)


@T.macro
def bring_to_rows(
    sums: Any, first: Any, rows: Any, problem: Problem, tile: Tile, scale: float, vectors: bool
) -> None:  # fmt: skip
    """Rows of dQ = scale * sums, which stand in a tile from `first` on: those that threads hold."""
    for x in T.Parallel(int(sums.shape[0])):
        query, d = workspace_entry(first + x, tile, padded(problem.dim), vectors)
        rows[query, d] = T.cast(sums[x] * scale, rows.dtype)


def transposes_dq(tile: Tile, dim: int) -> bool:
    """Does the kernel over keys hold dQ as (dim, queries)? Two warpgroups take 64 rows each, 80 queries don't fit."""
    return tile.hopper and dim % 128 == 0


def workspace_offset(i: Any, d: Any, tile: Tile, dim: int, vectors: bool) -> Any:
    """Where dQ[i, d] of a tile stands, so that the atomics of a warp meet consecutive addresses; those of a piece of
    queries (tiles.py) stand together, and tiles may begin at any.

    With vectors (sm_90 has 16-byte reductions), the four numbers of a thread stand together; else 32 lanes do.
    """
    transposed, height = transposes_dq(tile, dim), _height(vectors)
    if transposed:
        i, d = d, i
        block = d // 8 * (dim // height) + i // height
    else:
        block = i // height * (dim // 8) + d // 8
    if vectors:
        return block * 128 + (i % 8) * 16 + ((d % 8) // 2) * 4 + ((i % 16) // 8) * 2 + d % 2
    return block * 64 + (d % 2) * 32 + (i % 8) * 4 + (d % 8) // 2


def workspace_entry(x: Any, tile: Tile, dim: int, vectors: bool) -> tuple[Any, Any]:
    """The query and head dim of a tile that stand at x: the inverse of `workspace_offset`."""
    transposed, height = transposes_dq(tile, dim), _height(vectors)
    block, of_block = x // (height * 8), x % (height * 8)
    across = dim // height if transposed else dim // 8
    i, d = (block % across, block // across) if transposed else (block // across, block % across)
    if vectors:
        lane = of_block // 4
        i, d = i * 16 + x % 4 // 2 * 8 + lane // 4, d * 8 + lane % 4 * 2 + x % 2
    else:
        lane = of_block % 32
        i, d = i * 8 + lane // 4, d * 8 + lane % 4 * 2 + of_block // 32
    return (d, i) if transposed else (i, d)


def _height(vectors: bool) -> int:
    """Rows of an accumulator's block of eight columns whose sums stand together."""
    return 16 if vectors else 8
