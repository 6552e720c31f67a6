"""Calls with a cache that passed every check once: what launches them again, with nothing left to look up.

Decoding a small model is made of such calls' host time, and of that asking and looking up were most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attention_engine.compiler import CachedKernels
from attention_engine.frontend.captured import Captured
from attention_engine.plan.buffers import Role, buffers_of
from attention_engine.plan.launches import Launch, Step, launches
from attention_engine.runtime.arguments import ALIGNED, MOST_PLANS, as_parameter
from attention_engine.runtime.gpu import maker
from attention_engine.runtime.inputs import signature
from attention_engine.runtime.run import Ready
from attention_engine.runtime.scratch import Scratch
from attention_engine.runtime.seen import TensorGuards

Given: TypeAlias = tuple[Any, ...]  # the tensors of a call at GIVEN, None where there is none, then custom inputs
Direct: TypeAlias = Callable[[Given, bool], list[Tensor] | None]
GIVEN = ("q", "k", "v", "kv_lengths", "page_table", "q_starts", "cu_seqlens_q", "out")
KEYS, VALUES, OUT = map(GIVEN.index, ("k", "v", "out"))


@dataclass(frozen=True, slots=True)
class Again:
    """A call that passed every check, of tensors of which some, or none, ask for gradients.

    form: all that it said beside tensors, and which of them there are. take: those that torch's guards look at. fits:
    the guards (runtime/seen.py). launch: takes all, and whether rows are returned; it returns the output, then the
    rows, or None where more is to be done than to launch.
    """

    form: object
    take: Callable[[Given], Sequence[Tensor]]
    fits: Callable[..., bool]
    launch: Direct
    requires_grad: bool


class SeenCaches:
    """The calls of an engine that passed every check. captured: what its functions captured, once there is such a call;
    rows: the names of the rows that it returns."""

    def __init__(self) -> None:
        self.last: Again | None = None
        self.found: dict[object, Again] = {}
        self.captured: Sequence[Captured] | None = None
        self.rows: Sequence[str] = ()

    def launch(self, form: object, given: Given, returns_rows: bool) -> list[Tensor] | None:
        """What a call of tensors like these makes; None where it must be checked, or more is to be done than launch."""
        last = self.last
        if last is None or last.form != form or not last.fits(*last.take(given)):
            tensors = _guarded(given)(given)
            last = self.found.get(_kind(form, tensors)) if self.found else None
            if last is None or not last.fits(*tensors):
                return None
            self.last = last
        if last.requires_grad and torch.is_grad_enabled():
            return None
        return last.launch(given, returns_rows)

    def keep(self, form: object, given: Given, launch: Direct | None) -> None:
        """That a call passed every check."""
        if launch is None or TensorGuards is None:
            return
        take = _guarded(given)
        tensors = take(given)
        fits = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        requires_grad = any(t.requires_grad for t in tensors)
        if len(self.found) >= MOST_PLANS:
            self.found.clear()
        self.last = Again(form, take, fits, launch, requires_grad)
        self.found[_kind(form, tensors)] = self.last


def _guarded(given: Given) -> Callable[[Given], Sequence[Tensor]]:
    """What there is, each tensor once: torch's guards take none twice."""
    twice = VALUES if given[VALUES] is given[KEYS] else None
    return itemgetter(*[n for n, tensor in enumerate(given) if tensor is not None and n != twice])


def _kind(form: object, tensors: Sequence[Tensor]) -> object:
    asks = tuple([getattr(t, "requires_grad", None) for t in tensors])
    return form, signature(*tensors), asks, torch.is_inference_mode_enabled()


