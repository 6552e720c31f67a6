"""The last block of a row's parts joins them: a launch less than where another kernel does (combine.py).

Each block counts its part as done. Who counts the last one sees what all others left, and sets the counter back for the
next launch. A few rows are joined at once, on Hopper so many that their entries are a row of threads with 16 bytes
each: what is added up over the parts then stays within a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tilelang.language as T

from attention_engine.ir.merge import Merge
from attention_engine.ir.problem import Problem, padded
from attention_engine.kernels.cached.combine import SIDE_BY_SIDE, JoinedRows
from attention_engine.kernels.cached.packed_rows import Rows
from attention_engine.kernels.common import FLOAT, Sizes
from attention_engine.plan import cached, cached_buffers


@T.macro
def meet_all() -> None:
    """All threads of a block wait for each other."""
    T.sync_threads()


@dataclass(frozen=True)
class Join:
    """What all blocks that join have in common. at_once: how many rows are joined at once. meet: where the threads that
    join wait for each other. waits: do they wait for what others wrote to shared memory, too? If not, TileLang has them
    wait."""

    problem: Problem
    merge: Merge
    at_once: int
    sizes: Sizes
    buffers: Any
    meet: Callable[[], None] = meet_all
    waits: bool = False

    def rows(self, packed: Rows, batch: Any) -> JoinedRows:
        """The first rows of a tile, as many as are joined at once."""

        def at(i: Any) -> tuple[Any, Any, Any]:
            return batch, packed.head(i), packed.first_query + packed.query(i)

        shape = self.at_once, cached.MOST_PARTS
        of = self.problem, self.merge, shape, self.sizes, self.buffers
        return JoinedRows(*of, at, packed.at, packed.at, packed.exists, self.wait)

    def wait(self) -> None:
        """Where what threads wrote to shared memory is read by others."""
        if self.waits:
            self.meet()


@T.macro
def join_if_last(of: Join, packed: Rows, at: tuple[Any, Any]) -> None:
    """What a block does when its part is in memory. at: the request, and the block among its rows'."""
    problem, sizes, buffers = of.problem, of.sizes, of.buffers
    parts, done, (batch, block) = sizes.spell(cached_buffers.PARTS), buffers[cached_buffers.DONE], at
    before = T.alloc_shared([1], "int32")
    of.meet()
    if T.get_thread_binding() == 0:
        before[0] = T.atomic_add(done[batch, block], 1, memory_order="acq_rel", return_prev=True)
    of.meet()
    if before[0] == parts - 1:
        if T.get_thread_binding() == 0:
            done[batch, block] = 0
        at_once = of.at_once
        rows = T.min(packed.queries * problem.group - packed.first, cached.ROWS)  # of the tile
        for step in T.serial(T.ceildiv(rows, at_once)):
            _join(of, replace(packed, first=packed.first + step * at_once), batch)


@T.macro
def _join(of: Join, packed: Rows, batch: Any) -> None:
    problem, buffers = of.problem, of.buffers
    at_once, dim_v = of.at_once, padded(problem.dim_v)
    parts = of.sizes.spell(cached_buffers.PARTS)
    rows = of.rows(packed, batch)
    factors = T.alloc_shared([at_once, cached.MOST_PARTS], FLOAT)
    ahead = T.alloc_fragment([SIDE_BY_SIDE, at_once * dim_v], FLOAT)
    output = T.alloc_fragment([at_once * dim_v], FLOAT)
    T.fill(output, 0)
    _bring_sums(ahead, buffers["part_o"], 0, parts, packed, dim_v, problem.dim_v)
    rows.bring(0, parts)
    rows.join()
    of.wait()  # the factors of the rows before have been read
    rows.write_factors(factors, parts)
    of.wait()
    for step in T.serial(T.ceildiv(parts, SIDE_BY_SIDE)):
        for n, x in T.Parallel(SIDE_BY_SIDE, at_once * dim_v):
            ahead[n, x] = factors[x // dim_v, step * SIDE_BY_SIDE + n] * ahead[n, x]
        T.reduce_sum(ahead, output, dim=0, clear=False)
        if (step + 1) * SIDE_BY_SIDE < parts:
            _bring_sums(ahead, buffers["part_o"], (step + 1) * SIDE_BY_SIDE, parts, packed, dim_v, problem.dim_v)
    rows.finish(output)


@T.macro
def _bring_sums(
    target: Any, source: Any, first: Any, parts: Any, packed: Rows, dim_v: int, columns: int
) -> None:  # fmt: skip
    for n, x in T.Parallel(*target.shape):
        owner, row, head = packed.at(x // dim_v)
        inside = T.And(first + n < parts, x % dim_v < columns)
        target[n, x] = T.if_then_else(inside, source[first + n, owner, row, head, x % dim_v], T.float32(0))
