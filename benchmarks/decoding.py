"""Decoding from a cache on a GPU: numbers against float64 first, then times beside a copy of as many bytes and SDPA.

python -m benchmarks.decoding            compiles (a process for each kernel), checks, times
python -m benchmarks.decoding --quick    the first half of the shapes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_engine import AttentionEngine, OnlineFunc, SymbolScalar, Var, library, meta_tensor
from attention_engine.arch import detect
from attention_engine.runtime.cached_shown import cached_kernels
from benchmarks.timing import Clock

DIM, DTYPE = 128, torch.bfloat16
ROUNDS = 15


class Entropic(OnlineFunc):
    """Softmax whose rows also return their entropy: a third state."""

    def __init__(self) -> None:
        states = {n: SymbolScalar(n, Var(v)) for n, v in {"m": "-inf", "r": "0", "t": "0"}.items()}
        super().__init__(states, {"entropy": SymbolScalar("entropy", Var("0.0"))})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):  # type: ignore[no-untyped-def]
        m, r, t = (online_rowscales[n] for n in "mrt")
        new = m.max(scores.get_reduce("max"))
        factor, weights = (m - new).exp(), (scores - new).exp()
        t = (t + (m - new).max(-1e4) * r) * factor + (weights * (scores - new)).get_reduce("sum")
        return weights, {"m": new, "r": r * factor + weights.get_reduce("sum"), "t": t}, factor

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):  # type: ignore[no-untyped-def]
        r, t = online_rowscales["r"], online_rowscales["t"]
        return o / r, {"entropy": r.log() - t / r}


@dataclass(frozen=True)
class Shape:
    """One call: requests, query and key heads, keys of each request, queries."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    queries: int = 1

    @property
    def bytes(self) -> int:
        """Of keys and values, which must be read."""
        return 2 * self.batch * self.keys * self.kv_heads * DIM * DTYPE.itemsize

    def __str__(self) -> str:
        more = f", {self.queries} queries" if self.queries > 1 else ""
        return f"B{self.batch} {self.heads}/{self.kv_heads} KV {self.keys}{more}"


SHAPES = (
    Shape(16, 32, 8, 8192), Shape(1, 32, 8, 32768), Shape(1, 32, 8, 8192), Shape(8, 64, 8, 8192),
    Shape(4, 32, 8, 16384, 4), Shape(1, 32, 8, 131072), Shape(32, 32, 8, 8192),
)  # fmt: skip
PROGRAMS = {"softmax": library.OnlineSoftmax, "sigmoid": library.OnlineSigmoid, "entropy": Entropic}
# Which programs and pages (0: none) are timed at each shape, and how many parts its rows have: what is compiled.
PLAN = {
    shape: [("softmax", 0), ("softmax", 64), *more]
    for shape, more in zip(
        SHAPES,
        ([("softmax", 16), ("sigmoid", 0), ("entropy", 0)], [("sigmoid", 0), ("entropy", 0)], [], [], [], [], []),
        strict=True,
    )
}
PLAN[SHAPES[3]] = [("softmax", 0)]


def engine_of(program: str) -> AttentionEngine:
    """The engine of a program."""
    return AttentionEngine(mask_mod=library.causal, online_func=PROGRAMS[program]())


