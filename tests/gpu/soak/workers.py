"""Processes that run draws under a time limit: one that exceeds it, or dies, is ended and another takes its place."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.soak.draws import Draw

STARTING, ENDING = 300.0, 30.0  # seconds
APART = {"compiling": 1800.0, "judging": 600.0}  # seconds that a stage may take whose time a draw is not charged
TAIL = 2000  # characters of what a process said last
ROOT = Path(__file__).resolve().parents[3]
ANSWER = "import torch; assert torch.ones(1000, device='cuda').sum().item() == 1000"


@dataclass(frozen=True)
class Setting:
    """How draws are run. limit: seconds a draw may take, compiling apart; fresh: a process for each draw."""

    backend: str
    device: str
    limit: float
    fresh: bool = False


class Worker:
    """One process, started when it is first needed, and anew after it ended."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.process, self.errors = setting, None, tempfile.TemporaryFile()  # noqa: SIM115
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def run(self, draw: Draw, plant: str = "") -> dict[str, Any]:
        """The fields of an Outcome; its outcome may also be "HUNG", "crashed" or "not judged"."""
        if self.process is None:
            found = self._start()
            if found:
                return found
        asked = {"draw": asdict(draw), "backend": self.setting.backend, "device": self.setting.device, "plant": plant}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        found = self._await("outcome", self.setting.limit)
        if (self.setting.fresh or found["outcome"] in ("error", "HUNG", "crashed", "not judged")) and not self.end():
            found |= {"outcome": "HUNG", "detail": f"{found['detail']}\nits process can't be ended"}
        return found

    def _start(self) -> dict[str, Any] | None:
        self.lines = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.soak.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=_read, args=(self.process.stdout, self.lines), daemon=True).start()
        found = self._await("stage", STARTING)
        return found if "outcome" in found else None

    def _await(self, wanted: str, limit: float) -> dict[str, Any]:
        """The next line that has it; the time of stages apart, such as compiling, is not counted."""
        left, stage = limit, ""
        while True:
            started = time.monotonic()
            try:
                line = self.lines.get(timeout=APART.get(stage, left))
            except queue.Empty:
                outcome = "not judged" if stage == "judging" else "HUNG"
                said = stage if stage in APART else f"a limit of {limit:g} s"
                return {"outcome": outcome, "detail": f"still running after {said}\n{self._tail()}"}
            if line is None:
                status = self.process.wait(ENDING)
                return {"outcome": "crashed", "detail": f"exit status {status}\n{self._tail()}"}
            if wanted in line:
                return line
            left -= 0 if stage in APART else time.monotonic() - started
            left, stage = max(left, 0.01), line.get("stage", "")

    def _tail(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-TAIL:]

    def end(self) -> bool:
        """Ends the process; False if it can't be ended."""
        process, self.process = self.process, None
        if process is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return False
        finally:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
        self.errors.seek(0)
        self.errors.truncate()
        return True


def _read(pipe: Any, lines: queue.Queue[dict[str, Any] | None]) -> None:
    with contextlib.suppress(ValueError):  # closed
        for line in pipe:
            lines.put(json.loads(line))
    lines.put(None)


def gpu_answers() -> bool:
    """Does a new process get an answer of the GPU?"""
    try:
        return subprocess.run([sys.executable, "-c", ANSWER], timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


class Pool:
    """Workers side by side. take: the next (number, draw, what to plant), or None; tell: of each what came of it."""

    def __init__(self, setting: Setting, workers: int) -> None:
        self.setting, self.count, self.lost = setting, workers, False
        self._lock = threading.Lock()

    def run(
        self, take: Callable[[], tuple[int, Draw, str] | None], tell: Callable[[int, Draw, dict[str, Any]], None]
    ) -> None:  # fmt: skip
        """Until there are no more draws, or the GPU no longer answers (`lost`)."""
        threads = [threading.Thread(target=self._work, args=(take, tell)) for _ in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, take: Callable[[], Any], tell: Callable[[int, Draw, dict[str, Any]], None]) -> None:
        worker = Worker(self.setting)
        try:
            while not self.lost:
                with self._lock:
                    taken = take()
                if taken is None:
                    return
                number, draw, plant = taken
                found = worker.run(draw, plant)
                if found["outcome"] == "HUNG" and self.setting.device.startswith("cuda") and not gpu_answers():
                    self.lost = True
                with self._lock:
                    tell(number, draw, found)
        finally:
            worker.end()
            worker.errors.close()
