"""Launches of tensors as callers hold them, heads before lengths, without views of them: kernels are told addresses.

A kernel takes a tensor as the address of its description: where its data lies, shape, strides, dtype, device. All but
the first follows from what a call is known by, so descriptions are written once, and a call writes addresses into them.
A view costs more than a launch's other work in Python, and a tensor's conversion a third of a view.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import partial as bind
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attention_engine.arch import Arch
from attention_engine.plan.targets import Target
from attention_engine.runtime.arguments import ALIGNED, as_parameter
from attention_engine.runtime.gpu import maker
from attention_engine.runtime.kept_lists import KeptLists, Place, place_in
from attention_engine.runtime.program_kernels import Bound
from attention_engine.runtime.run import Memory, tensor_of

WORDS = 6  # of 8 bytes, which a description (DLPack's DLTensor) has
KINDS = {  # DLPack's codes of dtypes
    torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0, torch.uint8: 1, torch.float16: 2, torch.float32: 2,
    torch.bfloat16: 4,
}  # fmt: skip
Maker: TypeAlias = Callable[[], Tensor]
Results: TypeAlias = tuple[Tensor, ...]
DEVICES = {"cpu": 1, "cuda": 2}


class Like(NamedTuple):
    """What a description says of a tensor beside where it lies: it holds no tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """A tensor's."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class Descriptions:
    """Of tensors like these: words[WORDS * n] is the address of the n-th one's data; arguments: what a kernel takes."""

    def __init__(self, likes: Sequence[Like]) -> None:
        self.words, self.sizes = array("Q", bytes(8 * WORDS * len(likes))), array("q")
        for like in likes:
            self.sizes.extend((*like.shape, *like.strides))
        at, first = self.sizes.buffer_info()[0], self.words.buffer_info()[0]
        for n, like in enumerate(likes):
            rank, device = len(like.shape), like.device
            kind = KINDS[like.dtype] | like.dtype.itemsize * 8 << 8 | 1 << 16
            of_device = DEVICES[device.type] | (device.index or 0) << 32
            self.words[WORDS * n + 1 : WORDS * (n + 1)] = array(
                "Q", (of_device, rank | kind << 32, at, at + 8 * rank, 0)
            )
            at += 16 * rank
        self.arguments = [ctypes.c_void_p(first + 8 * WORDS * n) for n in range(len(likes))]


def takes_addresses(target: Target) -> bool:
    """Do kernels of this kind take the address of a description in a tensor's place?"""
    return isinstance(target, Arch) and target.language == "cuda"


class _Frame:
    """The arguments of one call's launches, as lists in whose holes the tensors that a call makes are put."""

    def __init__(self, likes: Sequence[Like], launches: Sequence[tuple[Callable[..., None], Sequence[object]]],
                 made: Sequence[str]) -> None:  # fmt: skip
        """launches: what runs, and its arguments: numbers, slices [n:] of likes, or the name of what is made."""
        self.descriptions = Descriptions(likes)
        self.words, take = self.descriptions.words, self.descriptions.arguments
        self.runs: list[tuple[Callable[..., None], list[Any]]] = []
        holes: dict[str, list[tuple[list[Any], int]]] = {place: [] for place in made}
        for run, given in launches:
            arguments: list[Any] = [take[a.start] if isinstance(a, slice) else a for a in given]
            for n, argument in enumerate(arguments):
                if isinstance(argument, str):
                    holes[argument].append((arguments, n))
            self.runs.append((run, arguments))
        self.holes = [*holes.values()]


