"""Processes that run calls for the tuner: what they raise, how they die, and that the caller lives on."""

from __future__ import annotations

import math
import operator
import os
import time

import pytest

from attention_engine.tuner import worker as workers
from attention_engine.tuner.worker import RemoteError, Worker, WorkerDied, WorkerTimeout, call_all, worker_count


def test_a_worker_answers_and_lives_through_errors():
    with Worker() as worker:
        assert worker.call(math.sqrt, 9.0, timeout=20) == 3.0
        first = worker.call(os.getpid, timeout=20)
        with pytest.raises(RemoteError, match="division by zero") as caught:
            worker.call(operator.truediv, 1, 0, timeout=20)
        assert caught.value.kind == "ZeroDivisionError"
        assert worker.call(os.getpid, timeout=20) == first != os.getpid()


def test_a_worker_that_dies_or_hangs_is_replaced():
    with Worker() as worker:
        first = worker.call(os.getpid, timeout=20)
        with pytest.raises(WorkerDied, match="the process ended with -6"):
            worker.call(os.abort, timeout=20)
        second = worker.call(os.getpid, timeout=20)
        started = time.monotonic()
        with pytest.raises(WorkerTimeout, match="no answer in 0 s"):
            worker.call(time.sleep, 60, timeout=0.3)
        assert time.monotonic() - started < 10
        assert worker.call(os.getpid, timeout=20) not in (first, second)
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)


def test_what_a_worker_prints_does_not_mix_with_its_answers():
    with Worker() as worker:
        assert worker.call(os.system, "echo noise; echo more >&2", timeout=20) == 0
        assert worker.call(math.sqrt, 4.0, timeout=20) == 2.0


def test_calls_of_several_workers_all_come_back_with_their_numbers():
    calls = [(float(n),) for n in range(7)] + [("four",)]
    found = dict(call_all(math.sqrt, calls, 2, timeout=20))
    assert [found[n] for n in range(7)] == [math.sqrt(n) for n in range(7)]
    assert isinstance(found[7], RemoteError) and found[7].kind == "TypeError"


def test_closing_the_answers_ends_the_workers():
    answers = call_all(time.sleep, [(0,), (60,), (60,)], 2, timeout=100)
    assert next(answers) == (0, None)
    started = time.monotonic()
    answers.close()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("cores", "memory", "jobs", "expected"), [(16, 128, 24, 16), (16, 10, 24, 3), (2, 1, 24, 1), (8, 64, 3, 3)]
)
def test_as_many_workers_as_cores_memory_and_jobs_allow(monkeypatch, cores, memory, jobs, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(workers, "available_memory", lambda: memory << 30)
    assert worker_count(jobs) == expected
