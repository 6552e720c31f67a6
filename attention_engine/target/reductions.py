"""Works round a shortfall of TileLang 0.1.15: a thread reduces its part of a row by one chain of dependent operations.

On Hopper a row of 128 scores is 32 numbers of a thread; their maximum in one chain waits for each of 32 results in turn
(4 to 6 clocks each), four chains side by side for 8. It is a rule on the CUDA text: the loop as TileLang prints it,
with CHAINS partial results in place of one. Sums are taken in another order, the same in every run.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

FLAGS = ["-DATTENTION_ENGINE_REDUCTIONS=1"]  # in the compiler's cache key: other sums are another kernel
CHAINS = 4

# for (int rv = 0; rv < 32; ++rv) {
#   total[i] = max(total[i], scores[...]);      or   total[i] = (total[i] + scores[...]);
# }
_LOOP = re.compile(
    r"(?P<indent>[ \t]*)\#pragma\ unroll\n"
    r"[ \t]*for\ \(int\ (?P<step>\w+)\ =\ 0;\ \w+\ <\ (?P<count>\d+);\ \+\+\w+\)\ \{\n"
    r"[ \t]*(?P<total>\w+\[\w+\])\ =\ "
    r"(?:(?P<greatest>max)\((?P=total),\ (?P<of>.+)\)|\((?P=total)\ \+\ (?P<term>.+)\));\n"
    r"[ \t]*\}\n",
    re.VERBOSE,
)


_ours = threading.local()
_lock = threading.Lock()
_installed = False


def install() -> None:
    """Rewrite what TileLang prints, from now on, while `rewriting` is entered; once a process."""
    global _installed
    import tvm_ffi
    from tilelang.engine import register_cuda_postproc

    with _lock:
        if not _installed:
            before = tvm_ffi.get_global_func("tilelang_callback_cuda_postproc", allow_missing=True)
            register_cuda_postproc(lambda code, target: _printed(code, target, before))
            _installed = True


@contextlib.contextmanager
def rewriting() -> Iterator[None]:
    """Kernels that this thread compiles inside are ours; those of others stay as they are."""
    _ours.now = True
    try:
        yield
    finally:
        _ours.now = False


def _printed(code: str, target: Any, before: Any) -> str:
    code = code if before is None else str(before(code, target))
    return in_chains(code) if getattr(_ours, "now", False) else code


def in_chains(cuda: str) -> str:
    """The source with each such loop over float32 in CHAINS chains."""
    return _LOOP.sub(_rewritten, cuda)


def _rewritten(loop: re.Match[str]) -> str:
    count, total, step, indent = int(loop["count"]), loop["total"], loop["step"], loop["indent"]
    declared = re.search(rf"\bfloat {re.escape(total.split('[')[0])}\[", loop.string)
    if declared is None or count % CHAINS or count < 4 * CHAINS:
        return loop[0]
    part = f"{total.split('[')[0]}_part"
    each = f"{part}[{step} & {CHAINS - 1}]"
    if loop["greatest"]:
        start, joined = total, f"max({each}, {loop['of']})"
        end = f"max(max({part}[0], {part}[1]), max({part}[2], {part}[3]))"
    else:
        start, joined = "0.0f", f"{each} + {loop['term']}"
        end = f"{total} + (({part}[0] + {part}[1]) + ({part}[2] + {part}[3]))"
    lines = [
        "{",
        f"  float {part}[{CHAINS}] = {{{', '.join([start] * CHAINS)}}};",
        "  #pragma unroll",
        f"  for (int {step} = 0; {step} < {count}; ++{step}) {{ {each} = {joined}; }}",
        f"  {total} = {end};",
        "}",
    ]
    return "".join(f"{indent}{line}\n" for line in lines)