def launch_again(
    kernels: CachedKernels, ready: Ready, steps: Sequence[Step], given: Mapping[str, Sequence[int]],
    custom: Sequence[str], rows: Sequence[str], converts: bool,
) -> Direct:  # fmt: skip
    """The launches of all calls of such shapes and strides.

    given: the strides that a kernel takes of each tensor that a call gives; queries, keys and values are of (batch,
    length, heads, dim). custom: the places of its custom inputs, in the order in which it gives them. converts: are
    some of those not as kernels take them?
    """
    misaligned = 0 if kernels.problem.stride_unit == 1 else ALIGNED - 1
    made = ["o", *[f"row_{name}" for name in rows]]
    of_all = [b for step in launches(steps) for b in buffers_of(step.arguments)]
    parts = [*dict.fromkeys(b.place for b in of_all if b.place.startswith("part_"))]
    counters = [*dict.fromkeys(b.place for b in of_all if b.role is Role.ZEROED)]
    output, *row_likes = ready.results(made)
    make_output, *make_rows = (maker(x.shape, x.dtype, x.device) for x in (output, *row_likes))
    scratch, rows_too = Scratch([*row_likes, *ready.results(parts)], ready.results(counters)), len(row_likes)
    places = [*GIVEN, *custom, *made, *parts, *counters]
    numbers = [step for steps_of in given.values() for step in steps_of]
    runs = [(kernels.kernel(step).run, _arguments(step, places, given)) for step in launches(steps)]
    (first, of_first), *others = runs

    def launch(given: Given, returns_rows: bool) -> list[Tensor] | None:
        v, out = given[VALUES], given[OUT]
        address = given[0].data_ptr() | given[KEYS].data_ptr()
        if v is not None:
            address |= v.data_ptr()
        if address & misaligned:
            return None
        if converts:
            given = (*given[: len(GIVEN)], *map(as_parameter, given[len(GIVEN) :]))
        results, left = [make_output() if out is None else out], scratch()
        if returns_rows:  # else they are left where nobody reads them
            results += [make() for make in make_rows]
            left = left[rows_too:]
        values = [*given, *results, *left, *numbers]
        first(*of_first(values))
        for run, of_run in others:
            run(*of_run(values))
        return results

    return launch


def viewed(launch: Direct | None, heads_first: bool, packed: bool) -> Direct | None:
    """The same, of tensors as callers give them: heads before lengths, queries without a batch."""
    if launch is None or not (heads_first or packed):
        return launch
    inner = launch

    def turned(tensor: Tensor | None) -> Tensor | None:
        return tensor.transpose(1, 2) if heads_first and tensor is not None else tensor

    def view(tensor: Tensor | None) -> Tensor | None:
        return tensor[None] if packed and tensor is not None else turned(tensor)

    def launch_viewed(given: Given, returns_rows: bool) -> list[Tensor] | None:
        q, k, v, *places, out = given[: len(GIVEN)]
        made = inner((view(q), turned(k), turned(v), *places, view(out), *given[len(GIVEN) :]), returns_rows)
        if made is None:
            return None
        output, rows = made[0], [row[0] for row in made[1:]] if packed else made[1:]
        return [out if out is not None else output[0] if packed else output.transpose(1, 2), *rows]

    return launch_viewed


def with_starts(launch: Direct, queries: int, makes: bool) -> Direct:
    """The same, of a program that reads at a query's own row: where queries start is a custom input of it, the last.

    makes: were they not given?
    """
    place, lengths = GIVEN.index("q_starts"), GIVEN.index("kv_lengths")

    def launch_with_starts(given: Given, returns_rows: bool) -> list[Tensor] | None:
        if makes:
            given = (*given[:place], given[lengths] - queries, *given[place + 1 :])
        return launch((*given, given[place]), returns_rows)

    return launch_with_starts


def _arguments(launch: Launch, places: Sequence[str], given: Mapping[str, Sequence[int]]) -> Callable[..., Any]:
    """Which values a launch takes, of what is in these places and then the strides of what is given."""
    number, steps = len(places), {}
    for place, strides in given.items():
        steps[place] = range(number, number + len(strides))
        number += len(strides)
    found = [n for a in launch.arguments for n in (*steps.get(a.place, ()), places.index(a.place))]
    return itemgetter(*found)
