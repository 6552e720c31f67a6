"""Compiles all kernels that draws of the soak may need, for a GPU that need not be here."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from functools import cached_property
from typing import Any

import pytest
import torch

from attention_engine import arch, compiler
from attention_engine.plan.few_key_heads import may_have_a_head_each
from tests import cached_cases
from tests.gpu.compile import silence
from tests.gpu.soak.cached import Cached
from tests.gpu.soak.check import inputs_of, linear_inputs, linear_results, softmax_results
from tests.gpu.soak.draws import MOST_BATCHES, Draw
from tests.gpu.soak.programs import PROGRAMS

# Which kernels run depends on whether a bias's rows are whole 16 bytes, and for linear attention on the batch.
SHAPES = ((1, 256), (1, 131))
LINEAR_SHAPES = tuple((batch, 1024) for batch in range(1, MOST_BATCHES + 1))


def compile_one(place: int, device: str) -> tuple[int, float, list[str], str]:
    """The number, the seconds, the digests of its kernels and what went wrong, for one program."""
    started, program = time.perf_counter(), PROGRAMS[place]
    made: dict[str, None] = {}
    fault = ""
    with pytest.MonkeyPatch.context() as monkeypatch:
        silence(monkeypatch, getattr(arch, device)())
        _note(monkeypatch, made)
        try:
            if isinstance(program, Cached):
                _launch_cached(program)
                return place, time.perf_counter() - started, list(made), fault
            monkeypatch.setattr(compiler, "suits_a_head_each", lambda *_: False)
            for batch, length in LINEAR_SHAPES if program.linear else SHAPES:
                _launch(Draw(place, batch, length, packing="uneven", documents=3))
            monkeypatch.setattr(compiler, "suits_a_head_each", lambda plan, *_: may_have_a_head_each(plan))
            for batch, length in () if program.linear else SHAPES:  # other lengths: those above have their kernels
                _launch(Draw(place, batch, length + 16, packing="uneven", documents=3))
        except Exception:  # noqa: BLE001 - the other programs are compiled all the same
            fault = traceback.format_exc()
    return place, time.perf_counter() - started, list(made), fault


def _launch(draw: Draw) -> None:
    if draw.of.linear:
        linear_results(draw.of, linear_inputs(draw, "cpu"), "tilelang")
    else:
        softmax_results(draw.of, inputs_of(draw, "cpu"), "tilelang")


def _launch_cached(program: Cached) -> None:
    """Whole rows; parts that the last of their blocks joins, and those that a launch of its own does."""
    queries = cached_cases.DRAFTS if program.case == "tree" else 1
    for count, parts in ((queries, 1), (queries, 2), (33 if queries == 1 else queries, 40)):
        shape = cached_cases.Shape((100,), count, program.heads, program.kv_heads, program.dim, program.page)
        given = cached_cases.inputs(program.case, shape, program.dtype)
        cached_cases.caller(program.case, shape, given, "tilelang", parts)()


def _note(monkeypatch: pytest.MonkeyPatch, made: dict[str, None]) -> None:
    compile_now = compiler.Kernel.__dict__["compiled"].func

    def noted(kernel: Any) -> Any:
        found = compile_now(kernel)
        made[kernel._key.digest] = None
        return found

    noting = cached_property(noted)
    noting.__set_name__(compiler.Kernel, "compiled")
    monkeypatch.setattr(compiler.Kernel, "compiled", noting)


def compile_all(device: str, processes: int, only: str = "") -> int:
    """Compiles, tells and counts; 1 where a program's kernels can't be compiled."""
    started, kernels, failed = time.perf_counter(), set(), 0
    places = [n for n, program in enumerate(PROGRAMS) if only in program.name]
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_one_thread, maxtasksperchild=4) as pool:
        for place, seconds, made, fault in pool.imap_unordered(_compile, [(n, device) for n in places]):
            kernels.update(made)
            failed += bool(fault)
            said = f"FAILED\n{fault}" if fault else f"{len(made)} kernels"
            print(f"{seconds:6.1f} s  {PROGRAMS[place].name}: {said}", flush=True)
    spent = time.perf_counter() - started
    print(f"{len(kernels)} kernels of {len(places)} programs for {device} in {spent:.0f} s, {failed} programs failed")
    print(f"in {os.environ.get('ATTENTION_ENGINE_CACHE_DIR', 'the default cache folder')}")
    return int(failed > 0)


def _compile(asked: tuple[int, str]) -> tuple[int, float, list[str], str]:
    return compile_one(*asked)


def _one_thread() -> None:
    torch.set_num_threads(1)
