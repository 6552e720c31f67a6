"""The blocks of a grid in the interpreter, in the order that a GPU starts them: one after another, or beside each other
where they wait for one another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial as bind
from typing import Protocol, cast

from attention_engine.codegen.simulator.blocks import run_blocks
from attention_engine.codegen.tiles.buffers import ROLE
from attention_engine.codegen.tiles.tir_nodes import is_call, kind_of
from attention_engine.codegen.tiles.windows import Frame, Run
from attention_engine.codegen.tir_types import Evaluate, Expression, For, Statement, Variable
from attention_engine.errors import HazardInKernel

GRID_KIND = 4  # tirx.ForKind.THREAD_BINDING: an index of a block


class Compiler(Protocol):
    """The part of the interpreter's compiler that loops over blocks need."""

    blocks_wait: bool  # for one another, as far as was compiled

    def statement(self, node: Statement) -> Run:
        """The code of one statement."""

    def value(self, node: Expression) -> Run:
        """The code of an expression."""

    def variable(self, node: Variable) -> int:
        """The slot of a fresh variable."""


def grid(compiler: Compiler, node: Statement) -> Run:
    """A nest of loops over the indices of blocks, of which the first runs fastest."""
    slots: list[int] = []
    extents: list[Run] = []
    while kind_of(node) == "For" and int((loop := cast(For, node)).kind) == GRID_KIND:
        slots.insert(0, compiler.variable(loop.loop_var))
        extents.insert(0, compiler.value(loop.extent))
        node = loop.body
    compiler.blocks_wait = False
    body = compiler.statement(node)
    wait = compiler.blocks_wait

    def run_at(frame: Frame, indices: tuple[int, ...]) -> None:
        for slot, index in zip(slots, indices, strict=True):
            frame[slot] = index
        body(frame)

    def bodies(frame: Frame) -> Iterator[Callable[[], None]]:
        for indices in itertools.product(*(range(extent(frame)) for extent in extents)):
            yield bind(run_at, list(frame) if wait else frame, indices)

    def run(frame: Frame) -> None:
        if wait:
            run_blocks(bodies(frame))
        else:
            for run_block in bodies(frame):
                run_block()

    return run


WITHOUT_EFFECT = ("__nanosleep", "fence_proxy_of_memory")  # where blocks run one after another


def is_nothing(node: Statement) -> bool:
    """Whether a statement has no effect, but to take time."""
    if kind_of(node) != "Evaluate":
        return False
    call = cast(Evaluate, node).value
    called = getattr(call.args[0], "value", None) if is_call(call) and len(call.args) > 0 else None
    return called in WITHOUT_EFFECT or kind_of(call) == "IntImm"


def wait_for_blocks(test: Run, condition: str) -> Run:
    """A loop without a body: what it waits for, an earlier block has done, or another role of this one will."""

    def run(frame: Frame) -> None:
        role = frame[ROLE]
        if role.turns is not None:
            role.turns.wait(lambda: not test(frame), f"while {condition}")
        elif test(frame):
            raise HazardInKernel(f"a block waits for what no block before it has done: while {condition}")

    return run
