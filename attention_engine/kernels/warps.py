"""How the kernels for Hopper divide a block: one group of warps copies, the others compute."""

from __future__ import annotations

import tilelang.language as T

WARP, GROUP = 32, 128  # threads
COMPUTE = 1  # the named barrier on which the computing threads meet
ROWS_WHOLE = T.GemmWarpPolicy.FullRow
REGISTERS_PER_SM = 65536


def registers(threads: int) -> tuple[int, int]:
    """Registers of a copying thread, and of each of so many computing ones, in the units of 8 that setmaxnreg takes.

    A copying thread of a block of 512 starts with 128, and gives back all but 24.
    """
    copying = 24
    return copying, min(240, (REGISTERS_PER_SM - GROUP * copying) // threads // 8 * 8)
