"""The numbers and the time of one candidate: numbers first, and no time for wrong ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FLUSHED = 256 << 20  # bytes written between calls: several L2 caches, and time for the host to be ahead
REPEATS = (5, 40)  # fewest and most timed calls
SECONDS = 0.4  # spent on timed calls, about
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-3}
TF32_TOLERANCE = 1e-2


def worst_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest, over the tensors, of mean |difference| over mean |expected|; infinite where a number is not one."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        a, b = a.detach().double(), b.detach().double().to(a.device)
        size = b.abs().mean().item() if b.numel() else 0.0
        off = (a - b).abs().mean().item() if b.numel() else 0.0
        if not (off == off and off != float("inf")):
            return float("inf")
        worst = max(worst, off / size if size else float(off > 0))
    return worst


def median_time_us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one call: the median, on a GPU with the L2 cache emptied before each."""
    return _gpu_time(call, device) if device.type == "cuda" else _host_time(call)


def _host_time(call: Callable[[], object]) -> float:
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < REPEATS[1] and time.perf_counter() - began < SECONDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _gpu_time(call: Callable[[], object], device: torch.device) -> float:
    """By CUDA events around a replayed graph, so that the host's work between launches doesn't count."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    flushed = torch.empty(FLUSHED, dtype=torch.int8, device=device)
    once = _timed(graph, flushed, 2)[-1]
    repeats = int(min(max(SECONDS / max(once * 1e-6, 1e-9), REPEATS[0]), REPEATS[1]))
    return statistics.median(_timed(graph, flushed, repeats))


def _timed(graph: torch.cuda.CUDAGraph, flushed: Tensor, repeats: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        flushed.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]
