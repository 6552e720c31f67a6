"""Runs the launches of a plan: allocates what they make, and binds their arguments by name.

The memory of a call holds all that its launches read and write, by place: tensors, numbers, and callers' tensors behind
their strides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attention_engine.compiler import Kernel, begin_all
from attention_engine.plan.buffers import Buffer, Role, buffers_of
from attention_engine.plan.launches import Launch, Step, Sum, Trim
from attention_engine.runtime.arguments import template
from attention_engine.runtime.gpu import is_capturing, stream_of
from attention_engine.runtime.kept_lists import number_of, share
from attention_engine.runtime.packed_shared import share_results

Value: TypeAlias = Tensor | int | list[int | Tensor] | tuple[int | Tensor, ...]
Memory: TypeAlias = dict[str, Value]
KernelOf: TypeAlias = Callable[[Launch], Kernel]
KEPT = 8  # results of launches that depend on lengths alone


def values_of(memory: Mapping[str, Value], places: Iterable[str]) -> list[int | Tensor]:
    """A kernel's arguments."""
    found: list[int | Tensor] = []
    for place in places:
        value = memory[place]
        if isinstance(value, (list, tuple)):
            found += value
        else:
            found.append(value)
    return found


def tensor_of(memory: Mapping[str, Value], place: str) -> Tensor:
    """The tensor in a place."""
    found = memory[place]
    assert isinstance(found, Tensor)
    return found


def launch_once(launch: Launch, kernel_of: KernelOf, memory: Mapping[str, Value]) -> None:
    """Runs a launch all of whose arguments are in memory."""
    kernel_of(launch).run(*values_of(memory, [a.place for a in launch.arguments]))


