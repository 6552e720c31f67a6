"""Puts a program's maths in the order a kernel runs it: what is computed once a block, once a row, and for each pair.

A tile of scores is held in one buffer, TILE. Where score_mod is a positive number times something, the tile holds the
something and the number joins the later formulas (for softmax: one multiply-add and one exp2 a pair).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from attention_engine.ir.evaluate import LOWEST
from attention_engine.ir.expr import (
    Axis,
    Expr,
    Op,
    Type,
    VarKind,
    const,
    rebuild,
    substitute,
    topological,
    var,
)
from attention_engine.ir.program import PRODUCT, SCORE, Backward, Extreme, Program
from attention_engine.ir.reach import least_of, may_be_far
from attention_engine.passes.empty_rows import finite, guard_empty_rows
from attention_engine.passes.ends import Ends, find_ends
from attention_engine.passes.fills import LOW, NEUTRAL, find_fill, is_low_enough
from attention_engine.passes.row_terms import part_row_terms, reads_places_alone, terms_beside_product
from attention_engine.passes.row_values import largest
from attention_engine.passes.simplify import add, construct, mul, reduce, simplify, split_coefficient, terms, where
from attention_engine.passes.starts import starts_read
from attention_engine.passes.steps import KEEP, TILE, RowStep, Step, Steps, TileStep, row_values
from attention_engine.passes.strength import lighten, open_pairs, use_exp2

Held: TypeAlias = tuple[Expr, list[Expr], float | None]  # what a tile first holds, what is made of it, and the fill
Hoisted: TypeAlias = tuple[list[tuple[Expr, Expr]], list[Expr], Ends | None]
SCALES = (1e-6, 1e6)  # the scales between which other terms of a sum may be divided by one: fp32 has room for them


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


def keeps_products(schedule: BackwardSchedule) -> bool:
    """Do later formulas read the products that the weights came from?"""
    read = topological(schedule.product_gradient, *(e for _, e in schedule.pair_gradients))
    return PRODUCT in read or len(schedule.extremes) > 0


def schedule_forward(
    program: Program, saved: tuple[tuple[str, Expr], ...] = (), parts_rows: bool = False
) -> ForwardSchedule:
    """The forward pass in order; `saved` are rows to write beside the program's own. parts_rows: are terms of rows to
    leave the tile, where nothing else is then left beside products than terms of places?"""
    far, least = may_be_far(program.score), least_of(program.score)
    program = guard_empty_rows(program)
    parted = _part_rows(program) if parts_rows and not far else None
    (block, (score, *roots), ends), fill = _hold(program, far, parted, not far)
    rows = (*program.finals, *(s for s in saved if s[0] not in dict(program.finals)))
    steps, rescale = Steps(roots).build(program.states)
    output_rows, (output,) = row_values([program.output], "end")
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


def _hold(program: Program, far: bool, parted: Held | None, may_be_low: bool) -> tuple[Hoisted, float | None]:
    """Block values; the tile's first value and the roots of it, in the order in which they are computed; and the fill.

    may_be_low: is LOW tried? It must do for what is computed, as it may overflow in another order.
    """
    score, roots, fill = parted or _hold_tile(program, far, may_be_low)
    if fill is None:
        roots = _ask_keep(roots, len(roots) - 2)
    found = _hoist_all(open_pairs(*use_exp2(score, *roots, differences=far)))
    *updates, weights, _ = found[1][1:]
    if fill == LOW and not is_low_enough(updates, weights, TILE, _starts(program)):
        return _hold(program, far, parted, False)
    return found, fill


def _starts(program: Program) -> dict[Expr, float]:
    return {s.variable: finite(s.initial) for s in program.states}


def _part_rows(program: Program) -> Held | None:
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


def _hold_tile(program: Program, whole: bool, may_be_low: bool) -> Held:
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
    if fill is None and may_be_low and is_low_enough(roots[:-2], roots[-2], TILE, _starts(program)):
        return score, roots, LOW
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


def _hoist_all(roots: Iterable[Expr]) -> Hoisted:
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
