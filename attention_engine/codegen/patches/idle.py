"""Passes of TileLang without which kernels placed by hand have the same text are left out: a quarter of their lowering.

It makes negative indices positive, moves conditions out of loops, and simplifies nine times. Kernels placed by hand
have no pipeline of TileLang's, no index that is known to be negative and no condition that a loop repeats, and what one
run of Simplify would have made shorter the next one does; the others keep these passes. Found by comparing the texts of
the programs that the tests share, in both directions.
"""

from __future__ import annotations

import threading
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace
from attention_engine.plan.rules import NO_STORAGE_SYNC

# Of the runs of Simplify, in their order. TileLang's own first one stays: some texts have their conditions by it in
# another order; and its last, behind which nobody simplifies what launches a kernel.
IDLE = (2, 3, 4, 5)
IDLE_OF_TVM = (2,)


class _Thread(threading.local):
    """How often the kernel that a thread lowers was simplified, by TileLang's pass and by TVM's."""

    simplified = simplified_by_tvm = 0


_thread = _Thread()


def put() -> Undo:
    """TileLang asks for each of them by its name, at each kernel."""
    import tilelang
    from tvm import s_tir, tirx
    from tvm.ir.transform import PassContext

    known, conditions, of_tvm = tilelang.transform, s_tir.transform, tirx.transform
    make_positive, simplify, hoist = known.LegalizeNegativeIndex, known.Simplify, conditions.HoistIfThenElse
    simplify_by_tvm = of_tvm.Simplify

    def by_hand() -> bool:
        return inside() and bool(PassContext.current().config.get(NO_STORAGE_SYNC))

    def positive() -> Any:
        """The first of them."""
        _thread.simplified = _thread.simplified_by_tvm = 0
        return _unchanged if by_hand() else make_positive()

    def simpler(*given: Any, **more: Any) -> Any:
        _thread.simplified += 1
        return _unchanged if by_hand() and _thread.simplified in IDLE else simplify(*given, **more)

    def simpler_by_tvm() -> Any:
        _thread.simplified_by_tvm += 1
        return _unchanged if by_hand() and _thread.simplified_by_tvm in IDLE_OF_TVM else simplify_by_tvm()

    def hoisted(*given: Any, **more: Any) -> Any:
        return _unchanged if by_hand() else hoist(*given, **more)

    return replace(
        (known, "LegalizeNegativeIndex", positive), (known, "Simplify", simpler),
        (conditions, "HoistIfThenElse", hoisted), (of_tvm, "Simplify", simpler_by_tvm),
    )  # fmt: skip


def _unchanged(module: Any) -> Any:
    return module


PATCH = Patch(
    defect="passes that change nothing walk over a kernel and ask Z3 of its indices and conditions",
    version="0.1.15",
    proof="test_tilelang_runs_passes_that_change_nothing",
    put=put,
)
