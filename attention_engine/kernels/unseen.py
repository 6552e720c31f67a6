"""Keys that nobody sees, by a condition of the mask that reads neither query nor head: their rows of tiles are 0.

Their pairs have weight 0 and gradient 0, but 0 * NaN is NaN, and memory behind a length may hold anything. What else
NaN comes to is selected away with the pair. So only what stands on the other side of a product with weights is cleared:
the values of a forward pass, the keys where dQ is made.

Tiles are cleared in shared memory after they have come. Where TileLang pipelines a loop, a tile there has one writer
alone: it comes by registers, asked for where a step begins, and is cleared on its way from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import tilelang.language as T
from tvm import DataType

from attention_engine.ir.expr import Expr
from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import Operand, Place, load, store, where_partial, window
from attention_engine.kernels.tiles import Visit
from attention_engine.kernels.warps import COMPUTE


class SeenTile:
    """Copies tiles of keys or values in a loop of so many stages, without those that nobody sees."""

    def __init__(self, seen: Expr | None, operand: Operand, problem: Problem, stages: int) -> None:
        self.seen, self.operand = seen, operand
        in_registers = seen is not None and stages > 0 and operand.low is None
        self.registers = T.alloc_fragment(operand.shape, problem.dtype) if in_registers else None

    def ask(self, source: Any, batch: Any, head: Any, kv0: Any) -> None:
        """Starts to bring the tile from kv0 on, if it comes by registers."""
        if self.registers is not None:
            _copy(self._window(source, batch, head, kv0), self.registers)

    def take(self, source: Any, batch: Any, head: Any, kv0: Any, place: Place) -> None:
        """The tile is in the operand, with 0 in the rows of keys that nobody sees."""
        if self.seen is None:
            load(self.operand, self._window(source, batch, head, kv0))
        elif self.registers is None:
            load(self.operand, self._window(source, batch, head, kv0))
            clear_operand(self.seen, place, kv0, self.operand)
        else:
            _keep_seen(self.operand.whole, self.registers, *self.operand.shape, _is_seen(self.seen, place, kv0))

    def _window(self, source: Any, batch: Any, head: Any, kv0: Any) -> Any:
        return window(source, batch, head, kv0, *self.operand.shape)


def clear_unseen(seen: Expr, place: Place, kv0: Any, tile: Any, *stage: Any) -> None:
    """Of a tile of keys from kv0 on in shared memory, or a stage of one: 0 in the rows of keys that nobody sees."""
    rows, columns = (int(n) for n in tile.shape[-2:])
    _clear_rows(tile, stage, rows, columns, _is_seen(seen, place, kv0))


@T.macro
def clear_step(
    seen: Expr | None, place: Place, visit: Visit, values: Any, full: Any, at: tuple[Any, Any], threads: int
) -> None:  # fmt: skip
    """Of a partial tile that is copied to a stage, in a turn: it is cleared when all groups of the block have met.

    They have their weights by then, and have handed their turns on: nobody who is waited for waits.
    """
    if seen is not None:
        where_partial(
            visit.holds_unseen(visit.start), bind(_clear_stage, seen, place, visit, values, full, at, threads)
        )


@T.macro
def _clear_stage(
    seen: Expr, place: Place, visit: Visit, values: Any, full: Any, at: tuple[Any, Any], threads: int
) -> None:  # fmt: skip
    stage, turn = at
    T.barrier_wait(full[stage], turn)
    clear_unseen(seen, place, visit.start, values, stage)
    _tell_products(threads)


@T.macro
def clear_keys(seen: Expr | None, place: Place, kv0: Any, tiles: tuple[Any, ...], threads: int) -> None:
    """Clears tiles that stay for a whole walk over queries, before its products read them."""
    if seen is not None and len(tiles) > 0:
        for tile in tiles:
            clear_unseen(seen, place, kv0, tile)
        _tell_products(threads)


@T.macro
def _tell_products(threads: int) -> None:
    """Asynchronous products see what so many threads have stored."""
    T.fence_proxy_async()
    T.sync_threads(COMPUTE, threads)


def clear_operand(seen: Expr, place: Place, kv0: Any, operand: Operand) -> None:
    """The same of an operand, both parts of it if it was split."""
    for part in (operand.whole, operand.low):
        if part is not None:
            clear_unseen(seen, place, kv0, part)


def _is_seen(seen: Expr, place: Place, kv0: Any) -> Callable[[Any], Any]:
    return lambda j: place.splice(None, kv0 + j, {})(seen)[0]


@T.macro
def _copy(source: Any, target: Any) -> None:
    T.copy(source, target)


@T.macro
def _keep_seen(tile: Any, held: Any, rows: int, columns: int, is_seen: Callable[[Any], Any]) -> None:
    for j, d in T.Parallel(rows, columns):
        tile[j, d] = T.if_then_else(is_seen(j), held[j, d], 0)


@T.macro
def _clear_rows(
    tile: Any, stage: tuple[Any, ...], rows: int, columns: int, is_seen: Callable[[Any], Any]
) -> None:  # fmt: skip
    wide = 128 // DataType(tile.dtype).bits  # what one store may write
    for j, piece in T.Parallel(rows, columns // wide):
        if T.Not(is_seen(j)):
            for d in T.vectorized(wide):
                store(tile, T.cast(0, tile.dtype), *stage, j, piece * wide + d)
