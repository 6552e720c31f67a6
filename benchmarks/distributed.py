"""Sequences that GPUs share: numbers against float64, then a rank's time beside one GPU's and beside other libraries'.

python -m benchmarks.distributed                      all parts on all GPUs of this machine
python -m benchmarks.distributed --parts causal,peers --lengths 32768   of these alone
torchrun --nproc-per-node 2 -m benchmarks.distributed ...   the same

| part | measures |
| --- | --- |
| causal | softmax by each method: gather, heads, ring |
| peers | torch's context_parallel with cuDNN, both rotations; FlexAttention's; ring-flash-attn's zigzag |
| programs | ALiBi, sigmoid, retention, by gather |
| documents | packed documents with a mean of 8192 tokens, dealt, beside causal |
| linear | Mamba-2 and gated linear attention by states |
| graph | a call captured in a CUDA graph |

"(0.93, 0.95)" is T(one GPU) / (ranks T(ranks)): 1 is ideal. T(ranks) is the slowest rank's median, with the host ahead
and ranks begun together, by a sum of one number over all; T(one GPU) the mean of those that all ranks find at once, and
the slowest of them, as GPUs of one host differ. Before each call GPUs rest: what ran before it costs clocks.
Backward is `torch.autograd.grad`.
bf16, batch 1, 32 query and 8 key heads of 128. Who doesn't import, or refuses, says why and is left out.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, library
from attention_engine.distributed import ContextParallel
from benchmarks.distributed_linear import LINEAR, TOKENS_AT, drawn_linear, linear_results, shared_linear
from benchmarks.distributed_peers import PEERS
from benchmarks.timing import Clock

DEVICE, HEADS, KV_HEADS, DIM, DTYPE = "cuda", 32, 8, 128, torch.bfloat16
MEAN = 8192  # tokens of a document
AHEAD_CYCLES = 20_000_000  # ten milliseconds: so long may the host take for a call
REST = 0.1  # seconds
CHECKED = 2048  # tokens of what is compared with float64
METHODS = ("gather", "heads", "ring")
PARTS = ("causal", "peers", "programs", "documents", "linear", "graph")
Attend = Callable[..., Tensor]
BEGAN = time.monotonic()


def say(*words: object) -> None:
    """Prints, on the first rank, with the seconds since the start."""
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - BEGAN:5.0f}", *words, flush=True)


class Timer:
    """Milliseconds of calls that all ranks make together."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.clock = rounds, Clock()
        self.one = torch.ones(1, device=DEVICE)

    def once(self, call: Callable[[], object]) -> float:
        """Of one call on this rank, the host ahead of the device."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        time.sleep(REST)
        self.clock._flush.zero_()
        dist.barrier()
        torch.cuda._sleep(AHEAD_CYCLES)
        dist.all_reduce(self.one)  # hosts are back from a barrier at different times, GPUs from this at one
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def medians(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Each call's median on each rank. Calls take turns."""
        for call in calls.values():
            call()
            call()
        torch.cuda.synchronize()
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                found[name].append(self.once(call))
        mine = torch.tensor([statistics.median(each) for each in found.values()], device="cuda")
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return {name: [each[n].item() for each in everyone] for n, name in enumerate(calls)}


