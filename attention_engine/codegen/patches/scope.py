"""Where our changes to TileLang act: on kernels of ours, in the thread that traces, lowers or compiles one.

A change stands in TileLang from when the first thread begins until the last has ended; then TileLang is as it was
before. Meanwhile threads that work on no kernel of ours reach what stood there before: the change asks `inside`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Undo = Callable[[], bool]  # puts back what stood there; False where somebody else has replaced it since

_thread = threading.local()


@dataclass(frozen=True)
class Patch:
    """A change to TileLang."""

    defect: str  # what TileLang does
    version: str  # of TileLang, in which that was seen
    proof: str  # the test that fails once TileLang does without this change
    put: Callable[[], Undo]


def inside() -> bool:
    """Whether this thread works on a kernel of ours."""
    return getattr(_thread, "depth", 0) > 0


@contextmanager
def within() -> Iterator[None]:
    """What this thread does inside is work on a kernel of ours."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


def replace(*changes: tuple[Any, str, object]) -> Undo:
    """Puts values in the place of attributes of modules and classes: (owner, name, value)."""
    before = [vars(owner)[name] for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)

    def undo() -> bool:
        if not all(vars(owner).get(name) is value for owner, name, value in changes):
            return False
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)
        return True

    return undo


class Scope:
    """A context manager, `with scope():`, that any number of threads may enter, each as often as it likes."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._lock = threading.Lock()
        self._entered = 0
        self._standing: dict[Patch, Undo] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The patches act on what this thread does inside. TileLang is imported by then."""
        with self._lock:
            self._entered += 1
            try:
                for patch in self._patches:
                    if patch not in self._standing:
                        self._standing[patch] = patch.put()
            except BaseException:
                self._leave()
                raise
        try:
            with within():
                yield
        finally:
            with self._lock:
                self._leave()

    def _leave(self) -> None:
        """The last to leave takes all patches back, but for those on which somebody else has put their own."""
        self._entered -= 1
        if not self._entered:
            for patch, undo in reversed(list(self._standing.items())):
                if undo():
                    del self._standing[patch]
