"""How parts of a row join: what attention to some of a row's keys leaves, made one with what it leaves of the others.

A part is what the forward pass has of some keys before its epilogue: the row states, and the sum of weights times
values. A merge is expressions like a program's, whose key axis counts parts and whose reductions run over parts, so
that whatever evaluates programs evaluates merges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from attention_engine.ir.expr import Expr, VarKind, topological, var
from attention_engine.ir.pretty import lines
from attention_engine.ir.program import OUTPUT, PAIR, ROW, Program, digest_of_parts


@lru_cache(maxsize=256)
def part_variable(name: str) -> Expr:
    """A row state of each part; keys count parts."""
    return var(name, PAIR, kind=VarKind.PART)


@lru_cache(maxsize=256)
def whole_variable(name: str) -> Expr:
    """A row state of all parts together."""
    return var(name, ROW, kind=VarKind.WHOLE)


def returned_by_part(name: str) -> Expr:
    """A row that the epilogue returns of each part, which the user's `combine` reads."""
    return var(name, PAIR, kind=VarKind.FINAL)


@dataclass(frozen=True)
class Merge:
    """The merge of one program.

    program: with an output of 0 for rows that keep no pair, for which it may have a state more than the user's.
    states: each state of the whole, of the parts' states and of those of the whole that stand before it; none where
    only the user's `combine` joins parts. factor: what a part's sum of weights times values is multiplied with before
    these are added, of the same variables. output and finals: the end of the row, of OUTPUT (that sum) and the states
    of the whole. finished: is OUTPUT the output already, so that what was merged is merged no more?
    """

    program: Program
    states: tuple[tuple[str, Expr], ...]
    factor: Expr
    output: Expr
    finals: tuple[tuple[str, Expr], ...]
    finished: bool = False

    @cached_property
    def read(self) -> tuple[str, ...]:
        """The states that a part must hold."""
        nodes = topological(self.factor, *(e for _, e in self.states))
        names = {n.bare_name for n in nodes if n.kind is VarKind.PART}
        return tuple(s.name for s in self.program.states if s.name in names)

    @cached_property
    def part_program(self) -> Program:
        """The forward pass over a part: its output is the sum so far, and it returns the states that are read."""
        held = tuple((s.name, s.variable) for s in self.program.states if s.name in self.read)
        return dataclasses.replace(self.program.returning(held), output=OUTPUT)

    def named(self) -> Iterator[tuple[str, Expr]]:
        """Every expression with what it is."""
        for name, state in self.states:
            yield f"whole.{name}", state
        yield "factor", self.factor
        yield "output", self.output
        for name, row in self.finals:
            yield f"final.{name}", row

    @cached_property
    def fingerprint(self) -> str:
        """A name of the merge that is the same in every process."""
        parts = (f"{name} {expr.digest}" for name, expr in self.named())
        return digest_of_parts([self.program.fingerprint, *parts])

    def __str__(self) -> str:
        return "\n".join(["# parts of a row, then all of them: o is the sum of factor * part.o", *lines(self.named())])
