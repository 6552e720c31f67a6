"""Buffers and numbers that kernels are given: kernels declare their parameters by them, calls allocate by them.

A shape is a tuple of integer expressions over the lengths of a call. A length is a variable with the name that the
kernel gives to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Expr, Op, Type, const, make, topological, var


def length(name: str) -> Expr:
    """A length that is known when a call is made."""
    return var(name, (), Type.INT)


def own_length(name: str, axis: str) -> Expr:
    """Of an axis that only this custom input has. Users' names may have dots, the package's may not."""
    return length(f"{name}_{axis}".replace(".", "-"))


BATCH, QUERIES, KEYS = length("batch"), length("q_length"), length("kv_length")
Size = Expr | int


def ceil_div(size: Expr, parts: int) -> Expr:
    """The least whole number that is not below size / parts."""
    return make(Op.FLOORDIV, size + parts - 1, const(parts))


class Role(Enum):
    """Who fills a buffer before a launch reads it."""

    GIVEN = "given"  # the caller
    MADE = "made"  # a launch, which writes every entry that is read
    ZEROED = "zeroed"  # launches add to it: it is allocated as zeros


@dataclass(frozen=True)
class Buffer:
    """A tensor of a call.

    name: of the kernel's parameter. key: of the tensor in the call's memory, where that isn't the parameter's name: one
    kernel may read what another wrote under another name. strides: the names of the parameters that say its strides, in
    units of `unit` elements, for all dims, or for all but the last, which is contiguous; without them all of it is
    contiguous. known: what lengths are that the kernel knows by name alone.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str = "float32"
    role: Role = Role.MADE
    key: str = ""
    strides: tuple[str, ...] = ()
    unit: int = 1
    known: tuple[tuple[str, Expr], ...] = ()

    @property
    def place(self) -> str:
        """The name of the tensor in the call's memory."""
        return self.key or self.name

    def at(self, key: str) -> Buffer:
        """The same parameter, for another tensor."""
        return replace(self, key=key)

    def shape_of(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in a call with these lengths."""
        known = {name: value_of(size, lengths) for name, size in self.known}
        return tuple(value_of(size, {**lengths, **known}) for size in self.shape)


@dataclass(frozen=True)
class Number:
    """An integer of a call that is no tensor's length: the parameter's name, which is its name in the call's memory."""

    name: str

    @property
    def place(self) -> str:
        """As of a Buffer."""
        return self.name


Argument = Buffer | Number
Arguments = tuple[Argument, ...]


def value_of(size: Size, lengths: Mapping[str, int]) -> int:
    """A size in a call with these lengths."""
    if isinstance(size, int):
        return size
    values = {node: lengths[node.name] for node in topological(size) if node.op is Op.VAR}
    return int(evaluate(size, values))


def buffers_of(arguments: Iterable[Argument]) -> list[Buffer]:
    """The buffers among the arguments."""
    return [a for a in arguments if isinstance(a, Buffer)]
