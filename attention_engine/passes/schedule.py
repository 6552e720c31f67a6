"""Puts a program's maths in the order a kernel runs it: what is computed once a block, once a row, and for each pair.

A tile of scores is held in one buffer, TILE. Where score_mod is a positive number times something, the tile holds the
something and the number joins the later formulas (for softmax: one multiply-add and one exp2 a pair).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from attention_engine.ir.evaluate import LOWEST
from attention_engine.ir.expr import (
    Axis,
    Expr,
    Op,
    Reduction,
    Type,
    VarKind,
    const,
    is_const,
    rebuild,
    substitute,
    topological,
    var,
)
from attention_engine.ir.program import PAIR, PRODUCT, SCORE, Backward, Extreme, Program, State, made_variable
from attention_engine.ir.reach import least_of, may_be_far
from attention_engine.passes.differentiate import differentiate
from attention_engine.passes.empty_rows import finite, guard_empty_rows
from attention_engine.passes.ends import Ends, find_ends
from attention_engine.passes.fills import NEUTRAL, find_fill
from attention_engine.passes.row_terms import part_row_terms, reads_places_alone, terms_beside_product
from attention_engine.passes.row_values import largest
from attention_engine.passes.simplify import add, construct, mul, reduce, simplify, split_coefficient, terms, where
from attention_engine.passes.starts import starts_read
from attention_engine.passes.strength import lighten, open_pairs, use_exp2

TILE = var("tile", PAIR)
KEEP = var("keep", PAIR, Type.BOOL)
SCALES = (1e-6, 1e6)  # the scales between which other terms of a sum may be divided by one: fp32 has room for them


@dataclass(frozen=True)
class ReduceStep:
    """variable = the reduction of `source` over the keys (of its absolute value); without a source, of the tile."""

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
    """TILE = expression."""

    value: Expr


@dataclass(frozen=True)
class SumStep:
    """state = factor * state + the sum of the tile over the keys; without a factor, of 1.

    Nothing reads the state before the end, so that a kernel may hold it in parts, which it joins there.
    """

    state: Expr
    factor: Expr | None


Step = ReduceStep | RowStep | TileStep | SumStep


@dataclass(frozen=True)
class ForwardSchedule:
    """A forward kernel's maths.

    block: values of a (batch, head), computed before the loop; score: what the tile first holds, of PRODUCT; fill: what
    masked pairs hold then (None: the steps ask KEEP themselves); steps: from the tile to the weights, which it holds
    last, and the row states; rescale: the row variable that the output so far is multiplied with (None: with 1);
    output: of OUTPUT and the states, at the end; rows: what the kernel writes for each row, by name; ends: of score;
    least: what stands for -inf where a maximum starts; dropped: which weights meet no value (`drop_weights`).
    """

    block: tuple[tuple[Expr, Expr], ...]
    score: Expr
    fill: float | None
    initial: tuple[tuple[Expr, float], ...]
    steps: tuple[Step, ...]
    rescale: Expr | None
    output_rows: RowStep
    output: Expr
    rows: tuple[tuple[str, Expr], ...]
    mask: Expr | None
    ends: Ends | None = None
    least: float = LOWEST
    dropped: Expr | None = None

    @property
    def rescales_early(self) -> bool:
        """Is the output's factor known before the weights are?"""
        before = itertools.takewhile(lambda step: not isinstance(step, TileStep), self.steps)
        return any(self.rescale is v for step in before if isinstance(step, RowStep) for v, _ in step.assignments)


@dataclass(frozen=True)
class BackwardSchedule:
    """A backward kernel's maths: block values; weights, of PRODUCT and row variables; the gradient of PRODUCT without
    its factor `scale`, and the gradients of reads in pairs, of PRODUCT, WEIGHT, WEIGHT_GRADIENT and row variables; the
    ends of the weights; the extremes that the gradients ask for, their values as kernels compute them; which weights
    met no value, so that WEIGHT_GRADIENT is 0 there."""

    block: tuple[tuple[Expr, Expr], ...]
    weights: Expr
    product_gradient: Expr
    scale: float
    pair_gradients: tuple[tuple[Expr, Expr], ...]
    mask: Expr | None
    ends: Ends | None = None
    extremes: tuple[Extreme, ...] = ()
    dropped: Expr | None = None


