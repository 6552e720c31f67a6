"""Host time of a call: how long Python and the driver are busy before a kernel is on its way.

    python -m benchmarks.host

On a GPU: the call without and with gradients, forward and backward together, the bare launch of the forward kernel, a
call with a cache, and torch's scaled_dot_product_attention on the same tensors. Without one: the same calls with the
launches left out, which is what this package itself takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_engine import AttentionEngine, compiler, meta_tensor
from attention_engine.library import OnlineSoftmax, causal, scale
from attention_engine.runtime import op, pointers
from attention_engine.runtime.inputs import signature
from attention_engine.runtime.run import values_of

BATCH, LENGTH, HEADS, DIM = 1, 128, 8, 64  # short: the device is done before the host asks again
CALLS, ROUNDS = 200, 25


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of host time that one call takes: the median of rounds of many, the device idle between them."""
    found = []
    for _ in range(ROUNDS + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(found[1:])


def calls(backend: str, device: str) -> dict[str, Callable[[], object]]:
    """What is timed, by name. The engine has run every one of them once."""
    meta = meta_tensor(None, HEADS, None, DIM, dtype=torch.float16)
    engine = AttentionEngine((meta,) * 3, None, scale(DIM**-0.5), causal, OnlineSoftmax(), backend=backend)
    q, k, v = (torch.randn(BATCH, LENGTH, HEADS, DIM, dtype=torch.float16, device=device) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    d_o = torch.randn_like(q)

    def train(forward: Callable[..., Tensor], given: list[Tensor], arriving: Tensor) -> object:
        return torch.autograd.grad(forward(*given), given, arriving)

    def sdpa(*given: Tensor) -> Tensor:
        return scaled_dot_product_attention(*given, is_causal=True)

    train(engine, leaves, d_o)
    found: dict[str, Callable[[], object]] = {
        "a call": lambda: engine(q, k, v),
        "a call with gradients": lambda: engine(*leaves),
        "a call and its backward": lambda: train(engine, leaves, d_o),
        "the launch alone": bare_launch(engine, q, k, v),
        **cached_calls(engine, q[:, :1].clone(), k, v),
    }
    if device == "cuda":
        turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
        turned_leaves = [t.clone().requires_grad_() for t in turned]
        found["SDPA, a call"] = lambda: sdpa(*turned)
        found["SDPA, a call with gradients"] = lambda: sdpa(*turned_leaves)
        found["SDPA, a call and its backward"] = lambda: train(sdpa, turned_leaves, d_o.transpose(1, 2))
    return found


def cached_calls(engine: AttentionEngine, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """A query of each request against a cache, in two parts: two launches."""
    lengths, out = torch.full((len(q),), k.shape[1], dtype=torch.int32, device=q.device), torch.empty_like(q)
    call = partial(engine.with_cache, q, k, v, kv_lengths=lengths, num_splits=2)
    return {"a call with a cache": call, "the same, out given": partial(call, out=out)}


def bare_launch(engine: AttentionEngine, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """The forward kernel on arguments that are ready."""
    program_kernels = op.ATTENTIONS[engine._seen[None, signature(q, k, v)].key].program_kernels
    assert program_kernels is not None
    bound = program_kernels.bound(q, k, v, ())
    memory = bound.memory(q, k, v, ())
    bound.ready(memory)
    launch = bound.kernels.plan.forward
    arguments, run = values_of(memory, [a.place for a in launch.arguments]), bound.kernels.forward.run
    return lambda: run(*arguments)


def without_launches() -> None:
    """Kernels of this process do nothing."""
    silent = cached_property(lambda kernel: lambda *_: None)
    silent.__set_name__(compiler.Kernel, "run")
    compiler.Kernel.run = silent  # type: ignore[assignment]
    pointers.takes_addresses = lambda _: True  # as compiled kernels do


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
        without_launches()
    where = torch.cuda.get_device_name() if on_gpu else "no GPU: launches left out"
    print(f"host time, us ({where})")
    for name, call in calls("tilelang" if on_gpu else "interpret", "cuda" if on_gpu else "cpu").items():
        print(f"{name:32} {host_us(call):8.1f}")


if __name__ == "__main__":
    main()
