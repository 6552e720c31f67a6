"""A kernel's key and a compiler that makes text: what test_cache.py hands to other processes, without torch."""

from __future__ import annotations

import time
from pathlib import Path

from attention_engine import arch
from attention_engine.codegen import cache
from attention_engine.codegen.cache import KernelKey
from attention_engine.codegen.compile import CompiledKernel, LoweredKernel
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX, PRODUCT, Q_IDX
from attention_engine.plan.forms import Tile

H100 = arch.H100()
GIVEN = (Problem(2, 2, 64, 64, "float16"), (PRODUCT * 0.125, Q_IDX + KV_IDX), Tile(64, 64, 128, 2), -float("inf"))
KEY = KernelKey("straight.forward.forward", GIVEN, H100, (("fast", True),))


class Compiler:
    """Counts compilations; what it makes is text."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self.count, self.seconds, self.library = 0, seconds, folder / "made.so"
        self.library.write_bytes(b"machine code")

    def __call__(self) -> CompiledKernel:
        self.count += 1
        time.sleep(self.seconds)
        lowered = LoweredKernel(cache.Script("# kernel"), H100, "cuda text", "host text", ("--flag",), "forward")
        return CompiledKernel(lowered, lambda *_: None, self.library)


def compile_once(folder: Path) -> int:
    """How often a process that wants the kernel compiles it."""
    cache.load_library = lambda path: {"forward": None}  # type: ignore[assignment]
    folder.mkdir()
    compiler = Compiler(folder, seconds=0.5)
    cache.find_or_compile(KEY, compiler)
    return compiler.count
