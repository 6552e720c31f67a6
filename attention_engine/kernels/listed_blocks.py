"""Makes a map of blocks from lists of their numbers, all in one launch."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import Buffers, build

THREADS = 128


def listed_blocks(problem: Problem, counted: bool) -> Any:
    """The PrimFunc: (numbers of key blocks, how many of each list count if that is said, the map).

    A block of threads makes a row of the map: it clears it, and then marks what the list names. A number of no block is
    left out, and what lies behind the count.
    """
    batch, heads, rows, length, columns = (T.dynamic(n) for n in ("batch", "lists", "q_blocks", "entries", "kv_blocks"))
    parameters = {"indices": T.Tensor([batch, heads, rows, length], "int32")}
    if counted:
        parameters["counts"] = T.Tensor([batch, heads, rows], "int32")
    parameters["map"] = T.Tensor([batch, heads, rows, columns], "int8")

    @T.macro
    def body(buffers: Buffers) -> None:
        with T.Kernel(rows, heads, batch, threads=THREADS) as (row, head, item):
            found = buffers["map"]
            most = T.min(buffers["counts"][item, head, row], length) if counted else length
            for turn in T.serial(T.ceildiv(columns, THREADS)):
                for n in T.Parallel(THREADS):
                    if turn * THREADS + n < columns:
                        found[item, head, row, turn * THREADS + n] = T.int8(0)
            T.sync_threads()
            for turn in T.serial(T.ceildiv(most, THREADS)):
                for n in T.Parallel(THREADS):
                    at = turn * THREADS + n
                    if at < most:
                        block = buffers["indices"][item, head, row, at]
                        if T.And(block >= 0, block < columns):
                            found[item, head, row, block] = T.int8(1)

    return build("listed_blocks", parameters, body)
