"""A program, analysed: its backward pass derived, both directions in order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from attention_engine.errors import BackwardNotDerived
from attention_engine.ir.expr import Expr
from attention_engine.ir.program import Backward, Program
from attention_engine.ir.verify import checked, verify_program
from attention_engine.passes.absent_pairs import leave_out_absent
from attention_engine.passes.bent_output import Bend, part_output
from attention_engine.passes.derive_backward import derive_backward
from attention_engine.passes.drop_weights import drop_in
from attention_engine.passes.half_range import bound_weights, final_weights_fit, weights_fit
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule, schedule_backward, schedule_forward
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.passes.verify_schedule import verify_backward_schedule, verify_bend, verify_forward_schedule
from attention_engine.passes.within_sequences import is_packed, keys_within_sequences, within_sequences

Saved = tuple[tuple[str, Expr], ...]


@dataclass(frozen=True)
class Maths:
    """A program, analysed: what its kernels compute. `refusal` says why there is no backward pass, if there is none.

    bent: where the epilogue is no factor of the output, what runs in place of this program when gradients are wanted.
    unfinished: is it the forward pass over a part of a row, whose output is stored as it was summed, in fp32?
    in_blocks: does its backward pass store gradients of q, k, v in fp32, as others are added to them? Where it has
    whole rows, all keys of its queries, nothing is added to those of q, which it stores in the tensors' dtype.
    beside_sends: do copies to other GPUs take SMs while its forward pass runs? Persistent blocks, dealt over all SMs,
    would wait for them.
    """

    program: Program
    backward: Backward | None
    refusal: BackwardNotDerived | None
    forward_schedule: ForwardSchedule
    backward_schedule: BackwardSchedule | None
    bent: Bent | None = None
    unfinished: bool = False
    in_blocks: bool = False
    whole_rows: bool = False
    beside_sends: bool = False

    @property
    def trained(self) -> Maths:
        """What runs when gradients are wanted."""
        return self if self.bent is None else self.bent.maths

    def forward_of(self, dtype: str) -> ForwardSchedule:
        """The forward pass in this dtype: in fp16 its weights may need a bound."""
        return self._forward_bounded if dtype == "float16" and not self._weights_fit else self.forward_schedule

    def forward_parted_of(self, dtype: str) -> ForwardSchedule:
        """The same with a score's terms of rows out of its tile, where they can leave it."""
        bounded = dtype == "float16" and not self._weights_fit
        return self._bounded_parted if bounded else self.forward_parted

    @cached_property
    def forward_parted(self) -> ForwardSchedule:
        """The forward pass with a score's terms of rows out of its tile, in other dtypes than fp16."""
        return _in_order(self.program, self._saved, parts_rows=True)

    @cached_property
    def _forward_bounded(self) -> ForwardSchedule:
        return _in_order(bound_weights(self.program), self._saved)

    @cached_property
    def _bounded_parted(self) -> ForwardSchedule:
        return _in_order(bound_weights(self.program), self._saved, parts_rows=True)

    @cached_property
    def within(self) -> Program | None:
        """Of packed sequences, the program of blocks that lie in one; None where its mask's bounds don't tell tiles."""
        if not is_packed(self.program) or self.unfinished:
            return None
        found = checked(verify_program, within_sequences(self.program))
        return None if plan_tiles(found.mask).mapped else found

    def forward_within_of(self, dtype: str) -> ForwardSchedule:
        """The forward pass of such blocks, terms of rows out of its tile."""
        bounded = dtype == "float16" and not self._weights_fit
        return self._within_bounded if bounded else self._within_parted

    @cached_property
    def _within_parted(self) -> ForwardSchedule:
        assert self.within is not None
        return _in_order(self.within, self._saved, parts_rows=True)

    @cached_property
    def _within_bounded(self) -> ForwardSchedule:
        assert self.within is not None
        return _in_order(bound_weights(self.within), self._saved, parts_rows=True)

    @cached_property
    def backward_within(self) -> BackwardSchedule | None:
        """The backward pass of packed sequences in blocks whose keys are of one; None where its mask's bounds don't
        tell tiles, and where pairs make gradients of custom inputs."""
        if self.within is None or self.backward is None or self.backward.pair_gradients:
            return None
        program, backward = keys_within_sequences(self.program, self.backward)
        if plan_tiles(checked(verify_program, program).mask).mapped:
            return None
        return _backward_in_order(program, backward)

    @cached_property
    def _weights_fit(self) -> bool:
        return weights_fit(self.program)

    @cached_property
    def backward_fits_half(self) -> bool:
        """Are the backward pass's weights in fp16's range?"""
        return self._weights_fit or final_weights_fit(self.program)

    @property
    def _saved(self) -> Saved:
        return self.backward.saved if self.backward else ()

    def wanting(self, names: Collection[str]) -> Maths:
        """The same with the gradients of these custom inputs alone."""
        if self.backward is None:
            return self
        of_pairs, of_rows = (
            tuple((read, e) for read, e in gradients if read.name in names)
            for gradients in (self.backward.pair_gradients, self.backward.row_gradients)
        )
        backward = replace(self.backward, pair_gradients=of_pairs, row_gradients=of_rows)
        return replace(self, backward=backward, backward_schedule=_backward_in_order(self.program, backward))


@dataclass(frozen=True)
class Bent:
    """A program whose output `bend` makes the wanted one of."""

    bend: Bend
    maths: Maths


def analyse(program: Program) -> Maths:
    """Derives the backward pass and puts both directions in order."""
    program = leave_out_absent(checked(verify_program, program))
    bend = part_output(program)
    if bend is None:
        return _analyse(program)
    inner = _analyse(checked(verify_bend, bend).inner)
    lacking = dict(inner.backward.undifferentiated) if inner.backward is not None else {}
    reasons = [lacking[name] for name in bend.rows if name in lacking]
    refusal = BackwardNotDerived(f"{reasons[0]}.\n  Detach it (`.detach()`).") if reasons else inner.refusal
    bent = Bent(bend, inner) if refusal is None else None
    return Maths(program, None, refusal, _in_order(program), None, bent)


def analyse_part(program: Program) -> Maths:
    """The forward pass over a part of a row (`Merge.part_program`) in order. It has no backward pass."""
    refusal = BackwardNotDerived("a part of a row has no backward pass.")
    return Maths(program, None, refusal, _in_order(checked(verify_program, program)), None, unfinished=True)


def _analyse(program: Program) -> Maths:
    backward: Backward | None = None
    refusal: BackwardNotDerived | None = None
    try:
        backward = derive_backward(program)
    except BackwardNotDerived as error:
        refusal = error
    forward_schedule = _in_order(program, backward.saved if backward else ())
    return Maths(
        program, backward, refusal, forward_schedule, _backward_in_order(program, backward) if backward else None
    )


def _in_order(program: Program, saved: Saved = (), parts_rows: bool = False) -> ForwardSchedule:
    return checked(verify_forward_schedule, drop_in(schedule_forward(program, saved, parts_rows), program), program)


def _backward_in_order(program: Program, backward: Backward) -> BackwardSchedule:
    return checked(verify_backward_schedule, drop_in(schedule_backward(program, backward), program), backward, program)
