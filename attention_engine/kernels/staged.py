"""Biases of pairs, tile by tile in shared memory: copied ahead in a kernel's pipeline, as keys and values are."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from attention_engine.ir.expr import Expr, Op, topological
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.kernels.common import FLOAT, Buffers, named
from attention_engine.passes.read_places import ReadPlace, place_of_read
from attention_engine.plan.forms import Tile


class StagedReads:
    """The tiles (queries, keys) of the staged custom inputs that some expressions read at each pair."""

    def __init__(self, exprs: list[Expr], problem: Problem, tile: Tile) -> None:
        self.shape = tile
        kinds = {name: (dtype, axes) for name, dtype, axes in problem.custom if name in problem.staged}
        loads = [n for n in topological(*exprs) if n.op is Op.LOAD and n.name in kinds]
        loads = [n for n in loads if place_of_read(n, kinds[n.name][1]) is ReadPlace.PAIR]
        self.tiles = {
            load: named(f"{load.name}_tile", T.alloc_shared([tile.q, tile.kv], kinds[load.name][0])) for load in loads
        }
        if self.tiles:  # else the eight rows that a warp reads at once would lie in the same banks
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in self.tiles.values()})

    def values(self, query: Any, key: Any) -> dict[Expr, Any]:
        """What the reads are at a pair of the tile."""
        return {load: T.cast(tile[query, key], FLOAT) for load, tile in self.tiles.items()}

    def window(self, load: Expr, buffers: Buffers, batch: Any, head: Any, q0: Any, kv0: Any) -> Any:
        """The part of the custom input that a read takes for the tile at (q0, kv0)."""
        at = {B: batch, H: head, Q_IDX: slice(q0, q0 + self.shape.q), KV_IDX: slice(kv0, kv0 + self.shape.kv)}
        return buffers[f"custom_{load.name}"][tuple(at.get(a, 0) for a in load.args)]


@T.macro
def copy_staged(staged: StagedReads, buffers: Buffers, batch: Any, head: Any, q0: Any, kv0: Any) -> None:
    """Copies the tiles at (q0, kv0)."""
    for load, tile in staged.tiles.items():
        T.copy(staged.window(load, buffers, batch, head, q0, kv0), tile)
