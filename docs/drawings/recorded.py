"""Runs kernels for Hopper in the warp simulator, and writes down what each role of a block does, in its order.

The simulator says who waits for what, and which phase of a barrier ends a wait. It does not say how long anything
takes: replay.py gives each act a length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attention_engine import CustomIO
from attention_engine.codegen.interpreter.statements import _StatementCompiler
from attention_engine.codegen.simulator import ops
from attention_engine.codegen.tiles.buffers import ROLE
from attention_engine.frontend.tracing import trace
from attention_engine.library import OnlineSoftmax, scale
from attention_engine.passes.maths import analyse
from attention_engine.plan.attention import Tiles
from attention_engine.plan.forms import Tile
from attention_engine.runtime.program_kernels import ProgramKernels

GROUP = 128  # threads of a warpgroup
OPERANDS = {
    "tl.tileop.copy": 2, "tl.tileop.tma_copy": 2, "tl.tileop.reduce": 2, "tl.tileop.fill": 1,
    "tl.tileop.wgmma_gemm": 3,
}  # fmt: skip
ATOMICS = {"tl.atomic_add_elem_op", "tl.atomic_add_ret_elem_op"}


@dataclass(frozen=True)
class Event:
    """One act of a role.

    op: its name in TileLang, without the dialect; names: of the buffers that it reads and writes, tiles by the name
    of what they hold; threads: those that
    act, by warpgroup; at: where a copy's global end begins (buffer, element); barrier: the one that it waits for,
    arrives at or lands at; count: the threads that this one expects; phase: the one that ended a wait; numbers: other
    arguments, as text.
    """

    first: int
    threads: dict[int, int]
    op: str
    names: tuple[str, ...] = ()
    at: tuple[tuple[str, int], ...] = ()
    barrier: str = ""
    count: int = 0
    phase: int = 0
    numbers: tuple[str, ...] = ()


@contextlib.contextmanager
def recording() -> Iterator[list[Event]]:
    """What roles do in kernels that are made ready, and run, within."""
    events: list[Event] = []
    table = _StatementCompiler._statements
    plain = table["Evaluate"]

    def evaluate(compiler: Any, node: Any) -> Callable[[Any], Any]:
        run = plain(compiler, node)
        call = node.value
        name = str(getattr(getattr(call, "op", None), "name", ""))
        if name not in ops.WARP_OPS and name not in ATOMICS:
            return run
        return _noting(events, compiler, call, name, run)

    table["Evaluate"] = evaluate
    try:
        yield events
    finally:
        table["Evaluate"] = plain


def _plain(name: object) -> str:
    """A name, a tile's without its ending: a string of Python's own, as TVM's must not outlive it."""
    return str(name).removesuffix("_tile")[:]


def _noting(
    events: list[Event], compiler: Any, call: Any, name: str, run: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    windows = [compiler.region(argument) for argument in call.args[: OPERANDS.get(name, 0)]]
    names = tuple(_plain(window.buffer.name) for window in windows)
    if name in ATOMICS:
        names = (_plain(call.args[0].args[0].buffer.name),)
    outside = [w for w in windows if not w.buffer.on_chip] if "copy" in name else []
    at_barrier = [v for key, v in call.annotations.items() if str(key) == "barrier"]
    if name in ("tl.mbarrier_wait_parity", "tirx.ptx_arrive_barrier"):
        at_barrier = [call.args[0]]
    barrier = ops._barrier(compiler, at_barrier[0]) if at_barrier else None
    numbers = () if OPERANDS.get(name) or at_barrier else tuple(_plain(argument) for argument in call.args)

    def noting(frame: Any) -> Any:
        role = frame[ROLE]
        at = tuple((_plain(w.buffer.name), int(w.read(frame).storage_offset())) for w in outside)
        result = run(frame)
        shares: dict[int, int] = {}
        for thread in role.threads.tolist():
            shares[thread // GROUP] = shares.get(thread // GROUP, 0) + 1
        found = barrier(frame) if barrier is not None else None
        told = (_plain(found.name), found.count, found.phase - 1) if found is not None else ("", 0, 0)
        events.append(Event(int(role.threads[0]), shares, name.split(".")[-1], names, at, *told, numbers))
        return result

    return noting


@dataclass(frozen=True)
class Recorded:
    """What the kernels of a call did; the backward pass begins with the kernel of rows."""

    forward: list[Event]
    backward: list[Event]


def attend(forward: Tile, backward: Tile, queries: int, keys: int, heads: int = 1) -> Recorded:
    """Softmax at head dims 128, without a mask, by kernels with these tiles."""
    maths = analyse(trace(scale(0.1), None, OnlineSoftmax(), CustomIO()))
    program_kernels = ProgramKernels(maths, [], interpret=True, device=None, deterministic=False,
                        tiles=Tiles(forward, backward, backward))  # fmt: skip
    random = torch.Generator().manual_seed(0)
    q, k, v, d_output = (
        torch.randn(1, length, heads, 128, generator=random).half() for length in (queries, keys, keys, queries)
    )
    with recording() as events:
        output, rows = program_kernels.forward(q, k, v, [])
        end = len(events)
        program_kernels.backward(q, k, v, [], output, rows, d_output, {}, ())
    return Recorded(events[:end], events[end:])
