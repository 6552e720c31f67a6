"""Calls with a cache: the attentions of tests/cached_cases.py with lengths, queries and parts at random.

Keys behind a length, and pages that no request has, hold NaN. Each call is run again many times: parts that another
block joins before they are there would be seen as other bits.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests import cached_cases
from tests.cached_cases import CASES, DRAFTS, Shape

if TYPE_CHECKING:
    from tests.gpu.soak.draws import Draw

Results = dict[str, Tensor]
PAGES = (0, 64, 16, 256)  # each attention has one of them, so that few kernels are compiled
PARTS = (None, None, 1, 2, 7, 40, 128)
MOST_KEYS = 1 << 16  # of all requests: the yardstick goes over them on the host
AGAIN, AGAIN_SECONDS = 40, 1.0


@dataclass(frozen=True)
class Cached:
    """An attention to a cache, and the heads that its kernels are compiled for."""

    case: str
    page: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    linear = False

    @property
    def name(self) -> str:
        return f"cached {self.case} {self.heads}/{self.kv_heads} D {self.dim}" + f" pages of {self.page}" * (
            self.page > 0
        )

    def small(self) -> Cached:
        """The same with few heads."""
        return replace(self, heads=4, kv_heads=2, dim=64, dtype=torch.float16)

    def shape(self, draw: Draw) -> tuple[Shape, int | None]:
        """What a draw asks: lengths, of which one is the longest and some are 0, queries; and in how many parts."""
        rng = random.Random(draw.seed)
        tree = self.case == "tree"
        queries = DRAFTS if tree else draw.queries
        most = max(draw.keys, queries)
        lengths = [
            most,
            *(rng.choice((0, 1, rng.randint(0, most), rng.randint(0, most))) for _ in range(draw.batch - 1)),
        ]
        rng.shuffle(lengths)
        lengths = [max(n, queries) for n in lengths] if tree else lengths
        shape = Shape(tuple(lengths), queries, self.heads, self.kv_heads, self.dim, self.page)
        return shape, rng.choice(PARTS)


PROGRAMS = tuple(Cached(case, page) for case, page in zip(CASES, itertools.cycle(PAGES), strict=False))


def drawn(rng: random.Random, tiny: bool) -> tuple[int, int, int]:
    """Requests, queries of each, and the most keys of one."""
    batch = rng.randint(1, 3) if tiny else rng.choice((1, 1, 2, 4, 7, 16, 64))
    queries = rng.choice((1, 1, 1, 2, 4, 5)) if tiny else rng.choice((1, 1, 1, 1, 2, 4, 5, 16, 33))
    most = 200 if tiny else MOST_KEYS // batch
    return batch, queries, max(1, int(most ** rng.uniform(0.3, 1)))


def measure(
    draw: Draw, backend: str, device: str, change: Callable[[Results], None] | None, judging: Callable[[], None]
) -> tuple[list[str], float, str, float]:
    """What is wrong; the worst error over what is allowed, and its name; the seconds of the first call."""
    program = draw.of
    assert isinstance(program, Cached)
    shape, parts = program.shape(draw)
    given = cached_cases.inputs(program.case, shape, program.dtype, device, draw.seed)
    call = cached_cases.caller(program.case, shape, given, backend, parts)
    started = time.perf_counter()
    ours = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    faults = _unlike_again(ours, call, device)
    judging()
    if change:
        change(ours)
    try:
        errors = cached_cases.judge(program.case, shape, given, ours)
    except AssertionError as fault:
        return [*faults, str(fault)], math.inf, "o", seconds
    worst = max(errors, key=lambda error: error.ours / error.allowed)
    return faults, worst.ours / worst.allowed, worst.name, seconds


def _unlike_again(ours: Results, call: Callable[[], Results], device: str) -> list[str]:
    """What further runs have otherwise: no bit may differ."""
    most, end = (AGAIN, time.monotonic() + AGAIN_SECONDS) if device.startswith("cuda") else (1, math.inf)
    for number in range(most):
        again = call()
        unlike = [name for name, found in again.items() if not torch.equal(found, ours[name])]
        if unlike:
            return [f"in run {number + 2}: {', '.join(unlike)} is another"]
        if number > 3 and time.monotonic() > end:
            break
    return []
