"""A small part of tests/sweep.py, without nvcc: kernels whose layouts are hard to find."""

from __future__ import annotations

import itertools

import pytest

from attention_engine import arch
from tests import sweep
from tests.sweep import DIMS, DTYPES, MASKS, Job, jobs, run

pytest.importorskip("tilelang")


@pytest.mark.slow
def test_a_tile_that_is_made_of_no_score_gets_a_layout():
    """What is reduced is made of the mask and numbers alone: TileLang found "no available layout"."""
    outcome, _ = run(Job("example: mean relu", "causal", 64, "fp16"), "A100", True, None, ("forward",))
    assert outcome == "ok"


def test_the_sweep_meets_every_program_at_every_head_dim_in_every_dtype_under_every_mask():
    all_jobs = jobs()
    names = {job.program for job in all_jobs}
    assert len(set(all_jobs)) == len(all_jobs) == len(names) * len(DIMS) * len(DTYPES)
    assert {(job.mask, job.dim) for job in all_jobs} == {(mask, dim) for mask in MASKS for dim in DIMS}
    assert {(job.mask, job.dtype) for job in all_jobs} == {(mask, dtype) for mask in MASKS for dtype in DTYPES}


def test_neighbours_of_the_sweep_have_different_programs_so_that_a_part_of_it_meets_them_all():
    all_jobs = jobs()
    assert all(one.program != other.program for one, other in itertools.pairwise(all_jobs))


def test_a_problem_becomes_an_engine_for_its_architecture():
    engine = Job("case: alibi", "causal", 32, "bf16").engine(arch.H100())
    assert "32" in repr(engine)


@pytest.mark.parametrize("arguments", [("-n", "0"), ("-n", "-3"), ("-n", "two"), ("--part", "0/4"), ("--part", "5/4"),
                                       ("--part", "all")], ids=" ".join)  # fmt: skip
def test_the_sweep_says_which_numbers_it_takes(arguments, monkeypatch, capsys):
    """A pool of no processes would have waited for ever."""
    monkeypatch.setattr("sys.argv", ["sweep", *arguments])
    with pytest.raises(SystemExit):
        sweep.read_arguments()
    says = {"-n": "a number of processes, of 1 or more", "--part": "the Kth of N parts, K from 1 to N"}
    assert f"argument {arguments[0]}: it is" in (said := capsys.readouterr().err)
    assert f"{says[arguments[0]]}; it was {arguments[1]!r}." in said


@pytest.mark.parametrize("each", [True, False])
def test_the_sweep_tells_of_each_problem_on_request(each, monkeypatch, capsys):
    outcomes = [("ok", 2.0), ("ok, spills in forward", 3.0)]
    monkeypatch.setattr(sweep, "sweep", lambda chosen, *_: [(j, *o) for j, o in zip(chosen, outcomes, strict=False)])
    monkeypatch.setattr("sys.argv", ["sweep", "--only", "case: alibi, causal", *(["--each"] if each else [])])
    assert sweep.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("case: ")]
    assert [line.split(": ")[2] for line in lines] == (
        ["ok, 2 s of a core", "ok, spills in forward, 3 s of a core"] if each else ["ok, spills in forward"]
    )
