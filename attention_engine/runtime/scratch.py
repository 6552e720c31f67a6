"""Memory that a call's launches leave to each other, kept for the next call: to allocate takes longer than to launch.

Counters among it are 0 before a launch and behind it. A graph has counters that nobody else has, out of a store that
was zeroed before: zeroed in the graph, each replay would do it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor

from attention_engine.runtime import gpu

MOST_BYTES = 16 << 20  # of scratch memory that is kept for the next call
MOST_SCRATCH = 64  # pieces of it
LEAST_COUNTERS = 1024  # of a thread on a stream
STORE = 1 << 18  # counters for graphs, of a GPU
_SCRATCH: dict[object, _Piece] = {}
_STORES: dict[int, _Store] = {}


class _Piece:
    """Scratch memory of a thread on a stream; another one where it was outgrown or dropped."""

    __slots__ = ("counters", "memory")

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.counters: Tensor | None = None


class _Store:
    """Zeros of a GPU, of which each graph takes its own."""

    def __init__(self, device: torch.device) -> None:
        self.memory, self.used, self.lock = torch.zeros(STORE, dtype=torch.int32, device=device), 0, Lock()

    def take(self, like: Tensor) -> Tensor | None:
        """Zeros that nobody else has; None where none are left."""
        with self.lock:
            first = self.used
            if first + like.numel() > STORE:
                return None
            self.used += like.numel()
        return self.memory[first : first + like.numel()].view(like.shape)


class Scratch:
    """Memory for what parts leave, which a call's second launch reads and nobody else, and for rows not asked for.

    It is kept: to allocate it takes longer than to launch. Launches of one thread on one stream follow each other, so
    there is one piece for each thread and stream, for all calls. A graph gets memory of its own, as it may be replayed
    beside others.
    """

    def __init__(self, likes: Sequence[Tensor], counters: Sequence[Tensor] = ()) -> None:
        """likes: what parts leave, and rows; counters: those of one launch, or none, behind them."""
        self.likes, self.counters = likes, counters
        self.sizes = [-(-like.numel() // 4) * 4 for like in likes]
        self.size = sum(self.sizes)
        self.on_gpu = bool(likes) and likes[0].device.type == "cuda"
        stays_right = self.on_gpu or not counters  # a kernel on the interpreter may be interrupted as it counts
        self.is_kept = 4 * self.size <= MOST_BYTES and stays_right
        self.device = (likes[0].device.index or 0) if self.on_gpu else -1
        self.views: dict[object, tuple[_Piece, Tensor, list[Any]]] = {}

    def __call__(self) -> list[Any]:
        """The memory, on a GPU as kernels take it: to make a tensor so at each call takes as long as all else here."""
        if not self.likes:
            return []
        stream = gpu.raw_stream(self.device) if self.on_gpu else 0
        captured = bool(stream and gpu.captures())  # nobody captures the stream that is 0
        if captured or not self.is_kept:
            store = _STORES.get(self.device) if captured else None
            zeros = [(None if store is None else store.take(like)) for like in self.counters]
            of_call = [torch.zeros_like(like) if z is None else z for z, like in zip(zeros, self.counters, strict=True)]
            return [*(torch.empty_like(like) for like in self.likes), *of_call]
        key = (stream, get_ident())
        found = self.views.get(key)
        if found is None or found[0].memory is not found[1]:
            found = self._views(key)
        return found[2]

    def _views(self, key: tuple[int, int]) -> tuple[_Piece, Tensor, list[Any]]:
        piece = _SCRATCH.get((self.device, *key))
        if piece is None:
            if len(_SCRATCH) >= MOST_SCRATCH:
                for dropped in _SCRATCH.values():
                    dropped.memory = None
                _SCRATCH.clear()
            piece = _SCRATCH[self.device, *key] = _Piece()
        memory = piece.memory
        if memory is None or memory.numel() < self.size:
            size = 1 << max(self.size - 1, 1).bit_length()  # what is outgrown, calls may hold: it is less than this
            memory = piece.memory = torch.empty(size, device=self.likes[0].device)
        if len(self.views) >= MOST_SCRATCH:
            self.views.clear()
        pieces = memory[: self.size].split(self.sizes)
        views = [
            p[: like.numel()].view(like.dtype).view(like.shape) for p, like in zip(pieces, self.likes, strict=True)
        ]
        views += self._counters(piece)
        found = self.views[key] = (piece, memory, [*map(_as_kernels_take, views)] if self.on_gpu else views)
        return found

    def _counters(self, piece: _Piece) -> list[Tensor]:
        """Where launches of one thread on one stream count, all of them in one place."""
        found = []
        for like in self.counters:
            if self.on_gpu and self.device not in _STORES:
                _STORES[self.device] = _Store(like.device)
            if piece.counters is None or piece.counters.numel() < like.numel():
                size = max(LEAST_COUNTERS, 2 * like.numel())
                piece.counters = torch.zeros(size, dtype=torch.int32, device=like.device)
            found.append(piece.counters[: like.numel()].view(like.shape))
        return found


def _as_kernels_take(tensor: Tensor) -> Any:
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)
