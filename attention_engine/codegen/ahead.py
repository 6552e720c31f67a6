"""Kernels are compiled side by side, in threads: those of a call together, and its backward pass's while it runs.

TileLang's passes and nvcc run outside Python's lock. A terminal shows how far they are; elsewhere the log gets a line.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")
LOG = logging.getLogger("attention_engine")
MOST = 8  # threads: each takes a core, and up to a gigabyte while nvcc runs


@dataclass
class Work(Generic[Made]):
    """Something that is made in a thread. `result` waits for it, and raises what its making raised."""

    make: Callable[[], Made]
    future: Future[Made]
    process: int = field(default_factory=os.getpid)

    def result(self) -> Made:
        """What was made; made here where this process was forked from the one whose thread was at it."""
        return self.future.result() if self.process == os.getpid() else self.make()


class _Threads:
    """The threads of a process, the first of which starts with the first work."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()
        self.process = os.getpid()

    def submit(self, work: Callable[[], Made]) -> Future[Made]:
        """Runs `work` in one of them."""
        with self.lock:
            if self.pool is None or self.process != os.getpid():
                count = max(1, min(MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else MOST))
                self.pool, self.process = ThreadPoolExecutor(count, "attention_engine"), os.getpid()
            return self.pool.submit(work)


class _Progress:
    """How many kernels are being compiled, as somebody who waits should see it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun = self.ended = 0
        self.since = 0.0
        self.bar: Any = None

    def begin(self) -> None:
        """One more is to be compiled."""
        with self.lock:
            if self.begun == self.ended:
                self.begun, self.ended, self.since = 0, 0, time.perf_counter()
            self.begun += 1
            if sys.stderr is not None and sys.stderr.isatty():
                self._show()

    def end(self) -> None:
        """One has been compiled, or can't be."""
        with self.lock:
            self.ended += 1
            if self.bar is not None:
                self._show()
            if self.begun == self.ended:
                count, seconds = self.ended, time.perf_counter() - self.since
                LOG.info("compiled %d kernel%s in %.1f s", count, "s" if count > 1 else "", seconds)

    def _show(self) -> None:
        from tqdm import tqdm

        if self.bar is None:
            form = "{desc}: {n_fmt}/{total_fmt} [{elapsed}]"
            self.bar = tqdm(desc="attention_engine: compiling kernels", leave=False, bar_format=form, total=0)
        self.bar.total, self.bar.n = self.begun, self.ended
        self.bar.refresh()
        if self.begun == self.ended:
            self.bar.close()
            self.bar = None


class OneAtATime:
    """`with one_at_a_time:` a thread does what holds Python's lock throughout, so that who came first is done first.

    A child of a fork, whose parent's threads are not there, waits for none of them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: setattr(self, "lock", threading.RLock()))

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


_threads, _progress, tracing = _Threads(), _Progress(), OneAtATime()


def begin(make: Callable[[], Made]) -> Work[Made]:
    """Starts making a kernel in a thread. A process that ends begins no more: it waits for those that are at work."""
    _progress.begin()

    def run() -> Made:
        try:
            if not threading.main_thread().is_alive():
                raise RuntimeError("the process ends")
            return make()
        finally:
            _progress.end()

    return Work(make, _threads.submit(run))
