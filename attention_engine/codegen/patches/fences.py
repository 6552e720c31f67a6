"""Works round a defect of TileLang 0.1.15: the fences around wgmma name too many registers.

A product that W warpgroups share by rows is fenced, on each thread, on the registers of all W groups' rows; those past
the thread's own array don't exist, and what ptxas makes of them differs from kernel to kernel.
"""

from __future__ import annotations

from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace

FLAGS = ["-DATTENTION_ENGINE_FENCES=1"]  # in the compiler's cache key: other fences are another kernel


def put() -> Undo:
    """Fences count a thread's own registers."""
    from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter

    name = "wgmma_accum_regs"
    theirs = vars(TensorCoreIntrinEmitter)[name].fget

    def registers(emitter: Any) -> int:
        return own_registers(emitter) if inside() else int(theirs(emitter))

    return replace((TensorCoreIntrinEmitter, name, property(registers)))


def own_registers(emitter: Any) -> int:
    """The 32-bit registers of one thread's part of a (fp32) accumulator: of its own warpgroup's instructions."""
    return int(emitter.wgmma_num_inst_m * emitter.warp_cols * emitter.local_size_out)


PATCH = Patch(
    defect="fences around wgmma name the registers of all warpgroups, of which a thread has only its own's",
    version="0.1.15",
    proof="test_tilelang_fences_registers_that_a_thread_does_not_have",
    put=put,
)
