"""A process of the soak: reads draws, one JSON a line, and answers what came of each; its parent ends it if it hangs.

Lines that go out: {"stage": "compiling" | "running" | "judging"} and {"outcome": ...}. What else is printed goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

# Plain PyTorch's tensors of many sizes would leave most of the GPU's memory in a process's cache.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from attention_engine import compiler
from tests.gpu.soak.check import Named, Outcome, run
from tests.gpu.soak.draws import Draw

BROKEN = 3  # exit status after an error, which may have left the GPU's context unusable


def main() -> int:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**line: object) -> None:
        out.write(json.dumps(line) + "\n")

    _tell_when_compiling(say)
    say(stage="ready")
    for line in sys.stdin:
        asked = json.loads(line)
        say(stage="running")
        draw, judging = Draw(**asked["draw"]), partial(say, stage="judging")
        outcome = _outcome(draw, asked["backend"], asked["device"], asked["plant"], judging)
        say(**outcome.spelled())
        if outcome.outcome == "error":
            return BROKEN
        if asked["device"].startswith("cuda"):
            torch.cuda.empty_cache()
    return 0


def _outcome(draw: Draw, backend: str, device: str, plant: str, judging: Callable[[], None]) -> Outcome:
    if plant == "hang":
        time.sleep(1e6)
    if plant == "crash":
        os.abort()
    try:
        return run(draw, backend, device, _spoil if plant == "wrong" else None, judging)
    except Exception:  # noqa: BLE001 - whatever it is, it is what came of the draw
        return Outcome("error", detail=traceback.format_exc())


def _spoil(results: Named) -> None:
    """One row of dq (without gradients: of o) is another row's: a fault that a mean over everything would hide."""
    spoiled = results["dq" if "dq" in results else "o"]
    spoiled[-1, -1] = -spoiled[-1, -1] + 1


def _tell_when_compiling(say: Any) -> None:
    """While a kernel is compiled, a draw's time stands still."""
    compile_now = compiler.Kernel.__dict__["compiled"].func

    def compiled(kernel: Any) -> Any:
        say(stage="compiling")
        found = compile_now(kernel)
        say(stage="running")
        return found

    telling = cached_property(compiled)
    telling.__set_name__(compiler.Kernel, "compiled")
    compiler.Kernel.compiled = telling  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
