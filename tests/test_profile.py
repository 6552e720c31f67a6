"""What a profile of the benchmarks reads and says, where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention_engine import arch
from attention_engine.codegen.compile import Resources, find_nvcc
from attention_engine.tuner.cases import CASES, Case
from benchmarks import profile

CASE = CASES["mha-64.softmax.causal.512"]
COMPUTE, CLOCK = "sm__throughput.avg.pct_of_peak_sustained_elapsed", "gpc__cycles_elapsed.avg.per_second"
REPORT = f"""\
==PROF== Connected to process 7
a line of the program
"ID","Process ID","Kernel Name","{COMPUTE}","{CLOCK}"
"","","","%","hz"
"0","7","forward_kernel(CUtensorMap_st, float *)","71.60","1,700,000,000"
"1","7","backward_kernel","66","1740000000"
"""


def test_counters_are_read_by_kernel():
    found = profile.parse_counters(REPORT)
    assert found["forward_kernel"] == {COMPUTE: 71.6, CLOCK: 1.7e9}
    assert found["backward_kernel"][COMPUTE] == 66
    assert profile.parse_counters("==ERROR== ERR_NVGPUCTRPERM") == {}


def test_a_line_says_what_a_kernel_takes():
    kernel = profile.KernelProfile("forward_kernel", Resources(168, 8, 4, 164864), 12.5, {COMPUTE: 71.6})
    said = " ".join(kernel.line().split())
    assert said == "forward_kernel 12.5 us 168 registers 12 B spilled 164864 B shared compute % 71.6"
    assert profile.KernelProfile("another", microseconds=1.0).line().split() == ["another", "1.0", "us"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "ncu is not on the PATH"),
        (subprocess.CompletedProcess([], 1, "==ERROR== ERR_NVGPUCTRPERM: not allowed\n"), "==ERROR== ERR_NVGPU"),
        (subprocess.CompletedProcess([], 9, ""), "ncu ended with 9 and counted nothing"),
        (subprocess.TimeoutExpired("ncu", 1), "ncu took more than"),
    ],
)
def test_missing_counters_have_a_reason(monkeypatch, found, said):
    def run(*args, **options):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(profile.shutil, "which", lambda name: found and "ncu")
    monkeypatch.setattr(profile.subprocess, "run", run)
    reason = profile.counters_of(CASE, torch.float16)
    assert isinstance(reason, str) and reason.startswith(said)


def test_ncu_runs_this_very_case(monkeypatch):
    seen: list[str] = []

    def run(command, **options):
        seen.extend(command)
        return subprocess.CompletedProcess(command, 0, REPORT)

    monkeypatch.setattr(profile.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(profile.subprocess, "run", run)
    assert set(profile.counters_of(CASE, torch.bfloat16)) == {"forward_kernel", "backward_kernel"}
    assert seen[-3:] == [CASE.name, "--dtype", "bfloat16"] and seen[seen.index("--clock-control") + 1] == "none"


def test_proton_starts_and_ends(monkeypatch):
    seen = []
    fake = SimpleNamespace(start=lambda path: seen.append(path), finalize=lambda: seen.append("end"))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(profiler=fake))
    monkeypatch.setitem(sys.modules, "triton.profiler", fake)
    with profile.proton(None):
        assert seen == []
    with pytest.raises(RuntimeError), profile.proton(Path("trace")):
        raise RuntimeError("a case failed")
    assert seen == ["trace", "end"]


@pytest.mark.slow  # tests/codegen/test_compile.py reads what nvcc says of one kernel
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_an_engine_says_what_its_kernels_take(monkeypatch):
    case = Case("mha-64", "softmax", "causal", 512)
    engine = profile.engine_of(case, torch.float16)
    monkeypatch.setattr("attention_engine.runtime.shown.gpu_to_compile_for", lambda engine, device: arch.H100())
    both = engine._all_kernels
    quick = ("preprocess", "postprocess")  # to compile
    monkeypatch.setattr(engine, "_all_kernels", lambda *a, **kw: {name: both(*a, **kw)[name] for name in quick})
    found = profile.resources_of(engine)
    assert set(found) == {"backward_preprocess_kernel", "backward_postprocess_kernel"}
    assert all(not r.spills and 0 < r.registers <= 255 for r in found.values())
