"""Which rows the forward pass keeps for the backward pass, and which numbers of a row the backward's pairs read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from attention_engine.errors import BackwardNotDerived
from attention_engine.ir.expr import Axis, Expr, Op, VarKind, const, rebuild, substitute, topological
from attention_engine.ir.program import DELTA, final_variable, row_variable
from attention_engine.passes.simplify import add, construct, factors, mul, simplify, split_coefficient, terms

SIDES = frozenset({Axis.QUERY, Axis.KEY})


def reductions_in(*roots: Expr) -> list[Expr]:
    """The row reductions below the roots, inner ones first."""
    return [n for n in topological(*roots) if n.op is Op.REDUCE]


def near(a: float, b: float) -> bool:
    """Are the numbers equal, up to rounding (or both NaN)?"""
    return a == b or abs(a - b) <= 1e-9 * (abs(a) + abs(b)) or (a != a and b != b)


class RowValues:
    """Turns row values that the backward's pairs need into rows to save and rows to read.

    finals: the rows that the epilogue returns; states: what each final state is, of row reductions; found: the rows
    that are made anew, by their reduction. shifted: is a returned row beside a number no row of its own?
    """

    def __init__(
        self, finals: Iterable[tuple[str, Expr]], states: Mapping[Expr, Expr], found: Mapping[Expr, Expr] = {},
        shifted: bool = False,
    ) -> None:  # fmt: skip
        self.found, self.shifted = found, shifted
        self.states = set(states)
        self.by_states = {value: state for state, value in states.items() if value.op is not Op.CONST}
        finals = list(finals)
        self.returned = [name for name, _ in finals]
        self.finals = [(row, final_variable(name)) for name, row in finals]
        self.saved: dict[Expr, str] = {}
        self.rows: dict[Expr, str] = {}

    def in_states(self, expr: Expr) -> Expr:
        """The expression with row reductions as the final states that hold them."""
        expr = simplify(substitute(expr, self.by_states))[0]
        if reductions_in(expr):
            expr = simplify(substitute(expr, {**self.found, **self._solved()}))[0]
        if left := reductions_in(expr):
            raise BackwardNotDerived(
                f"the backward pass needs {left[0]}, which no row state carries to the end of the row.\n"
                "  Keep it in a state (online_rowscales), or write the static method `backward`."
            )
        return expr

    def _solved(self) -> dict[Expr, Expr]:
        """Reductions that states hold beside other terms: row_max(x) = m - a, where the state m is a + row_max(x)."""
        found = {}
        for value, state in self.by_states.items():
            held = [term for term in terms(value) if reductions_in(term)]
            number, reduction = split_coefficient(held[0]) if len(held) == 1 else (1.0, None)
            if reduction is not None and reduction.op is Op.REDUCE and reduction not in self.by_states:
                others = (mul(const(-1.0), term) for term in terms(value) if term is not held[0])
                found[reduction] = mul(const(1.0 / number), add(state, *others))
        return found

    def name(self, *roots: Expr) -> list[Expr]:
        """The roots, every row value in them (the largest whole) replaced by a row variable."""
        done = {node: row_variable(self._row(node)) for node in largest(roots, self._is_row)}
        return [substitute(r, done) for r in roots]

    def _is_row(self, node: Expr) -> bool:
        return Axis.KEY not in node.axes and any(self._is_fact(n) for n in topological(node))

    def _is_fact(self, node: Expr) -> bool:
        return node in self.states or _is_late(node)

    def _row(self, node: Expr) -> str:
        return self.rows.setdefault(self.settle(node), f"row{len(self.rows)}")

    def settle(self, node: Expr) -> Expr:
        """A row value as an expression of saved rows, DELTA and final gradients."""
        numbers = [term for term in terms(node) if term.op is Op.CONST] if self.shifted else []
        rest = add(*(term for term in terms(node) if term not in numbers)) if numbers else node
        for final, variable in self.finals:
            if (ratio := proportion(rest, final)) is not None:
                return add(mul(const(ratio), variable), *numbers)
        parts = largest([node], self._is_savable)
        keep = {part: final_variable(self.saved.setdefault(part, self._new_name())) for part in parts}
        return simplify(substitute(node, keep))[0]

    def _new_name(self) -> str:
        """A name for a saved row that no returned row has."""
        taken = {*self.saved.values(), *self.returned}
        return next(name for n in itertools.count(len(self.saved)) if (name := f"_{n}") not in taken)

    def _is_savable(self, node: Expr) -> bool:
        inside = topological(node)
        return any(n in self.states for n in inside) and not any(_is_late(n) for n in inside)


def _is_late(node: Expr) -> bool:
    """Is it known only in the backward pass (or saved for it already)?"""
    return node is DELTA or node.kind in (VarKind.FINAL, VarKind.ARRIVING)


def unlike(name: str, taken: Iterable[str]) -> str:
    """The name behind as many underscores as no other has."""
    name = f"_{name}"
    while name in taken:
        name = f"_{name}"
    return name


def largest(roots: Iterable[Expr], chosen: Callable[[Expr], bool]) -> list[Expr]:
    """The nodes below the roots that are chosen and don't stand inside another chosen one, each once."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if chosen(node):
            found[node] = None
        else:
            stack.extend(reversed(node.args))
    return list(found)


def reads_of_one_side(exprs: Iterable[Expr]) -> list[Expr]:
    """The reads of custom inputs at places that a pair's query alone says, or its key alone; none inside another."""
    return largest(exprs, lambda node: node.op is Op.LOAD and len(node.axes & SIDES) == 1)


def proportion(a: Expr, b: Expr) -> float | None:
    """k where a = k * b, term by term; else None."""
    ours = {rest: number for number, rest in map(split_coefficient, terms(a))}
    theirs = {rest: number for number, rest in map(split_coefficient, terms(b))}
    if ours.keys() != theirs.keys() or None in ours:
        return None
    ratios = [ours[rest] / theirs[rest] for rest in ours]
    return ratios[0] if all(near(r, ratios[0]) for r in ratios) else None


def name_product(expr: Expr, product: Expr, variable: Expr) -> Expr:
    """The expression with a product, wherever it stands whole or as part of another, replaced by a variable."""
    number, rest = split_coefficient(product)
    if rest is None:
        return expr
    wanted = factors(rest)
    done: dict[Expr, Expr] = {}
    for node in topological(expr):
        have = factors(node)
        if node is product:
            done[node] = variable
        elif all(have.count(f) >= wanted.count(f) for f in wanted):
            for factor in wanted:
                have.remove(factor)
            done[node] = mul(const(1.0 / number), variable, *(done.get(f, f) for f in have))
        else:
            done[node] = construct(rebuild(node, tuple(done[a] for a in node.args)))
    return done[expr]
