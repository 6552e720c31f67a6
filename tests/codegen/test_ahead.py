"""Kernels that are compiled side by side: nvcc and the GPU are left out."""

import io
import logging
import os
import threading
import time

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, arch, meta_tensor
from attention_engine.codegen import ahead, cache
from attention_engine.compiler import compile_all
from attention_engine.library import OnlineSoftmax, causal
from attention_engine.runtime.attentions import ATTENTIONS
from tests.codegen.test_cache import FITS

H100 = arch.H100()


@pytest.fixture
def compiled(monkeypatch):
    """The builders whose kernels are compiled, and by which threads; nothing is."""
    found: dict[str, threading.Thread] = {}

    def find_or_compile(key, compile_now):
        found[key.builder] = threading.current_thread()
        return FITS

    monkeypatch.setattr(cache, "find_or_compile", find_or_compile)
    monkeypatch.setattr(cache, "is_kept", lambda key: False)
    return found


def test_works_run_side_by_side():
    meet = threading.Barrier(2, timeout=30)
    works = [ahead.begin(meet.wait) for _ in range(2)]
    assert sorted(work.result() for work in works) == [0, 1]


def test_what_making_raised_is_raised_where_it_is_asked_for():
    def fail():
        raise RuntimeError("nvcc failed")

    work = ahead.begin(fail)
    with pytest.raises(RuntimeError, match="nvcc failed"):
        work.result()


def test_a_forked_process_makes_it_itself():
    threads: list[threading.Thread] = []
    work = ahead.begin(lambda: threads.append(threading.current_thread()))
    work.result()
    work.process += 1  # as a child sees it, whose parent's threads are not there
    work.result()
    assert threads[1] is threading.current_thread() and threads[0] is not threads[1]


def test_who_came_first_to_be_traced_is_done_first():
    held, order = threading.Event(), []

    def first():
        with ahead.tracing:
            held.set()
            with ahead.tracing:  # again, by the same thread
                order.append("first")
            time.sleep(0.1)
            order.append("first's end")

    def second():
        held.wait(30)
        with ahead.tracing:
            order.append("second")

    works = [ahead.begin(first), ahead.begin(second)]
    for work in works:
        work.result()
    assert order == ["first", "first's end", "second"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_what_its_parent_traces():
    held, enough = threading.Event(), threading.Event()

    def hold():
        with ahead.tracing:
            held.set()
            enough.wait(30)

    work = ahead.begin(hold)
    held.wait(30)
    child = os.fork()
    if not child:
        with ahead.tracing:
            os._exit(7)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    enough.set()
    work.result()
    assert ended == 7


def test_a_log_gets_one_line_for_kernels_compiled_together(caplog):
    gate = threading.Event()
    with caplog.at_level(logging.INFO, "attention_engine"):
        works = [ahead.begin(lambda: gate.wait(30)) for _ in range(3)]
        gate.set()
        assert all(work.result() for work in works)
    assert [r.message[:18] for r in caplog.records] == ["compiled 3 kernels"]


def test_a_terminal_shows_how_many_are_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    gate = threading.Event()
    works = [ahead.begin(lambda: gate.wait(30)) for _ in range(2)]
    gate.set()
    assert [work.result() for work in works] == [True, True]
    shown = terminal.getvalue()
    assert "compiling kernels: 0/2" in shown and "compiling kernels: 1/2" in shown


def called(engine, *given):
    """The attention that a call of these tensors runs, its backward pass's kernels begun."""
    types = tuple((name, kind) for name, kind in engine._types.items())
    key = engine._key("tilelang", types, engine.ORDINARY, ())
    ATTENTIONS[key].begin_backward(given)
    return ATTENTIONS[key]


def test_the_backward_pass_is_begun_with_a_forward_pass_that_wants_gradients(compiled):
    metas = [meta_tensor(1, 4, 256, 64, dtype=torch.float16)] * 3
    engine = AttentionEngine(metas, CustomIO({}), None, causal, OnlineSoftmax(), device=H100)
    q = torch.empty(1, 256, 4, 64, dtype=torch.float16, requires_grad=True)
    program_kernels = called(engine, q, q, q).program_kernels
    kernels = program_kernels.kernels(q, q, q, [], (), True)
    compile_all([*kernels.of_forward.values(), *kernels.of_backward.values()])
    assert {name.rsplit(".", 1)[1] for name in compiled} == {"forward", "preprocess", "backward", "postprocess"}
    assert all(thread is not threading.current_thread() for thread in compiled.values())


def test_of_the_backward_pass_the_kernel_that_takes_longest_is_begun_first(compiled, monkeypatch):
    begun, begin = [], ahead.begin
    monkeypatch.setattr(ahead, "begin", lambda make: begun.append(make.__self__.builder) or begin(make))
    metas = [meta_tensor(1, 4, 512, 64, dtype=torch.float16)] * 3
    engine = AttentionEngine(metas, CustomIO({}), None, causal, OnlineSoftmax(), device=H100)
    q = torch.empty(1, 512, 4, 64, dtype=torch.float16, requires_grad=True)
    called(engine, q, q, q)
    assert [name.rsplit(".", 1)[1] for name in begun] == ["forward", "backward", "preprocess", "postprocess"]


def test_the_backward_pass_of_a_linear_attention_is_begun_too(compiled):
    engine = LinearAttentionEngine([meta_tensor(1, 2, 256, 64, dtype=torch.float16)] * 3, device=H100)
    q = torch.empty(1, 256, 2, 64, dtype=torch.float16, requires_grad=True)
    decay = torch.zeros(1, 256, 2, requires_grad=True)
    key = engine._key("tilelang", (), 3, ())
    ATTENTIONS[key].begin_backward((q, q, q, decay, None))
    program_kernels = ATTENTIONS[key].program_kernels
    kernels = program_kernels.kernels(q, q, q, decay, [], "backward", frozenset({"decay"}))
    compile_all(kernels.of_backward(1, 256, frozenset({"decay"})).values())
    assert any("gradients" in name for name in compiled)
