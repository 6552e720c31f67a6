"""A plain read of memory, by Triton: what a call that reads so many bytes takes at least on this GPU, by this clock."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

ITEMS, STEPS = 4096, 4  # of 4 bytes, that a program reads at once; how often
IMPROBABLE = 123456789


@triton.jit
def _read(source, target, items: tl.constexpr, steps: tl.constexpr, improbable: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads all of it; writes only where the items say what zeros don't, so that nothing is left out."""
    first = tl.program_id(0).to(tl.int64) * items * steps + tl.arange(0, items)
    found = tl.zeros([items], tl.int32)
    for step in range(steps):
        found ^= tl.load(source + first + step * items)
    if tl.max(found, 0) == improbable:
        tl.store(target, 1)


def read_of(size: int) -> Callable[[], object]:
    """Reads so many bytes, whole programs of them."""
    programs = max(size // (4 * ITEMS * STEPS), 1)
    source = torch.zeros(programs * ITEMS * STEPS, dtype=torch.int32, device="cuda")
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    return lambda: _read[(programs,)](source, target, ITEMS, STEPS, IMPROBABLE, num_warps=8)
