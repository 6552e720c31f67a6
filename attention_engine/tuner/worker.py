"""Processes that run functions for the tuner: a crash, a hang or a lost GPU context costs one trial, not the caller.

with Worker() as worker:
    worker.call(math.sqrt, 2.0, timeout=5)
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

MEMORY_PER_WORKER = 3 << 30  # bytes: torch, TileLang and one run of nvcc


class WorkerDied(Exception):
    """The process ended in the middle of a call; its last words."""


class WorkerTimeout(Exception):
    """A call took longer than it may; the process was ended."""


class RemoteError(Exception):
    """A call raised; `kind` is the class's name, the message its words."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """A process that is started at the first call, and started anew after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._words: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        package = str(Path(__file__).parent.parent.parent)
        paths = os.pathsep.join([package, *(p for p in sys.path if p and p != package)])
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        code = "import sys; from attention_engine.tuner.worker import serve; serve(int(sys.argv[1]))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=self._words, stderr=self._words, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        theirs.close()
        self._connection = ours
        return ours

    def call(self, function: Callable[..., Any], *given: Any, timeout: float | None = None) -> Any:
        """function(*given) there; it must stand in a module. Raises WorkerDied, WorkerTimeout, RemoteError."""
        connection = self._start()
        try:
            connection.send_bytes(pickle.dumps((function, given)))
            if not connection.poll(timeout):
                self.close()
                raise WorkerTimeout(f"no answer in {timeout:.0f} s")
            status, value = pickle.loads(connection.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            words = self._last_words()
            self.close()
            raise WorkerDied(words) from error
        if status == "raised":
            raise RemoteError(*value)
        return value

    def _last_words(self) -> str:
        code = self._process.wait(10) if self._process else None
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()[-3:]
        return "; ".join([f"the process ended with {code}", *lines])

    def close(self) -> None:
        """Ends the process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._words is not None:
            self._words.close()
        self._connection = self._process = self._words = None


def serve(handle: int) -> None:
    """Answers calls until the caller hangs up; what a worker process runs."""
    connection = Connection(handle)
    while True:
        try:
            function, given = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("done", function(*given))
        except Exception as error:  # noqa: BLE001 - handed on whole, to be judged by the caller
            answer = ("raised", (type(error).__name__, str(error)))
        connection.send_bytes(pickle.dumps(answer))


def worker_count(jobs: int) -> int:
    """How many processes may compile at once: a core and memory for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(jobs, cores, available_memory() // MEMORY_PER_WORKER))


def available_memory() -> int:
    """Bytes that this machine has to give."""
    pages, size = "SC_AVPHYS_PAGES", "SC_PAGE_SIZE"
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf(pages) * os.sysconf(size)


Answer = tuple[int, Any]  # the number of the call, and its value or the exception


def call_all(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int, timeout: float
) -> Iterator[Answer]:
    """Calls in several processes, begun in order; answers as they come. Closing the iterator ends the processes."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    crew = [Worker() for _ in range(workers)]
    stopping = threading.Event()

    def work(worker: Worker) -> None:
        while not stopping.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers.put((number, worker.call(function, *calls[number], timeout=timeout)))
            except (WorkerDied, WorkerTimeout, RemoteError) as error:
                answers.put((number, error))
            except (OSError, ValueError) as error:  # closed under its feet
                answers.put((number, WorkerDied(str(error))))

    for number in range(len(calls)):
        waiting.put(number)
    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in crew]
    try:
        for thread in threads:
            thread.start()
        for _ in calls:
            yield answers.get()
    finally:
        stopping.set()
        for worker in crew:
            _end(worker)
        for thread in threads:
            thread.join(10)
        for worker in crew:
            worker.close()


def _end(worker: Worker) -> None:
    """Ends a process whose thread may be waiting for it: the thread then sees the end of the line."""
    process = worker._process
    if process is not None:
        process.kill()
