"""Memory that a call's launches leave to each other: who shares it, and who must not."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from attention_engine.runtime import gpu, scratch
from attention_engine.runtime.scratch import Scratch


def test_kernels_are_handed_scratch_memory_as_they_take_it():
    """On a GPU torch's tensors would be made so at each launch; a kernel's host code has them as DLPack has them."""
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    taken = scratch._as_kernels_take(tensor)
    assert tuple(taken.shape) == (3, 4) and str(taken.dtype) == "float32"
    tensor[1, 2] = -1
    assert torch.equal(torch.from_dlpack(taken), tensor)  # the same memory


def test_what_parts_leave_has_one_piece_of_memory_for_each_thread(monkeypatch):
    monkeypatch.setattr(scratch, "_SCRATCH", {})
    small, large = (Scratch([torch.empty(n), torch.empty(n, 5)]) for n in (7, 1 << 20))
    first = [t.data_ptr() for t in small()]
    assert first == [t.data_ptr() for t in small()] and first[1] - first[0] == 4 * 8
    assert [t.shape for t in small()] == [(7,), (7, 5)]
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(t.data_ptr() for t in small()))
    thread.start()
    thread.join()
    assert not set(found) & set(first)
    held = large()
    assert held[0].data_ptr() != large()[0].data_ptr() and len(scratch._SCRATCH) == 2  # too much to keep
    wider = Scratch([torch.empty(5000)])
    (grown,) = wider()
    assert grown.data_ptr() == small()[0].data_ptr() != first[0]


def test_a_graph_has_scratch_memory_of_its_own(monkeypatch):
    """Whether a stream is captured is asked of streams that can be: not of the one that is 0."""
    monkeypatch.setattr(scratch, "_SCRATCH", {})
    memory = Scratch([torch.empty(7)])
    memory.on_gpu, asked, now = True, [], SimpleNamespace()
    monkeypatch.setattr(scratch, "_as_kernels_take", lambda tensor: tensor)
    monkeypatch.setattr(gpu, "captures", lambda: asked.append(now) or now.captures)
    monkeypatch.setattr(gpu, "raw_stream", lambda device: now.stream)
    for now.stream, now.captures, is_kept in ((0, True, True), (5, False, True), (5, True, False)):
        first, second = memory()[0], memory()[0]
        assert is_kept is (first.data_ptr() == second.data_ptr())
    assert len(asked) == 4


@pytest.fixture
def on_gpu(monkeypatch):
    """What a GPU is asked, as `now` says; tensors are a CPU's."""
    now = SimpleNamespace(stream=5, captures=False)
    monkeypatch.setattr(scratch, "_SCRATCH", {})
    monkeypatch.setattr(scratch, "_STORES", {})
    monkeypatch.setattr(scratch, "_as_kernels_take", lambda tensor: tensor)
    monkeypatch.setattr(gpu, "captures", lambda: now.captures)
    monkeypatch.setattr(gpu, "raw_stream", lambda device: now.stream)

    def make(*counts: int) -> Scratch:
        made = Scratch([torch.empty(7)], [torch.empty(1, n, dtype=torch.int32) for n in counts])
        made.on_gpu, made.is_kept = True, True
        return made

    return SimpleNamespace(now=now, make=make)


def test_counters_begin_at_0_and_are_those_of_all_calls_of_a_thread_on_a_stream(on_gpu):
    one, other = on_gpu.make(8), on_gpu.make(3)
    _, first = one()
    assert first.shape == (1, 8) and first.dtype is torch.int32 and not first.any()
    assert one()[1].data_ptr() == other()[1].data_ptr() == first.data_ptr()
    on_gpu.now.stream = 6
    assert one()[1].data_ptr() != first.data_ptr()


def test_more_counters_are_zeros_too_and_who_has_the_old_ones_keeps_them(on_gpu):
    few, many = on_gpu.make(8), on_gpu.make(2 * scratch.LEAST_COUNTERS)
    _, first = few()
    first += 1
    assert not many()[1].any()
    assert few()[1].data_ptr() == first.data_ptr()


def test_each_graph_has_counters_that_were_zeroed_before(on_gpu, monkeypatch):
    """A graph that zeroed them would do so at each replay; two that are replayed at once may not share them."""
    monkeypatch.setattr(scratch, "STORE", 20)
    memory = on_gpu.make(8)
    memory()  # outside of a graph: there is a store from here on
    on_gpu.now.captures = True
    store = scratch._STORES[memory.device].memory
    graphs = [memory()[1] for _ in range(3)]
    inside = [store.data_ptr() <= g.data_ptr() < store.data_ptr() + 4 * 20 for g in graphs]
    assert inside == [True, True, False]  # the third found no more room
    assert len({g.data_ptr() for g in graphs}) == 3 and not any(g.any() for g in graphs)


def test_a_graph_before_any_call_zeroes_its_counters_itself(on_gpu):
    on_gpu.now.captures = True
    assert not on_gpu.make(8)()[1].any() and not scratch._STORES


def test_counters_of_the_interpreter_are_new_in_each_call(monkeypatch):
    """A kernel that is interrupted there leaves a count behind."""
    monkeypatch.setattr(scratch, "_SCRATCH", {})
    memory = Scratch([torch.empty(7)], [torch.empty(1, 8, dtype=torch.int32)])
    memory()[1].fill_(3)
    assert not memory()[1].any()
