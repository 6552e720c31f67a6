"""What our kernels take on a case: registers, spills, shared memory, time, bandwidth, and Nsight Compute's counters.

    python -m benchmarks.run --case 'mha-128.softmax.full.8192' --peer attention_engine --profile --proton trace

Registers, spills and shared memory are ptxas's. Times are torch.profiler's. Counters come from `ncu`, which runs this
module on the case in a process of its own; where there is no `ncu`, or it may not read counters, a line says so. Clocks
are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attention_engine import AttentionEngine
from attention_engine.codegen.compile import Resources
from attention_engine.tuner.cases import Case, find
from benchmarks.cases import make_inputs, moved_bytes
from benchmarks.timing import Call

COUNTERS = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute %",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "lts__t_sector_hit_rate.pct": "L2 hits %",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots %",
    "gpc__cycles_elapsed.avg.per_second": "clock Hz",
}
SECONDS = 120  # for ncu: it runs each kernel several times


@dataclass
class KernelProfile:
    """One kernel of one call; microseconds is of all its launches."""

    name: str
    resources: Resources | None = None
    microseconds: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """The kernel as a line of a table."""
        r = self.resources
        spilled = r.spill_stores + r.spill_loads if r else 0
        taken = f"{r.registers:4} registers  {spilled:3} B spilled  {r.shared_bytes:6} B shared" if r else ""
        counted = "  ".join(f"{COUNTERS[n]} {value:.3g}" for n, value in self.counters.items())
        return f"    {self.name:32} {self.microseconds:9.1f} us  {taken}  {counted}".rstrip()


def engine_of(case: Case, dtype: torch.dtype) -> AttentionEngine:
    """The engine that the benchmark times."""
    return AttentionEngine(case.metas(str(dtype).removeprefix("torch.")), **case.options())


def resources_of(engine: AttentionEngine) -> dict[str, Resources]:
    """What each kernel of both directions takes, by its name on the GPU. Needs nvcc; takes seconds a kernel."""
    return {f"{name}_kernel": found for name, found in engine.resources().items()}


def calls_of(case: Case, dtype: torch.dtype) -> dict[str, Call]:
    """Forward and backward of the case on the current GPU."""
    inputs, engine = make_inputs(case, dtype, "cuda"), engine_of(case, dtype)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    output = engine(*leaves, **inputs.custom)
    return {
        "forward": lambda: engine(*leaves, **inputs.custom),
        "backward": lambda: torch.autograd.grad(output, leaves, inputs.do, retain_graph=True),
    }


def times_of(call: Call) -> dict[str, float]:
    """Microseconds of each kernel in one call, by torch.profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    call()
    with trace(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return {short_name(e.key): e.self_device_time_total for e in found.key_averages() if e.self_device_time_total}


def short_name(function: str) -> str:
    """A kernel's name without its parameters."""
    return re.sub(r"\(.*", "", function)


def parse_counters(report: str) -> dict[str, dict[str, float]]:
    """Counters of each kernel from `ncu --csv --page raw`: a header, a row of units, and a row for each launch."""
    start = report.find('"ID"')
    if start < 0:
        return {}
    _, *launches = csv.DictReader(io.StringIO(report[start:]))
    found = {}
    for launch in launches:
        values = {n: launch[n].replace(",", "") for n in COUNTERS if launch.get(n)}
        found[short_name(launch["Kernel Name"])] = {n: float(v) for n, v in values.items()}
    return found


def counters_of(case: Case, dtype: torch.dtype) -> dict[str, dict[str, float]] | str:
    """Counters of each kernel of both directions, or why there are none."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu is not on the PATH"
    options = [
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--page",
        "raw",
        "--csv",
        "--print-units",
        "base",
    ]
    this = [sys.executable, "-m", "benchmarks.profile", case.name, "--dtype", str(dtype).removeprefix("torch.")]
    command = [ncu, *options, "--metrics", ",".join(COUNTERS), *this]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"ncu took more than {SECONDS} s"
    found = parse_counters(done.stdout)
    if found:
        return found
    errors = [line for line in done.stdout.splitlines() if "==ERROR==" in line]
    return errors[0] if errors else f"ncu ended with {done.returncode} and counted nothing"


def profile(case: Case, dtype: torch.dtype) -> str:
    """The table of a case: a line for each kernel, by direction."""
    resources, counted = resources_of(engine_of(case, dtype)), counters_of(case, dtype)
    counters = {} if isinstance(counted, str) else counted
    lines = [f"  no counters: {counted}"] if isinstance(counted, str) else []
    for direction, call in calls_of(case, dtype).items():
        times = times_of(call)
        moved = moved_bytes(case, direction, dtype.itemsize) / max(sum(times.values()), 1e-9) * 1e-3
        lines.append(f"  {direction}: {moved:.0f} GB/s of what must move")
        lines += [KernelProfile(n, resources.get(n), us, counters.get(n, {})).line() for n, us in times.items()]
    return "\n".join(lines)


@contextmanager
def proton(path: Path | None) -> Any:
    """Writes what runs inside as a Proton profile, PATH.hatchet; needs triton. None: does nothing."""
    with ExitStack() as stack:
        if path is not None:
            import triton.profiler as profiler

            profiler.start(str(path))
            stack.callback(profiler.finalize)
        yield


def counted(calls: dict[str, Callable[[], object]]) -> None:
    """Runs each call once for ncu to count, warm."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(argv: Sequence[str] | None = None) -> None:
    """What ncu runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    args = parser.parse_args(argv)
    counted(calls_of(find(args.case)[0], getattr(torch, args.dtype)))


if __name__ == "__main__":
    main()
