"""dQ of units that are done leaves beside the items of a persistent block of the backward pass over keys.

A kernel after it would find all SMs taken until the last items end. So a block's spare warps convert the sums of a unit
that is some behind its own, each block a share of it, as they prepare one that is ahead (keys/spare_warps.py); the
kernel after it (rows.postprocess) does the last ones.
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import FLOAT, Buffers, window
from attention_engine.kernels.hopper.keys.spare_warps import SpareWork, Target, see_memory, wait_for_rows, walk_share
from attention_engine.kernels.hopper.notes import note_in
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.warps import SPARE, WARP
from attention_engine.kernels.workspace import bring_to_rows, take_sums_for_granted, wait_until_finished

QUERIES = 8  # queries whose sums stand together, in the order of `workspace_offset`
SUMS = 256  # that a warp holds at once


@T.macro
def store_together(work: SpareWork, buffers: Buffers) -> None:
    """What the spare warps store beside a block of keys: its share of dQ = scale * sums of a unit that is done."""
    thread = T.get_thread_binding()
    for warp in SPARE:
        if T.And(thread >= WARP * warp, thread < WARP * (warp + 1)):
            store_share(work, buffers, warp - 1)


@T.macro
def store_share(work: SpareWork, buffers: Buffers, warp: int) -> None:
    """A spare warp's part of that share, when the unit is done."""
    blocks, group = work.blocks, work.form.problem.group
    if T.And(work.number >= blocks.behind, work.number < blocks.whole):
        unit = work.number - blocks.behind
        first_pair, pairs = blocks.pairs_of(unit)
        wait_until_finished(buffers, unit)
        see_memory()
        walk_share(work, work.memory.at[warp], pairs * group, bind(store_tile, work, buffers, warp, first_pair * group))
        T.tma_store_wait(0)  # has read the last rows


@T.macro
def store_tile(
    work: SpareWork, buffers: Buffers, warp: int, first_head: Any, head_of_unit: Any, tile_of_head: Any
) -> None:  # fmt: skip
    """A spare warp's part of a tile's dQ, some queries at a time. Sums come where rows of dO do, and dQ leaves by rows
    of o. The first warp has the smallest part, as it makes most of delta."""
    form, problem, tile, rows = work.form, work.form.problem, work.form.tile, work.rows
    dim, parts = form.dim, tile.q // QUERIES
    dq, target = rows.o[warp], note_in(Target, rows.target[warp])
    sums = T.view(rows.do[warp], [QUERIES * dim], FLOAT)
    own = len(SPARE) - 1 - warp
    for turn in T.unroll(-(-(parts - own) // len(SPARE)), unroll_factor=1):
        head_of_all = name_value(first_head + head_of_unit)
        q0 = name_value(tile_of_head * tile.q + (turn * len(SPARE) + own) * QUERIES)
        take_sums_for_granted(buffers, head_of_all, q0 * dim, QUERIES * dim)
        T.tma_copy(buffers["workspace"][head_of_all, q0 * dim : (q0 + QUERIES) * dim], sums, barrier=rows.arrived[warp])
        batch = name_value(T.truncdiv(head_of_all, problem.heads))
        wait_for_rows(rows, warp, batch, name_value(head_of_all - batch * problem.heads), q0)
        part = T.alloc_fragment([SUMS], FLOAT)  # some at a time: a thread has few registers
        for first in T.unroll(0, QUERIES * dim, SUMS, unroll_factor=1):
            T.copy(sums[first : first + SUMS], part)
            bring_to_rows(part, first, dq, problem, tile, form.schedule.scale, True)
        T.fence_proxy_async()
        T.sync_warp()
        T.tma_copy(dq[:QUERIES, :], window(buffers["dq"], target.batch, target.head, target.query, QUERIES, dim))
