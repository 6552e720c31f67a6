"""The scores of each row in each block of keys that a call lists: their maximum, and the sum of what they weigh."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.block_lists import ListedBlocks
from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.common import FLOAT, Operand, Sizes, build, load, loop, multiply, named, place_at, window
from attention_engine.kernels.splice import take_for_granted
from attention_engine.kernels.staged import StagedReads
from attention_engine.kernels.tile_maths import ScoreTile, TileMaths, needs_another, row_variables
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.plan import attention_buffers
from attention_engine.plan.attention_buffers import COUNTS, INDICES
from attention_engine.plan.forms import Tile


def block_rows(problem: Problem, schedule: ForwardSchedule, tile: Tile, blocks: ListedBlocks) -> Any:
    """The PrimFunc: (q, k, custom..., indices, counts, a row for each entry of a list by the schedule's names...).

    indices (batch or 1, lists, blocks of queries, entries), counts without entries; rows fp32 (batch, heads, entries,
    queries). A tile lies in one block, and its rows begin anew with each entry. Where an entry doesn't count, or names
    no block, a row has no pair.
    """
    sizes = Sizes(problem)
    parameters = sizes.declare(attention_buffers.block_rows(problem, schedule, blocks))
    dim, parts = padded(problem.dim), blocks.kv // tile.kv
    stages = tile.stages if parts == 1 else 0

    @T.macro
    def body(buffers: Any) -> None:
        grid = T.ceildiv(sizes.q, tile.q), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block, head, batch):
            q = Operand("q", problem, (tile.q, dim))
            k = Operand("k", problem, (tile.kv, dim))
            scores = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            other = T.alloc_fragment([tile.q, tile.kv], FLOAT) if needs_another(schedule) else None
            rows = {v: named(v.name, T.alloc_fragment([tile.q], FLOAT)) for v in row_variables(schedule)}
            written = T.alloc_fragment([tile.q], FLOAT)
            q0 = block * tile.q
            kv_head = head // problem.group
            place = place_at(schedule.block, problem, sizes, buffers, batch, head)
            staged = StagedReads([], problem, tile)
            maths = TileMaths(schedule, tile, sizes, place, q0, ScoreTile(scores, other, rows, {}, staged))
            listed = list_of(blocks, buffers, batch, head, q0)
            entries = buffers[INDICES].shape[3]
            load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
            for entry in loop(entries, stages):
                found = buffers[INDICES][(*listed, entry)]
                there = T.And(found >= 0, found < T.ceildiv(sizes.kv, blocks.kv))
                counts = T.And(entry < buffers[COUNTS][listed], there)
                first = T.if_then_else(counts, found * blocks.kv, sizes.kv)
                maths.start()
                if parts == 1:
                    load(k, window(buffers["k"], batch, kv_head, first, tile.kv, dim))
                    look_at_tile(maths, q, k, first)
                else:
                    for part in T.serial(parts):
                        kv0 = first + part * tile.kv
                        load(k, window(buffers["k"], batch, kv_head, kv0, tile.kv, dim))
                        look_at_tile(maths, q, k, kv0)
                maths.finish_rows()
                for name, expr in schedule.rows:
                    maths.write_row(written, expr)
                    T.copy(written, buffers[f"row_{name}"][batch, head, entry, q0 : q0 + tile.q])

    return build("block_rows", parameters, body)


@T.macro
def look_at_tile(maths: TileMaths, q: Operand, k: Operand, kv0: Any) -> None:
    """Row states move on by a tile's scores."""
    T.clear(maths.scores)
    multiply(q, k, maths.scores, transpose_B=True)
    maths.score(kv0)
    if maths.schedule.fill is not None:
        maths.mask(kv0)
    maths.weigh(kv0)


def list_of(blocks: ListedBlocks, buffers: Any, batch: Any, head: Any, q0: Any) -> tuple[Any, Any, Any]:
    """Where the list of a tile's queries stands. Nothing has a name here: TileLang cuts a pipelined loop by names, and
    where it gives copies a group of warps, reads with named indices may come to stand before the names are known."""
    of_head = 0 if blocks.sharing == 0 else T.truncdiv(head, blocks.sharing)
    found = batch if blocks.by_batch else 0, of_head, T.truncdiv(q0, blocks.q)
    for index, length in zip(found, buffers[COUNTS].shape, strict=True):
        take_for_granted(T.And(index >= 0, index < length))
    return found
