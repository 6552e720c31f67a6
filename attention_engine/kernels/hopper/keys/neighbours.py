"""Packed sequences: what a block of keys does of rows of a neighbouring sequence in a tile of queries, or of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import Buffers
from attention_engine.kernels.hopper.barriers import arrive_when_read
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.keys.items import KeyItem, leave_by_groups
from attention_engine.kernels.hopper.keys.memory import KeyMemory, Results
from attention_engine.kernels.hopper.keys.pair_operands import Step, meet
from attention_engine.kernels.warps import COMPUTE


@T.macro
def at_ends(form: KeyForm, ends: Any, q0: Any, act: Callable[[], None]) -> None:
    """Acts where a tile of queries has rows of a neighbouring sequence, too. ends: of the block's own."""
    if T.Or(q0 < ends.first_query, q0 + form.tile.q > ends.last_query):
        act()


@T.macro
def clear_neighbours(form: KeyForm, memory: KeyMemory, ends: Any, at: Step) -> None:
    """Rows of neighbours, of queries and of gradients of the output, become 0: their pairs have weight 0, and a product
    with what they may hold, NaN, has not."""
    q0 = at.q0
    T.sync_threads(COMPUTE, form.tile.threads)  # no product reads them any more
    for tile in (memory.queries.tile, memory.output_gradients.tile):
        for i, piece in T.Parallel(form.tile.q, int(tile.shape[2]) // 8):
            if T.Or(q0 + i < ends.first_query, q0 + i >= ends.last_query):
                for d in T.vectorized(8):
                    tile[at.stage, i, piece * 8 + d] = T.cast(0, form.problem.dtype)
    meet(form.tile.threads)


@T.macro
def keep_own_dq(form: KeyForm, dq: Any, ends: Any, q0: Any) -> None:
    """Nothing is added to neighbours' dQ, also where a key holds NaN."""
    for i, j in T.Parallel(form.dq_shape[0], form.dq_shape[1]):
        query = q0 + (j if form.transposes_dq else i)
        dq[i, j] = T.if_then_else(T.And(query >= ends.first_query, query < ends.last_query), dq[i, j], 0)


@T.macro
def leave_within(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, kv0: Any) -> None:
    """dK and dV leave. A copy would not end where the sequence does, so that rows of its last block are stored each. So
    are rows of every block where they are in fp32."""
    results, tile = memory.results, form.tile
    end = item.ends.last_key
    if form.wide:
        store_rows(buffers, results, item, kv0, end)
    else:
        if kv0 + tile.kv <= end:
            T.copy(results.dv, memory.values.tile)
            T.copy(results.dk, memory.keys.tile)
            T.fence_proxy_async()
            leave_by_groups(memory.values.tile, buffers["dv"], item, tile)
            leave_by_groups(memory.keys.tile, buffers["dk"], item, tile)
        else:
            store_rows(buffers, results, item, kv0, end)
    arrive_when_read(T.get_thread_binding(), [(memory.values.empty, 0), (memory.keys.empty, 0)])


@T.macro
def store_rows(buffers: Buffers, results: Results, item: KeyItem, kv0: Any, end: Any) -> None:
    """Rows of dV and dK up to the end of a sequence."""
    for gradient, name in ((results.dv, "dv"), (results.dk, "dk")):
        for j, d in T.Parallel(int(gradient.shape[0]), int(gradient.shape[1])):
            if kv0 + j < end:
                buffers[name][item.batch, kv0 + j, item.kv_head, d] = gradient[j, d]
