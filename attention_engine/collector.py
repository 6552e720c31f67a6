"""Python's garbage collector, which runs seldom while this package or TileLang is imported and kernels are made.

All make objects by the hundred thousand and hardly any garbage, so that each collection walks over all that a process
with torch in it holds: half of the time that this package's import takes, a third of TileLang's, and a twentieth of
lowering.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 200_000  # objects made between two collections of young ones, at least


class _Threads:
    """The threads that want few collections, and what the thresholds were before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = self.set = gc.get_threshold()


_threads = _Threads()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collections are seldom while any thread is inside, unless they are off. Who else sets them is left alone."""
    with _threads.lock:
        if not _threads.inside:
            _threads.before = gc.get_threshold()
            young, middle, old = _threads.before
            _threads.set = (max(young, SELDOM) if young else 0, middle, old)
            gc.set_threshold(*_threads.set)
        _threads.inside += 1
    try:
        yield
    finally:
        with _threads.lock:
            _threads.inside -= 1
            if not _threads.inside and gc.get_threshold() == _threads.set:
                gc.set_threshold(*_threads.before)
