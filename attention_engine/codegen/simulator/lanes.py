"""Lanes of simulated warps: each may be late, or early, from one meeting of its warp to the next.

A wait that one lane has alone parts it from the others of its warp, and they need not come together again by
themselves: only meetings bring them together (sync_warp, shuffles, votes, elections, products). The simulator runs the
code of a warp once, whichever of its lanes is late. But a role has two clocks: one of lane 0 of its warps, which acts
alone where a lane speaks for its warp, and one of the other lanes. A clock holds which accesses to shared memory, of
all lanes of the block, are over by now: those before a meeting, or before an arrival at a barrier whose phase was
waited for.

The law: **a lane speaks for its warp, and a place that a warp reads is written anew, behind a sync_warp alone.** Raises
HazardInKernel, which names both sides, for two accesses to one place that nothing orders, one of which is a store: in
whichever order the simulator came to them, and whatever stands there. So it does for lanes that come to a meeting
without the rest of their warp, for a variable that lane 0 has set alone, which other lanes read, and for a counter in
memory that lanes read each for itself: they would go different ways.

Not modelled: which thread has which element of a tile. What lanes of one role store in it is not held against what
others of them store, nor, where the role has several warps, against what they read.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

import torch

from attention_engine.errors import HazardInKernel

WARP = 32  # threads
READ, STORED = range(2)
Clock = dict[tuple[int, int], int]  # of each part and kind of access: the number of the last that is over


def join(clock: Clock, other: Clock) -> None:
    """Let a clock know what another does."""
    for key, number in other.items():
        if number > clock.get(key, 0):
            clock[key] = number


class Cells:
    """The bytes of a piece of shared memory: the last access to each, by kind and by part."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.last: tuple[dict[int, array[int]], dict[int, array[int]]] = ({}, {})

    def of(self, kind: int, part: int) -> array[int]:
        """Of one part."""
        if part not in self.last[kind]:
            self.last[kind][part] = array("i", bytes(4 * self.size))
        return self.last[kind][part]


class Accesses:
    """The accesses of a block's lanes to shared memory, numbered as they come. Parts: of roles, their lanes 0 and the
    other ones."""

    def __init__(self) -> None:
        self.number = 0
        self.changes = 0  # stores, and what orders accesses: until the next, to read again what was read says nothing
        self.parts: list[str] = []
        self._cells: dict[int, Cells] = {}
        self._found: dict[int, tuple[torch.Tensor, Cells, int, list[int]]] = {}

    def cells(self, tensor: torch.Tensor) -> Cells:
        """Of the memory in which a tensor lies."""
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._cells:
            self._cells[memory.data_ptr()] = Cells(memory.nbytes())
        return self._cells[memory.data_ptr()]

    def find(self, tensor: torch.Tensor, where: Sequence[int]) -> tuple[Cells, int]:
        """The cells of a buffer's tensor, which stays, and where an element is in them."""
        found = self._found.get(id(tensor))
        if found is None:
            width = tensor.element_size()
            steps = [step * width for step in tensor.stride()]
            found = self._found[id(tensor)] = tensor, self.cells(tensor), int(tensor.storage_offset()) * width, steps
        _, cells, at, steps = found
        for index, step in zip(where, steps, strict=True):
            at += index * step
        return cells, at


