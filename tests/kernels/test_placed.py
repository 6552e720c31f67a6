"""Pages that a warp copies ahead by TMA, in the warp simulator, against plain torch in float64."""

from dataclasses import replace

import pytest
import torch

from attention_engine import arch
from attention_engine.ir.problem import Problem
from attention_engine.plan import cached as plan
from tests.cached_cases import CASES, DRAFTS, Shape, errors
from tests.plain import worst_ratio

LENGTHS = (200, 77, 6, 64, 128, 0, 65)
DIM = 64


@pytest.fixture(autouse=True)
def _by_tma(monkeypatch):
    """The interpreter runs what a plan for Hopper launches."""
    monkeypatch.setattr(plan, "comes_by_tma", lambda problem, cache, target: not cache.shared)


@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, record_property):
    shape = Shape((200, 77, 6, 64, 129) if name == "tree" else LENGTHS, DRAFTS if name == "tree" else 1, dim=DIM)
    found = errors(name, replace(shape, page=64), torch.float16, "interpret", 1)
    queries = DRAFTS if name == "tree" else 5
    found += errors(name, replace(shape, queries=queries, page=16), torch.bfloat16, "interpret", 3)
    record_property(*worst_ratio(found, name))


@pytest.mark.parametrize("page", [32, 128, 256])
def test_pages_of_other_sizes(page):
    assert errors("sink", Shape(LENGTHS, 1, dim=DIM, page=page), torch.bfloat16, "interpret", 2)


@pytest.mark.parametrize("name", ["softmax", "entropy"])
def test_packed_queries_keep_the_rule(name):
    shape = Shape(LENGTHS, 1, dim=DIM, page=16, packed=(70, 1, 6, 0, 2, 0, 20))
    for parts in (1, 3):
        assert errors(name, shape, torch.bfloat16, "interpret", parts)


def test_which_caches_come_by_tma(monkeypatch):
    monkeypatch.undo()
    problem, on = Problem(32, 8, 128, 128, "bfloat16"), arch.H100()
    assert plan.comes_by_tma(problem, plan.Cache(page=16), on) and plan.comes_by_tma(problem, plan.Cache(page=256), on)
    assert not plan.comes_by_tma(problem, plan.Cache(), on), "as fast without, and a launch makes no descriptors"
    assert not plan.comes_by_tma(problem, plan.Cache(page=48), on), "tiles would end inside a page"
    assert not plan.comes_by_tma(replace(problem, stride_unit=1), plan.Cache(page=16), on), "rows begin anywhere"
    assert not plan.comes_by_tma(replace(problem, dim=256, dim_v=256), plan.Cache(page=16), on), (
        "one block would have an SM"
    )
    assert not plan.comes_by_tma(problem, plan.Cache(page=16), arch.A100())


@pytest.mark.parametrize("name", ["softmax", "entropy", "sink"])
def test_parts_that_are_dealt(name, monkeypatch):
    for constant, value in {"WIDE": 1, "BUSY": 0, "LEAST_DEALT": 1, "DEALT": 3}.items():
        monkeypatch.setattr(plan, constant, value)
    assert errors(name, Shape((700, 77, 6, 64, 129, 0), dim=DIM, page=16), torch.bfloat16, "interpret")