def schedule_forward(
    program: Program, saved: tuple[tuple[str, Expr], ...] = (), parts_rows: bool = False
) -> ForwardSchedule:
    """The forward pass in order; `saved` are rows to write beside the program's own. parts_rows: are terms of rows to
    leave the tile, where nothing else is then left beside products than terms of places?"""
    far, least = may_be_far(program.score), least_of(program.score)
    program = guard_empty_rows(program)
    score, roots, fill = (_part_rows(program) if parts_rows and not far else None) or _hold_tile(program, far)
    if fill is None:
        roots = _ask_keep(roots, len(roots) - 2)
    rows = (*program.finals, *(s for s in saved if s[0] not in dict(program.finals)))
    block, (score, *roots), ends = _hoist_all(open_pairs(*use_exp2(score, *roots, differences=far)))
    steps, rescale = _Steps(roots).build(program.states)
    output_rows, (output,) = _row_values([program.output], "end")
    starts = starts_read(program.mask, score, *roots, program.output, *(e for _, e in rows))
    return ForwardSchedule(
        block=(*starts, *block),
        score=score,
        fill=fill,
        initial=tuple((s.variable, finite(s.initial, least)) for s in program.states),
        steps=tuple(steps),
        rescale=rescale,
        output_rows=RowStep(tuple(output_rows)),
        output=output,
        rows=rows,
        mask=program.mask,
        ends=ends,
        least=least,
    )


def _part_rows(program: Program) -> tuple[Expr, list[Expr], float | None] | None:
    """What `_hold_tile` gives, the terms of rows out of the tile; None where something else would be left in it than
    products and terms of places, or a reduction can't do without the terms."""
    scale, score = _take_scale(program.score)
    of_pairs, of_row = part_row_terms(score)
    added = terms_beside_product(of_pairs)
    if of_row is None or not (of_pairs is PRODUCT or (added and reads_places_alone(added))):
        return None
    roots = _roots_of(program, add(mul(const(scale), TILE), mul(const(scale), of_row)))
    if any(node.args[0] not in (TILE, roots[-2]) for node in topological(*roots) if node.op is Op.REDUCE):
        return None
    return of_pairs, roots, find_fill(roots[:-2], roots[-2], TILE)


def _roots_of(program: Program, score: Expr) -> list[Expr]:
    """Updates, weights and rescale, of the score as it is held."""
    raw = (*(s.update for s in program.states), program.weights, program.rescale)
    return list(simplify(*(substitute(e, {SCORE: score}) for e in raw)))


def _hold_tile(program: Program, whole: bool) -> tuple[Expr, list[Expr], float | None]:
    """What the tile first holds, of PRODUCT; then updates, weights and rescale of TILE; and what masked pairs hold.

    Where no reduction reads the scores, the products themselves are held if a fill can be found: score and weights are
    then one formula. whole: are scores held as they are, whose factor would cost digits of what it is taken out of?
    """
    raw = [*(s.update for s in program.states), program.weights, program.rescale]
    reduced = [n for n in topological(*raw) if n.op is Op.REDUCE]
    if SCORE not in topological(*reduced):
        roots = _roots_of(program, substitute(program.score, {PRODUCT: TILE}))
        fill = find_fill(roots[:-2], roots[-2], TILE)
        if fill is not None:
            return PRODUCT, roots, fill
    scale, score = (1.0, program.score) if whole else _take_scale(program.score)
    roots = _roots_of(program, mul(const(scale), TILE))
    fill = find_fill(roots[:-2], roots[-2], TILE)
    if fill is None and reduced and scale != 1 and any(abs(s.initial) >= -LOWEST for s in program.states):
        # Of a tile that keeps no pair the maximum must be the start of its state, not a multiple of it.
        return program.score, _roots_of(program, TILE), None
    return score, roots, fill


def _take_scale(score: Expr) -> tuple[float, Expr]:
    """score = number * rest, with number > 0.

    Of a sum the number is what PRODUCT is multiplied with. The other terms are divided by it: that joins a number of
    the block that they are multiplied with, or their addition.
    """
    number, rest = split_coefficient(score)
    if rest is not None and number != 1 and 0 < number < math.inf:
        return float(number), rest
    parts = [(*split_coefficient(term), term) for term in terms(score)]
    scale = next((float(number) for number, rest, _ in parts if rest is PRODUCT), 1.0)
    if scale == 1 or not SCALES[0] < scale < SCALES[1]:
        return 1.0, score
    return scale, add(*(PRODUCT if rest is PRODUCT else mul(const(1 / scale), term) for _, rest, term in parts))


def schedule_backward(program: Program, backward: Backward) -> BackwardSchedule:
    """The backward's pairs in order."""
    gradients = [e for _, e in backward.pair_gradients]
    scale, product = 1.0, backward.product_gradient
    number, rest = split_coefficient(product)
    if rest is not None and math.isfinite(number):  # as a factor of sums inf and NaN would reach pairs that are 0
        scale, product = float(number), rest
    values = [e.value for e in backward.extremes]
    pairs = backward.weights, product, *values, *gradients, *([] if backward.score is None else [backward.score])
    block, (weights, product, *gradients), ends = _hoist_all(open_pairs(*pairs))
    values, gradients = gradients[: len(values)], gradients[len(values) :]
    extremes = (dataclasses.replace(e, value=value) for e, value in zip(backward.extremes, values, strict=True))
    if backward.score is not None:  # no pass comes after this one that would part a score's sum
        weights, ends = substitute(weights, {SCORE: gradients.pop()}), None
    loads = [load for load, _ in backward.pair_gradients]
    starts = starts_read(program.mask, weights, product, *values, *gradients, *loads)
    return BackwardSchedule(
        (*starts, *block), weights, product, scale, tuple(zip(loads, gradients, strict=True)), program.mask, ends,
        tuple(extremes),
    )  # fmt: skip


