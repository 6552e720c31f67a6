"""dQ's sums by bulk reductions: a warp hands its part of a tile to one copy that adds (`Tile.bulk_dq`).

Reductions from registers take an instruction for 16 bytes of a thread, each of which waits in the queue that loads go
through. Here a warp writes its part to shared memory, where it stands as in the workspace, and one thread asks for all
of it to be added; the copy reads while the warp goes on.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Tile
from attention_engine.kernels.common import FLOAT, named
from attention_engine.kernels.rows import place_in_workspace, transposes_dq
from attention_engine.kernels.warps import GROUP, WARP

ADD = "tl::tma_store_add"  # cp.reduce.async.bulk, of TileLang's own templates


class BulkSums:
    """The tile of dQ of a step, on its way to the workspace."""

    def __init__(self, tile: Tile, dim: int) -> None:
        self.tile, self.dim = tile, dim
        self.transposed = transposes_dq(tile, dim)
        rows, self.columns = (dim, tile.q) if self.transposed else (tile.q, dim)
        assert rows <= 128, "a warp has one strip of 16 rows"
        self.side_by_side = rows == 64  # the warpgroups, of which each has half of the columns
        self.part = tile.q * dim // (tile.threads // WARP)
        self.held = named("dq_out", T.alloc_shared([tile.q * dim], FLOAT))

    def start(self, warp: Any) -> Any:
        """Where the part of a warp begins."""
        if self.side_by_side:
            return warp % 4 * (16 * self.columns) + warp // 4 * self.part
        return warp * self.part


@T.macro
def wait_read(thread: Any) -> None:
    """Until the reduction before has read what the warp held."""
    if thread % WARP == 0:
        T.tma_store_wait(0)
    T.sync_warp()


@T.macro
def add_in_bulk(sums: BulkSums, dq: Any, workspace: Any, batch: Any, head: Any, first: Any, thread: Any) -> None:
    """Adds dq, a tile whose sums begin at `first` of its head."""
    wait_read(thread)
    for i, j in T.Parallel(sums.tile.q * sums.dim // sums.columns, sums.columns):
        query, d = (j, i) if sums.transposed else (i, j)
        sums.held[place_in_workspace(query, d, sums.tile, sums.dim, vectors=True)] = dq[i, j]
    T.fence_proxy_async()
    T.sync_warp()
    if thread % WARP == 0:
        at = sums.start((thread - GROUP) // WARP)
        T.call_extern(
            "handle", ADD, T.access_ptr(sums.held[at], "r", sums.part),
            T.access_ptr(workspace[batch, head, first + at], "rw", sums.part), sums.part * 4,
        )  # fmt: skip
        T.tma_store_arrive()
