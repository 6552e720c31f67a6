"""What the steps share: run a kernel on this machine's GPU, or tile by tile on the CPU, beside torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attention_engine import arch
from attention_engine.codegen.compile import compile_kernel
from attention_engine.codegen.interpreter import Interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cache
def compiled(kernel: Callable[..., Any], *sizes: int) -> Callable[..., None]:
    """The kernel of these sizes, as a function that writes its last argument; compiled once."""
    if DEVICE == "cuda":
        return compile_kernel(kernel(*sizes), arch.detect(torch.device("cuda")))
    return Interpreter(kernel(*sizes))


def random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """Normal numbers on the device; the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def compare(
    name: str, ours: Callable[..., Tensor], torchs: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[float, float]:
    """Mean errors against float64, of our kernel and of torch in the inputs' dtype; printed, with times on a GPU."""
    exact = torchs(*(t.double() for t in inputs))
    errors = [(f(*inputs).double() - exact).abs().mean().item() for f in (ours, torchs)]
    print(f"{name}: mean error {errors[0]:.2e}, torch's {errors[1]:.2e}, on {DEVICE}")
    if DEVICE == "cuda":
        times = [_microseconds(f, inputs) for f in (ours, torchs)]
        print(f"{name}: {times[0]:.1f} us, torch's {times[1]:.1f} us")
    return errors[0], errors[1]


def _microseconds(function: Callable[..., Tensor], inputs: Sequence[Tensor], repeats: int = 20) -> float:
    for _ in range(5):
        function(*inputs)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(*inputs)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]
