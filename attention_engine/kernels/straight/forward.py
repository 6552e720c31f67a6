"""The forward pass: a block holds a tile of queries and walks over the tiles of keys that its mask leaves."""

from __future__ import annotations

from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.bounds import either
from attention_engine.kernels.common import (
    FLOAT,
    Accumulator,
    Operand,
    Sizes,
    accumulate,
    build,
    load,
    loop,
    multiply,
    named,
    place_at,
    where_partial,
    window,
)
from attention_engine.kernels.staged import StagedReads, copy_staged
from attention_engine.kernels.tile_maths import (
    ScoreTile,
    TileMaths,
    multiply_rows,
    needs_another,
    of_pairs,
    row_variables,
)
from attention_engine.kernels.tiles import KeyWalk, Walks
from attention_engine.kernels.unseen import SeenTile
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import Tile


def forward(problem: Problem, schedule: ForwardSchedule, tile: Tile) -> Any:
    """The PrimFunc: (q, k, v, custom..., [tile_lists], o, rows...), rows fp32 (batch, heads, queries), as scheduled."""
    return _forward(problem, schedule, tile, unfinished=False)


def forward_of_part(problem: Problem, schedule: ForwardSchedule, tile: Tile) -> Any:
    """The same over a part of each row: o is fp32, the sum so far."""
    return _forward(problem, schedule, tile, unfinished=True)


def _forward(problem: Problem, schedule: ForwardSchedule, tile: Tile, unfinished: bool) -> Any:
    sizes = Sizes(problem)
    walks = Walks(plan_tiles(schedule.mask), problem, sizes, tile)
    parameters = sizes.declare(attention_buffers.forward(problem, schedule, tile, unfinished=unfinished))
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    seen = key_condition(schedule.mask)

    @T.macro
    def body(buffers: Any) -> None:
        grid = T.ceildiv(sizes.q, tile.q), problem.heads, sizes.batch
        with T.Kernel(*grid, threads=tile.threads) as (block, head, batch):
            q = Operand("q", problem, (tile.q, dim))
            k = Operand("k", problem, (tile.kv, dim))
            v = Operand("v", problem, (tile.kv, dim_v))
            values = SeenTile(seen, v, problem, tile.stages)
            weights = Operand("weights", problem, (tile.q, tile.kv), fragment=True)
            scores = T.alloc_fragment([tile.q, tile.kv], FLOAT)
            other = T.alloc_fragment([tile.q, tile.kv], FLOAT) if needs_another(schedule) else None
            sums = Accumulator("output", problem, (tile.q, dim_v))
            output = sums.sum
            rows = {v: named(v.name, T.alloc_fragment([tile.q], FLOAT)) for v in row_variables(schedule)}
            written = T.alloc_fragment([tile.q], FLOAT) if len(schedule.rows) > 0 else None
            q0 = block * tile.q
            kv_head = head // problem.group
            place = place_at(schedule.block, problem, sizes, buffers, batch, head)
            staged = StagedReads(of_pairs(schedule), problem, tile)
            maths = TileMaths(schedule, tile, sizes, place, q0, ScoreTile(scores, other, rows, {}, staged))
            load(q, window(buffers["q"], batch, head, q0, tile.q, dim))
            T.fill(output, 0)
            maths.start()
            walk = KeyWalk(walks, buffers, batch, head, block)
            for step in loop(walk.count, tile.stages):
                visit = walk.at(step)
                kv0 = visit.start
                values.ask(buffers["v"], batch, kv_head, kv0)
                load(k, window(buffers["k"], batch, kv_head, kv0, tile.kv, dim))
                T.clear(scores)
                multiply(q, k, scores, transpose_B=True)
                if len(staged.tiles) > 0:
                    copy_staged(staged, buffers, batch, head, q0, kv0)
                maths.score(kv0)
                if schedule.fill is not None:
                    partial = either(visit.is_partial(kv0), kv0 + tile.kv > sizes.kv)
                    where_partial(partial, bind(maths.mask, kv0))
                maths.weigh(kv0)
                load(weights, scores)
                if schedule.rescale is not None:
                    multiply_rows(output, rows[schedule.rescale], tile, dim_v)
                values.take(buffers["v"], batch, kv_head, kv0, place)
                accumulate(weights, v, sums)
            maths.finish(output, dim_v)
            T.copy(output, window(buffers["o"], batch, head, q0, tile.q, dim_v))
            for name, expr in schedule.rows:
                maths.write_row(written, expr)
                T.copy(written, buffers[f"row_{name}"][batch, head, q0 : q0 + tile.q])

    return build("forward", parameters, body)