class Kept:
    """The latest results of launches that read no tensor, such as tile maps of masks of indices alone."""

    def __init__(self) -> None:
        self.found: OrderedDict[object, dict[str, Tensor]] = OrderedDict()

    def __call__(self, key: object, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What was made for this key, or is made now."""
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = make()
            if len(self.found) > KEPT:
                self.found.popitem(last=False)
        else:
            self.found.move_to_end(key)
        return found


class Hashed:
    """A value whose hash is worked out once: that of all that a kernel is made of takes as long as a launch."""

    __slots__ = ("hash", "value")

    def __init__(self, value: object) -> None:
        self.value, self.hash = value, hash(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Hashed) and self.value == other.value)


class Ready:
    """The steps of a plan, with all that the lengths of a call say worked out.

    lengths: those that shapes are expressions of. numbers: what launches take beside tensors and their strides. done:
    launches before them, whose results are in memory.
    """

    def __init__(
        self, steps: Sequence[Step], kernel_of: KernelOf, lengths: Mapping[str, int], numbers: Mapping[str, int],
        device: torch.device, kept: Kept, done: Iterable[Launch] = (),
    ) -> None:  # fmt: skip
        self.numbers: Memory = {**numbers, **lengths}
        self.steps: list[_Launch | _Trim | _Sum] = []
        made = {place for launch in done for place in launch.writes}
        for step in steps:
            if isinstance(step, Trim):
                self.steps.append(_Trim(step.source, step.target.place, lengths["q_length"]))
            elif isinstance(step, Sum):
                self.steps.append(_Sum(step))
            if not isinstance(step, Launch):
                made.add(step.target.place)
                continue
            new = [b for b in buffers_of(step.arguments) if b.role is not Role.GIVEN and b.place not in made]
            made |= {b.place for b in new}
            self.steps.append(_Launch(step, kernel_of, new, lengths, device, kept))
        begin_all([kernel_of(step) for step in steps if isinstance(step, Launch)])

    @property
    def launches(self) -> list[_Launch] | None:
        """The steps, where all of them are launches of this call alone; else None."""
        found = [step for step in self.steps if isinstance(step, _Launch) and not step.launch.of_sequences]
        return found if len(found) == len(self.steps) else None

    def results(self, places: Iterable[str]) -> list[Tensor]:
        """Templates of what is made in these places."""
        likes = {place: like for step in self.steps if isinstance(step, _Launch) for place, like, _ in step.made}
        return [likes[place] for place in places]

    def by_number(
        self, given: Sequence[tuple[str, Sequence[int]]], wanted: Sequence[str]
    ) -> Callable[..., tuple[Tensor, ...]] | None:  # fmt: skip
        """All steps with their arguments looked up beforehand: (tensors in the order of `given`) -> what is wanted.

        given: places, and the strides that stand before a tensor. None where a step must look at more.
        """
        steps = [step for step in self.steps if isinstance(step, _Launch) and not step.launch.of_sequences]
        if len(steps) < len(self.steps):
            return None
        numbers, slots = list[Any](), dict[str, list[int]]()
        for place, number in [*self.numbers.items(), *[(p, n) for p, strides in given for n in strides]]:
            slots.setdefault(place, []).append(len(numbers))
            numbers.append(number)
        tensors = [*[place for place, _ in given], *[place for step in steps for place, _, _ in step.made]]
        for n, place in enumerate(tensors, len(numbers)):
            slots.setdefault(place, []).append(n)
        each = [step.by_number(slots, self.numbers) for step in steps]
        take = itemgetter(*[slots[place][-1] for place in wanted], len(numbers))  # of two or more: a tuple

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            values = [*numbers, *tensors]
            for run in each:
                run(values)
            return tuple(take(values)[:-1])

        return call

    def __call__(self, memory: Memory) -> None:
        """Runs them all; memory: what is given to them, of results where they go, and then also what they made."""
        memory.update(self.numbers)
        for step in self.steps:
            step.run(memory)


def _tensors_read(launch: Launch) -> list[str]:
    """The tensors that a launch reads, where all are callers' own that stand beside q, k and v; else none."""
    read = [b for b in buffers_of(launch.arguments) if b.place not in launch.writes]
    alone = all([b.role is Role.GIVEN and b.name.startswith("custom_") for b in read])
    return [b.place for b in read] if alone and not launch.of_sequences else []


class _Trim:
    def __init__(self, source: str, target: str, queries: int) -> None:
        self.source, self.target, self.queries = source, target, queries

    def run(self, memory: Memory) -> None:
        """Copies."""
        memory[self.target] = tensor_of(memory, self.source)[..., : self.queries].contiguous()


class _Sum:
    def __init__(self, step: Sum) -> None:
        self.step, self.dtype = step, getattr(torch, step.target.dtype)

    def run(self, memory: Memory) -> None:
        """Adds."""
        found, step = tensor_of(memory, self.step.source), self.step
        if step.group:
            summed = found.unflatten(step.dim - 1, (-1, step.group)).sum(step.dim).to(self.dtype)
        else:
            summed = sum_parts(found, self.dtype)
        memory[step.target.place] = summed


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dim. Of two, an addition is three times as fast as torch's reduction."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    most = parts[0] if len(parts) == 2 else parts[:-1].sum(0)
    return torch.add(most, parts[-1], out=torch.empty_like(parts[-1], dtype=dtype))


class _Launch:
    """A launch, its results' shapes known."""

    def __init__(
        self, launch: Launch, kernel_of: KernelOf, made: Sequence[Buffer], lengths: Mapping[str, int],
        device: torch.device, kept: Kept,
    ) -> None:  # fmt: skip
        self.launch, self.kernel_of, self.device, self.kept = launch, kernel_of, device, kept
        self.places = [a.place for a in launch.arguments]
        self.made = [
            (b.place, template(b.shape_of(lengths), getattr(torch, b.dtype), device), b.role is Role.ZEROED)
            for b in made
        ]
        shapes = tuple(like.shape for _, like, _ in self.made)  # heads too: engines alike but for them share kernels
        self.key = (launch.name, launch.given, shapes, *lengths.values(), device)
        self.reads = _tensors_read(launch)
        self.hashed = Hashed(self.key) if launch.lasting else None
        self.number = number_of(Hashed(self.key)) if self.reads else -1

    def run(self, memory: Memory) -> None:
        """Allocates and launches."""
        if self.launch.lasting:
            memory.update(self.once(memory))
        elif self.launch.of_sequences:
            memory.update(share_results(memory, self.key, lambda: self._made(memory)))
        elif self.reads:
            read = [memory[place] for place in self.reads]
            memory.update(share(read, self.number, self.device, lambda: self._made(memory)))
        else:
            memory.update(self._made(memory))

    def once(self, numbers: Memory) -> dict[str, Tensor]:
        """What is made by a launch that reads numbers alone: now, or by an earlier call of the same lengths."""
        if is_capturing(self.device):
            return self._made(dict(numbers))
        return self.kept((self.hashed, stream_of(self.device)), lambda: self._made(dict(numbers)))

    @property
    def run_alone(self) -> Callable[..., None]:
        """The kernel, of all its arguments."""
        return self._kernel.run

    def by_number(self, slots: Mapping[str, Sequence[int]], numbers: Memory) -> Callable[[list[Any]], None]:
        """The same, of a list of values. slots: where those of each place stand in it; what is made goes to its end.
        numbers: those by name."""
        take, launch = itemgetter(*[n for place in self.places for n in slots[place]]), self._kernel.run
        zeros_like, empty_like = torch.zeros_like, torch.empty_like
        likes = [(like, zeroed) for _, like, zeroed in self.made]

        def run(values: list[Any]) -> None:
            values += [zeros_like(like) if zeroed else empty_like(like) for like, zeroed in likes]
            launch(*take(values))

        def run_once(values: list[Any]) -> None:
            values += self.once(numbers).values()

        if self.launch.lasting or not self.reads:
            return run_once if self.launch.lasting else run
        read = itemgetter(*[slots[place][-1] for place in self.reads])
        of_read = read if len(self.reads) > 1 else lambda values: (read(values),)

        def run_or_share(values: list[Any]) -> None:
            count = len(values)

            def make() -> dict[str, Tensor]:
                run(values)
                return dict(zip([place for place, _, _ in self.made], values[count:], strict=True))

            found = share(of_read(values), self.number, self.device, make)
            if len(values) == count:
                values += found.values()

        return run_or_share

    def _made(self, memory: Memory) -> dict[str, Tensor]:
        found: dict[str, Any] = {}
        for place, like, zeroed in self.made:
            given = memory.get(place)
            if given is None:
                given = torch.zeros_like(like) if zeroed else torch.empty_like(like)
            found[place] = given
        memory.update(found)
        self._kernel.run(*values_of(memory, self.places))
        return found

    @cached_property
    def _kernel(self) -> Kernel:
        """Its kernel, found at the first run: a launch's hash is that of all that its kernel is made of."""
        return self.kernel_of(self.launch)
