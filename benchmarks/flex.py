"""flex_attention beside torch's FlexAttention: five masks and scores, their numbers first, then forward and backward.

python -m benchmarks.flex                ours and torch's, case by case, on a GPU
python -m benchmarks.flex --who torch    one of them
python -m benchmarks.flex --host         the host time alone, with functions made anew; on a CPU without launches
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine
from attention_engine.flex import create_block_mask, flex_attention
from attention_engine.flex.engines import FINDER
from benchmarks.host import CALLS, ROUNDS, host_us, without_launches

B, H, S, D = 2, 16, 8192, 128
Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keys up to the query."""
    return q_idx >= kv_idx


def cases(device: str) -> dict[str, Mods]:
    """The functions of each case, as people write them for either."""
    slopes = torch.exp2(-torch.arange(1, H + 1, device=device) * 8.0 / H)
    ends = torch.tensor([700, 2100, 2500, 5200, 7000], device=device)
    documents = torch.searchsorted(ends, torch.arange(S, device=device), right=True).int()
    return {
        "causal": (None, causal),
        "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), causal),
        "alibi": (lambda s, b, h, q, k: s - slopes[h] * (q - k), causal),
        "window 1024": (None, lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        "documents": (None, lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])),
    }


def ours(mods: Mods, device: str) -> Callable[..., Tensor]:
    """The call by this package."""
    score, mask = mods
    blocks = create_block_mask(mask, None, None, S, S)
    return lambda q, k, v: flex_attention(q, k, v, score, blocks)


def torchs(mods: Mods, device: str) -> Callable[..., Tensor]:
    """The call by torch.compile(flex_attention), its Triton kernels."""
    from torch.nn.attention import flex_attention as flex

    score, mask = mods
    blocks: Any = torch.compile(flex.create_block_mask, dynamic=False)(mask, None, None, S, S, device=device)
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score, blocks)


def inputs(device: str) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    make = torch.Generator(device=device).manual_seed(0)
    given = [torch.randn(B, H, S, D, generator=make, device=device, dtype=torch.bfloat16) for _ in range(4)]
    return [t.requires_grad_(n < 3) for n, t in enumerate(given)]


def off(call: Callable[..., Tensor], mods: Mods, device: str, head: int = 5) -> float:
    """The largest of the mean errors of output and gradients, over eager bfloat16's: of one head, by float64."""
    score, mask = mods
    *qkv, arriving = inputs(device)
    index = torch.arange(S, device=device)
    at = torch.zeros_like(index[:1]), torch.full_like(index[:1], head), index[:, None], index

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = (q @ k.mT) * D**-0.5
        x = x if score is None else score(x, *at)
        x = x if mask is None else x.masked_fill(~mask(*at), -math.inf)
        return x.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(v.dtype) @ v

    def of_head(dtype: torch.dtype) -> list[Tensor]:
        given = [t[0, head].detach().to(dtype).requires_grad_() for t in qkv]
        o = plain(*given)
        return [o.detach(), *torch.autograd.grad(o, given, arriving[0, head].to(o.dtype))]

    o = call(*qkv)
    found = [t[0, head] for t in (o.detach(), *torch.autograd.grad(o, qkv, arriving))]
    exact, eager = of_head(torch.float64), of_head(torch.bfloat16)
    return max(float((f - x).abs().mean() / (e - x).abs().mean()) for f, e, x in zip(found, eager, exact, strict=True))


