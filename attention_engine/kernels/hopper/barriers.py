"""Barriers in shared memory: rings of tiles that one warp fills and others read, and how threads arrive at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.warps import GROUP, WARP


@dataclass(frozen=True)
class Ring:
    """A tile in each of several stages, used one after another; or a single tile.

    A barrier of `full` completes when the tile of its stage has come, one of `empty` when nobody reads the tile any
    more. Of a tile that comes once, `empty` is None.
    """

    tile: Any
    full: Any
    empty: Any


@T.macro
def wait(barriers: Any, number: Any, parity: Any) -> None:
    """Waits for one of several barriers."""
    T.barrier_wait(barriers[number], parity)


@T.macro
def arrive(barriers: Any, number: Any) -> None:
    """Arrives at one of several barriers."""
    T.barrier_arrive(barriers[number])


@T.macro
def give_back(thread: Any, barriers: Any, number: Any, when: Any = True) -> None:
    """A lane of each warp arrives at one of several barriers: nobody of the warp reads any more what it guards."""
    if T.And(thread % WARP == 0, when):
        T.barrier_arrive(barriers[number])


@T.macro
def arrive_when_read(thread: Any, empty: list[tuple[Any, Any]], when: Any = True) -> None:
    """The warp of each group that began the copies out arrives, when the copies have read. The whole warp does, for
    which of its lanes began them is the hardware's choice."""
    if T.And(thread % GROUP < WARP, when):
        T.tma_store_wait(0)
        for barrier_and_number in empty:
            arrive(*barrier_and_number)


@T.macro
def finish_before(values: Any, registers_of_each: int, barriers: Any, stage: Any, turn: Any) -> None:
    """Makes a fragment's values now, not after a wait for products that comes next: the products run meanwhile.

    Compilers move the two past each other, as neither needs the other. The fence holds NVVM; the branch of a wait that
    is over holds ptxas.
    """
    T.warpgroup_fence_operand(values, num_regs=registers_of_each)
    T.barrier_wait(barriers[stage], turn)
