"""Our changes to TileLang: what is wrong with it, in which version, and which test says when that is over.

All tracing and compiling of kernels goes through `patched`. Who else uses TileLang in the process, at the same time or
later, finds it as it is.
"""

from attention_engine.codegen.patches import (
    extremes,
    fences,
    headers,
    host_code,
    idle,
    layouts,
    lines,
    masked,
    printed,
    quiet,
    remembered,
    shared_names,
    wait_groups,
)
from attention_engine.codegen.patches.scope import Patch, Scope

PATCHES: tuple[Patch, ...] = (
    remembered.PATCH, shared_names.PATCH, wait_groups.PATCH, fences.PATCH, printed.PATCH, quiet.PATCH,
    extremes.PATCH, headers.PATCH,
    host_code.PATCH, lines.PATCH, idle.PATCH, layouts.PATCH, masked.PATCH,
)  # fmt: skip
patched = Scope(PATCHES)