def pointed(bound: Bound, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> bind[Results] | None:
    """The forward pass of all tensors like these, (batch, heads, length, dim): the output, as they are, then rows. Its
    function is told before them where a mask keeps lists of tiles.

    None where tensors must be copied or converted first, or where kernels take no addresses.
    """
    kernels, steps = bound.kernels, bound.ready.launches
    if not takes_addresses(kernels.target) or kernels.problem.staged or None in bound.strides or not steps:
        return None
    if any(c.dtype not in KINDS or not c.is_contiguous() for c in custom):
        return None
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    make_output = maker((*q.shape[:3], v.shape[3]), q.dtype, q.device, order=(0, 2, 1, 3))
    likes = [Like.of(t) for t in (*turned, *map(as_parameter, custom), make_output().transpose(1, 2))]
    known: dict[str, list[object]] = {place: [number] for place, number in bound.ready.numbers.items()}
    for n, place in enumerate(["q", "k", "v", *bound.custom, "o"]):
        known[place] = [*(bound.strides[n] or () if n < len(turned) else ()), slice(n, None)]
    made: dict[str, Maker] = {}
    for step in steps:
        for place, like, zeroed in step.made:
            if step.launch.lasting:
                made[place] = bind(_once, step, bound.ready.numbers, place)
            elif zeroed:
                made[place] = bind(torch.zeros_like, like)
            elif place != "o":
                made[place] = maker(like.shape, like.dtype, like.device)
    every = [step for step in steps if not step.launch.lasting]
    launches = [(step.run_alone, [a for place in step.places for a in known.get(place, [place])]) for step in every]
    if not all(any(isinstance(a, str) for a in arguments) for _, arguments in launches):
        return None  # a tensor among the arguments tells on which stream a launch goes
    places = [*made]
    take = itemgetter(0, *[1 + places.index(row) for row in bound.rows])
    listed = _Listed.of(steps[0], bound) if steps[0].reads else None
    return _calls(bound, lambda: _Frame(likes, launches, places), [*made.values()], make_output, take, listed)


class _Listed(NamedTuple):
    """The first launch of a call, if a mask may keep what it makes: the lists of its tiles.

    places: of what it makes. reads: where the tensors that it reads stand among the custom inputs. number: of all else
    that it is told.
    """

    places: list[str]
    reads: list[int]
    number: int
    device: torch.device

    @classmethod
    def of(cls, step: Any, bound: Bound) -> _Listed:
        """Of such a step."""
        return cls([p for p, _, _ in step.made], [bound.custom.index(p) for p in step.reads], step.number, step.device)

    def place(self, custom: Sequence[Tensor]) -> Place | None:
        """Where a mask keeps it; None where none does."""
        return place_in([custom[n] for n in self.reads], self.number, self.device)


def _once(step: Any, numbers: Memory, place: str) -> Tensor:
    """What a launch made that reads numbers alone."""
    return tensor_of(step.once(numbers), place)


def _calls(
    bound: Bound, frame_of: Callable[[], _Frame], makers: Sequence[Maker], make_output: Maker,
    take: Callable[[Sequence[Tensor]], Results], listed: _Listed | None,
) -> bind[Results]:  # fmt: skip
    """frame_of: a frame more, as each call under way has its own. makers: of what else a call makes, or looks up."""
    misaligned, frames = 0 if bound.unit == 1 else ALIGNED - 1, list[_Frame]()
    of_custom = range(3 * WORDS, (3 + len(bound.custom)) * WORDS, WORDS)
    of_output = (3 + len(bound.custom)) * WORDS

    def launch(lists: KeptLists | None, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> Results:
        of_q, of_k, of_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (of_q | of_k | of_v) & misaligned:
            first, rows = bound.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), custom)
            return (first.transpose(1, 2), *rows)
        place = kept = None
        if lists is not None and listed is not None:
            place = listed.place(custom)
            kept = None if place is None else lists.find(place)
        try:
            frame = frames.pop()
        except IndexError:
            frame = frame_of()
        words, found = frame.words, [make_output()]
        words[0], words[WORDS], words[2 * WORDS], words[of_output] = of_q, of_k, of_v, found[0].data_ptr()
        for n, tensor in zip(of_custom, custom):
            words[n] = tensor.data_ptr()
        if kept is not None:
            found += kept.values()
        for make in makers[len(found) - 1 :]:
            found.append(make())
        for tensor, holes in zip(found[1:], frame.holes):
            for arguments, n in holes:
                arguments[n] = tensor
        for run, arguments in frame.runs if kept is None else frame.runs[1:]:
            run(*arguments)
        for holes in frame.holes:
            for arguments, n in holes:
                arguments[n] = None
        frames.append(frame)
        if lists is not None and listed is not None and place is not None and kept is None:
            lists.keep(place, dict(zip(listed.places, found[1:])))
        return take(found)

    return bind(launch, None)
