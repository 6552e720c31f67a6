"""Kernels are compiled without a word, unless ATTENTION_ENGINE_VERBOSE asks for TileLang's reports."""

from __future__ import annotations

import logging
from typing import Any

from attention_engine import settings
from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace

# Who warns of what no user of ours wrote: statements that end in no effect, kernels that are asked for twice.
LOGGERS = ("tilelang.language.eager.builder", "tilelang.cache.kernel_cache")


def put() -> Undo:
    """TileLang reports each kernel that it compiles, and warns of what it finds in it, but for ours."""
    import tilelang
    from tilelang import language
    from tvm import tirx

    environment = type(tilelang.env)
    asked, theirs = environment.is_print_on_compilation_enabled, language.pow

    def reports(held: Any) -> bool:
        return bool(asked(held)) and (settings.verbose() or not inside())

    def pow(x: Any, y: Any, span: Any = None) -> Any:
        """The same call, without the warning that TVM prints of exponents of 3 and more."""
        if not inside() or settings.verbose() or not isinstance(y, tirx.FloatImm) or x.dtype != y.dtype:
            return theirs(x, y, span)
        return tirx.call_intrin(x.dtype, "tirx.pow", x, y, span=span)

    def says(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or settings.verbose() or not inside()

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(says)
    undo = replace((environment, "is_print_on_compilation_enabled", reports), (language, "pow", pow))

    def undo_all() -> bool:
        if not undo():
            return False
        for logger in loggers:
            logger.removeFilter(says)
        return True

    return undo_all


PATCH = Patch(
    defect="each kernel that is compiled is reported or warned of, and only the whole process can be told not to",
    version="0.1.15",
    proof="test_tilelang_reports_what_it_compiles",
    put=put,
)