@functools.lru_cache(maxsize=256)
def _lanes(threads: tuple[int, ...]) -> tuple[bool, bool, bool]:
    """Are there lanes 0, and others, among threads? Are these all of their warps?"""
    first = sum(thread % WARP == 0 for thread in threads)
    return first > 0, first < len(threads), len(threads) == WARP * len({thread // WARP for thread in threads})


class Lanes:
    """The lanes of one role's warps; before: what was over when it began."""

    def __init__(self, block: Accesses, threads: torch.Tensor, before: Clock | None = None) -> None:
        self.block = block
        self.parts = len(block.parts), len(block.parts) + 1
        self.clocks: dict[int, Clock] = {part: dict(before or {}) for part in self.parts}
        self.own: set[tuple[int, int]] = set()  # the variables that lane 0 alone has set
        self._read: dict[tuple[object, ...], tuple[int, tuple[int, ...]]] = {}
        self.written = 0  # the number of the last wait for copies to be in memory
        self.telling = False  # is what is worked out a shuffle's, of which lane 0's counts?
        block.parts += ["", ""]
        self.name(threads)

    def name(self, threads: torch.Tensor) -> None:
        """Which threads run the role from now on."""
        self.warps = len(threads) // WARP
        span = f"threads {int(threads[0])} to {int(threads[-1])}"
        first = "lane 0" if self.warps < 2 else "lanes 0"
        for part, lanes in zip(self.parts, (first, "the other lanes"), strict=True):
            self.block.parts[part] = f"{lanes} of {span}"
        self.narrow(threads)

    def narrow(self, threads: torch.Tensor) -> None:
        """Which of them run the present piece of code."""
        first, others, self.whole = _lanes(tuple(threads.tolist()))
        self.active = tuple(part for part, there in zip(self.parts, (first, others), strict=True) if there)

    @property
    def alone(self) -> bool:
        """Do lanes 0 act alone?"""
        return self.active == self.parts[:1]

    def meet(self, what: str, *, of_memory: bool) -> None:
        """All lanes of the warps come to a meeting. What they have read is over; of_memory: what they stored, too."""
        if not self.whole:
            raise HazardInKernel(
                f"{' and '.join(self.block.parts[part] for part in self.active)} come to {what} "
                f"without all lanes of their warps"
            )
        known = self.released() if of_memory else {key: n for key, n in self.released().items() if key[1] == READ}
        for clock in self.clocks.values():
            join(clock, known)

    def released(self) -> Clock:
        """What is over when the present lanes arrive somewhere."""
        clock: Clock = {}
        self.block.changes += 1
        for part in self.active:
            join(clock, self.clocks[part])
            clock |= {(part, READ): self.block.number, (part, STORED): self.block.number}
        return clock

    def learn(self, clock: Clock) -> None:
        """The present lanes waited for those who arrived with this."""
        self.block.changes += 1
        for part in self.active:
            join(self.clocks[part], clock)

    # Variables

    def set_variable(self, variable: tuple[int, int]) -> None:
        """A private variable gets a value from the present lanes."""
        if self.alone:
            self.own.add(variable)
        else:
            self.own.discard(variable)

    def read_variable(self, variable: tuple[int, int], name: str) -> None:
        """A private variable is read by the present lanes."""
        if variable in self.own and not self.alone and not self.telling:
            first, others = (self.block.parts[part] for part in self.parts)
            raise HazardInKernel(f"the variable {name} is read by {others}, and was set by {first} alone")

    def know_written(self) -> None:
        """Each present lane knows that the copies which it began are in memory."""
        self.block.number += 1
        self.written = self.block.number

    def count(self) -> None:
        """The present lanes tell other blocks, by a counter, what their warps have done."""
        first, others = self.parts
        if self.alone and self.written > self.clocks[first].get((others, READ), 0):
            raise HazardInKernel(
                f"{self.block.parts[first]} counts what its warp has copied to memory before "
                f"{self.block.parts[others]} know their copies to be there, or after: no sync_warp orders them"
            )

    def read_counter(self) -> None:
        """The present lanes read what other blocks change meanwhile."""
        if not self.alone and not self.telling:
            first, others = (self.block.parts[part] for part in self.parts)
            raise HazardInKernel(f"{first} and {others} read a counter each for itself, and may find different numbers")

    # Shared memory

    def access_one(self, kind: int, name: str, tensor: torch.Tensor, where: Sequence[int], same: bool = False) -> None:
        """The present lanes read or store an element of a buffer's tensor; same: it holds what it held."""
        cells, at = self.block.find(tensor, where)
        for other_kind in _at_odds(kind, same):
            for other, last in cells.last[other_kind].items():
                number = last[at]
                for part in self.active if number else ():
                    over = self.clocks[part].get((other, other_kind), 0)
                    if part == other or number <= over:
                        continue
                    stored = cells.last[STORED].get(part)
                    if kind == READ and other in self.parts and stored is not None and stored[at] >= number:
                        continue  # by the same statement
                    place = f"{name}[{', '.join(map(str, where))}]"
                    raise self._hazard(kind, part, other_kind, other, place)
        self.block.number += 1
        self.block.changes += kind == STORED
        for part in self.active:
            cells.of(kind, part)[at] = self.block.number

    def access(self, kind: int, name: str, view: torch.Tensor, by_one: bool = False) -> None:
        """The present lanes read or store a tile together; by_one: any lane does, all of it."""
        width, memory = view.element_size(), view.untyped_storage().data_ptr()
        steps, first = tuple(step * width for step in view.stride()), view.storage_offset() * width
        tile, now = (memory, view.shape, steps, first, by_one), (self.block.changes, self.active)
        if kind == READ and self._read.get(tile) == now:
            return  # nothing has changed since they read it
        cells = self.block.cells(view)

        def of(numbers: array[int]) -> torch.Tensor:
            return torch.frombuffer(numbers, dtype=torch.int32).as_strided(view.shape, steps, first)

        for other_kind in _at_odds(kind, same=False):
            for other, last in cells.last[other_kind].items():
                if other in self.parts and (kind == other_kind or (self.warps > 1 and not by_one)):
                    continue
                for part in self.active:
                    if part == other:
                        continue
                    late = of(last) > self.clocks[part].get((other, other_kind), 0)
                    if kind == READ and other in self.parts and not by_one and part in cells.last[STORED]:
                        late &= of(last) > of(cells.last[STORED][part])
                    if late.any():
                        raise self._hazard(kind, part, other_kind, other, f"{name} (some of it)")
        self.block.number += 1
        for part in self.active:
            of(cells.of(kind, part)).fill_(self.block.number)
        if kind == READ:
            self._read[tile] = now
        else:
            self.block.changes += 1

    def _hazard(self, kind: int, part: int, other_kind: int, other: int, place: str) -> HazardInKernel:
        mine, theirs = self.block.parts[part], self.block.parts[other]
        done = "read", "written"
        return HazardInKernel(
            f"{place} may be {done[kind]} by {mine} before it is {done[other_kind]} by {theirs}, or after: "
            f"neither a sync_warp nor a barrier orders them"
        )


def _at_odds(kind: int, same: bool) -> tuple[int, ...]:
    """The kinds of accesses that one of a kind must be ordered with; same: a store that changes nothing."""
    if kind == READ:
        return (STORED,)
    return (READ,) if same else (READ, STORED)
