"""Deals parts to requests by their lengths: long requests are cut into many parts, short ones are whole.

One block adds up the tiles of all requests. A part has an even share of them, so that there are as many parts as there
is room for at most: one for each request, and as many more as the call has. Where a request's parts begin is a sum
over the requests before it: of runs of them, and of those in its own run.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import Sizes, build, store
from attention_engine.plan import cached_buffers
from attention_engine.plan.cached import MOST_REQUESTS
from attention_engine.plan.cached_buffers import PART_REQUESTS, PART_STARTS

RUN = 32  # requests whose sum is taken first
RUNS = MOST_REQUESTS // RUN
TOGETHER = 512  # places of parts that are looked at together
LONGEST = 1 << 26  # keys: a length that says more is wrong
NOBODY = -1


def deal(problem: Problem, keys: int, least: int, most: int) -> Any:
    """The PrimFunc: (kv_lengths, part_starts, part_requests). keys: of a tile; least: tiles of a part; most: parts of a
    request."""
    sizes = Sizes(problem)
    parameters = sizes.declare(cached_buffers.dealing())

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(1, threads=TOGETHER):
            counts = T.alloc_shared([MOST_REQUESTS], "int32")
            sums = T.alloc_shared([RUNS], "int32")
            total = T.alloc_var("int32", 0)
            parts = T.alloc_var("int32", 0)
            places = sizes.spell(cached_buffers.PARTS)
            for b in T.Parallel(MOST_REQUESTS):
                counts[b] = 0
                if b < sizes.batch:
                    counts[b] = T.ceildiv(T.max(T.min(buffers["kv_lengths"][b], LONGEST), 0), keys)
            add_runs(counts, sums)
            for r in T.serial(RUNS):
                total = total + sums[r]
            each = T.max(T.ceildiv(total, T.max(places - sizes.batch, 1)), least)
            for b in T.Parallel(MOST_REQUESTS):
                if b < sizes.batch:
                    counts[b] = T.max(T.min(T.ceildiv(counts[b], each), most), 1)
            add_runs(counts, sums)
            for r in T.serial(RUNS):
                parts = parts + sums[r]
            name_parts(buffers, counts, sums, sizes.batch)
            for turn in T.serial(T.ceildiv(places, TOGETHER)):
                for n in T.Parallel(TOGETHER):
                    if T.And(turn * TOGETHER + n >= parts, turn * TOGETHER + n < places):
                        store(buffers[PART_REQUESTS], NOBODY, turn * TOGETHER + n)

    return build("deal", parameters, body)


@T.macro
def add_runs(counts: Any, sums: Any) -> None:
    """The sum of each run."""
    for r in T.Parallel(RUNS):
        found = T.alloc_var("int32")
        found = 0
        for n in T.serial(RUN):
            found = found + counts[r * RUN + n]
        sums[r] = found


@T.macro
def name_parts(buffers: Any, counts: Any, sums: Any, requests: Any) -> None:
    """Writes where each request's parts begin, and whose each part is."""
    for b in T.Parallel(MOST_REQUESTS):
        if b < requests:
            before, own = T.alloc_var("int32"), T.alloc_var("int32")
            before = 0
            own = counts[b]
            for r in T.serial(b // RUN):
                before = before + sums[r]
            for n in T.serial(b % RUN):
                before = before + counts[b // RUN * RUN + n]
            store(buffers[PART_STARTS], before, b)
            if b == requests - 1:
                store(buffers[PART_STARTS], before + own, b + 1)
            for n in T.serial(own):
                store(buffers[PART_REQUESTS], b, before + n)
