"""Masks, score functions and custom inputs beside plain softmax: TFLOP/s on the pairs that are kept, on one GPU.

    python -m benchmarks.masks [case ...]

Each case is checked against a small float64 run before it is timed. Without a name, all cases run one after another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, document_ids, library, meta_tensor
from benchmarks.timing import milliseconds

BATCH, HEADS, LENGTH, DIM = 2, 16, 8192, 128
SCALE = DIM**-0.5
DOCUMENTS = 8
WINDOW = 1024
BUCKETS = 257
PAIR = (1, "heads", "seq_len", "seq_len_kv")


@dataclass(frozen=True)
class Case:
    score_mod: Callable[..., Any] = lambda score, custom, b, h, q_idx, kv_idx: score * SCALE
    mask_mod: Callable[..., Any] | None = None
    axes: dict[str, tuple] = field(default_factory=dict)
    custom: Callable[[int], dict[str, Tensor]] = lambda length: {}
    kept: Callable[[int], float] = lambda length: length**2  # pairs of one head
    bytes: Callable[[int], int] = lambda length: 0  # that the custom inputs of a forward pass bring


def slopes(length: int) -> dict[str, Tensor]:
    return {"slopes": (2.0 ** (-8 * (torch.arange(HEADS) + 1) / HEADS)).cuda()}


def learned_slopes(length: int) -> dict[str, Tensor]:
    return {name: tensor.requires_grad_() for name, tensor in slopes(length).items()}


def table(length: int) -> dict[str, Tensor]:
    return {"table": (torch.randn(HEADS, BUCKETS) * 0.1).cuda().requires_grad_()}


def documents(lengths: Sequence[float]) -> Callable[[int], dict[str, Tensor]]:
    def make(length: int) -> dict[str, Tensor]:
        parts = [int(part * length) for part in lengths]
        return {"documents": document_ids(parts, length).expand(BATCH, -1).contiguous().cuda()}

    return make


def bias(length: int) -> dict[str, Tensor]:
    return {"bias": torch.randn(1, HEADS, length, length, device="cuda", dtype=torch.float16).mul_(0.1)}


def biased(score: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * SCALE + custom["bias"]


EVEN = [1 / DOCUMENTS] * DOCUMENTS
UNEVEN = [0.3, 0.02, 0.11, 0.07, 0.21, 0.04, 0.16, 0.09]
DOCUMENT = {"mask_mod": library.document(), "axes": {"documents": ("batch", "seq_len")}}
CASES = {
    "softmax": Case(),
    "causal": Case(mask_mod=library.causal, kept=lambda n: n * (n + 1) / 2),
    "alibi": Case(library.alibi(SCALE), axes={"slopes": ("heads",)}, custom=slopes),
    "learned": Case(library.alibi(SCALE), axes={"slopes": ("heads",)}, custom=learned_slopes),
    "softcap": Case(library.softcap(30.0, SCALE)),
    "relative": Case(
        library.relative_bias("table", BUCKETS // 2, SCALE), axes={"table": ("heads", BUCKETS)}, custom=table
    ),
    "documents": Case(**DOCUMENT, custom=documents(EVEN), kept=lambda n: n * n / DOCUMENTS),
    "uneven": Case(**DOCUMENT, custom=documents(UNEVEN), kept=lambda n: sum((int(p * n)) ** 2 for p in UNEVEN)),
    "window": Case(
        mask_mod=library.sliding_window(WINDOW), kept=lambda n: n * (WINDOW + 1) - WINDOW * (WINDOW + 1) / 2
    ),
    "bias": Case(biased, axes={"bias": PAIR}, custom=bias, bytes=lambda n: 2 * BATCH * HEADS * n * n),
}


def engine(case: Case, **options: Any) -> AttentionEngine:
    meta = meta_tensor(BATCH, HEADS, LENGTH, DIM, dtype=torch.float16)
    return AttentionEngine(
        (meta,) * 3, CustomIO(case.axes), case.score_mod, case.mask_mod, library.OnlineSoftmax(), **options
    )


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    size = (BATCH, length, HEADS, DIM)
    return [torch.randn(size, generator=generator, device="cuda", dtype=torch.float16) for _ in range(4)]


def check(name: str, case: Case, length: int = 1000) -> None:
    *tensors, do = inputs(length)
    custom = list(case.custom(length).values())
    found = []
    for backend in ("auto", "reference"):
        leaves = [t.clone().requires_grad_() for t in tensors]
        o = engine(case, backend=backend)(*leaves, *custom)
        wanted = [*leaves, *(c for c in custom if c.requires_grad)]
        found.append([o.detach(), *torch.autograd.grad(o, wanted, do)])
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        off = ((a.float() - b.float()).abs().mean() / b.float().abs().mean()).item()
        if not off <= 1e-2:
            raise SystemExit(f"{name}: result {number} differs from the reference by {off:.1e} of its size")


def measure(name: str) -> None:
    case = CASES[name]
    check(name, case)
    *leaves, do = inputs(LENGTH)
    custom = list(case.custom(LENGTH).values())
    attention = engine(case)
    with torch.no_grad():
        forward = milliseconds(lambda: attention(*leaves, *custom))
    wanted = [t.requires_grad_() for t in leaves] + [c for c in custom if c.requires_grad]
    o = attention(*leaves, *custom)
    backward = milliseconds(lambda: torch.autograd.grad(o, wanted, do, retain_graph=True))
    flops = 4 * BATCH * HEADS * DIM * case.kept(LENGTH)
    line = f"{name:10} forward {forward:7.3f} ms {flops / forward * 1e-9:6.0f} TFLOP/s"
    line += f"   backward {backward:7.3f} ms {2.5 * flops / backward * 1e-9:6.0f} TFLOP/s"
    if case.bytes(LENGTH):
        line += f"   {case.bytes(LENGTH) / forward * 1e-6:.0f} GB/s of custom inputs"
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compile and compare, without timing")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    for name in args.cases or CASES:
        if args.check:
            check(name, CASES[name])
        else:
            measure(name)


if __name__ == "__main__":
    main()
