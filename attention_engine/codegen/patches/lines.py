"""Statements of kernels carry no line of Python, unless ATTENTION_ENGINE_VERBOSE asks for TileLang's reports."""

from __future__ import annotations

from typing import Any

from attention_engine import settings
from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace


def put() -> Undo:
    """TileLang notes the line of each statement for its reports, which takes a third of the time of tracing."""
    import tilelang

    environment = type(tilelang.env)
    asked = environment.is_span_enable

    def notes(held: Any) -> bool:
        return bool(asked(held)) and (settings.verbose() or not inside())

    return replace((environment, "is_span_enable", notes))


PATCH = Patch(
    defect="each statement gets its line of Python, in a third of the time of tracing, for reports that nobody sees",
    version="0.1.15",
    proof="test_tilelang_notes_the_line_of_each_statement",
    put=put,
)
