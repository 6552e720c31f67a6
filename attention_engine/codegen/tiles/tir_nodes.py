"""Walks over TIR nodes by the names of their classes, so that reading a program imports no compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeGuard, cast

from attention_engine.codegen.tir_types import Call, Expression, Load, Node, Variable

LEAVES = frozenset({"Var", "SizeVar", "IntImm", "FloatImm", "StringImm"})
OPERANDS: dict[str, tuple[str, ...]] = {
    "Not": ("a",),
    "Cast": ("value",),
    "Select": ("condition", "true_value", "false_value"),
    "Let": ("value", "body"),
}


def handle_of(node: Node) -> int:
    """The identity of a TIR node, whose Python wrapper is made anew at each access."""
    return int(node.__chandle__())


def kind_of(node: object) -> str:
    """The name of a TIR node's class."""
    return type(node).__name__


def is_variable(node: Expression) -> TypeGuard[Variable]:
    """Is it a name?"""
    return kind_of(node) in ("Var", "SizeVar")


def is_call(node: Expression) -> TypeGuard[Call]:
    """Does it call something?"""
    return kind_of(node) == "Call"


def operands(node: Expression) -> Iterator[Expression]:
    """The expressions that an expression is made of."""
    kind = kind_of(node)
    if is_call(node):
        yield from node.args
    elif kind == "BufferLoad":
        yield from cast(Load, node).indices
    elif kind not in LEAVES:
        for name in OPERANDS.get(kind, ("a", "b")):
            if hasattr(node, name):
                yield getattr(node, name)


def variables_of(root: Expression) -> Iterator[Variable]:
    """The variables that an expression reads, each at least once."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if is_variable(node):
            yield node
        elif kind_of(node) not in LEAVES and handle_of(node) not in seen:
            seen.add(handle_of(node))
            pending.extend(operands(node))


def nodes_used_twice(roots: Iterable[Expression]) -> set[int]:
    """The inner nodes which more than one place of these expressions uses."""
    seen: set[int] = set()
    twice: set[int] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if kind_of(node) in LEAVES or not hasattr(node, "__chandle__"):
            continue
        handle = handle_of(node)
        if handle in seen:
            twice.add(handle)
        else:
            seen.add(handle)
            pending.extend(operands(node))
    return twice
