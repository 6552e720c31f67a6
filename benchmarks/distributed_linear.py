"""Linear attention over sequences that GPUs share, for benchmarks/distributed.py: what is drawn, and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attention_engine import LinearAttentionEngine
from attention_engine.distributed import ContextParallel
from benchmarks.linear import Problem

Attend: TypeAlias = Callable[..., Tensor]
LINEAR = {"mamba2": (80, 1, 128, 64), "gla": (4, 4, 256, 512)}  # heads, groups, dims
TOKENS_AT = {**dict.fromkeys(("q", "k", "v", "decay", "o"), 1), "dt": 2}


def drawn_linear(kind: str, length: int) -> tuple[LinearAttentionEngine, dict[str, Tensor], Tensor]:
    """A linear engine, its tensors and the output's gradient, the same on all ranks."""
    problem = Problem(kind, 1, length, *LINEAR[kind])
    tensors = {n: t.detach() for n, t in problem.inputs().items()}
    generator = torch.Generator("cuda").manual_seed(1)
    return (
        problem.engine(),
        tensors,
        torch.randn(tensors["v"].shape, generator=generator, device="cuda", dtype=torch.bfloat16),
    )


def linear_results(call: Attend, given: Mapping[str, Tensor], d_o: Tensor) -> dict[str, Tensor]:
    """The output and the gradients, by name."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    o = call(**leaves)
    found = torch.autograd.grad(o, list(leaves.values()), d_o.to(o.dtype))
    return {"o": o.detach(), **dict(zip(leaves, found, strict=True))}


def shared_linear(
    engine: LinearAttentionEngine, mesh: DeviceMesh, whole: Mapping[str, Tensor], d_o: Tensor
) -> dict[str, Tensor]:  # fmt: skip
    """The same by all ranks: tokens in the order of the sequence, and the sum of what is whole on each."""
    attention = ContextParallel(engine, mesh)
    mine = {n: attention.shard(t, TOKENS_AT[n]) if n in TOKENS_AT else t for n, t in whole.items()}
    found = linear_results(attention, mine, attention.shard(d_o))
    for name, tensor in found.items():
        if name in TOKENS_AT:
            found[name] = attention.unshard(tensor, TOKENS_AT[name])
        else:
            dist.all_reduce(tensor)
    return found
