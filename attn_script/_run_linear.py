"""What the scripts of linear attention share: run an engine beside plain PyTorch, print errors, and times on a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from _run import milliseconds
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_engine import LinearAttentionEngine, meta_tensor

SMALL = 140  # length on a CPU, where the kernels are interpreted tile by tile; not a multiple of any tile
CHECKED = 1024  # longest length compared with float64 on a GPU: that comparison is dense


@dataclass(frozen=True)
class Sizes:
    """heads: of v and decay; q and k may have fewer."""

    heads: int
    q_heads: int
    k_heads: int
    dim: int
    dim_v: int
    batch: int = 1
    length: int = SMALL

    def meta(self) -> tuple[Any, ...]:
        sizes = ((self.q_heads, self.dim), (self.k_heads, self.dim), (self.heads, self.dim_v))
        return tuple(meta_tensor(self.batch, n, self.length, d, dtype=torch.bfloat16) for n, d in sizes)

    def inputs(self) -> dict[str, Tensor]:
        """q, k, v and the gradient of the output."""
        make = torch.Generator().manual_seed(0)
        sizes = {"q": (self.q_heads, self.dim), "k": (self.k_heads, self.dim), "v": (self.heads, self.dim_v)}
        sizes["do"] = sizes["v"]
        return {n: torch.randn(self.batch, self.length, *s, generator=make).bfloat16() for n, s in sizes.items()}


def run(
    make_engine: Callable[..., LinearAttentionEngine],
    plain: Callable[..., tuple[Tensor, ...]],
    sizes: Sizes,
    *,
    extra: Callable[[Sizes], dict[str, Tensor]],
    peer: Callable[..., Any] | None = None,
    argv: Sequence[str] | None = None,
) -> dict[str, tuple[float, float]]:
    """Check the engine against `plain`, time both (and a peer) where there is a GPU; return {name: (error, eager's)}.

    make_engine(qkv_meta, **options) gives the engine; extra(sizes) what a call gets beside q, k and v, by name;
    plain(q, k, v, **extra) gives q, k, v (batch, length, heads, dim) and the log decay (batch, length, heads) or with a
    last dim one for each channel, modded.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="auto, tilelang, reference or interpret; on a CPU interpret, else auto")
    parser.add_argument("--length", type=int, default=None, help=f"2048 on a GPU, {SMALL} on a CPU")
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    length = args.length or (2048 if on_gpu else SMALL)
    if not on_gpu:  # few heads; groups stay groups
        sizes = replace(sizes, heads=4, q_heads=min(sizes.q_heads, 4), k_heads=min(sizes.k_heads, 4), dim=64, dim_v=64)
    backend = args.backend or ("auto" if on_gpu else "interpret")
    checked = replace(sizes, length=min(length, CHECKED) if on_gpu else length)
    print(f"{sizes.heads} heads, {sizes.q_heads} of q, {sizes.k_heads} of k, dims {sizes.dim} and {sizes.dim_v}, bf16")
    errors = _check(make_engine(checked.meta(), backend=backend), plain, *_tensors(checked, extra, args.device))
    print(f"length {checked.length} on {args.device}: mean error against float64, and that of the same in PyTorch")
    for name, (ours, eager) in errors.items():
        print(f"  {name:8} {ours:.2e}   {eager:.2e}")
    if on_gpu:
        whole = replace(sizes, length=length)
        _time(make_engine(whole.meta(), backend=backend), peer, *_tensors(whole, extra, args.device))
    return errors


def _tensors(
    sizes: Sizes, extra: Callable[[Sizes], dict[str, Tensor]], device: str
) -> tuple[dict[str, Tensor], Tensor]:
    inputs = {n: x.to(device) for n, x in {**sizes.inputs(), **extra(sizes)}.items()}
    return inputs, inputs.pop("do")


def parallel(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """The output from all pairs at once: products in the dtype of q, decays at least in fp32."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if log_decay.ndim == 4:
        return parallel_channels(q, k, v, log_decay)
    sums = log_decay.to(torch.promote_types(log_decay.dtype, torch.float32)).cumsum(1).transpose(1, 2)
    earlier = torch.ones(v.shape[1], v.shape[1], dtype=torch.bool, device=v.device).tril()
    decay = torch.where(earlier, sums[..., :, None] - sums[..., None, :], -torch.inf).exp()
    weights = torch.einsum("bihd,bjhd->bhij", q, k).to(decay.dtype) * decay
    return torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v)


def parallel_channels(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """The same with a decay for each channel, eight queries at a time: each pair has a decay for each channel."""
    sums = log_decay.to(torch.promote_types(log_decay.dtype, torch.float32)).cumsum(1)

    def rows(start: int, stop: int) -> Tensor:
        earlier = torch.ones(stop, stop, dtype=torch.bool, device=v.device).tril()[start:]
        since = sums[:, start:stop, None] - sums[:, None, :stop]
        decay = torch.where(earlier[..., None, None], since, -torch.inf).exp()
        faded = (q[:, start:stop, None].to(decay.dtype) * decay).to(q.dtype)
        weights = torch.einsum("bijhd,bjhd->bhij", faded, k[:, :stop])
        return torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v[:, :stop])

    length = v.shape[1]
    tiles = [(start, min(start + 8, length)) for start in range(0, length, 8)]
    return torch.cat([checkpoint(rows, *tile, use_reentrant=False) for tile in tiles], 1)


def _check(
    engine: LinearAttentionEngine, plain: Callable[..., tuple[Tensor, ...]], inputs: dict[str, Tensor], do: Tensor
) -> dict[str, tuple[float, float]]:
    def dense(**tensors: Tensor) -> Tensor:
        return parallel(*plain(**tensors))

    exact = _results(dense, {n: x.double() for n, x in inputs.items()}, do.double())
    ours, eager = _results(engine, inputs, do), _results(dense, inputs, do)

    def off(found: Tensor, best: Tensor) -> float:
        return (found.double() - best).abs().mean().item()

    return {name: (off(ours[name], best), off(eager[name], best)) for name, best in exact.items()}


def _results(function: Callable[..., Tensor], inputs: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    o = function(**leaves)
    return {"o": o.detach(), **dict(zip((f"d{n}" for n in leaves), torch.autograd.grad(o, list(leaves.values()), do)))}


def _time(
    engine: LinearAttentionEngine, peer: Callable[..., Any] | None, inputs: dict[str, Tensor], do: Tensor
) -> None:
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    print(f"length {do.shape[1]} on {torch.cuda.get_device_name()}:")
    for name, function in (("ours", engine), ("peer", peer)):
        if function is None:
            continue
        try:
            o = function(**leaves)
        except ImportError as missing:
            print(f"  {name}: not installed ({missing.name})")
            continue
        forward = milliseconds(lambda f=function: f(**leaves))
        backward = milliseconds(lambda o=o: torch.autograd.grad(o, list(leaves.values()), do, retain_graph=True))
        print(f"  {name}: forward {forward:.3f} ms, backward {backward:.3f} ms")
