"""What the scripts share: run an engine beside plain PyTorch, print the errors, and on a GPU the speed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, meta_tensor

SMALL = 160  # length on a CPU, where the kernels are interpreted tile by tile; not a multiple of any tile
CHECKED = 1024  # longest length compared with float64 on a GPU: that one is dense


def run(
    make_engine: Callable[..., AttentionEngine],
    plain: Callable[..., Tensor],
    *,
    heads: int,
    kv_heads: int,
    dim: int = 128,
    causal: bool = True,
    kept: Callable[[int], float] | None = None,
    custom: Callable[[int], dict[str, Tensor]] = lambda length: {},
    small: int = SMALL,
    argv: Sequence[str] | None = None,
) -> dict[str, tuple[float, float]]:
    """Check the engine against `plain`, time it where there is a GPU, and return {name: (error, eager's error)}.

    make_engine(qkv_meta, **options) gives the engine; plain(s, h, q_idx, kv_idx, *custom) gives the weights from all
    the products s = q.k, (B, H, Sq, Skv); custom(length) gives the custom inputs; kept(length), the kept pairs of a
    head, is what speed is counted on (all, or the causal half); small is the length on a CPU.
    """
    args = _arguments(argv, small)
    on_gpu = args.device == "cuda"
    if not on_gpu:  # the group stays
        heads, kv_heads = 2 * heads // kv_heads, 2
    backend = args.backend or ("auto" if on_gpu else "interpret")
    half = "causal" if causal else "full"
    print(f"{heads} query heads, {kv_heads} key heads, dim {dim}, fp16, {half}, on {args.device}")

    length = min(args.length, CHECKED) if on_gpu else args.length
    tensors = [x.to(args.device) for x in _inputs(args.batch, length, heads, kv_heads, dim)]
    extra = {name: x.to(args.device) for name, x in custom(length).items()}
    engine = make_engine(_meta(args.batch, heads, kv_heads, length, dim), backend=backend)
    if args.show:
        print(engine, engine.program(), sep="\n\n")
        print("\nthe forward kernel begins", *engine.source("forward").splitlines()[:80], "...\n", sep="\n")
    errors = _check(engine, plain, tensors, extra)
    print(f"length {length}: mean error against float64, and that of the same in PyTorch")
    for name, (ours, eager) in errors.items():
        print(f"  {name:8} {ours:.2e}   {eager:.2e}")
    if on_gpu:
        pairs = kept(args.length) if kept else args.length**2 / (2 if causal else 1)
        _time(make_engine, args, heads, kv_heads, dim, pairs, custom)
    return errors


def _arguments(argv: Sequence[str] | None, small: int) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--backend", help="auto, tilelang, reference or interpret; on a CPU interpret, else auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=None, help=f"4096 on a GPU, {small} on a CPU")
    parser.add_argument("--show", action="store_true", help="print the derived program and the kernel's first lines")
    args = parser.parse_args(argv)
    args.length = args.length or (4096 if args.device == "cuda" else small)
    return args


def _meta(batch: int, heads: int, kv_heads: int, length: int, dim: int) -> tuple[Any, ...]:
    return tuple(meta_tensor(batch, n, length, dim, dtype=torch.float16) for n in (heads, kv_heads, kv_heads))


def _inputs(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(size, generator=generator).half() for size in sizes]


def _check(
    engine: AttentionEngine,
    plain: Callable[..., Tensor],
    tensors: list[Tensor],
    extra: dict[str, Tensor],
) -> dict[str, tuple[float, float]]:
    def dense(q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        h, i, j = (torch.arange(n, device=q.device) for n in (q.shape[2], q.shape[1], k.shape[1]))
        weights = plain(torch.einsum("bqhd,bkhd->bhqk", q, k), h[:, None, None], i[:, None], j, *custom)
        return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v)

    *inputs, do = tensors
    names = ["o", "dq", "dk", "dv", *(f"d{name}" for name, x in extra.items() if x.is_floating_point())]
    inputs += extra.values()
    exact = _results(dense, [x.double() if x.is_floating_point() else x for x in inputs], do.double())
    found = zip(names, exact, _results(engine, inputs, do), _results(dense, inputs, do))
    return {name: tuple((x.double() - best).abs().mean().item() for x in both) for name, best, *both in found}


def _results(function: Callable[..., Tensor], inputs: list[Tensor], do: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, [x for x in leaves if x.requires_grad], do)]


def _time(make_engine, args, heads: int, kv_heads: int, dim: int, pairs: float, custom) -> None:
    *inputs, do = (x.cuda() for x in _inputs(args.batch, args.length, heads, kv_heads, dim))
    tensors = (*inputs, *(x.cuda() for x in custom(args.length).values()))
    leaves = [x.requires_grad_(x.is_floating_point()) for x in tensors]
    wanted = [x for x in leaves if x.requires_grad]
    engine = make_engine(_meta(args.batch, heads, kv_heads, args.length, dim), backend=args.backend or "auto")
    flops = 4 * args.batch * heads * pairs * dim
    o = engine(*leaves)
    with torch.no_grad():
        forward = milliseconds(lambda: engine(*leaves))
    backward = milliseconds(lambda: torch.autograd.grad(o, wanted, do, retain_graph=True))
    print(f"length {args.length} on {torch.cuda.get_device_name()}:")
    print(f"  forward  {forward:.3f} ms, {flops / forward * 1e-9:.0f} TFLOP/s")
    print(f"  backward {backward:.3f} ms, {2.5 * flops / backward * 1e-9:.0f} TFLOP/s")


def milliseconds(function: Callable[[], Any], repeats: int = 30) -> float:
    """The median, after a warm-up, by CUDA events."""
    for _ in range(10):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]
