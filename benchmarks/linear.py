"""Linear attention against fla and mamba-ssm, where they are installed, forward and backward, in one run on one GPU.

    python -m benchmarks.linear [--cases mamba2,retention] [--out results.csv]

Times are by the rules of README.md beside this file. A second table gives each of our kernels by the profiler: time,
and achieved bytes/s and FLOP/s over the GPU's ceilings; whichever is nearer to its ceiling bounds the kernel. Bytes
count each tensor once, FLOPs what the algorithm needs with its chunk.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention_engine import CustomIO, LinearAttentionEngine, arch, meta_tensor
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import ROLES, LinearProblem, column_tiles
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles
from benchmarks.timing import environment, milliseconds

TOLERANCE = 2e-2  # mean difference from the recurrence over mean size: a few roundings of bf16
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Problem:
    kind: str  # mamba2, retention, simple_gla or gla
    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    dim_v: int

    def inputs(self) -> dict[str, Tensor]:
        """q, k, v and what the kind adds; all want gradients."""
        make = torch.Generator("cuda").manual_seed(0)
        b, t, h = self.batch, self.length, self.heads
        sizes = {"q": (b, t, self.groups, self.dim), "k": (b, t, self.groups, self.dim), "v": (b, t, h, self.dim_v)}
        found = {n: torch.randn(s, generator=make, device="cuda").bfloat16() for n, s in sizes.items()}
        if self.kind == "mamba2":
            found["dt"] = torch.rand(b, h, t, generator=make, device="cuda") * 0.1 + 0.001
            found["A"] = -torch.rand(h, generator=make, device="cuda") * 15 - 1
        elif self.kind == "simple_gla":
            found["decay"] = -torch.rand(b, t, h, generator=make, device="cuda") * 0.1
        elif self.kind == "gla":
            found["decay"] = -torch.rand(b, t, h, self.dim, generator=make, device="cuda") * 0.1
        return {n: x.requires_grad_() for n, x in found.items()}

    def engine(self) -> LinearAttentionEngine:
        sizes = ((self.groups, self.dim), (self.groups, self.dim), (self.heads, self.dim_v))
        metas = tuple(meta_tensor(self.batch, h, self.length, d, dtype=torch.bfloat16) for h, d in sizes)
        scale = self.dim**-0.5
        match self.kind:
            case "mamba2":
                io = CustomIO({"dt": ("batch", "heads", "seq_len"), "A": ("heads",)})
                mods = {"v_mod": lambda x, c: x * c["dt"], "decay_mod": lambda x, c: c["dt"] * c["A"], "custom_io": io}
            case "retention":
                rates = (1 - 2.0 ** (-5 - torch.arange(self.heads))).log().tolist()
                io = CustomIO({"rate": ("heads",)})
                mods = {"q_mod": lambda x, c: x * scale, "decay_mod": lambda x, c: c["rate"], "custom_io": io}
                made = LinearAttentionEngine(metas, **mods)
                rate = torch.tensor(rates, device="cuda")
                return lambda **tensors: made(**tensors, rate=rate)
            case "simple_gla" | "gla":
                mods = {"q_mod": lambda x, c: x * scale}
            case _:
                raise ValueError(self.kind)
        return LinearAttentionEngine(metas, **mods)


CASES = {
    "mamba2": Problem("mamba2", 8, 2048, 80, 1, 128, 64),
    "mamba2_8k": Problem("mamba2", 8, 8192, 80, 1, 128, 64),
    "mamba2_b1": Problem("mamba2", 1, 2048, 80, 80, 128, 64),
    "simple_gla": Problem("simple_gla", 8, 4096, 32, 32, 256, 512),
    "gla": Problem("gla", 8, 4096, 4, 4, 256, 512),
    "retention": Problem("retention", 8, 4096, 32, 32, 256, 512),
    "retention_b1": Problem("retention", 1, 2048, 32, 32, 256, 512),
}


def peer(problem: Problem) -> tuple[str, Attention]:
    """The peer's name and call; ImportError where it is not installed."""
    match problem.kind:
        case "mamba2":
            from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

            return "mamba-ssm", lambda q, k, v, dt, A: mamba_chunk_scan_combined(  # noqa: N803
                v, dt.transpose(1, 2).contiguous(), A, k, q, chunk_size=256
            )
        case "retention":
            from fla.ops.retention import chunk_retention

            return "fla", lambda q, k, v: chunk_retention(q, k, v)[0]
        case "simple_gla":
            from fla.ops.simple_gla import chunk_simple_gla

            return "fla", lambda q, k, v, decay: chunk_simple_gla(q, k, v, decay)[0]
        case "gla":
            from fla.ops.gla import chunk_gla

            return "fla", lambda q, k, v, decay: chunk_gla(q, k, v, decay)[0]
        case _:
            raise ValueError(problem.kind)


