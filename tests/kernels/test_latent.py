"""Keys that are values too by the kernel for Hopper, in the warp simulator, against plain torch in float64."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, arch, library, meta_tensor
from attention_engine.plan import cached as plan
from attention_engine.runtime.cached_shown import kernels_of_caches
from tests import cached_cases
from tests.cached_cases import CASES, DRAFTS, Shape, errors
from tests.plain import worst_ratio

LENGTHS = (200, 77, 6, 64, 128, 0, 65)
DIM, DIM_V = 192, 128  # in pieces of 64 columns: each half of the values, and keys alone


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch):
    """The interpreter runs what a plan for Hopper launches; values are the first columns of keys."""
    monkeypatch.setattr(plan, "placed_by_hand", lambda problem, cache, target: True)
    monkeypatch.setattr(cached_cases, "CASES", {name: replace(case, dim_v=DIM_V) for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, record_property):
    shape = Shape((200, 77, 6, 64, 129) if name == "tree" else LENGTHS, DRAFTS if name == "tree" else 1, dim=DIM)
    found = errors(name, shape, torch.float16, "interpret", 1)
    queries = DRAFTS if name == "tree" else 5
    found += errors(name, replace(shape, queries=queries, page=64), torch.bfloat16, "interpret", 3)
    record_property(*worst_ratio(found, name))


@pytest.mark.slow
@pytest.mark.parametrize("online", [library.OnlineSoftmax, library.OnlineSigmoid])
def test_latent_attention_compiles_without_spills(online, monkeypatch):
    monkeypatch.undo()
    metas = [meta_tensor(None, h, None, d, dtype=torch.bfloat16) for h, d in ((64, 576), (1, 576), (1, 512))]
    engine = AttentionEngine(tuple(metas), mask_mod=library.causal, online_func=online())
    kernel = kernels_of_caches(engine, arch.H100(), 64, shared=True).every["decode"]
    assert kernel.builder == "cached.latent.latent"
    assert not kernel.resources.spills and kernel.resources.notes == ()


@pytest.mark.parametrize("name", ["softmax", "entropy", "sink"])
def test_parts_that_are_dealt(name, monkeypatch):
    for constant, value in {"WIDE": 1, "BUSY": 0, "LEAST_DEALT": 1, "DEALT": 3}.items():
        monkeypatch.setattr(plan, constant, value)
    assert errors(name, Shape((700, 77, 6, 64, 129, 0), dim=DIM, page=64), torch.bfloat16, "interpret")
