"""Works round a defect of TileLang 0.1.15: the fences around wgmma name too many registers.

A product that W warpgroups share by rows is fenced, on each thread, on the registers of all W groups' rows; those past
the thread's own array don't exist, and what ptxas makes of them differs from kernel to kernel.
"""

from __future__ import annotations

import threading
from typing import Any

FLAGS = ["-DATTENTION_ENGINE_FENCES=1"]  # in the compiler's cache key: other fences are another kernel

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Count a thread's own registers from now on; once a process."""
    global _installed
    from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter

    with _lock:
        if not _installed:
            TensorCoreIntrinEmitter.wgmma_accum_regs = property(own_registers)
            _installed = True


def own_registers(emitter: Any) -> int:
    """The 32-bit registers of one thread's part of a (fp32) accumulator: of its own warpgroup's instructions."""
    return int(emitter.wgmma_num_inst_m * emitter.warp_cols * emitter.local_size_out)
