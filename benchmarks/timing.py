"""How long a call takes: on the device, with a cold L2 cache and the host ahead; and on the host. And where it ran."""

from __future__ import annotations

import functools
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

Call = Callable[[], object]
AHEAD_CYCLES = 2_000_000  # the device sleeps about a millisecond, so that launches wait for it and not it for them


@dataclass(frozen=True)
class Timing:
    """Times of one call: the device's median and 10th and 90th percentile, and the host's median, in microseconds."""

    device_us: float
    low_us: float
    high_us: float
    host_us: float


class Clock:
    """Times calls on the current CUDA device.

    clean: the L2 cache is then full of what was read, not of what was written. Lines that were written go to memory
    when others take their place, so that a call that only reads moves up to an L2 cache's size more than it asks for.
    """

    def __init__(self, clean: bool = False) -> None:
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.clean = clean
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.int8, device="cuda")
        self._read = torch.zeros(l2_bytes, dtype=torch.float32, device="cuda") if clean else None

    def once(self, call: Call) -> tuple[float, float]:
        """Microseconds on the device and on the host of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        if self._read is not None:
            self._read.amax()
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        began = time.perf_counter()
        call()
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3, host * 1e6

    def times(self, calls: Mapping[str, Call], rounds: int, warm_up: int = 3) -> dict[str, Timing]:
        """Each call's timing. Calls take turns, so that a drifting clock meets all alike. Each round has an order of
        its own, the same in every run, for what ran before a call leaves the card warmer or cooler: in turns that went
        there and back one kernel under six names had times 6 % apart."""
        for call in calls.values():
            for _ in range(warm_up):
                call()
        torch.cuda.synchronize()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        draw = random.Random(0)
        for _ in range(rounds):
            for name in draw.sample(list(calls), len(calls)):
                found[name].append(self.once(calls[name]))
        return {name: summarise(samples) for name, samples in found.items()}


def summarise(samples: list[tuple[float, float]]) -> Timing:
    """The timing of (device, host) samples."""
    device = sorted(d for d, _ in samples)
    last = len(device) - 1
    low, high = device[round(0.1 * last)], device[round(0.9 * last)]
    return Timing(statistics.median(device), low, high, statistics.median(h for _, h in samples))


@functools.cache
def clock() -> Clock:
    """The clock of this process."""
    return Clock()


def milliseconds(call: Call, rounds: int = 15) -> float:
    """The device's median time of one call."""
    return clock().times({"": call}, rounds)[""].device_us * 1e-3


def environment(*packages: str) -> dict[str, str]:
    """The device, its driver and every version, of these packages too where they are installed; the commit."""
    found = {
        "device": torch.cuda.get_device_name(), "date": date.today().isoformat(),
        "python": platform.python_version(), "torch": torch.__version__,
        "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version()),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _output("git", "rev-parse", "HEAD"),
    }  # fmt: skip
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


@dataclass(frozen=True)
class Ceilings:
    """What this device gave in this run: a large matrix product, TFLOP/s, and a large copy (read + write), GB/s.

    highest_tflops: the same product of zeros. A GPU lowers its clock to keep its power, and zeros take less of it, as
    do the weights of ReLU, which may be faster than a product of random numbers.
    """

    matmul_tflops: float
    copy_gbs: float
    highest_tflops: float


def measure_ceilings(clock: Clock, dtype: torch.dtype, side: int = 8192) -> Ceilings:
    """The best of the device on plain tasks: torch's product of (side, side) matrices, and a copy of 1 GiB."""
    a, b = (torch.randn(side, side, device="cuda", dtype=dtype) for _ in range(2))
    zeros = torch.zeros_like(a)
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    calls = {"matmul": lambda: a @ b, "zeros": lambda: zeros @ zeros, "copy": lambda: target.copy_(source)}
    low = {name: timing.low_us for name, timing in clock.times(calls, rounds=9).items()}
    matmul, highest = (2 * side**3 / low[name] * 1e-6 for name in ("matmul", "zeros"))
    return Ceilings(matmul, 2 * source.numel() / low["copy"] * 1e-3, max(matmul, highest))


def peak_bytes(call: Call) -> int:
    """Memory that a call takes at its highest, beyond what stood before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