def ms(run: Callable[[], object], rounds: int = 12) -> float:
    """The median, with the cache of the GPU cold."""
    cold = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times = []
    for n in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cold.zero_()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end)] if n >= 3 else []
    return sorted(times)[rounds // 2]


MAKERS = {"ours": ours, "torch": torchs}


def compile_case(who: str, name: str) -> None:
    """Compiles what a case runs, forward and backward, and keeps it on disk."""
    *qkv, arriving = inputs("cuda")
    torch.autograd.grad(MAKERS[who](cases("cuda")[name], "cuda")(*qkv), qkv, arriving)
    torch.cuda.synchronize()


def begin_compiling(who: Sequence[str], names: Sequence[str]) -> dict[tuple[str, str], subprocess.Popen[bytes]]:
    """A process for each case, which share the compilers' folders with this one."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor_")
    command = [sys.executable, "-m", "benchmarks.flex", "--compile"]
    return {(w, n): subprocess.Popen([*command, "--who", w, n]) for n in names for w in who}


def measure(who: Sequence[str], names: Sequence[str]) -> None:
    """Prints a row a case, compiled, compared, then timed, and how many times the other's time torch's is."""
    known, (*qkv, arriving) = cases("cuda"), inputs("cuda")
    names = names or list(known)
    compiling, times = begin_compiling(who, names), {}
    for compiles in compiling.values():  # all of them: what compiles would slow what is timed
        compiles.wait()
    for name in names:
        for each in who:
            began, call = time.perf_counter(), MAKERS[each](known[name], "cuda")
            with torch.no_grad():
                call(*qkv)
                forward = ms(lambda: call(*qkv))  # noqa: B023
            o = call(*qkv)
            backward = ms(lambda: torch.autograd.grad(o, qkv, arriving, retain_graph=True))  # noqa: B023
            times[each] = forward, backward
            row = f"{each:6} {name:12} {forward:7.3f} ms, {backward:7.3f} ms"
            print(f"{row} ({time.perf_counter() - began:.0f} s)", flush=True)
        if len(times) > 1:
            ratios = [b / a for a, b in zip(times["ours"], times["torch"], strict=True)]
            print(f"ratio  {name:12} {ratios[0]:7.2f}   , {ratios[1]:7.2f}", flush=True)
    for name in names:
        for each in who:
            error = off(MAKERS[each](known[name], "cuda"), known[name], "cuda")
            print(f"{each:6} {name:12} error {error:5.2f} of eager's", flush=True)


def host(device: str) -> None:
    """Microseconds of Python of calls whose functions are made anew, in inference."""
    if device == "cpu":
        torch.set_num_threads(1)
        without_launches()
    options = None if device == "cuda" else {"backend": "interpret"}
    q, k, v = (torch.randn(1, 8, 128, 64, device=device, dtype=torch.float16) for _ in range(3))
    slopes = torch.rand(8, device=device)
    documents = torch.zeros(128, dtype=torch.int32, device=device)
    engine = AttentionEngine(None, mask_mod=causal, layout="bhsd", backend="auto" if options is None else "interpret")

    def plain() -> None:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128)
        flex_attention(q, k, v, None, mask, kernel_options=options)

    def scored() -> None:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128)
        flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), mask, kernel_options=options)

    def packed() -> None:
        mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 128, 128)
        flex_attention(q, k, v, None, mask, kernel_options=options)

    before = FINDER._built.cache_info().misses
    print("host time of a call, us" + (" (launches left out)" if device == "cpu" else ""))
    calls = {"an engine": lambda: engine(q, k, v), "a mask made anew": plain, "a score and a mask made anew": scored,
             "documents, made anew": packed}  # fmt: skip
    for name, call in calls.items():
        call()
        print(f"{name:32} {host_us(call):8.1f}")
    made = FINDER._built.cache_info().misses - before
    print(f"engines made for {3 * (ROUNDS + 1) * CALLS} calls of three kinds: {made}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--who", choices=["ours", "torch"])
    parser.add_argument("names", nargs="*", help="cases; all where none is named")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile the cases, and end")
    asked = parser.parse_args()
    if asked.host:
        host("cuda" if torch.cuda.is_available() else "cpu")
        return
    who = [asked.who] if asked.who else ["ours", "torch"]
    if asked.compile:
        for each in who:
            for name in asked.names:
                compile_case(each, name)
        return
    measure(who, asked.names)


if __name__ == "__main__":
    main()
