"""Tensors for the benchmark cases, and each case's maths as plain torch, one head at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_engine.tuner.cases import WINDOW, Case

Weigh = Callable[[Tensor, Tensor], Tensor]  # (masked scores, keep) -> weights


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output, (batch, length, heads, dim), and the custom inputs by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    custom: dict[str, Tensor]


def make_inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """Normally distributed numbers, the same for every peer."""
    generator = torch.Generator(device).manual_seed(0)
    s = case.shape

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(s.batch, case.length, heads, dim, generator=generator, device=device, dtype=dtype)

    sizes = ((s.heads, s.dim), (s.kv_heads, s.dim), (s.kv_heads, s.dim_v), (s.heads, s.dim_v))
    q, k, v, do = (normal(*size) for size in sizes)
    return Inputs(q, k, v, do, custom_inputs(case, device))


def moved_bytes(case: Case, direction: str, itemsize: int) -> float:
    """Bytes that must move: each input read once, each result written once (o too is read by the backward pass)."""
    s = case.shape
    queries, keys = s.batch * case.length * s.heads, s.batch * case.length * s.kv_heads
    inputs = queries * s.dim + keys * (s.dim + s.dim_v)
    output = queries * s.dim_v
    return itemsize * (inputs + output if direction == "forward" else 2 * inputs + 2 * output)


def custom_inputs(case: Case, device: str) -> dict[str, Tensor]:
    """The usual slopes (arXiv 2108.12409) and the bias -log(length) (arXiv 2409.04431), fp32."""
    match case.program:
        case "alibi":
            heads = torch.arange(case.shape.heads, device=device)
            return {"slopes": 2.0 ** (-8 * (heads + 1) / case.shape.heads)}
        case "sigmoid":
            return {"bias": torch.full((1,), -float(torch.tensor(case.length).log()), device=device)}
        case _:
            return {}


def keep_pairs(case: Case, device: str | torch.device) -> Tensor | None:
    """The mask, bool (length, length); None keeps all."""
    if case.mask == "full":
        return None
    distance = torch.arange(case.length, device=device)[:, None] - torch.arange(case.length, device=device)
    return distance >= 0 if case.mask == "causal" else (distance >= 0) & (distance < WINDOW)


def attend_head(case: Case, q: Tensor, k: Tensor, v: Tensor, custom: dict[str, Tensor], head: Tensor | int,
                keep: Tensor | None) -> Tensor:  # fmt: skip
    """One head of a case, or several (then `head` has a trailing (1, 1)), as a formula: q (..., length, dim) -> o."""
    x = q @ k.transpose(-1, -2) * case.shape.dim**-0.5
    distance = torch.arange(case.length, device=q.device)[:, None] - torch.arange(case.length, device=q.device)
    match case.program:
        case "softcap":
            x = 50.0 * torch.tanh(x / 50.0)
        case "alibi":
            x = x - (custom["slopes"].to(q.dtype)[head] * distance).to(q.dtype)
        case "sigmoid":
            x = x + custom["bias"].to(q.dtype)
        case "retention":
            wide = torch.promote_types(q.dtype, torch.float32)
            decay = 1 - 2.0 ** (-5.0 - torch.as_tensor(head, device=q.device, dtype=wide))
            x = x * torch.exp2(distance.abs() * decay.log2()).to(q.dtype)
    return WEIGHTS[case.program](x, torch.ones_like(x, dtype=torch.bool) if keep is None else keep) @ v


def _softmax(x: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(~keep, -torch.inf), -1)


def _retention(x: Tensor, keep: Tensor) -> Tensor:
    x = x.masked_fill(~keep, 0.0)
    return x / x.detach().abs().sum(-1, keepdim=True).clamp(min=1.0)


WEIGHTS: dict[str, Weigh] = {
    "softmax": _softmax,
    "softcap": _softmax,
    "alibi": _softmax,
    "sigmoid": lambda x, keep: torch.sigmoid(x).masked_fill(~keep, 0.0),
    "relu": lambda x, keep: torch.relu(x).masked_fill(~keep, 0.0),
    "retention": _retention,
}


def _heads(case: Case) -> Iterator[tuple[int, int, int]]:
    group = case.shape.heads // case.shape.kv_heads
    for batch in range(case.shape.batch):
        for head in range(case.shape.heads):
            yield batch, head, head // group


NAMES = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class References:
    """o, dq, dk and dv by the formula: in float64, and in the inputs' own dtype."""

    exact: list[Tensor]
    eager: list[Tensor]

    def ratios(self, found: list[Tensor]) -> dict[str, float]:
        """For each result: the mean error of `found` over that of the formula in the same dtype."""
        return {
            name: ((ours - true).abs().mean() / (theirs - true).abs().mean().clamp(min=1e-30)).item()
            for name, ours, true, theirs in zip(NAMES, found, self.exact, self.eager, strict=True)
        }


def make_references(case: Case, inputs: Inputs) -> References:
    """One head at a time, so that lengths of 16384 fit; key heads shared by several sum their gradients."""
    return References(_by_heads(case, inputs, torch.float64), _by_heads(case, inputs, inputs.q.dtype))


def _by_heads(case: Case, inputs: Inputs, kind: torch.dtype) -> list[Tensor]:
    keep = keep_pairs(case, inputs.q.device)
    sizes = (inputs.do, inputs.q, inputs.k, inputs.v)
    results = [torch.zeros(x.shape, dtype=kind, device=x.device) for x in sizes]
    custom = {n: x.to(kind) for n, x in inputs.custom.items()}
    for batch, head, kv_head in _heads(case):
        leaves = [x[batch, :, at].to(kind).requires_grad_()
                  for x, at in ((inputs.q, head), (inputs.k, kv_head), (inputs.v, kv_head))]  # fmt: skip
        o = attend_head(case, *leaves, custom, head, keep)
        gradients = torch.autograd.grad(o, leaves, inputs.do[batch, :, head].to(kind))
        for result, part, at in zip(results, (o.detach(), *gradients), (head, head, kv_head, kv_head), strict=True):
            result[batch, :, at] += part
    return results
