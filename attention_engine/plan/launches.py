"""Launches of kernels, in order, as data: who runs them, lists them, or compiles them ahead reads the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attention_engine.plan.buffers import Arguments, Buffer


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments.

    name: what users call it. builder, given: the function in kernels/ that makes it, "straight.forward.forward", and
    that function's arguments after the problem. rules: what TileLang is told, and what is done to the text that it
    prints. writes: the places that it fills or adds to. lasting: it reads no tensor, so that a later call of the same
    lengths and heads may use what it wrote. of_sequences: it reads the tables of packed sequences alone, so that a call
    that shares them may.
    """

    name: str
    builder: str
    given: tuple[object, ...]
    arguments: Arguments
    writes: frozenset[str]
    rules: tuple[str, ...] = ()
    lasting: bool = False
    of_sequences: bool = False


@dataclass(frozen=True)
class Trim:
    """A copy of the first entries of a row, as many as there are queries, in the place of another name."""

    source: str
    target: Buffer


@dataclass(frozen=True)
class Sum:
    """A sum over a dim of what lies in a place: over all of it, or over groups of so many neighbours in the dim before
    it. The target's dtype is the result's."""

    source: str
    target: Buffer
    dim: int
    group: int = 0


Step = Launch | Trim | Sum


def launches(steps: Iterable[Step]) -> Iterator[Launch]:
    """The launches among the steps, each name once."""
    seen: set[str] = set()
    for step in steps:
        if isinstance(step, Launch) and step.name not in seen:
            seen.add(step.name)
            yield step
