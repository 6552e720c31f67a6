"""The GPU's soak, on a CPU: what is wrong, hangs or dies is told, and a right draw is right."""

import random
import threading

import pytest
import torch

from attention_engine import arch
from tests.cached_cases import CASES
from tests.gpu.soak import cached, workers
from tests.gpu.soak.__main__ import main
from tests.gpu.soak.cached import Cached
from tests.gpu.soak.check import Measured, run
from tests.gpu.soak.draws import HARD, PACKINGS, Draw, draw
from tests.gpu.soak.parts import lengths_of
from tests.gpu.soak.programs import PACKED, PROGRAMS, Linear, Program
from tests.gpu.soak.workers import Setting, Worker
from tests.kernels.test_each_gpu import planned_for

UNLIKE = next(n for n, program in enumerate(PROGRAMS) if getattr(program, "ends_meet", False))
ON_CPU = ["--tiny", "--backend", "reference", "--device", "cpu", "--workers", "1"]


def test_right_and_wrong_draws_are_told_apart(capsys):
    assert main([*ON_CPU, "--draws", "2", "--limit", "300", "--plant", "1=wrong"]) == 1
    said = capsys.readouterr().out
    assert "| right |" in said and "right      1" in said and "wrong      1" in said
    script = said.split("----")[1]
    found = {}
    exec(script.replace("print(", "found = ("), found)  # as a user pastes it, who has no planted fault
    assert found["found"].outcome == "right"


@pytest.fixture
def worker():
    """One without a process."""
    made = Worker(Setting("reference", "cpu", 60))
    yield made
    made.errors.close()


@pytest.mark.parametrize(
    ("stage", "outcome"), [("judging", "right"), ("compiling", "right"), ("running", "HUNG")]
)  # fmt: skip
def test_the_limit_is_that_of_our_kernels_alone(worker, stage, outcome):
    """What a process says half a second after a stage began, where a draw has a tenth of one."""
    worker.lines.put({"stage": stage})
    later = threading.Timer(0.5, worker.lines.put, [{"outcome": "right"}])
    later.start()
    assert worker._await("outcome", 0.1)["outcome"] == outcome
    later.join()


def test_a_yardstick_that_does_not_end_is_no_hang(worker, monkeypatch):
    monkeypatch.setitem(workers.APART, "judging", 0.1)
    worker.lines.put({"stage": "judging"})
    assert worker._await("outcome", 60)["outcome"] == "not judged"


@pytest.mark.slow
def test_a_draw_that_hangs_and_one_that_dies_are_told(capsys):
    assert main([*ON_CPU, "--draws", "2", "--limit", "2", "--plant", "0=hang", "1=crash"]) == 1
    said = capsys.readouterr().out
    assert "HUNG       1" in said and "crashed    1" in said and "still running after a limit of 2 s" in said


@pytest.mark.parametrize("program", [0, 13, UNLIKE])
def test_the_kernels_are_held_to_the_same_rule(program):
    drawn = Draw(program, 1, 20, packing="uneven", documents=2, seed=1, small=True)
    assert run(drawn, "interpret", "cpu").outcome == "right"


def of_hopper(place, monkeypatch):
    """A draw whose kernels are those of an H100, in the warp simulator."""
    program, rng = PROGRAMS[place], random.Random(place)
    if isinstance(program, Cached):
        batch, queries, keys = cached.drawn(rng, True)
        drawn = Draw(place, batch, queries, keys, seed=place, small=True)
    else:
        keys = 0 if program.linear or program.square else rng.randint(1, 300)
        drawn = Draw(place, 2, rng.randint(130, 300), keys, documents=5, packing="uneven", seed=place, small=True)
    for kind in (Program, Linear):  # whose engines know calls by plans that are forgotten here
        monkeypatch.setattr(kind, "engine", kind.engine.__wrapped__)
    with planned_for(arch.H100(), monkeypatch):
        return run(drawn, "interpret", "cpu")


