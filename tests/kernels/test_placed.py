"""Pages that a warp copies ahead by TMA, in the warp simulator, against plain torch in float64."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, arch, library, meta_tensor
from attention_engine.codegen.compile import lower_kernel
from attention_engine.ir.problem import Problem
from attention_engine.plan import cached as plan
from attention_engine.runtime.cached_shown import cached_kernels
from tests.cached_cases import CASES, DRAFTS, Shape, errors
from tests.plain import worst_ratio

LENGTHS = (200, 77, 6, 64, 128, 0, 65)
DIM = 64


@pytest.fixture(autouse=True)
def _by_tma(monkeypatch):
    """The interpreter runs what a plan for Hopper launches."""

    def comes(problem, cache, target, joined=False):
        return not cache.shared and (joined or cache.page > 0)

    monkeypatch.setattr(plan, "comes_by_tma", comes)


@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, record_property):
    shape = Shape((200, 77, 6, 64, 129) if name == "tree" else LENGTHS, DRAFTS if name == "tree" else 1, dim=DIM)
    found = errors(name, replace(shape, page=64), torch.float16, "interpret", 1)
    queries = DRAFTS if name == "tree" else 5
    found += errors(name, replace(shape, queries=queries, page=16), torch.bfloat16, "interpret", 3)
    record_property(*worst_ratio(found, name))


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("name", ["softmax", "entropy", "sigmoid", "window", "sink"])
def test_parts_that_join_themselves(name, page):
    """Their first tiles come before lengths are known: of requests that have none, and of more parts than tiles."""
    for queries, parts in ((1, 2), (2, 5), (1, 9)):
        assert errors(name, Shape(LENGTHS, queries, dim=DIM, page=page), torch.float16, "interpret", parts)


def joining_kernel(page, mask=None):
    """As CUDA text."""
    metas = [meta_tensor(None, heads, None, DIM, dtype=torch.float16) for heads in (8, 2, 2)]
    kernel = cached_kernels(AttentionEngine(metas, mask_mod=mask), arch.H100(), page)["decode joined parts"]
    return lower_kernel(kernel.prim_func, arch.H100()).cuda


def test_first_tiles_are_asked_for_before_the_length_and_have_come_before_rows_are_joined(monkeypatch):
    """Where rows are joined, tiles lay: one that nobody reads must have come."""
    monkeypatch.undo()
    cuda = joining_kernel(0)
    first, length = cuda.index("tma_load<tl::CacheHintSm90::EVICT_FIRST>(k_desc"), cuda.index("(kv_lengths[")
    unread, joined = cuda.index("(int unread = 0;"), cuda.index("AtomicAddRet(")
    assert first < length < unread < joined


@pytest.mark.parametrize(("page", "mask"), [(0, library.sliding_window(100)), (64, None), (16, None)])
def test_tiles_wait_for_the_length_in_pages_and_of_a_mask_that_leaves_out_first_keys(page, mask, monkeypatch):
    """A page is looked up in a line of the table that lies apart from the last: one tile after the other in turns was
    slower. And requests may share pages, which are then to stay in the cache."""
    monkeypatch.undo()
    cuda = joining_kernel(page, mask)
    assert cuda.index("(kv_lengths[") < cuda.index("tl::tma_load") and "unread" not in cuda
    assert ("EVICT_FIRST" in cuda) == (page == 0)


@pytest.mark.parametrize("page", [0, 16])
def test_tables_and_lengths_may_say_anything_behind_the_last_key(page):
    """Pages that are none, too."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 1, 4, DIM).half(), torch.randn(2, 2, 320, 2, DIM).half()
    lengths, given = torch.tensor([70, 320]), {}
    engine = AttentionEngine(backend="interpret")
    wanted = AttentionEngine(backend="reference").with_cache(q, k, v, kv_lengths=lengths.int())
    if page:
        table = torch.arange(40).view(2, 20)
        table[0, 5:] = torch.tensor([-1, 40, 1 << 30, -(1 << 30)]).repeat(4)[:15]
        k, v = (t.view(40, page, 2, DIM) for t in (k, v))
        given["page_table"] = table.int()
    found = engine.with_cache(q, k, v, kv_lengths=lengths.int(), num_splits=4, **given)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


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
    assert plan.comes_by_tma(problem, plan.Cache(), on, joined=True), "whose first tiles it asks for early"
    assert not plan.comes_by_tma(problem, plan.Cache(page=48), on, joined=True)
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
