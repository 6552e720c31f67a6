"""Softmax attention against cuDNN (through SDPA) and FlexAttention, forward and backward, in one run on one GPU.

    python benchmarks/softmax.py [--out results.csv]

The numbers are checked against SDPA's before anything is timed. README.md beside this file says what is counted.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.library import OnlineSoftmax, causal

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCE = 5e-3  # mean difference from SDPA over mean size: a few roundings of fp16


@dataclass(frozen=True)
class Problem:
    batch: int
    length: int
    heads: int
    dim: int
    mask: str  # full or causal

    def flops(self, direction: str) -> float:
        forward = 4 * self.batch * self.heads * self.length**2 * self.dim / (2 if self.mask == "causal" else 1)
        return forward * {"forward": 1.0, "backward": 2.5}[direction]

    def inputs(self, layout: str) -> list[Tensor]:
        """q, k, v and the gradient of the output, contiguous in the layout asked for, the same values in both."""
        generator = torch.Generator("cuda").manual_seed(0)
        size = (self.batch, self.length, self.heads, self.dim)
        tensors = [torch.randn(size, generator=generator, device="cuda", dtype=torch.float16) for _ in range(4)]
        if layout == "bhsd":
            tensors = [x.transpose(1, 2).contiguous() for x in tensors]
        return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


# ---- what is compared; each takes its own favourite layout

def engine(problem: Problem) -> Attention:
    scale = problem.dim**-0.5
    meta = meta_tensor(problem.batch, problem.heads, problem.length, problem.dim, dtype=torch.float16)
    return AttentionEngine(
        (meta,) * 3, score_mod=lambda score, custom, b, h, q_idx, kv_idx: score * scale,
        mask_mod=causal if problem.mask == "causal" else None, online_func=OnlineSoftmax(),
    )


def cudnn(problem: Problem) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.mask == "causal")
    return attention


def flex(problem: Problem) -> Attention:
    import torch._functorch.config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch_config.donated_buffer = False  # else the backward pass runs once only
    block_mask = None
    if problem.mask == "causal":
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, problem.length, problem.length, "cuda")
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


PEERS: dict[str, tuple[Callable[[Problem], Attention], str]] = {
    "attention_engine": (engine, "bshd"),
    "cudnn": (cudnn, "bhsd"),
    "flex_attention": (flex, "bhsd"),
}


# ---- checks and times

def results(attention: Attention, inputs: list[Tensor], layout: str) -> list[Tensor]:
    *leaves, do = inputs
    o = attention(*leaves)
    found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    return [x.transpose(1, 2) if layout == "bhsd" else x for x in found]


def check(name: str, found: list[Tensor], expected: list[Tensor]) -> None:
    for which, x, y in zip(("o", "dq", "dk", "dv"), found, expected):
        off = ((x.float() - y.float()).abs().mean() / y.float().abs().mean()).item()
        if not off <= TOLERANCE:
            raise SystemExit(f"{name}: {which} differs from SDPA's by {off:.1e} of its size; nothing was timed")


def measure(problem: Problem, rounds: int) -> dict[tuple[str, str], float]:
    """Median milliseconds of each peer and direction; peers take turns, so that a drifting clock meets all alike."""
    from triton.testing import do_bench

    calls: dict[tuple[str, str], Callable[[], object]] = {}
    expected = results(cudnn(problem), problem.inputs("bhsd"), "bhsd")
    for name, (make, layout) in PEERS.items():
        attention, inputs = make(problem), problem.inputs(layout)
        check(name, results(attention, inputs, layout), expected)
        calls |= _calls(name, attention, inputs)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(do_bench(call, warmup=50, rep=200, return_mode="median"))
    return {key: statistics.median(found) for key, found in times.items()}


def _calls(name: str, attention: Attention, inputs: list[Tensor]) -> dict[tuple[str, str], Callable[[], object]]:
    *leaves, do = inputs
    o = attention(*leaves)
    detached = [x.detach() for x in leaves]
    return {
        (name, "forward"): lambda: attention(*detached),
        (name, "backward"): lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
    }


# ---- the table

def environment() -> dict[str, str]:
    found = {"device": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__,
             "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return found | {package: version(package) for package in ("triton", "tilelang")}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 2), ("length", 8192), ("heads", 16), ("dim", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="a CSV file: one row for each peer, mask and direction")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    rows, where = [], environment()
    for mask in ("full", "causal"):
        problem = Problem(args.batch, args.length, args.heads, args.dim, mask)
        for (name, direction), ms in measure(problem, args.rounds).items():
            speed = problem.flops(direction) / ms * 1e-9
            rows.append({**asdict(problem), "dtype": "float16", "name": name, "direction": direction,
                         "ms": f"{ms:.4f}", "tflops": f"{speed:.1f}", "rounds": args.rounds, **where})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    print(table(rows, where, args))


def table(rows: list[dict], where: dict[str, str], args: argparse.Namespace) -> str:
    columns = [(mask, direction) for mask in ("full", "causal") for direction in ("forward", "backward")]
    speeds = {(row["name"], row["mask"], row["direction"]): row["tflops"] for row in rows}
    lines = [
        ", ".join(f"{name} {value}" for name, value in where.items()),
        f"TFLOP/s, fp16, B {args.batch} S {args.length} H {args.heads} D {args.dim}, median of {args.rounds} rounds",
        f"{'':18}" + "".join(f"{' '.join(column):>18}" for column in columns),
    ]
    lines += [f"{name:18}" + "".join(f"{speeds[(name, *column)]:>18}" for column in columns) for name in PEERS]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
