"""Trials: each way to fail has its class, wrong numbers are seen, and a process that fails is replaced."""

from types import SimpleNamespace

import pytest
import torch

from attention_engine import arch
from attention_engine.codegen.compile import Resources
from attention_engine.plan.forms import Tile
from attention_engine.runtime import trials
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.runtime.trials import Job, LocalBench, WorkerBench, compiled, judged
from attention_engine.tuner import measure
from attention_engine.tuner.defaults import default_tiles
from attention_engine.tuner.measure import worst_difference
from attention_engine.tuner.search import Outcome
from attention_engine.tuner.worker import RemoteError, WorkerDied, WorkerTimeout
from tests.runtime import faults
from tests.runtime.engines import build

TILE = Tile(64, 64, 128, 2)
H100_JOB = SimpleNamespace(target=arch.H100(), device="cuda:0", token="t")

MEASURED = {
    "ok": ((0.9, 12.5), Outcome.OK),
    "wrong": ((1.1, 0.0), Outcome.WRONG),
    "not a number": ((float("inf"), 0.0), Outcome.WRONG),
    "timeout": (WorkerTimeout("no answer in 25 s"), Outcome.TIMEOUT),
    "out of memory": (RemoteError("OutOfMemoryError", "CUDA out of memory"), Outcome.OUT_OF_MEMORY),
    "launch": (RemoteError("RuntimeError", "CUDA error: invalid argument"), Outcome.LAUNCH_ERROR),
    "crash": (WorkerDied("the process ended with -11"), Outcome.LAUNCH_ERROR),
}
COMPILED = {
    "ok": (Resources(168, 0, 0, 1000), Outcome.OK),
    "on the interpreter": (None, Outcome.OK),
    "too big": (Resources(168, 0, 0, 300000), Outcome.REJECTED),
    "spills": (Resources(255, 400, 400, 1000), Outcome.REJECTED),
    "does not fit": (RemoteError("TileDoesNotFit", "head dims ..."), Outcome.REJECTED),
    "timeout": (WorkerTimeout("no answer in 120 s"), Outcome.TIMEOUT),
    "out of memory": (RemoteError("MemoryError", ""), Outcome.OUT_OF_MEMORY),
    "compiler": (RemoteError("InternalError", "no layout"), Outcome.COMPILE_ERROR),
    "killed": (WorkerDied("the process ended with -9"), Outcome.COMPILE_ERROR),
}


@pytest.mark.parametrize("kind", MEASURED)
def test_what_measuring_answers_has_its_class(kind):
    answer, outcome = MEASURED[kind]
    found = judged(TILE, answer)
    assert (found.tile, found.outcome) == (TILE, outcome)
    assert (found.time_us == 12.5 and not found.message) if outcome is Outcome.OK else found.message


@pytest.mark.parametrize("kind", COMPILED)
def test_what_compiling_answers_has_its_class(kind):
    answer, outcome = COMPILED[kind]
    found = compiled(H100_JOB, TILE, answer)
    assert (found.tile, found.outcome, found.time_us) == (TILE, outcome, None)
    assert bool(found.message) is (outcome is not Outcome.OK)


def test_a_process_that_fails_is_replaced_and_the_next_tile_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trials, "prepare", faults.prepare)
    monkeypatch.setattr(trials, "MEASURE_SECONDS", 0.6)
    bench = WorkerBench(H100_JOB, [])
    found = []
    for fault in (faults.fine, faults.wrong, faults.not_a_number, faults.illegal, faults.crash, faults.hang,
                  faults.exhausted, faults.fine):  # fmt: skip
        monkeypatch.setattr(trials, "measure_tile", fault)
        if fault is faults.fine or not bench.ready:  # a new process needs longer to start than a hang may last
            monkeypatch.setattr(trials, "MEASURE_SECONDS", 20)
            bench.worker.call(faults.prepare, None, None, timeout=20)
            monkeypatch.setattr(trials, "MEASURE_SECONDS", 0.6)
        found.append(bench.measure(TILE, 0.0))
    bench.close()
    assert [f.outcome for f in found] == [
        Outcome.OK, Outcome.WRONG, Outcome.WRONG, Outcome.LAUNCH_ERROR, Outcome.LAUNCH_ERROR, Outcome.TIMEOUT,
        Outcome.OUT_OF_MEMORY, Outcome.OK,
    ]  # fmt: skip
    assert found[3].message == "CUDA error: an illegal memory access was encountered"
    assert found[6].message == "CUDA out of memory. Tried to allocate 20.00 GiB."
    assert found[-1].time_us == 64.0


