"""Decoding from a cache on a GPU: numbers against float64 first, then times beside a copy of as many bytes and SDPA.

python -m benchmarks.decoding                          compiles (a process for each kernel), checks, times
python -m benchmarks.decoding --only "B1 " --only B16    shapes whose names have one of these, and their kernels alone
python -m benchmarks.decoding --programs softmax --pages 0 64 --numbers   numbers alone, of these programs and pages
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_engine import AttentionEngine, OnlineFunc, SymbolScalar, Var, library, meta_tensor
from attention_engine.arch import detect
from attention_engine.plan.cached import MOST_JOINED
from attention_engine.runtime.cached_shown import cached_kernels
from benchmarks.caches import error, exact, in_pages
from benchmarks.serving_peers import peers
from benchmarks.timing import Clock

DIM, DTYPE = 128, torch.bfloat16
ROUNDS = 15
IN_PARTS = (2, 4, 7, 64)  # in how many parts rows are checked
CALLS = 200  # of a loop in which the host is timed
Kernel = tuple[str, int, int, int, str]  # program, heads, page and name
Plan = dict["Shape", list[tuple[str, int]]]  # programs and pages (0: none) at each shape


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

    @property
    def whole(self) -> bool:
        """Are there so many requests that rows are not cut?"""
        return self.batch * self.kv_heads >= 128

    @property
    def joins(self) -> bool:
        """Are rows so few that the last block of their parts joins them?"""
        return self.queries * self.heads // self.kv_heads <= MOST_JOINED

    def __str__(self) -> str:
        more = f", {self.queries} queries" if self.queries > 1 else ""
        return f"B{self.batch} {self.heads}/{self.kv_heads} KV {self.keys}{more}"


SHAPES = (
    Shape(16, 32, 8, 8192), Shape(1, 32, 8, 32768), Shape(1, 32, 8, 8192), Shape(8, 64, 8, 8192),
    Shape(4, 32, 8, 16384, 4), Shape(1, 32, 8, 131072), Shape(32, 32, 8, 8192),
)  # fmt: skip
PROGRAMS = {"softmax": library.OnlineSoftmax, "sigmoid": library.OnlineSigmoid, "entropy": Entropic}
# Which programs and pages (0: none) are timed at each shape, and how many parts its rows have: what is compiled.
PLAN: Plan = {
    shape: [("softmax", 0), ("softmax", 64), *more]
    for shape, more in zip(
        SHAPES,
        (
            [("softmax", 16), ("sigmoid", 0), ("entropy", 0)],
            [("softmax", 16), ("sigmoid", 0), ("entropy", 0)],
            [("softmax", 16)],
            [],
            [],
            [],
            [("softmax", 16)],
        ),
        strict=True,
    )
}
PLAN[SHAPES[3]] = [("softmax", 0)]


def engine_of(program: str) -> AttentionEngine:
    """The engine of a program."""
    return AttentionEngine(mask_mod=library.causal, online_func=PROGRAMS[program]())


def compile_one(program: str, heads: int, kv_heads: int, page: int, name: str) -> None:
    """Compiles this kernel, and keeps it on disk."""
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


def kernels(plan: Plan) -> list[Kernel]:
    """All kernels that the plan runs."""
    found: dict[Kernel, None] = {}
    for shape, cases in plan.items():
        for program, page in cases:
            key = (program, shape.heads, shape.kv_heads, page)
            found[*key, "decode" if shape.whole else "decode joined parts" if shape.joins else "decode parts"] = None
            if not (shape.whole or shape.joins):
                found[*key[:3], 0, "combine"] = None
    return list(found)


def compile_all(wanted: list[Kernel], seconds: float) -> None:
    """Compiles the kernels in processes of their own."""
    command = [sys.executable, "-m", "benchmarks.decoding", "--compile"]
    running = [subprocess.Popen([*command, *map(str, kernel)]) for kernel in wanted]
    until = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def check(shape: Shape, program: str, page: int) -> None:
    """Uneven lengths, one of them 0, against float64; then a graph that replays with other lengths, three times."""
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

    def call(parts: int) -> Tensor:
        return engine.with_cache(q, of_k, of_v, kv_lengths=lengths, page_table=table, num_splits=parts)

    def error_now(found: Tensor) -> str:
        return error(found, exact(program, q, k, v, lengths))

    for parts in (1,) if shape.whole else IN_PARTS:
        lengths.copy_(torch.tensor([4096, 1, 0, 2049, 777]))
        first = error_now(call(parts))
        graph, replayed = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            output = call(parts)
        for now in ([100, 1, 0, 2048, 700], [0, 0, 0, 64, 65], [4096, 1, 0, 1, 777]):  # none longer: NaN lies behind
            lengths.copy_(torch.tensor(now))
            graph.replay()
            replayed.append(error_now(output))
        print(f"  {shape.heads}/{shape.kv_heads} {program} page {page}, {parts} parts: relative L2 {first}, replayed "
              f"with other lengths {', '.join(replayed)}", flush=True)  # fmt: skip


def print_times(clock: Clock, shape: Shape, cases: list[tuple[str, int]]) -> list[str]:
    """The times of a shape beside a copy, a read, and peers; as lines of a table, too."""
    print(f"{shape}: {shape.bytes / 1e6:.0f} MB of keys and values", flush=True)
    calls = calls_of(shape, cases)
    times = clock.times(calls, ROUNDS)
    lines = []
    for name, timing in times.items():
        speed = shape.bytes / timing.device_us * 1e-6
        share = times["copy"].device_us / timing.device_us
        held = "read" if clock.clean else "written"
        numbers = (timing.device_us, timing.low_us, timing.high_us, speed)
        lines.append(",".join([f'"{shape}"', f'"{name}"', held, *(f"{n:.4g}" for n in numbers)]))
        print(f"  {name:25} {timing.device_us:8.1f} us  {speed:5.2f} TB/s  {share:5.2f} of the copy   host "
              f"{timing.host_us:5.1f} us", flush=True)  # fmt: skip
    return lines


def print_host() -> None:
    """How long the host takes for a call of few keys, in a loop, the GPU idle as often as it can be."""
    q = torch.randn(1, 1, 32, DIM, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, 1, 64, 8, DIM, device="cuda", dtype=DTYPE)
    lengths, engine = torch.full((1,), 64, device="cuda", dtype=torch.int32), engine_of("softmax")
    out, target, source = torch.empty_like(q), torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
    (of_k, table), (of_v, _) = in_pages(k, 64), in_pages(v, 64)
    in_2, paged = {"kv_lengths": lengths, "num_splits": 2}, {"kv_lengths": lengths, "page_table": table}
    calls: dict[str, Callable[[], object]] = {
        "in 2 parts": lambda: engine.with_cache(q, k, v, **in_2),
        "in 2 parts, out given": lambda: engine.with_cache(q, k, v, out=out, **in_2),
        "whole rows": lambda: engine.with_cache(q, k, v, kv_lengths=lengths, num_splits=1),
        "in 2 parts, of pages": lambda: engine.with_cache(q, of_k, of_v, num_splits=2, **paged),
        "in 2 parts, of pages, out given": lambda: engine.with_cache(q, of_k, of_v, num_splits=2, out=out, **paged),
        "empty_like": lambda: torch.empty_like(q),
        "copy_": lambda: target.copy_(source),
        "a launch of next to nothing": lambda: torch.cuda._sleep(1),
    }
    for name, call in calls.items():
        found = []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append((time.perf_counter() - began) / CALLS * 1e6)
        print(f"  host in a loop, {name}: {min(found):.1f} us, median {statistics.median(found):.1f}", flush=True)


def calls_of(shape: Shape, cases: list[tuple[str, int]]) -> dict[str, Callable[[], object]]:
    """What is timed at a shape."""
    from benchmarks.reading import read_of  # wants Triton, which is where torch has a GPU

    torch.manual_seed(0)
    q = torch.randn(shape.batch, shape.queries, shape.heads, DIM, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, shape.batch, shape.keys, shape.kv_heads, DIM, device="cuda", dtype=DTYPE)
    lengths = torch.full((shape.batch,), shape.keys, device="cuda", dtype=torch.int32)
    half = torch.empty(shape.bytes // 4, device="cuda", dtype=DTYPE)
    target, source = torch.empty_like(half), half.normal_()
    found: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source), "read": read_of(shape.bytes)}
    for program, page in cases:
        engine, of_k, of_v, table = engine_of(program), k, v, None
        if page:
            (of_k, table), (of_v, _) = in_pages(k, page), in_pages(v, page)
        found[f"{program}{f' page {page}' if page else ''}"] = lambda e=engine, a=of_k, b=of_v, t=table: e.with_cache(
            q, a, b, kv_lengths=lengths, page_table=t
        )
        if program == "softmax":
            ours = engine.with_cache(q, of_k, of_v, kv_lengths=lengths, page_table=table)
            them = peers(ours, q, of_k, of_v, table, lengths)
            found |= {f"{name}{f' page {page}' if page else ''}": call for name, call in them.items()}
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


def chosen(names: list[str] | None, programs: list[str] | None, pages: list[int] | None) -> Plan:
    """What of the plan runs; None: all of it."""
    found: Plan = {}
    for shape, cases in PLAN.items():
        if names is None or any(name in str(shape) for name in names):
            kept = [(p, n) for p, n in cases if (programs is None or p in programs) and (pages is None or n in pages)]
            if kept:
                found[shape] = kept
    return found


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", help="shapes whose names have this in them")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS))
    parser.add_argument("--pages", nargs="+", type=int, help="keys of a page; 0: no pages")
    parser.add_argument("--numbers", action="store_true", help="no times")
    parser.add_argument("--compiled", action="store_true", help="the kernels are on disk: none is compiled ahead")
    parser.add_argument("--clean", action="store_true", help="before a call, the cache holds what was read alone")
    parser.add_argument("--to", type=Path, help="a file for the times")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop starting after so long")
    args = parser.parse_args()
    if args.compile is not None:
        program, heads, kv_heads, page, name = args.compile
        compile_one(program, int(heads), int(kv_heads), int(page), name)
        return
    began, plan = time.monotonic(), chosen(args.only, args.programs, args.pages)
    if not args.compiled:
        compile_all(kernels(plan), args.seconds * 0.7)
        print(f"compiled after {time.monotonic() - began:.0f} s, on {os.cpu_count()} processors", flush=True)
    torch.set_grad_enabled(False)
    checked = set()
    for shape, cases in plan.items():
        for program, page in cases:
            kind = (shape.heads, shape.kv_heads, shape.queries, shape.whole, program, page)
            if kind not in checked:
                check(shape, program, page)
            checked.add(kind)
    if args.numbers:
        return
    clock, lines = Clock(args.clean), ["shape,call,cache_held,device_us,low_us,high_us,tb_s"]
    for shape, cases in plan.items():
        if time.monotonic() - began > args.seconds:
            print(f"{shape}: no time left")
        else:
            lines += print_times(clock, shape, cases)
    if args.to is not None:
        args.to.write_text("\n".join([*lines, ""]))
    if any(not shape.whole for shape in plan):
        print_host()


if __name__ == "__main__":
    main()
