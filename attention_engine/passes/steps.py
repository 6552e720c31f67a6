"""The steps of a forward pass: reductions, row values, and what becomes of the tile, each behind what it takes.

Exponentials cost most of a pair. So what a row sums up beside the weights (an entropy's w log w) is made in one pass
with the weights, of which it shares them, and sums of weights come last, of the tile that holds them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from attention_engine.ir.expr import (
    Axis,
    Expr,
    Op,
    Reduction,
    Type,
    const,
    is_const,
    substitute,
    topological,
    var,
)
from attention_engine.ir.program import PAIR, State, made_variable
from attention_engine.passes.differentiate import differentiate
from attention_engine.passes.row_values import largest
from attention_engine.passes.simplify import simplify
from attention_engine.passes.strength import lighten

TILE = var("tile", PAIR)
OTHER = var("other", PAIR)  # a tile that was made beside the weights
KEEP = var("keep", PAIR, Type.BOOL)


@dataclass(frozen=True)
class ReduceStep:
    """variable = the reduction of `source` over the keys (of its absolute value); without a source, of the tile.

    OTHER as the source: of the tile that a step before made beside the weights.
    """

    variable: Expr
    kind: Reduction
    absolute: bool
    source: Expr | None


@dataclass(frozen=True)
class RowStep:
    """Each row variable = its expression, all computed before any is written."""

    assignments: tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True)
class TileStep:
    """TILE = value; OTHER = other, made of the tile as it was, too."""

    value: Expr
    other: Expr | None = None


@dataclass(frozen=True)
class SumStep:
    """state = factor * state + the sum of the tile over the keys; without a factor, of 1.

    Nothing reads the state before the end, so that a kernel may hold it in parts, which it joins there.
    """

    state: Expr
    factor: Expr | None


Step = ReduceStep | RowStep | TileStep | SumStep


def row_values(
    roots: list[Expr], prefix: str, without: Set[Expr] = frozenset()
) -> tuple[list[tuple[Expr, Expr]], list[Expr]]:
    """Takes out what depends on the row alone (and is more than a variable, a number or an index), not on `without`."""
    waiting = {n for n in topological(*roots) if without & set(topological(n))}

    def is_row(node: Expr) -> bool:
        taken = node.op in (Op.CONST, Op.VAR) or node in waiting or node.dtype is not Type.FLOAT
        return not taken and Axis.QUERY in node.axes and not node.axes & {Axis.KEY, Axis.CHANNEL}

    found = {node: made_variable(f"{prefix}{i}", node.axes) for i, node in enumerate(largest(roots, is_row))}
    return [(v, e) for e, v in found.items()], [substitute(r, found) for r in roots]


class Steps:
    """Orders reductions, row values and tile updates.

    Row values come as early as what they take: the factor of the output so far before the weights are made, so that the
    output can be multiplied while exponentials are.
    """

    def __init__(self, roots: list[Expr]) -> None:
        *self.updates, self.weights, self.rescale = roots
        self.pending = _weights_last([n for n in topological(self.weights, *roots) if n.op is Op.REDUCE], self.weights)
        self.results = {n: made_variable(f"reduced{i}") for i, n in enumerate(self.pending)}
        self.waited = set(self.results.values())
        self.steps: list[Step] = []
        self.left: dict[Expr, Expr] = {}  # to be assigned: states, and the factor of the output
        self.sums: dict[Expr, SumStep] = {}
        self.named: dict[Expr, Expr] = {}  # row values of states as they are, and the variables that hold them
        self.rows = 0

    def build(self, states: tuple[State, ...]) -> tuple[list[Step], Expr | None]:
        """The steps, and the row variable that the output so far is multiplied with (None: with 1)."""
        updates = zip((s.variable for s in states), self.updates, strict=True)
        self.left = {s: self._resolve(u) for s, u in updates if u is not s}
        rescale = None
        if not is_const(self.rescale, 1):
            rescale = made_variable("rescale")
            self.left[rescale] = self._resolve(self.rescale)
        from_zero = {s.variable for s in states if s.initial == 0}
        current: Expr = TILE
        for position, node in enumerate(self.pending):
            source = node.args[0]
            later = [p.args[0] for p in self.pending[position + 1 :] if p.args[0] is not self.weights]
            if source is self.weights and current is TILE and not any(_reads_tile(e) for e in later):
                self._make_weights(from_zero)
                current = self.weights
            self._reduce(node, None if source is current else source, current)
        if current is not self.weights:
            self._make_weights(from_zero)
        if self.left:
            self.steps.append(RowStep(tuple(self.left.items())))
        return self.steps, rescale

    def _resolve(self, expr: Expr) -> Expr:
        """The expression with reductions as the row variables that hold them."""
        return substitute(expr, self.results)

    def _values(self, expr: Expr) -> tuple[list[tuple[Expr, Expr]], Expr]:
        """The row values of an expression, and the expression with them."""
        found, (result,) = row_values([self._resolve(expr)], f"row{self.rows}_")
        self.rows += 1
        result = substitute(result, {v: self.named[e] for v, e in found if e in self.named})
        new = [(v, e) for v, e in found if e not in self.named]
        self.named |= {e: v for v, e in new}
        return new, result

    def _make_weights(self, from_zero: set[Expr]) -> None:
        beside = self._take_back()
        other = None if beside is None else beside.source
        found, result = self._values(self.weights)
        asked = [n for n, v in self.results.items() if v in self.waited and n.args[0] is not self.weights]
        sources = [n.args[0] for n in asked] + ([] if other is None else [other])
        moves_on = not self.left.keys() & set(topological(*sources))  # else they read the states as they were
        if moves_on:
            found += self._sum_weights(from_zero)
        if beside is not None:
            self.waited.add(beside.variable)
        if moves_on:
            moved, result = self._move_on(result)
            found += moved
        if found:
            self.steps.append(RowStep(tuple(found)))
        self.steps.append(TileStep(result, other))
        if beside is not None:
            self.steps.append(replace(beside, source=OTHER))
            self.waited.remove(beside.variable)

    def _take_back(self) -> ReduceStep | None:
        """The last step, where it reduces a formula of the tile that can be made beside the weights."""
        last = self.steps[-1] if self.steps else None
        if not isinstance(last, ReduceStep) or last.source is None:
            return None
        if last.variable in topological(self._resolve(self.weights)):
            return None
        self.steps.pop()
        return last

    def _sum_weights(self, from_zero: set[Expr]) -> list[tuple[Expr, Expr]]:
        """Finds the states that sums of weights are added to, and no more; their factors, where they have no name."""
        named = []
        for node, variable in self.results.items():
            readers = [s for s, e in self.left.items() if variable in topological(e)]
            if variable not in self.waited or (node.args[0], node.arg) != (self.weights, "sum") or len(readers) != 1:
                continue
            (state,) = readers
            (factor,) = lighten(*differentiate(self.left[state], [state]))  # as what is left is written
            (rest,) = simplify(substitute(self.left[state], {state: const(0.0)}))
            left = (e for s, e in self.left.items() if s is not state)
            others = topological(factor, self.weights, *self.pending, *left)
            if state not in from_zero or rest is not variable or {state, *self.waited} & set(others):
                continue
            del self.left[state]
            name = next((v for v, e in self.left.items() if e is factor), made_variable(f"factor{len(self.sums)}"))
            if name not in self.left and not is_const(factor, 1):
                named.append((name, factor))
            self.sums[variable] = SumStep(state, None if is_const(factor, 1) else name)
        return named

    def _move_on(self, weights: Expr) -> tuple[list[tuple[Expr, Expr]], Expr]:
        """What is left to assign, as far as reductions are there. The weights, which are returned, and the rest have by
        other names what they read of old states."""
        ready = {v: e for v, e in self.left.items() if not self.waited & set(topological(e))}
        ahead = {v: e for v, e in self.left.items() if v not in ready}
        found, exprs = row_values(list(ahead.values()), "ahead", self.waited)
        old = [v for v in ready if v in topological(weights, *exprs)]
        copies = {v: made_variable(f"old{number}") for number, v in enumerate(old)}
        self.left = {v: substitute(e, copies) for v, e in zip(ahead, exprs, strict=True)}
        self.named.clear()
        moved = [*ready.items(), *found, *((copy, v) for v, copy in copies.items())]
        return moved, substitute(weights, copies)

    def _reduce(self, node: Expr, source: Expr | None, current: Expr) -> None:
        absolute = source is not None and source.op is Op.ABS and source.args[0] is current
        value = None
        if source is not None and not absolute:
            found, value = self._values(source)
            if found:
                self.steps.append(RowStep(tuple(found)))
        variable = self.results[node]
        self.steps.append(self.sums.get(variable) or ReduceStep(variable, node.reduction, absolute, value))
        self.waited.remove(variable)


def _reads_tile(expr: Expr) -> bool:
    return TILE in topological(expr, closed=frozenset({Op.REDUCE}))


def _weights_last(reductions: Sequence[Expr], weights: Expr) -> list[Expr]:
    """Reductions of the weights behind all others that need none of them."""
    others = [n for n in reductions if n.args[0] is not weights]
    needed = topological(*(n.args[0] for n in others))
    return sorted(reductions, key=lambda n: n.args[0] is weights and n not in needed)