def _hoist_all(roots: Iterable[Expr]) -> tuple[list[tuple[Expr, Expr]], list[Expr], Ends | None]:
    """Block values; the roots of them, multiplied where it costs least; and the ends of the first root."""
    roots = list(roots)
    ends = find_ends(roots[0])
    block, roots = _hoist(roots if ends is None else [*roots, ends.below, ends.above])
    roots = list(lighten(*roots))
    if ends is not None:
        *roots, below, above = roots
        ends = dataclasses.replace(ends, below=below, above=above)
    return block, roots, ends


def _hoist(roots: list[Expr]) -> tuple[list[tuple[Expr, Expr]], list[Expr]]:
    """Takes out what depends on the batch and the head alone (and is more than a variable or a number)."""

    def is_block(node: Expr) -> bool:
        return node.dtype is Type.FLOAT and node.op not in (Op.CONST, Op.VAR) and node.axes <= {Axis.BATCH, Axis.HEAD}

    found = {node: var(f"block{i}", node.axes, kind=VarKind.BLOCK) for i, node in enumerate(largest(roots, is_block))}
    return [(v, e) for e, v in found.items()], [substitute(r, found) for r in roots]


def _row_values(
    roots: list[Expr], prefix: str, without: Set[Expr] = frozenset()
) -> tuple[list[tuple[Expr, Expr]], list[Expr]]:
    """Takes out what depends on the row alone (and is more than a variable, a number or an index), not on `without`."""
    waiting = {n for n in topological(*roots) if without & set(topological(n))}

    def is_row(node: Expr) -> bool:
        taken = node.op in (Op.CONST, Op.VAR) or node in waiting or node.dtype is not Type.FLOAT
        return not taken and Axis.QUERY in node.axes and not node.axes & {Axis.KEY, Axis.CHANNEL}

    found = {node: made_variable(f"{prefix}{i}", node.axes) for i, node in enumerate(largest(roots, is_row))}
    return [(v, e) for e, v in found.items()], [substitute(r, found) for r in roots]


class _Steps:
    """Orders reductions, row values and tile updates.

    Row values come as early as what they take: the factor of the output so far before the weights are made, so that the
    output can be multiplied while exponentials are.
    """

    def __init__(self, roots: list[Expr]) -> None:
        *self.updates, self.weights, self.rescale = roots
        self.pending = [n for n in topological(self.weights, *roots) if n.op is Op.REDUCE]
        self.results = {n: made_variable(f"reduced{i}") for i, n in enumerate(self.pending)}
        self.waited = set(self.results.values())
        self.steps: list[Step] = []
        self.left: dict[Expr, Expr] = {}  # to be assigned: states, and the factor of the output
        self.sums: dict[Expr, SumStep] = {}
        self.rows = 0

    def build(self, states: tuple[State, ...]) -> tuple[list[Step], Expr | None]:
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
        found, (result,) = _row_values([self._resolve(expr)], f"row{self.rows}_")
        self.rows += 1
        return found, result

    def _make_weights(self, from_zero: set[Expr]) -> None:
        found, result = self._values(self.weights)
        sources = [n.args[0] for n, v in self.results.items() if v in self.waited and n.args[0] is not self.weights]
        if not self.left.keys() & set(topological(*sources)):  # which read the states as they were
            found += self._sum_weights(from_zero)
            moved, result = self._move_on(result)
            found += moved
        if found:
            self.steps.append(RowStep(tuple(found)))
        self.steps.append(TileStep(result))

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
        found, exprs = _row_values(list(ahead.values()), "ahead", self.waited)
        old = [v for v in ready if v in topological(weights, *exprs)]
        copies = {v: made_variable(f"old{number}") for number, v in enumerate(old)}
        self.left = {v: substitute(e, copies) for v, e in zip(ahead, exprs, strict=True)}
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


def _ask_keep(roots: list[Expr], weights: int) -> list[Expr]:
    """The roots with KEEP asked in every reduction and in the weights."""
    done: dict[Expr, Expr] = {}
    for node in topological(*roots):
        args = tuple(done[a] for a in node.args)
        if node.op is Op.REDUCE:
            done[node] = reduce(node.reduction, where(KEEP, args[0], const(NEUTRAL[node.reduction])))
        else:
            done[node] = construct(rebuild(node, args))
    return [where(KEEP, done[r], const(0.0)) if n == weights else done[r] for n, r in enumerate(roots)]