# ---- numbers, on the interpreter


def job(kernel, lengths=(2, 40, 40)):
    engine = build(dtype=torch.float16)
    asked = engine._asked(None, True)
    tiles = default_tiles(asked.problem, asked.maths, "interpret")
    return Job(asked.maths.program, (), kernel, asked.problem, lengths, "interpret", "cpu", False, tiles)


def bend(monkeypatch, change, only_large=False):
    """Kernels of TILE make something else of their results."""
    honest = {name: getattr(ProgramKernels, name) for name in ("forward", "backward")}

    def bent(name):
        def run(self, q, *rest):
            first, *others = honest[name](self, q, *rest)
            bad = self.tiles is not None and TILE in (self.tiles.forward, self.tiles.backward)
            return (change(first) if bad and not (only_large and q.shape[0] == 1) else first, *others)

        return run

    for name in honest:
        monkeypatch.setattr(ProgramKernels, name, bent(name))


def one_entry_off(tensor):
    tensor[0, 3, 0, 0] = float("nan")
    return tensor


def refuse(error):
    def change(tensor):
        raise error

    return change


CHANGES = {
    "scaled": (lambda t: t * 1.05, Outcome.WRONG),
    "one NaN": (one_entry_off, Outcome.WRONG),
    "zeros": (torch.zeros_like, Outcome.WRONG),
    "launch": (refuse(RuntimeError("CUDA error: invalid configuration")), Outcome.LAUNCH_ERROR),
    "out of memory": (refuse(torch.OutOfMemoryError("CUDA out of memory")), Outcome.OUT_OF_MEMORY),
    "nothing": (lambda t: t, Outcome.OK),
}


@pytest.fixture(autouse=True)
def timed_thrice(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.0)


@pytest.mark.parametrize(("kernel", "kind"), [
    *(("forward", kind) for kind in CHANGES), ("backward", "scaled"), ("backward", "nothing"),
    *(pytest.param("backward", kind, marks=pytest.mark.slow) for kind in CHANGES if kind not in ("scaled", "nothing")),
])  # fmt: skip
def test_a_kernel_that_does_something_else_is_found_out(monkeypatch, kernel, kind):
    change, outcome = CHANGES[kind]
    bend(monkeypatch, change)
    bench = LocalBench(job(kernel), [])
    assert bench.measure(TILE, 1.0).outcome is outcome
    assert kernel == "backward" or bench.measure(Tile(32, 64, 64, 2), 1.0).outcome is Outcome.OK


def test_a_kernel_that_is_wrong_at_the_caller_s_size_only_is_found_out(monkeypatch):
    bend(monkeypatch, CHANGES["scaled"][0], only_large=True)
    assert LocalBench(job("forward"), []).measure(TILE, 1.0).outcome is Outcome.WRONG
    assert LocalBench(job("forward", (1, 40, 40)), []).measure(TILE, 1.0).outcome is Outcome.OK


def test_differences_are_of_the_worst_tensor():
    one, two = torch.ones(4), torch.full((4,), 2.0)
    assert worst_difference([one, two], [one, two]) == 0
    assert worst_difference([one, two * 1.1], [one, two]) == pytest.approx(0.1, rel=1e-5)
    assert worst_difference([torch.zeros(4)], [torch.zeros(4)]) == 0
    assert worst_difference([one], [torch.zeros(4)]) == 1
    assert worst_difference([one * float("inf")], [one]) == float("inf")