def in_pages(cache: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Keys of all requests in pages, in a random order, and the table."""
    batch, keys, heads, dim = cache.shape
    order = torch.randperm(batch * keys // page, device=cache.device)
    store = torch.empty(len(order), page, heads, dim, device=cache.device, dtype=cache.dtype)
    store[order] = cache.view(len(order), page, heads, dim)
    return store, order.view(batch, -1).to(torch.int32)


def exact(program: str, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The output in float64, request by request."""
    found = []
    for b, length in enumerate(lengths.tolist()):
        of_q = q[b].double().unflatten(1, (k.shape[2], -1))
        of_k, of_v = (t[b, :length].double() for t in (k, v))
        scores = torch.einsum("qhgd,khd->hgqk", of_q, of_k) * DIM**-0.5
        place = torch.arange(length - q.shape[1], length, device=q.device)[:, None]
        keep = place >= torch.arange(length, device=q.device)
        if program == "sigmoid":
            weights = torch.where(keep, scores.sigmoid(), 0.0)
        else:
            weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
        found.append(torch.einsum("hgqk,khd->qhgd", weights, of_v).flatten(1, 2))
    return torch.stack(found)


def compile_one(number: int) -> None:
    """Compiles the kernel with this number, and keeps it on disk."""
    program, heads, kv_heads, page, name = kernels()[number]
    began = time.perf_counter()
    metas = (
        meta_tensor(None, heads, None, DIM, dtype=DTYPE),
        *(meta_tensor(None, kv_heads, None, DIM, dtype=DTYPE),) * 2,
    )
    engine = AttentionEngine(metas, mask_mod=library.causal, online_func=PROGRAMS[program]())
    kernel = cached_kernels(engine, detect(), page)[name]
    found = kernel.resources
    print(f"{program} {heads}/{kv_heads} page {page} {name}: {found.registers} registers, {found.spill_stores} B "
          f"spilled, {found.shared_bytes} B shared, {time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip


def kernels() -> list[tuple[str, int, int, int, str]]:
    """All kernels that the plan runs: program, heads, page and name."""
    found: dict[tuple[str, int, int, int, str], None] = {}
    for shape, cases in PLAN.items():
        whole = shape.batch * shape.kv_heads >= 128
        for program, page in cases:
            key = (program, shape.heads, shape.kv_heads)
            found |= {(*key, page, "decode"): None} if whole else {(*key, page, "decode parts"): None}
            if not whole:
                found[*key, 0, "combine"] = None
    return list(found)


def compile_all(seconds: float) -> None:
    """Compiles the kernels in processes of their own."""
    command = [sys.executable, "-m", "benchmarks.decoding", "--compile"]
    running = [subprocess.Popen([*command, str(n)]) for n in range(len(kernels()))]
    until = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def check(shape: Shape, program: str, page: int) -> None:
    """Uneven lengths, one of them 0, against float64; then a graph that replays with other lengths."""
    torch.manual_seed(1)
    batch, most = 5, 4096
    q = torch.randn(batch, shape.queries, shape.heads, DIM, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, batch, most, shape.kv_heads, DIM, device="cuda", dtype=DTYPE)
    engine, table = engine_of(program), None
    lengths = torch.tensor([4096, 1, 0, 2049, 777], device="cuda", dtype=torch.int32)
    dirty = torch.arange(most, device="cuda")[:, None, None] >= lengths[:, None, None, None]
    of_k, of_v = (t.masked_fill(dirty, torch.nan) for t in (k, v))
    if page:
        torch.manual_seed(2)
        of_k, table = in_pages(of_k, page)
        torch.manual_seed(2)
        of_v, _ = in_pages(of_v, page)
    parts = 1 if shape.batch * shape.kv_heads >= 128 else 7

    def call() -> Tensor:
        return engine.with_cache(q, of_k, of_v, kv_lengths=lengths, page_table=table, num_splits=parts)

    def error(found: Tensor) -> float:
        wanted = exact(program, q, k, v, lengths)
        return float((found.double() - wanted).norm() / wanted.norm())

    first = error(call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    lengths.copy_(torch.tensor([100, 1, 0, 2048, 700], device="cuda", dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    print(f"  {program} page {page}, {parts} parts: relative L2 {first:.1e}, replayed with other lengths "
          f"{error(output):.1e}", flush=True)  # fmt: skip


def calls_of(shape: Shape, cases: list[tuple[str, int]]) -> dict[str, Callable[[], object]]:
    """What is timed at a shape."""
    torch.manual_seed(0)
    q = torch.randn(shape.batch, shape.queries, shape.heads, DIM, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, shape.batch, shape.keys, shape.kv_heads, DIM, device="cuda", dtype=DTYPE)
    lengths = torch.full((shape.batch,), shape.keys, device="cuda", dtype=torch.int32)
    half = torch.empty(shape.bytes // 4, device="cuda", dtype=DTYPE)
    target, source = torch.empty_like(half), half.normal_()
    found: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for program, page in cases:
        engine, of_k, of_v, table = engine_of(program), k, v, None
        if page:
            (of_k, table), (of_v, _) = in_pages(k, page), in_pages(v, page)
        found[f"{program}{f' page {page}' if page else ''}"] = lambda e=engine, a=of_k, b=of_v, t=table: e.with_cache(
            q, a, b, kv_lengths=lengths, page_table=t
        )
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    for name, backend in (("SDPA flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def peer(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)

        try:
            peer()
        except RuntimeError as refusal:
            print(f"  {name}: {str(refusal)[:80]}")
        else:
            found[name] = peer
    return found


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int, help="compile this kernel alone")
    parser.add_argument("--quick", action="store_true", help="the first half of the shapes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop starting after so long")
    args = parser.parse_args()
    if args.compile is not None:
        compile_one(args.compile)
        return
    began = time.monotonic()
    compile_all(args.seconds * 0.7)
    print(f"compiled after {time.monotonic() - began:.0f} s, on {os.cpu_count()} processors", flush=True)
    torch.set_grad_enabled(False)
    clock = Clock()
    for shape in SHAPES[: len(SHAPES) // 2 + 1] if args.quick else SHAPES:
        if time.monotonic() - began > args.seconds:
            print(f"{shape}: no time left")
            continue
        print(f"{shape}: {shape.bytes / 1e6:.0f} MB of keys and values", flush=True)
        for program, page in PLAN[shape]:
            check(shape, program, page)
        times = clock.times(calls_of(shape, PLAN[shape]), ROUNDS)
        for name, timing in times.items():
            speed = shape.bytes / timing.device_us * 1e-6
            share = times["copy"].device_us / timing.device_us
            print(f"  {name:18} {timing.device_us:8.1f} us  {speed:5.2f} TB/s  {share:5.2f} of the copy   host "
                  f"{timing.host_us:5.1f} us", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
