"""Passes of TileLang that change nothing in kernels placed by hand are left out: a ninth of what lowering one takes.

It makes negative indices positive, moves conditions out of loops, and simplifies six times, once after it built
pipelines and once after it opened blocks. Kernels placed by hand have no such pipeline, no index that is known to be
negative and no condition that a loop repeats; the others keep these passes. Found by comparing what went into each pass
with what came out, in both directions of the programs that the tests share.
"""

from __future__ import annotations

import threading
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace
from attention_engine.plan.rules import NO_STORAGE_SYNC

IDLE = (3, 5)  # of the runs of TileLang's own Simplify, in their order: after pipelines, after opened blocks


class _Thread(threading.local):
    """How often the kernel that a thread lowers was simplified."""

    simplified = 0


_thread = _Thread()


def put() -> Undo:
    """TileLang asks for each of them by its name, at each kernel."""
    import tilelang
    from tvm import s_tir
    from tvm.ir.transform import PassContext

    known, conditions = tilelang.transform, s_tir.transform
    make_positive, simplify, hoist = known.LegalizeNegativeIndex, known.Simplify, conditions.HoistIfThenElse

    def by_hand() -> bool:
        return inside() and bool(PassContext.current().config.get(NO_STORAGE_SYNC))

    def positive() -> Any:
        """The first of them."""
        _thread.simplified = 0
        return _unchanged if by_hand() else make_positive()

    def simpler(*given: Any, **more: Any) -> Any:
        _thread.simplified += 1
        return _unchanged if by_hand() and _thread.simplified in IDLE else simplify(*given, **more)

    def hoisted(*given: Any, **more: Any) -> Any:
        return _unchanged if by_hand() else hoist(*given, **more)

    return replace(
        (known, "LegalizeNegativeIndex", positive), (known, "Simplify", simpler),
        (conditions, "HoistIfThenElse", hoisted),
    )  # fmt: skip


def _unchanged(module: Any) -> Any:
    return module


PATCH = Patch(
    defect="passes that change nothing walk over a kernel and ask Z3 of its indices and conditions",
    version="0.1.15",
    proof="test_tilelang_runs_passes_that_change_nothing",
    put=put,
)
