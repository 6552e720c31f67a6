"""Proves a merge by numbers: rows cut into parts at random, in float64, whose merge must be the row.

Scores of many sizes are tried, so that a formula which is right and overflows is seen, too. Parts are of any size, also
empty; each is walked in tiles of its own; and some are merged before others, as a merge must not depend on that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attention_engine.ir.evaluate import Value, evaluate_all
from attention_engine.ir.expr import Axis, Expr, Op, Type, VarKind, topological
from attention_engine.ir.merge import Merge, part_variable, whole_variable
from attention_engine.ir.program import OUTPUT, Program
from attention_engine.passes.empty_rows import finite

KEYS = 12
MOST_PARTS = 6
TURNS = 24  # rows of each size of scores
SCORES = ((0.0, 1.0), (0.0, 4.0), (2.0, 0.5), (-3.0, 1.0), (0.0, 1e-3), (300.0, 30.0), (-300.0, 30.0), (0.0, 200.0),
          (1500.0, 400.0), (-1500.0, 400.0))  # center and spread  # fmt: skip
TOLERANCE = 1e-9  # of the larger result, or of SMALLEST where both are smaller
SMALLEST = 0.1
Row = Mapping[Expr, Value]  # what a row's variables and reads are; lists hold a number for each key


@dataclass(frozen=True)
class Held:
    """What is known of some of a row's keys: the states, and the sum of weights times values (of one channel)."""

    states: dict[str, float]
    output: float


def find_difference(merge: Merge) -> str | None:
    """A cut of a row into parts whose merge is not the row, in words; None where there is none."""
    variables = _variables(merge)
    seen = 0
    for number, (center, spread) in enumerate(SCORES):
        for turn in range(TURNS):
            draw = random.Random(1000 * number + turn)
            zero = turn % 5 == 4  # what is divided by a custom input must not be
            row = {n: _draw(n, draw, center, spread, zero) for n in variables}
            trial = _Trial(merge, row, [draw.gauss(0.0, 1.0) for _ in range(KEYS)])
            expected = trial.end_of_row()
            groups = _groups(draw)
            found = trial.end_of_parts(groups, draw, in_steps=turn % 2 == 1)
            for what, whole in expected.items():
                if not math.isfinite(whole):
                    continue
                seen += 1
                if not abs(whole - found[what]) <= TOLERANCE * max(abs(whole), abs(found[what]), SMALLEST):
                    sizes = ", ".join(str(len(g)) for g in groups)
                    return (
                        f"{what} of {KEYS} keys is {whole:.6g}; of parts of {sizes} keys it is {found[what]:.6g} "
                        f"(scores of {center:g} +- {spread:g})."
                    )
    return None if seen else "no row that was tried has finite numbers."


def _variables(merge: Merge) -> list[Expr]:
    """What a row is drawn of: scores, indices, custom inputs."""
    nodes = topological(*(e for _, e in merge.program.named()), *(e for _, e in merge.named()))
    made = (VarKind.STATE, VarKind.PART, VarKind.WHOLE, VarKind.FINAL)
    return [n for n in nodes if n.op in (Op.VAR, Op.LOAD) and n is not OUTPUT and n.kind not in made]


def _draw(node: Expr, draw: random.Random, center: float, spread: float, zero: bool) -> Value:
    """A value for a variable or a read of a custom input: a list where it depends on the key."""
    of_key = Axis.KEY in node.axes
    if node.dtype is not Type.FLOAT:
        numbers: list[float] = [draw.randrange(2) if node.dtype is Type.BOOL else n for n in range(KEYS)]
        return numbers if of_key else numbers[draw.randrange(KEYS)]
    if of_key:
        return [draw.gauss(center, spread) for _ in range(KEYS)]
    return 0.0 if zero and node.op is Op.LOAD else draw.gauss(center, spread)


def _groups(draw: random.Random) -> list[list[int]]:
    keys = list(range(KEYS))
    draw.shuffle(keys)
    return _cut(draw, keys, draw.randrange(1, MOST_PARTS))


def _cut(draw: random.Random, keys: list[int], cuts: int) -> list[list[int]]:
    stops = sorted(draw.choices(range(len(keys) + 1), k=cuts))
    return [keys[a:b] for a, b in zip([0, *stops], [*stops, len(keys)], strict=True)]


class _Trial:
    """One row and its values."""

    def __init__(self, merge: Merge, row: Row, values: Sequence[float]) -> None:
        self.merge, self.row, self.values = merge, row, values

    def end_of_row(self) -> dict[str, float]:
        """The output and the returned rows, as one tile."""
        program = self.merge.program
        held = self._walk(program, [list(range(KEYS))])
        known = {**self.row, **{s.variable: held.states[s.name] for s in program.states}, OUTPUT: held.output}
        names = [n for n, _ in self.merge.finals]
        rows = [e for n, e in program.finals if n in names]
        return self._named(names, evaluate_all([program.output, *rows], known))

    def end_of_parts(self, groups: list[list[int]], draw: random.Random, in_steps: bool) -> dict[str, float]:
        """The same of parts, some of which are merged first with in_steps."""
        parts = [self._walk(self.merge.program, _cut(draw, group, draw.randrange(3))) for group in groups]
        if in_steps and len(parts) > 2 and not self.merge.finished:
            first = draw.randrange(1, len(parts))
            parts = [self._merged(parts[:first]), *parts[first:]]
        whole = self._merged(parts)
        known = {**self.row, **{whole_variable(n): v for n, v in whole.states.items()}, OUTPUT: whole.output}
        names = [n for n, _ in self.merge.finals]
        return self._named(names, evaluate_all([self.merge.output, *(e for _, e in self.merge.finals)], known))

    @staticmethod
    def _named(names: Sequence[str], found: Sequence[float]) -> dict[str, float]:
        return dict(zip(["the output", *(f"the returned row {n!r}" for n in names)], found, strict=True))

    def _walk(self, program: Program, tiles: list[list[int]]) -> Held:
        """The forward pass over these tiles of keys."""
        states = {s.variable: finite(s.initial) for s in program.states}
        output = 0.0
        roots = [program.weights, program.rescale, *(s.update for s in program.states)]
        for tile in tiles:
            known = {n: [v[j] for j in tile] if isinstance(v, list) else v for n, v in self.row.items()} | states
            weights, rescale, *updates = evaluate_all(roots, known, len(tile))
            weights = weights if isinstance(weights, list) else [weights] * len(tile)
            output = output * rescale + sum(w * self.values[j] for w, j in zip(weights, tile, strict=True))
            states = dict(zip(states, updates, strict=True))
        return Held({s.name: states[s.variable] for s in program.states}, output)

    def _merged(self, parts: Sequence[Held]) -> Held:
        known: dict[Expr, Value] = {n: v for n, v in self.row.items() if not isinstance(v, list)}
        known |= {part_variable(s.name): [p.states[s.name] for p in parts] for s in self.merge.program.states}
        states = {}
        for name, state in self.merge.states:
            (states[name],) = evaluate_all([state], known, len(parts))
            known[whole_variable(name)] = states[name]
        (factor,) = evaluate_all([self.merge.factor], known, len(parts))
        factors = factor if isinstance(factor, list) else [factor] * len(parts)
        return Held(states, sum(f * p.output for f, p in zip(factors, parts, strict=True)))
