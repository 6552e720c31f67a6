"""A small part of tests/sweep.py, without nvcc: kernels whose layouts are hard to find."""

from __future__ import annotations

import itertools

import pytest

from attention_engine import arch
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
