"""Parts that the last of their blocks joins, on the interpreter, against plain torch in float64."""

import pytest
import torch

from attention_engine import arch
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.problem import Problem
from attention_engine.library import OnlineSoftmax
from attention_engine.plan import cached as plan
from attention_engine.plan.cached_buffers import Cache
from tests.cached_cases import Shape, errors
from tests.programs import causal, scaled

LENGTHS = (200, 77, 6, 64, 0, 65)
SHAPES = {  # queries, heads, key heads, dim, parts
    "rows of two queries at once": (2, 6, 2, 32, 5),
    "more parts than are read at once": (1, 8, 1, 64, 20),
    "a row a warp": (1, 4, 4, 128, 3),
    "rows of two turns": (4, 4, 2, 128, 2),
}


@pytest.fixture
def launched(monkeypatch):
    """The names of what calls launch."""
    names, steps = [], plan.CachedPlan.steps

    def noted(self, *asked):
        found = steps(self, *asked)
        names.append([step.name for step in found])
        return found

    monkeypatch.setattr(plan.CachedPlan, "steps", noted)
    return names


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_block_of_a_rows_parts_joins_them(shape, page, launched):
    queries, heads, kv_heads, dim, parts = SHAPES[shape]
    assert errors("entropy", Shape(LENGTHS, queries, heads, kv_heads, dim, page), torch.float16, "interpret", parts)
    assert ["decode joined parts"] in launched and ["decode parts", "combine"] not in launched


@pytest.mark.parametrize("name", ["softmax", "sink", "retention"])
def test_other_programs_are_joined_so_too(name, launched):
    assert errors(name, Shape(LENGTHS, 3, 4, 2, 64), torch.bfloat16, "interpret", 3)
    assert ["decode joined parts"] in launched


def test_pages_by_tma_are_joined_so_too(monkeypatch, launched):
    monkeypatch.setattr(plan, "comes_by_tma", lambda _, cache, __, joined=False: not cache.shared)
    for name in ("entropy", "sink"):
        assert errors(name, Shape(LENGTHS, 2, 8, 2, 64, 16), torch.bfloat16, "interpret", 5)
    assert ["decode joined parts"] in launched and ["decode parts", "combine"] not in launched


def test_more_rows_have_a_block_each(launched):
    assert errors("softmax", Shape(LENGTHS, 5, 8, 2, 64), torch.bfloat16, "interpret", 3)
    assert ["decode parts", "combine"] in launched and ["decode joined parts"] not in launched


def test_counters_are_0_behind_a_launch(monkeypatch, launched):
    made, zeros_like = [], torch.zeros_like

    def noted(like):
        made.append(zeros_like(like))
        return made[-1]

    monkeypatch.setattr(torch, "zeros_like", noted)
    assert errors("softmax", Shape(LENGTHS, 1, 4, 2, 64), torch.bfloat16, "interpret", 7)
    counters = [tensor for tensor in made if tensor.dtype is torch.int32 and tensor.shape == (len(LENGTHS), 2)]
    assert counters and not any(tensor.any() for tensor in counters)


def test_which_parts_join_themselves():
    def joins(dim: int, cache: Cache, queries: int = 1) -> bool:
        problem = Problem(32, 8, dim, dim, "bfloat16")
        made = plan.CachedPlan(trace(scaled, causal, OnlineSoftmax(), CustomIO()), problem, cache, arch.H100())
        return made.joins(queries)

    assert joins(128, Cache()) and joins(64, Cache(page=16)) and joins(128, Cache(), 2)
    assert not joins(128, Cache(), 3), "12 rows, one after the other"
    assert not joins(256, Cache()) and not joins(96, Cache()), "a row of threads has none, or one and a half of a row"
    assert not joins(128, Cache(packed=True)), "queries of all requests lie one after the other"
