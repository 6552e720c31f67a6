"""Kernels are compiled without a word, unless ATTENTION_ENGINE_VERBOSE asks for TileLang's reports."""

from __future__ import annotations

from typing import Any

from attention_engine import settings
from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace


def put() -> Undo:
    """TileLang reports each kernel that it compiles, but for ours."""
    import tilelang

    environment = type(tilelang.env)
    asked = environment.is_print_on_compilation_enabled

    def reports(held: Any) -> bool:
        return bool(asked(held)) and (settings.verbose() or not inside())

    return replace((environment, "is_print_on_compilation_enabled", reports))


PATCH = Patch(
    defect="each kernel that is compiled is reported, and only the whole process can be told not to",
    version="0.1.15",
    proof="test_tilelang_reports_what_it_compiles",
    put=put,
)
