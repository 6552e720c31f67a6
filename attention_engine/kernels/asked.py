"""What a kernel asks of TileLang stands in its program.

A statement of a function that is no T.macro is an expression whose value nobody takes: TileLang leaves it out without a
word, and the kernel computes something else. Tests count, and so does who sets ATTENTION_ENGINE_VERIFY.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tilelang.language as T
from tvm import tirx

from attention_engine import settings
from attention_engine.ir.verify import InvalidIR

# Functions of TileLang, and the operation that each call of one puts into a program.
OPERATIONS = {
    "gemm": "gemm", "wgmma_gemm": "wgmma_gemm", "copy": "copy", "tma_copy": "tma_copy", "fill": "fill", "clear": "fill",
}  # fmt: skip
PREFIX = "tl.tileop."

Asked = Counter[str]


@contextmanager
def noted() -> Iterator[Asked | None]:
    """Counts what is asked for meanwhile, by operation; None where nothing is to be checked."""
    if not settings.verifies():
        yield None
        return
    asked: Asked = Counter()
    before = {name: getattr(T, name) for name in OPERATIONS}
    for name, function in before.items():
        setattr(T, name, _noting(function, OPERATIONS[name], asked))
    try:
        yield asked
    finally:
        for name, function in before.items():
            setattr(T, name, function)


def _noting(function: Callable[..., Any], operation: str, asked: Asked) -> Callable[..., Any]:
    def note(*given: Any, **named: Any) -> Any:
        asked[operation] += 1
        return function(*given, **named)

    return note


def held(prim_func: Any) -> Asked:
    """How many of each operation a program holds."""
    found: Asked = Counter()

    def count(node: Any) -> None:
        if isinstance(node, tirx.Call):
            name = getattr(node.op, "name", "")
            if name.startswith(PREFIX):
                found[name.removeprefix(PREFIX)] += 1

    tirx.stmt_functor.post_order_visit(prim_func.body, count)
    return found


def verify_held(name: str, prim_func: Any, asked: Asked) -> None:
    """Raises InvalidIR where a program holds less, or more, than was asked for."""
    found = held(prim_func)
    for operation, count in asked.items():
        if found[operation] != count:
            raise InvalidIR(
                f"the kernel {name} asks for {count} {operation}, and its program holds {found[operation]}.\n"
                f"  Let them stand in a T.macro: what other functions say is left out."
            )
