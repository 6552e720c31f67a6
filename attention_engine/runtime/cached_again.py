"""Calls with a cache that passed every check once: what launches them again, with nothing left to look up.

Decoding a small model is made of such calls' host time, and of that asking and looking up were most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attention_engine.compiler import CachedKernels
from attention_engine.plan.buffers import buffers_of
from attention_engine.plan.launches import Launch, Step, launches
from attention_engine.runtime.arguments import ALIGNED, MOST_PLANS, as_parameter
from attention_engine.runtime.inputs import signature
from attention_engine.runtime.run import Ready
from attention_engine.runtime.seen import TensorGuards

try:
    from torch._C import _cuda_getCurrentRawStream as _stream_of
except ImportError:  # torch without CUDA; where it is gone, its public name takes a microsecond more

    def _stream_of(device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)


_is_capturing = torch.cuda.is_current_stream_capturing
Direct: TypeAlias = Callable[[Sequence[Tensor], Tensor | None, bool], list[Tensor] | None]
MOST_BYTES = 16 << 20  # of scratch memory that is kept for the next call
MOST_SCRATCH = 64  # pieces of it
_SCRATCH: dict[object, Tensor] = {}


class Again(NamedTuple):
    """A call that passed every check, of tensors of which some, or none, ask for gradients.

    form: all that it said beside tensors. fits: torch's guards (runtime/seen.py). size: how many tensors. launch: takes
    them, `out`, and whether rows are returned; it returns the output, then the rows, or None where more is to be done
    than to launch.
    """

    form: object
    fits: Callable[..., bool]
    size: int
    launch: Direct
    rows: Sequence[str]
    requires_grad: bool


class SeenCaches:
    """The calls that passed every check."""

    def __init__(self) -> None:
        self.last: Again | None = None
        self.found: dict[object, Again] = {}

    def find(self, form: object, tensors: Sequence[Tensor]) -> Again | None:
        """The call of tensors like these; None where it must be checked. tensors: `out` among them."""
        last = self.last
        if last is None or last.form != form or last.size != len(tensors) or not last.fits(*tensors):
            last = self.found.get(_kind(form, tensors)) if self.found else None
            if last is None or not last.fits(*tensors):
                return None
            self.last = last
        return None if last.requires_grad and torch.is_grad_enabled() else last

    def keep(self, form: object, tensors: Sequence[Tensor], launch: Direct | None, rows: Sequence[str]) -> None:
        """That a call passed every check."""
        if launch is None or TensorGuards is None:
            return
        fits = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        requires_grad = any(t.requires_grad for t in tensors)
        if len(self.found) >= MOST_PLANS:
            self.found.clear()
        self.last = Again(form, fits, len(tensors), launch, rows, requires_grad)
        self.found[_kind(form, tensors)] = self.last


def _kind(form: object, tensors: Sequence[Tensor]) -> object:
    asks = tuple([getattr(t, "requires_grad", None) for t in tensors])
    return form, signature(*tensors), asks, torch.is_inference_mode_enabled()


def launch_again(
    kernels: CachedKernels, ready: Ready, steps: Sequence[Step], given: Mapping[str, Sequence[int]], strided: int,
    rows: Sequence[str],
) -> Direct:  # fmt: skip
    """The launches of all calls of such shapes and strides.

    given: the strides that a kernel takes of each tensor that a call gives, in the order in which it gives them. The
    first `strided` are queries, keys and values, of (batch, length, heads, dim); from `custom_` on, custom inputs.
    """
    empty_like = torch.empty_like
    misaligned = 0 if kernels.problem.stride_unit == 1 else ALIGNED - 1
    made = ["o", *[f"row_{name}" for name in rows]]
    of_all = [b for step in launches(steps) for b in buffers_of(step.arguments)]
    parts = [*dict.fromkeys(b.place for b in of_all if b.place.startswith("part_"))]
    output, *row_likes = ready.results(made)
    scratch, rows_too = _Scratch([*row_likes, *ready.results(parts)]), len(row_likes)
    places = [*given, *made, *parts]
    numbers = [step for steps_of in given.values() for step in steps_of]
    runs = [(kernels.kernel(step).run, _arguments(step, places, given)) for step in launches(steps)]
    (first, of_first), *others = runs
    first_custom = next((n for n, place in enumerate(given) if place.startswith("custom_")), len(given))
    has_custom = first_custom < len(given)

    def launch(tensors: Sequence[Tensor], out: Tensor | None, returns_rows: bool) -> list[Tensor] | None:
        address = 0
        for tensor in tensors[:strided]:
            address |= tensor.data_ptr()
        if address & misaligned:
            return None
        if has_custom:
            tensors = [*tensors[:first_custom], *map(as_parameter, tensors[first_custom:])]
        results, left = [empty_like(output) if out is None else out], scratch()
        if returns_rows:  # else they are left where nobody reads them
            results += [empty_like(like) for like in row_likes]
            left = left[rows_too:]
        values = [*tensors, *results, *left, *numbers]
        first(*of_first(values))
        for run, of_run in others:
            run(*of_run(values))
        return results

    return launch


def viewed(launch: Direct | None, strided: int, heads_first: bool, packed: bool) -> Direct | None:
    """The same, of tensors as callers give them: heads before lengths, queries without a batch."""
    if launch is None or not (heads_first or packed):
        return launch
    inner = launch

    def view(tensor: Tensor) -> Tensor:
        return tensor[None] if packed else tensor.transpose(1, 2)

    def launch_viewed(tensors: Sequence[Tensor], out: Tensor | None, returns_rows: bool) -> list[Tensor] | None:
        caches = [t.transpose(1, 2) for t in tensors[1:strided]] if heads_first else tensors[1:strided]
        given = [view(tensors[0]), *caches, *tensors[strided:]]
        made = inner(given, None if out is None else view(out), returns_rows)
        if made is None:
            return None
        output, rows = made[0], [row[0] for row in made[1:]] if packed else made[1:]
        return [out if out is not None else output[0] if packed else output.transpose(1, 2), *rows]

    return launch_viewed


def with_starts(launch: Direct, lengths: int, place: int, queries: int, makes: bool) -> Direct:
    """The same, of a program that reads at a query's own row: where queries start is a custom input of it, the last.

    lengths, place: where requests' lengths and these starts are among the tensors. makes: were they not given?
    """

    def launch_with_starts(tensors: Sequence[Tensor], out: Tensor | None, returns_rows: bool) -> list[Tensor] | None:
        if makes:
            tensors = [*tensors[:place], tensors[lengths] - queries, *tensors[place:]]
        return launch([*tensors, tensors[place]], out, returns_rows)

    return launch_with_starts


def _arguments(launch: Launch, places: Sequence[str], given: Mapping[str, Sequence[int]]) -> Callable[..., Any]:
    """Which values a launch takes, of what is in these places and then the strides of what is given."""
    number, steps = len(places), {}
    for place, strides in given.items():
        steps[place] = range(number, number + len(strides))
        number += len(strides)
    found = [n for a in launch.arguments for n in (*steps.get(a.place, ()), places.index(a.place))]
    return itemgetter(*found)


class _Scratch:
    """Memory for what parts leave, which a call's second launch reads and nobody else, and for rows not asked for.

    It is kept: to allocate it takes longer than to launch. Launches of one thread on one stream follow each other, so
    there is one piece for each thread and stream, for all calls. A graph gets memory of its own, as it may be replayed
    beside others.
    """

    def __init__(self, likes: Sequence[Tensor]) -> None:
        self.likes, self.sizes = likes, [-(-like.numel() // 4) * 4 for like in likes]
        self.size = sum(self.sizes)
        self.on_gpu = bool(likes) and likes[0].device.type == "cuda"
        self.is_kept = 4 * self.size <= MOST_BYTES
        self.device = (likes[0].device.index or 0) if self.on_gpu else -1
        self.views: dict[object, tuple[Tensor, list[Any]]] = {}

    def __call__(self) -> list[Any]:
        """The memory, on a GPU as kernels take it: to make a tensor so at each call takes as long as all else here."""
        if not self.likes:
            return []
        if not self.is_kept or (self.on_gpu and _is_capturing()):
            return [torch.empty_like(like) for like in self.likes]
        stream = _stream_of(self.device) if self.on_gpu else 0
        key = (self.device, stream, get_ident())
        held, found = _SCRATCH.get(key), self.views.get(key)
        if held is None or found is None or found[0] is not held:
            found = self._views(key, held)
        return found[1]

    def _views(self, key: object, held: Tensor | None) -> tuple[Tensor, list[Any]]:
        if held is None or held.numel() < self.size:
            if len(_SCRATCH) >= MOST_SCRATCH:
                _SCRATCH.clear()
            size = 1 << max(self.size - 1, 1).bit_length()  # what is outgrown, calls may hold: it is less than this
            held = _SCRATCH[key] = torch.empty(size, device=self.likes[0].device)
        if len(self.views) >= MOST_SCRATCH:
            self.views.clear()
        pieces = held[: self.size].split(self.sizes)
        views = [
            p[: like.numel()].view(like.dtype).view(like.shape) for p, like in zip(pieces, self.likes, strict=True)
        ]
        found = self.views[key] = (held, [*map(_as_kernels_take, views)] if self.on_gpu else views)
        return found


def _as_kernels_take(tensor: Tensor) -> Any:
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)
