"""What is valid of schedules, and of an output that is bent: all that a step reads is computed before it.

The laws of the expressions in them stand in ir/verify.py; maths.py asks for these, as it hands schedules on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from attention_engine.ir.expr import Axis, Expr, Op, Type, VarKind
from attention_engine.ir.program import (
    DELTA,
    OUTPUT,
    PRODUCT,
    WEIGHT,
    WEIGHT_GRADIENT,
    Backward,
    Program,
    final_gradient,
    final_variable,
    is_start,
    row_variable,
)
from attention_engine.ir.verify import (
    OF_ENTRY,
    OF_PAIR,
    OF_ROW,
    PLACES,
    REDUCTIONS,
    Reads,
    distinct,
    refuse,
    verify_program,
)
from attention_engine.passes.bent_output import OUTPUT_GRADIENT, Bend
from attention_engine.passes.ends import Ends
from attention_engine.passes.row_sums import RowSums
from attention_engine.passes.row_terms import KV_FIRST, KV_PLACE
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule
from attention_engine.passes.steps import KEEP, OTHER, TILE, ReduceStep, RowStep, Step, SumStep, TileStep

OF_BLOCK = frozenset({Axis.BATCH, Axis.HEAD})


def verify_forward_schedule(schedule: ForwardSchedule, program: Program) -> None:
    """A forward pass in order. program: whose custom inputs and mask it has."""
    reads = Reads(program.custom)
    block = _verify_block(reads, schedule.block)
    of_tile = block | PLACES | set(KV_PLACE)
    reads("the tile's first value", schedule.score, {PRODUCT, *of_tile}, OF_PAIR)
    _verify_ends(reads, schedule.ends, {PRODUCT, *of_tile})
    if schedule.mask is not None:
        reads("mask", schedule.mask, PLACES, OF_PAIR, Type.BOOL)
    if schedule.dropped is not None:
        reads("dropped", schedule.dropped, block | PLACES, OF_PAIR, Type.BOOL)
    states = {variable for variable, _ in schedule.initial}
    distinct("initial states", (variable for variable, _ in schedule.initial))
    for variable, number in schedule.initial:
        if variable.kind is not VarKind.STATE or not math.isfinite(number):
            raise refuse("initial states", f"one that starts at {number}", variable)
    _Steps(reads, schedule, states, block).walk()
    end = _assigned(reads, "the rows of the end", schedule.output_rows, states | PLACES, set())
    reads("output", schedule.output, {OUTPUT, *states, *end, *PLACES}, OF_ENTRY)
    distinct("rows that are written", (name for name, _ in schedule.rows))
    for name, row in schedule.rows:
        reads(f"row {name}", row, states | PLACES, OF_ROW)


def _verify_block(reads: Reads, block: Sequence[tuple[Expr, Expr]]) -> set[Expr]:
    """The values of a (batch, head), which read nothing but the place and custom inputs."""
    distinct("values of a block", (variable for variable, _ in block))
    for variable, value in block:
        reads(f"{variable}", value, PLACES, OF_BLOCK, variable.dtype)
        stands_for_itself = variable is value and is_start(variable)
        if not stands_for_itself and (variable.kind is not VarKind.BLOCK or variable.axes != value.axes):
            raise refuse("values of a block", f"{variable} doesn't stand for", value)
    return {variable for variable, _ in block}


def _verify_ends(reads: Reads, ends: Ends | None, known: Iterable[Expr]) -> None:
    if ends is None:
        return
    known = set(known)
    reads("the index with ends", ends.index, PLACES, OF_PAIR, Type.INT)
    for what, value in (("below", ends.below), ("above", ends.above)):
        reads(f"the end {what}", value, known, OF_PAIR)
    if ends.least > ends.most:
        raise refuse("the ends", f"{ends.least} stands above {ends.most}", ends.index)


def _assigned(
    reads: Reads, what: str, step: RowStep, known: set[Expr] | frozenset[Expr], states: set[Expr]
) -> set[Expr]:
    """What a step assigns, all of it of what was known before; only row states are assigned again."""
    distinct(f"{what}: variables", (variable for variable, _ in step.assignments))
    for variable, value in step.assignments:
        if variable.kind is not VarKind.MADE and variable not in states:
            raise refuse(what, "no row that a schedule makes is", variable)
        if variable not in states and variable in known:
            raise refuse(what, "is assigned again", variable)
        reads(f"{what}: {variable}", value, known, OF_ROW)
        if not value.axes <= variable.axes:
            raise refuse(f"{what}: {variable}", "has not the axes of", value)
    return {variable for variable, _ in step.assignments}


class _Steps:
    """Walks over the steps of a forward schedule with what is known at each."""

    def __init__(self, reads: Reads, schedule: ForwardSchedule, states: set[Expr], block: set[Expr]) -> None:
        self.reads, self.schedule, self.states = reads, schedule, states
        self.rows = states | block | PLACES | {KV_FIRST}
        self.of_tile = {TILE, *KV_PLACE} | ({KEEP} if schedule.fill is None else set())
        self.summed = {step.state for step in schedule.steps if isinstance(step, SumStep)}
        self.rows -= self.summed  # which are whole at the end alone
        self.beside: set[Expr] = set()

    def walk(self) -> None:
        """Checks each step."""
        tiles = sum(isinstance(step, TileStep) for step in self.schedule.steps)
        if tiles > 1:  # none where what the tile holds first are the weights
            raise refuse("the steps", f"make the weights {tiles} times")
        for number, step in enumerate(self.schedule.steps):
            self._step(f"step {number}", step)
        rescale = self.schedule.rescale
        if rescale is not None and rescale not in self.rows:
            raise refuse("rescale", "no step has assigned", rescale)

    def _step(self, what: str, step: Step) -> None:
        match step:
            case RowStep():
                self.rows |= _assigned(self.reads, what, step, self.rows, self.states - self.summed)
            case TileStep():
                self.reads(what, step.value, self.rows | self.of_tile, OF_PAIR)
                if step.other is not None:
                    self.reads(f"{what}, beside the weights", step.other, self.rows | self.of_tile, OF_PAIR)
                    self.beside = {OTHER}
            case ReduceStep():
                if step.kind not in REDUCTIONS or (step.absolute and step.source is not None):
                    raise refuse(what, f"a reduction {step.kind!r} of this", step.source)
                if step.source is not None:
                    known = self.beside if step.source is OTHER else self.rows | self.of_tile
                    self.reads(what, step.source, known, OF_PAIR)
                    self.beside -= {OTHER} if step.source is not OTHER else set()  # whose tile it takes
                self._make(what, step.variable)
            case SumStep():
                if step.state not in self.states:
                    raise refuse(what, "no row state is", step.state)
                if step.factor is not None and step.factor not in self.rows:
                    raise refuse(what, "no step has assigned the factor", step.factor)
            case _:
                assert_never(step)

    def _make(self, what: str, variable: Expr) -> None:
        if variable.kind is not VarKind.MADE or variable in self.rows:
            raise refuse(what, "is no new row", variable)
        self.rows.add(variable)


def verify_backward_schedule(schedule: BackwardSchedule, backward: Backward, program: Program) -> None:
    """The pairs of a backward pass in order."""
    reads = Reads(program.custom)
    block = _verify_block(reads, schedule.block)
    known = block | {row_variable(name) for name, _ in backward.rows} | PLACES
    reads("weights", schedule.weights, {PRODUCT, *known}, OF_PAIR)
    _verify_ends(reads, schedule.ends, {PRODUCT, *known})
    if schedule.mask is not None:
        reads("mask", schedule.mask, PLACES, OF_PAIR, Type.BOOL)
    if schedule.dropped is not None:
        reads("dropped", schedule.dropped, block | PLACES, OF_PAIR, Type.BOOL)
    for extreme in schedule.extremes:
        reads(f"{extreme.of_pair}", extreme.value, {PRODUCT, *block, *PLACES}, OF_PAIR)
    pairs = known | {PRODUCT, WEIGHT, WEIGHT_GRADIENT, *(e.of_pair for e in schedule.extremes)}
    reads("d_qk", schedule.product_gradient, pairs, OF_PAIR)
    if not math.isfinite(schedule.scale):
        raise refuse("d_qk", f"has the factor {schedule.scale}")
    for load, gradient in schedule.pair_gradients:
        reads(f"d_{load}", gradient, pairs, OF_PAIR)
    if [read for read, _ in schedule.pair_gradients] != [read for read, _ in backward.pair_gradients]:
        raise refuse("gradients of reads", "are not those of the backward pass")


def verify_row_sums(sums: RowSums, backward: Backward, schedule: BackwardSchedule, program: Program) -> None:
    """The sums of rows, and what corrects them."""
    reads = Reads(program.custom)
    block = {variable for variable, _ in schedule.block}
    pairs = block | {row_variable(name) for name, _ in backward.rows} | PLACES
    pairs |= {PRODUCT, WEIGHT, WEIGHT_GRADIENT, *(e.of_pair for e in schedule.extremes)}
    for number, total in enumerate(sums.sums):
        reads(f"row sum {number}", total, pairs, OF_PAIR)
    used = [*(g.index for g in sums.gradients), *(c.index for g in sums.gradients for c in g.corrections)]
    if not set(used) <= set(range(len(sums.sums))):
        raise refuse("row sums", f"one of {sorted(used)} is none of the {len(sums.sums)}")
    arriving = (final_gradient(name) for name, _ in program.finals)
    given = {DELTA, *map(final_variable, backward.given_rows), *arriving, *PLACES}
    for gradient in sums.gradients:
        for correction in gradient.corrections:
            reads(f"a correction of d_{gradient.load}", correction.slope, given, OF_ROW)


def verify_bend(bend: Bend) -> None:
    """An epilogue in two: a valid program, and what is made of its output and rows."""
    verify_program(bend.inner)
    returned = dict(bend.inner.finals)
    reads, finals = Reads(bend.whole.custom), {final_variable(name) for name in returned}
    reads("the bent output", bend.output, {OUTPUT, *finals, *PLACES}, OF_ENTRY)
    for target, gradient in bend.gradients:
        of_load = target.op is Op.LOAD and target.dtype is Type.FLOAT
        if not of_load and target is not OUTPUT and target not in finals:
            raise refuse("the bent output", "no gradient is made of", target)
        reads(f"d_{target}", gradient, {OUTPUT, OUTPUT_GRADIENT, *finals, *PLACES}, OF_ENTRY)
    if bend.kept is not None and bend.kept not in returned:
        raise refuse("the bent output", f"no row {bend.kept!r} is returned")
