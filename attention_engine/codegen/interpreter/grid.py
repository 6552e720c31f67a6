"""The blocks of a grid in the interpreter: one after another, in the order that a GPU starts them."""

from __future__ import annotations

import itertools
from typing import Protocol, cast

from attention_engine.codegen.tiles.buffers import ROLE
from attention_engine.codegen.tiles.tir_nodes import is_call, kind_of
from attention_engine.codegen.tiles.windows import Frame, Run
from attention_engine.codegen.tir_types import Evaluate, Expression, For, Statement, Variable
from attention_engine.errors import HazardInKernel

GRID_KIND = 4  # tirx.ForKind.THREAD_BINDING: an index of a block


class Compiler(Protocol):
    """The part of the interpreter's compiler that loops over blocks need."""

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
    body = compiler.statement(node)

    def run(frame: Frame) -> None:
        for indices in itertools.product(*(range(extent(frame)) for extent in extents)):
            for slot, index in zip(slots, indices, strict=True):
                frame[slot] = index
            body(frame)

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