def programs(length: int, device: str = "") -> dict[str, tuple[AttentionEngine, dict[str, Tensor]]]:
    """Attentions and their custom inputs."""
    scale, device = DIM**-0.5, device or DEVICE
    slopes = 2.0 ** (-8 * (torch.arange(HEADS, device=device) + 1) / HEADS)
    documents = CustomIO({"documents": ("batch", "seq_len")})

    def decay(score: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale * ((1 - (-5.0 - h.to(float) / 4).exp2()).log() * (q_idx - kv_idx)).exp()

    lengths = torch.rand(max(length // MEAN, 1), generator=torch.Generator().manual_seed(0)) ** 2 + 0.05
    ends = (lengths.cumsum(0) / lengths.sum() * length).long()
    ids = torch.searchsorted(ends, torch.arange(length), right=True).int().clamp(max=len(lengths) - 1)[None].to(device)
    alibi = AttentionEngine(None, CustomIO({"slopes": ("heads",)}), library.alibi(scale), library.causal)
    return {
        "causal": (AttentionEngine(mask_mod=library.causal), {}),
        "alibi": (alibi, {"slopes": slopes}),
        "sigmoid": (
            AttentionEngine(mask_mod=library.causal, online_func=library.OnlineSigmoid(), scale=scale), {}
        ),
        "retention": (
            AttentionEngine(score_mod=decay, mask_mod=library.causal, online_func=library.OnlineRetention()), {}
        ),
        "documents": (
            AttentionEngine(custom_io=documents, mask_mod=library.and_masks(library.causal, library.document())),
            {"documents": ids},
        ),
    }  # fmt: skip


def drawn(length: int) -> list[Tensor]:
    """q, k, v and the output's gradient, the same on all ranks."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(1, length, heads, DIM, generator=generator, device=DEVICE, dtype=DTYPE)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def both_ways(call: Callable[..., Tensor], given: Sequence[Tensor], d_o: Tensor) -> dict[str, Callable[[], object]]:
    """A call's forward pass and its backward pass alone."""
    leaves = [t.detach().clone().requires_grad_() for t in given]

    def forward() -> object:
        with torch.no_grad():
            return call(*leaves)

    output = call(*leaves)
    return {"fwd": forward, "bwd": lambda: torch.autograd.grad(output, leaves, d_o, retain_graph=True)}


def parallel(engine: AttentionEngine, mesh: DeviceMesh, method: str, custom: Mapping[str, Tensor]) -> ContextParallel:
    """The engine over all ranks; documents are dealt."""
    found = ContextParallel(engine, mesh, method)
    if "documents" in custom:
        (ids,) = custom.values()
        found = ContextParallel(engine, mesh, method, found.deal(ids.shape[1], documents=ids))
    return found


def shared(
    engine: AttentionEngine, mesh: DeviceMesh, method: str, custom: Mapping[str, Tensor], whole: Sequence[Tensor]
) -> dict[str, Callable[[], object]]:
    """The same of this rank's tokens."""
    attention = parallel(engine, mesh, method, custom)
    *mine, d_o = (attention.shard(t) for t in whole)
    return both_ways(lambda *t: attention(*t, **custom), mine, d_o)


def row(name: str, one: Mapping[str, list[float]], many: Mapping[str, list[float]]) -> None:
    """Prints times and efficiencies of what ranks share."""
    ranks = dist.get_world_size()
    text = []
    for way, ms in many.items():
        found = (f"{each / ranks / max(ms):.3f}" for each in (statistics.mean(one[way]), max(one[way])))
        text.append(f"{way} {max(ms):.2f} ms ({', '.join(found)})")
    say(f"{name:<34}", "  ".join(text))


def row_of_one(name: str, one: Mapping[str, list[float]]) -> None:
    """Prints one GPU's times."""
    text = (f"{way} {statistics.mean(ms):.2f} ms ({min(ms):.2f} to {max(ms):.2f})" for way, ms in one.items())
    say(f"{name}, one GPU".ljust(34), "  ".join(text))


def measure(
    timer: Timer, mesh: DeviceMesh, length: int, name: str, methods: Sequence[str]
) -> dict[str, list[float]]:  # fmt: skip
    """One GPU, then all, by each method. One GPU's times."""
    engine, custom = programs(length)[name]
    whole = drawn(length)
    one = timer.medians(both_ways(lambda *t: engine(*t, **custom), whole[:3], whole[3]))
    row_of_one(f"{name} {length}", one)
    for method in methods:
        row(f"{name} {length}, {method}", one, timer.medians(shared(engine, mesh, method, custom, whole)))
        torch.cuda.empty_cache()
    return one


def errors(mesh: DeviceMesh, names: Sequence[str], methods: Sequence[str]) -> None:
    """The errors of o, dq, dk, dv beside float64, over one GPU's."""
    whole = drawn(CHECKED)

    def made(call: Attend, given: Sequence[Tensor], d_o: Tensor) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in given]
        o = call(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, d_o.to(o.dtype))]

    for name in names:
        engine, custom = programs(CHECKED)[name]
        exact_engine = AttentionEngine(
            custom_io=engine.custom_io, score_mod=engine.score_mod, mask_mod=engine.mask_mod,
            online_func=engine.online_func, scale=engine.scale, backend="reference",
        )  # fmt: skip
        exact = made(lambda *t, e=exact_engine, c=custom: e(*t, **c), [t.double() for t in whole[:3]], whole[3])
        one = made(lambda *t, e=engine, c=custom: e(*t, **c), whole[:3], whole[3])
        of_one = [(a.double() - b).norm() for a, b in zip(one, exact, strict=True)]
        for method in methods:
            attention = parallel(engine, mesh, method, custom)
            *mine, d_o = (attention.shard(t) for t in whole)
            found = made(lambda *t, a=attention, c=custom: a(*t, **c), mine, d_o)
            far = [(attention.unshard(a).double() - b).norm() for a, b in zip(found, exact, strict=True)]
            ratios = " ".join(f"{(a / b).item():.3f}" for a, b in zip(far, of_one, strict=True))
            say(f"{name}, {method}: errors of o, dq, dk, dv over one GPU's", ratios)


def peers(timer: Timer, mesh: DeviceMesh, length: int, one: Mapping[str, list[float]]) -> None:
    """Other libraries' times for the causal case. one: one GPU's of ours."""
    for name, make in PEERS.items():
        try:
            forward, leaves, d_o, close = make(mesh, drawn(length))
            with close:
                row(f"causal {length}, {name}", one, timer.medians(both_ways_of(forward, leaves, d_o)))
        except Exception as error:  # noqa: BLE001 - a library that can't run a case says so
            say(f"causal {length}, {name}:", f"{type(error).__name__}: {error}".split("\n")[0][:160])
        torch.cuda.empty_cache()


def both_ways_of(
    call: Callable[[], Tensor], leaves: Sequence[Tensor], d_o: Tensor
) -> dict[str, Callable[[], object]]:  # fmt: skip
    """The same of a call that has its tensors."""

    def forward() -> object:
        with torch.no_grad():
            return call()

    output = call()
    return {"fwd": forward, "bwd": lambda: torch.autograd.grad(output, leaves, d_o, retain_graph=True)}


def linear_errors(mesh: DeviceMesh, lengths: Sequence[int]) -> None:
    """Errors of the output and all gradients beside float64, over one GPU's; and how far they are from one GPU's."""
    for kind in LINEAR:
        engine, whole, d_o = drawn_linear(kind, CHECKED // 2)
        exact_engine = LinearAttentionEngine(
            q_mod=engine.mods["q"], v_mod=engine.mods["v"], decay_mod=engine.mods["decay"],
            custom_io=engine.custom_io, backend="reference",
        )  # fmt: skip
        exact = linear_results(exact_engine, {n: t.double() for n, t in whole.items()}, d_o)
        one, many = linear_results(engine, whole, d_o), shared_linear(engine, mesh, whole, d_o)
        far = {n: [(t[n].double() - e).norm() for t in (many, one)] for n, e in exact.items()}
        say(f"{kind}: errors over one GPU's:", " ".join(f"{n} {(a / b).item():.3f}" for n, (a, b) in far.items()))
        del exact, one, many
        for length in lengths:
            engine, whole, d_o = drawn_linear(kind, length)
            one, many = linear_results(engine, whole, d_o), shared_linear(engine, mesh, whole, d_o)
            apart = {n: ((many[n].float() - t).norm() / t.float().norm()).item() for n, t in one.items()}
            say(f"{kind} {length}, apart from one GPU's:", " ".join(f"{n} {a:.1e}" for n, a in apart.items()))
            del one, many, whole, d_o
            torch.cuda.empty_cache()


def linear(timer: Timer, mesh: DeviceMesh, length: int) -> None:
    """Linear engines by states."""
    for kind in LINEAR:
        engine, tensors, d_o = drawn_linear(kind, length)
        names = list(tensors)
        calls = both_ways(lambda *t, e=engine, n=names: e(**dict(zip(n, t, strict=True))), list(tensors.values()), d_o)
        one = timer.medians(calls)
        row_of_one(f"{kind} {length}", one)
        del calls
        attention = ContextParallel(engine, mesh)
        mine = [attention.shard(t, TOKENS_AT[n]) if n in TOKENS_AT else t for n, t in tensors.items()]
        calls = both_ways(
            lambda *t, a=attention, n=names: a(**dict(zip(n, t, strict=True))), mine, attention.shard(d_o)
        )
        many = timer.medians(calls)
        row(f"{kind} {length}, states", one, many)
        total = dist.get_world_size() * sum(max(ms) for ms in many.values())
        both = sum(map(statistics.mean, one.values()))
        say(f"{kind} {length}, states: both ways ({both / total:.3f})")
        del calls, mine, tensors
        torch.cuda.empty_cache()


def graph(timer: Timer, mesh: DeviceMesh, length: int) -> None:
    """Forward passes that are captured: bits and times are those of calls outside of a graph."""
    whole = drawn(length)
    for method in METHODS:
        attention = ContextParallel(AttentionEngine(mask_mod=library.causal), mesh, method)
        mine = [attention.shard(t) for t in whole[:3]]
        with torch.no_grad():
            wanted = attention(*mine)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                attention(*mine)
            torch.cuda.current_stream().wait_stream(side)
            captured = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(captured):
                    output = attention(*mine)
            except Exception as error:  # noqa: BLE001
                say(f"graph {length}, {method}:", f"{type(error).__name__}: {error}".split("\n")[0][:160])
                continue
            captured.replay()
            torch.cuda.synchronize()
            same = torch.equal(output, wanted)
            times = timer.medians({"outside": lambda a=attention, m=mine: a(*m), "replayed": captured.replay})
        text = ", ".join(f"{name} {max(ms):.2f} ms" for name, ms in times.items())
        say(f"graph {length}, {method}: same bits {same},", text)


def run(args: argparse.Namespace) -> None:
    """All parts that were asked for, on this rank."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    limit = timedelta(seconds=args.limit)
    dist.init_process_group("nccl", timeout=limit, device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    timer, parts, lengths = Timer(args.rounds), args.parts.split(","), [int(n) for n in args.lengths.split(",")]
    methods = args.methods.split(",")
    others = [name for name in args.programs.split(",") if name]
    if "causal" in parts:
        errors(mesh, ["causal"], methods)
    if "programs" in parts:
        errors(mesh, others, ["gather"])
    if "linear" in parts:
        linear_errors(mesh, lengths[:1])
    for length in [] if args.numbers else lengths:
        one: dict[str, list[float]] = {}
        if {"causal", "peers", "programs", "documents"} & set(parts):
            one = measure(timer, mesh, length, "causal", methods if "causal" in parts else ["gather"])
        if "peers" in parts:
            peers(timer, mesh, length, one)
        for name in [*(others if "programs" in parts else []), *(["documents"] if "documents" in parts else [])]:
            measure(timer, mesh, length, name, ["gather"])
        if "linear" in parts:
            linear(timer, mesh, length)
        if "graph" in parts:
            graph(timer, mesh, length)
    dist.barrier()
    dist.destroy_process_group()


def start_all() -> None:
    """This program once for each GPU of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = torch.cuda.device_count()
    known = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "benchmarks.distributed", *sys.argv[1:]]
    started = [subprocess.Popen(command, env=known | {"RANK": str(rank)}) for rank in range(ranks)]
    codes = [process.wait() for process in started]
    sys.exit(max(codes, key=abs))


def main() -> None:
    """Reads the options, and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--lengths", default="32768,65536,131072")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--programs", default="alibi,sigmoid,retention")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=int, default=120, help="seconds that a collective may take")
    parser.add_argument("--numbers", action="store_true", help="no times")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run(args)
    else:
        start_all()


if __name__ == "__main__":
    main()
