"""How the kernels for Hopper divide a block: one group of warps copies, the others compute."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import tilelang.language as T

from attention_engine.arch import H100
from attention_engine.ir.problem import Problem, padded
from attention_engine.plan.forms import Tile

WARP, GROUP = 32, 128  # threads
SPARE = tuple(range(1, GROUP // WARP))  # the copying group's warps that copy nothing
ORDERING = SPARE[0]  # the warp that keeps an order, where blocks add to dQ in one
COMPUTE = 1  # the named barrier on which the computing threads meet
TURN = 2  # the first of those on which each group waits for its turn to start products
SWIZZLED = 64  # columns of a 16-bit tile that lie together in shared memory: 128 bytes
TMA_FLOATS = 32  # 128 bytes: what TMA copies to begins at a multiple of them
LEAVE = 5  # the first of those on which each group meets before its rows leave
SPARE_START = 8  # on which the spare warps meet before their first work
ROWS_WHOLE, COLUMNS_SHARED = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol  # by groups: 64 rows each, or columns
REGISTERS_PER_SM = H100().registers_per_sm
SHARED_BYTES = H100().shared_memory_per_block - 1024  # for a block's tiles; the rest is for barriers


def registers(threads: int, copying: int = 24, making: int = 0, blocks: int = 1) -> tuple[int, int]:
    """Registers of a copying thread, and of each of so many computing ones, in the units of 8 that setmaxnreg takes.

    making: registers of each thread of one more group, if there is one. blocks: how many share an SM.

    Every thread starts with as many. Copying ones give back all but some, and computing ones ask for what was given
    back: for more they would wait for ever.
    """
    all_threads = GROUP + threads + (GROUP if making else 0)
    started_with = REGISTERS_PER_SM // blocks // all_threads // 8 * 8
    return copying, min(240, (started_with * all_threads - GROUP * (copying + making)) // threads // 8 * 8)


def preparing(tile: Tile) -> tuple[int, ...]:
    """The spare warps that prepare for later blocks over keys."""
    return tuple(warp for warp in SPARE if not (tile.in_order and warp == ORDERING))


def thread_of_row(row: Any, copy: Any) -> tuple[Any, Any]:
    """Who holds a value of a row of products whose rows the warpgroups share, 64 each: a thread, and which of its own.

    copy: which of the four that hold it (PTX: layout of wgmma's accumulators). A warp has 16 rows, a thread two.
    """
    return row // 16 * WARP + row % 8 * 4 + copy, row % 16 // 8


class Form:
    """What the forms of both directions have in common."""

    problem: Problem
    tile: Tile

    @cached_property
    def dim(self) -> int:
        """The head dim of queries and keys, in tiles."""
        return padded(self.problem.dim)

    @cached_property
    def dim_v(self) -> int:
        """The head dim of values, in tiles."""
        return padded(self.problem.dim_v)

    @cached_property
    def warps(self) -> int:
        """How many warps compute."""
        return self.tile.threads // WARP


def output_fits(problem: Problem, tile: Tile) -> bool:
    """Has shared memory room for a tile of the output beside queries, keys and values?"""
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    return 2 * (tile.q * (dim + dim_v) + tile.stages * tile.kv * (dim + dim_v)) <= SHARED_BYTES


def shared_bytes_left(problem: Problem, tile: Tile, blocks: int = 1) -> int:
    """Bytes that a forward block's tiles leave of shared memory, where so many blocks share an SM."""
    dim, dim_v = padded(problem.dim), padded(problem.dim_v)
    beside = tile.q * dim_v if tile.persistent and output_fits(problem, tile) else 0
    return SHARED_BYTES // blocks - 2 * (tile.q * dim + beside + tile.stages * tile.kv * (dim + dim_v))


def keeps_queries_ahead(problem: Problem, tile: Tile) -> bool:
    """Can that tile be a second one of queries?"""
    return tile.persistent and problem.dim == problem.dim_v and output_fits(problem, tile)