@pytest.mark.parametrize("place", [n for n, p in enumerate(PROGRAMS) if getattr(p, "unlike", False)])
def test_lengths_of_keys_of_their_own_are_held_to_it_in_kernels_for_hopper(place, monkeypatch):
    assert of_hopper(place, monkeypatch).outcome == "right"


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(PROGRAMS)))
def test_each_program_is_held_to_it_in_kernels_for_hopper(place, monkeypatch):
    assert of_hopper(place, monkeypatch).outcome == "right"


def test_one_wrong_row_is_seen_in_a_mean_that_hides_it():
    exact = torch.randn(1, 1000, 64, dtype=torch.float64)
    eager, ours = exact.bfloat16(), exact.bfloat16()
    assert Measured.of("o", ours, exact, eager, torch.bfloat16).worst <= 1
    ours[0, 500] = 0
    found = Measured.of("o", ours, exact, eager, torch.bfloat16)
    assert found.ratio < 2 and found.row_ratio > 5 and "(0, 500)" in found.said


def test_a_mean_of_few_numbers_that_are_not_0_is_luck():
    exact = torch.randn(16, 10, 64, dtype=torch.float64)
    off = 1e-3 * torch.randn_like(exact)
    assert 1.2 < Measured.of("dq", exact + 1.5 * off, exact, exact + off, torch.float16).ratio < 1.5
    exact[:, :-1] = off[:, :-1] = 0
    assert Measured.of("dq", exact + 1.5 * off, exact, exact + off, torch.float16).worst < 0.6
    off[:, :-1] = 1e-2  # where nothing is, ours has something
    assert Measured.of("dq", exact + off, exact, exact, torch.float16).worst > 5


def test_draws_are_the_same_in_every_process_and_come_in_the_shapes_that_hung():
    draws = [draw(3, number) for number in range(1000)]
    assert draws == [draw(3, number) for number in range(1000)]
    of_tensors = [found for found in draws if not isinstance(found.of, Cached)]
    packed = [found for found in of_tensors if found.of == PACKED]
    assert 0.15 < len(packed) / len(of_tensors) < 0.35
    assert {(d.batch, d.queries, d.packing, d.documents) for d in packed} > {*HARD}
    assert {d.program for d in draws} == {*range(len(PROGRAMS))}
    assert all(1 <= d.batch <= 8 and 1024 <= d.queries <= 65536 and 1 <= d.documents <= 200 for d in of_tensors)


def test_draws_of_caches_have_few_queries_and_lengths_of_all_sizes():
    drawn = [found for found in (draw(3, number) for number in range(1000)) if isinstance(found.of, Cached)]
    assert {d.of.case for d in drawn} == {*CASES} and {d.of.page for d in drawn} == {0, 16, 64, 256}
    shapes = [d.of.shape(d) for d in drawn]
    lengths = [n for shape, _ in shapes for n in shape.lengths]
    assert 0 in lengths and 1 in lengths and max(lengths) > 30000
    assert {1, 2, 5, 16, 33} <= {shape.queries for shape, _ in shapes} and {None, 1, 2, 128} <= {p for _, p in shapes}


@pytest.mark.parametrize("case", ["softmax", "tree", "entropy"])
@pytest.mark.parametrize("backend", ["interpret", "reference"])
def test_calls_with_a_cache_are_held_to_the_same_rule(case, backend):
    place = next(n for n, program in enumerate(PROGRAMS) if isinstance(program, Cached) and program.case == case)
    drawn = Draw(place, 3, 2, 90, seed=5, small=True)
    assert run(drawn, backend, "cpu").outcome == "right"

    def spoil(found):
        found["o"][1, 0] *= 1.05

    assert run(drawn, backend, "cpu", spoil).outcome == "wrong"


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("count", "total"), [(1, 1), (5, 3), (7, 1000), (200, 4097)])
def test_documents_fill_a_row(packing, count, total):
    lengths = lengths_of(packing, count, total, torch.Generator().manual_seed(0))
    assert sum(lengths) == total and min(lengths) >= 1