# ---- checks and times


def check(problem: Problem, attention: Attention) -> None:
    """The first tokens of the first sequence against the recurrence in float64."""
    first = {n: x.detach() for n, x in problem.inputs().items()}
    short = {n: x[:1, :, :200] if n == "dt" else x if n == "A" else x[:1, :200] for n, x in first.items()}
    q, k, v = (short[n].double() for n in "qkv")
    q, k = (x.repeat_interleave(problem.heads // x.shape[2], 2) for x in (q, k))
    match problem.kind:
        case "mamba2":
            weight = short["dt"].double().transpose(1, 2)
            v, logs = v * weight[..., None], weight * short["A"].double()
        case "retention":
            rates = 1 - 2.0 ** (-5 - torch.arange(problem.heads, device="cuda", dtype=torch.float64))
            q, logs = q * problem.dim**-0.5, rates.log().expand(v.shape[:3])
        case _:
            q, logs = q * problem.dim**-0.5, short["decay"].double()
    keep = (logs if logs.ndim == 4 else logs[..., None]).exp()[..., None]
    state, outputs = 0.0, []
    for t in range(200):
        state = keep[:, t] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    expected = torch.stack(outputs, 1)
    found = attention(**first)[:1, :200].double()
    off = ((found - expected).abs().mean() / expected.abs().mean()).item()
    if not off <= TOLERANCE:
        raise SystemExit(f"{problem.kind}: {off:.1e} of its size away from the recurrence; nothing was timed")


def calls(attention: Attention, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    o = attention(**inputs)
    gradient = torch.randn_like(o)
    detached = {n: x.detach() for n, x in inputs.items()}
    return {
        "forward": lambda: attention(**detached),
        "backward": lambda: torch.autograd.grad(o, list(inputs.values()), gradient, retain_graph=True),
    }


# ---- our kernels, one by one


def work(problem: Problem) -> dict[str, tuple[float, float]]:
    """Bytes and FLOPs of each kernel, by the name that the profiler shows."""
    if problem.kind == "gla":
        return work_of_channels(problem)
    tokens = problem.batch * problem.length * problem.heads
    described = LinearProblem(problem.heads, problem.groups, problem.groups, problem.dim, problem.dim_v, "bfloat16")
    tiles = default_linear_tiles(trace_mods({}, CustomIO({})), described, arch.detect())  # chunks are those of all mods
    shared, v = 2 * tokens * problem.dim * problem.groups / problem.heads, 2 * tokens * problem.dim_v

    def chunked(name: str, tile, reads: float, products: float, states: float) -> tuple[str, tuple[float, float]]:
        state = 2 * tokens / tile.chunk * problem.dim * problem.dim_v
        return name, (reads + states * state, 2 * tokens * products)

    d, e = problem.dim, problem.dim_v

    def walk(role: str) -> tuple[str, tuple[float, float]]:
        """A role's walk: scores over the rows' dim once for each tile of columns, and the state's part twice."""
        tile = tiles.forward if role == "output" else tiles.walks.get(role, tiles.forward)
        summed = described.dim_of(ROLES[role].rows)
        width, count = column_tiles(described, ROLES[role], tile)
        name = "forward_kernel" if role == "output" else f"walk_{role}_kernel"
        return chunked(name, tile, 2 * shared + 2 * v, tile.chunk * count * (summed + width) + 2 * d * e, 0)

    rows = tiles.rows["dq"].chunk
    return dict(
        [
            walk("output"),
            *(walk(role) for role in ("dq", "dk", "dv")),
            chunked("states_kernel", tiles.states, shared + v, d * e, 1),
            chunked("states_backward_kernel", tiles.states, shared + v, d * e, 2),
            chunked("chunk_dq_kernel", tiles.rows["dq"], 3 * shared + 2 * v, rows * (2 * d + e) + d * e, 1),
            chunked("chunk_dk_kernel", tiles.rows["dk"], 3 * shared + 2 * v, rows * (2 * d + e) + d * e, 1),
            chunked("chunk_dv_kernel", tiles.rows["dv"], 2 * shared + 2 * v, rows * (d + e) + d * e, 1),
        ]
    )


def work_of_channels(problem: Problem) -> dict[str, tuple[float, float]]:
    """The same for a decay for each channel."""
    tokens, d, e = problem.batch * problem.length * problem.heads, problem.dim, problem.dim_v
    described = LinearProblem(problem.heads, problem.groups, problem.groups, d, e, "bfloat16", per_channel=True)
    chunk = default_channel_tiles(described, arch.detect()).states.chunk
    levels = chunk.bit_length() - 1
    shared, v, sums, scores = 2 * d * problem.groups / problem.heads, 2 * e, 4 * d, 4 * chunk
    state = 2 * d * e / chunk
    each = {
        "sum_channel_decays": (2 * sums, 0),
        "channel_scores": (2 * shared + sums + scores, levels * chunk * d),
        "channel_states": (shared + v + sums + state, d * e),
        "channel_states_backward": (shared + v + sums + 2 * state, d * e),
        "channel_output": (shared + 2 * v + sums + scores + state, chunk * e + d * e),
        "channel_dv": (shared + 2 * v + sums + scores + state, chunk * e + d * e),
        "channel_gradients": (4 * shared + 2 * v + 3 * sums + 2 * state, (chunk + 2 * d) * e + 2 * levels * chunk * d),
    }
    return {f"{n}_kernel": (tokens * moved, 2 * tokens * products) for n, (moved, products) in each.items()}


def profile(problem: Problem, both: dict[str, Callable[[], object]]) -> list[str]:
    """A line for each kernel: time, bytes/s and FLOP/s over the ceilings, and what bounds it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA]) as found:
        for call in both.values():
            call()
        torch.cuda.synchronize()
    gpu, known, lines = arch.detect(), work(problem), []
    for event in found.key_averages():
        name = re.sub(r"\(.*", "", event.key)
        ms = event.self_device_time_total / 1000
        if name not in known or not ms:
            lines.append(f"  {name[:44]:44} {ms:8.3f} ms")
            continue
        moved, flops = known[name]
        memory = moved / ms * 1e-9 / gpu.bandwidth_tb_s if gpu.bandwidth_tb_s else float("nan")
        tensor = flops / ms * 1e-9 / gpu.peak_tflops if gpu.peak_tflops else float("nan")
        bound = "memory" if memory > tensor else "products"
        bound = bound if max(memory, tensor) > 0.5 else "latency"
        lines.append(f"  {name:44} {ms:8.3f} ms  memory {memory:4.0%}  products {tensor:4.0%}  bound by {bound}")
    return lines


# ---- the table


def measure(name: str, problem: Problem, repeats: int, where: dict[str, str]) -> list[dict]:
    contenders: dict[str, Attention] = {"attention_engine": problem.engine()}
    check(problem, contenders["attention_engine"])
    try:
        label, function = peer(problem)
        contenders[label] = function
    except ImportError as missing:
        print(f"{name}: no peer, {missing.name} is not installed")
    rows, inputs = [], problem.inputs()
    for contender, attention in contenders.items():
        both = calls(attention, inputs)
        for direction, call in both.items():
            row = {"case": name, **asdict(problem), "name": contender, "direction": direction}
            try:
                row["ms"] = f"{milliseconds(call, repeats):.4f}"
            except RuntimeError as refusal:  # some versions of fla refuse a backward pass that would be wrong
                row["ms"] = "nan"
                print(f"{name}: {contender} {direction}: {str(refusal).splitlines()[0]}")
            print(f"{name:14} {contender:18} {direction:9} {row['ms']:>10} ms")
            rows.append({**row, "repeats": repeats, **where})
        if contender == "attention_engine":
            print(*profile(problem, both), sep="\n")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a CSV file: one row for each case, contender and direction")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    rows, where = [], environment("triton", "tilelang", "mamba-ssm", "flash-linear-attention")
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    for name in args.cases.split(","):
        rows += measure(name, CASES[name], args.repeats, where)
        torch.cuda.empty_cache()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
