"""Attention in plain torch, written from the formulas: what every other part of the project is measured against.

Nothing of the package is imported here. Tensors are (batch, length, heads, dim); query head h reads key head
h // (Hq / Hkv). Gradients come from autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A score function gets the products q.k, (B, H, Sq, Skv), and the index tensors b, h, q_idx, kv_idx, which broadcast
# with them. A mask function gets the index tensors alone; True = keep.
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# ---- rows: scores and what is kept -> weights, and the log of the sum of exponentials where there is one


def softmax(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    return _exponential(x, keep, extra=0.0)


def softmax_one(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x) / (1 + sum exp(x)): a row may put weight on nothing ("off by one")."""
    return _exponential(x, keep, extra=1.0)


def _exponential(x: Tensor, keep: Tensor, extra: float) -> tuple[Tensor, Tensor]:
    x = x.masked_fill(~keep, -math.inf)
    top = x.detach().amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)  # a row with nothing kept: -inf - -inf would be NaN
    if extra:
        top = top.clamp(min=0.0)  # the log of what is added counts, too
    e = (x - top).exp()
    total = e.sum(-1, keepdim=True)
    if extra:
        total = total + extra * (-top).exp()
    some = total > 0
    weights = torch.where(some, e / torch.where(some, total, 1.0), 0.0)
    lse = torch.where(some, torch.where(some, total, 1.0).log() + top, -math.inf)
    return weights, lse.squeeze(-1)


def sigmoid(x: Tensor, keep: Tensor) -> tuple[Tensor, None]:
    return torch.where(keep, x.sigmoid(), 0.0), None


def relu(x: Tensor, keep: Tensor) -> tuple[Tensor, None]:
    return torch.where(keep, x.relu(), 0.0), None


def relu2(x: Tensor, keep: Tensor) -> tuple[Tensor, None]:
    return torch.where(keep, x.relu().square(), 0.0), None


def relu2_row_sum(x: Tensor, keep: Tensor, eps: float = 1e-6) -> tuple[Tensor, None]:
    weights, _ = relu2(x, keep)
    return weights / (eps + weights.sum(-1, keepdim=True)), None


def retention(x: Tensor, keep: Tensor) -> tuple[Tensor, None]:
    """x / max(sum |x|, 1) with the normaliser held constant in the backward pass, as RetNet trains."""
    x = torch.where(keep, x, 0.0)
    return x / x.detach().abs().sum(-1, keepdim=True).clamp(min=1.0), None


WEIGHTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]] = {
    "softmax": softmax,
    "softmax_one": softmax_one,
    "sigmoid": sigmoid,
    "relu": relu,
    "relu2": relu2,
    "relu2_row_sum": relu2_row_sum,
    "retention": retention,
}


# ---- scores


def scaled(scale: float) -> Score:
    return lambda s, b, h, i, j: s * scale


def softcapped(scale: float, cap: float) -> Score:
    return lambda s, b, h, i, j: cap * torch.tanh(s * scale / cap)


def alibi(scale: float, slopes: Tensor) -> Score:
    """Press et al. 2021; slopes has one value for each head. In the causal half |i-j| is i-j."""
    return lambda s, b, h, i, j: s * scale - slopes[h] * (i - j).abs()


def biased(scale: float, bias: Tensor) -> Score:
    return lambda s, b, h, i, j: s * scale + bias


def decayed(scale: float) -> Score:
    """RetNet's decay gamma_h^|i-j| with gamma_h = 1 - 2^(-5-h); in the causal half |i-j| is i-j."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        gamma = 1 - torch.exp2(-5.0 - h.double())
        return s * scale * (gamma ** (i - j).abs()).to(s.dtype)

    return score


# ---- the whole


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    *,
    causal: bool = False,
    score: Score | None = None,
    mask: Mask | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in float64, whatever dtype comes in; a row with no kept pair gives 0.

    score defaults to s / sqrt(D). With return_lse also the (B, H, Sq) logs of the row sums, for the softmax kinds.
    """
    o, lse = _dense(q.double(), k.double(), v.double(), kind, causal, score, mask, rows=torch.float64)
    if not return_lse:
        return o
    assert lse is not None, f"{kind} has no row sum of exponentials"
    return o, lse


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    *,
    causal: bool = False,
    score: Score | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """The same as a careful user of PyTorch writes it: products, scores and weights in the dtype of q, rows in fp32.

    Models do this (transformers' eager attention, with its softmax in fp32): it is the yardstick of `compare`.
    """
    return _dense(q, k, v, kind, causal, score, mask, rows=torch.float32)[0]


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    causal: bool,
    score: Score | None,
    mask: Mask | None,
    rows: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    b, h, i, j = (
        torch.arange(n, device=q.device).view([-1 if axis == place else 1 for axis in range(4)])
        for place, n in enumerate((*q.shape[:3], k.shape[2]))
    )
    x = (score or scaled(q.shape[-1] ** -0.5))(q @ k.transpose(-1, -2), b, h, i, j)
    keep = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if causal:
        keep = keep & (i >= j)
    if mask is not None:
        keep = keep & mask(b, h, i, j)
    weights, lse = WEIGHTS[kind](x.to(rows), keep)
    return (weights.to(v.dtype) @ v).transpose(1, 2), lse


# ---- the rule


@dataclass(frozen=True)
class Error:
    """How far one output or gradient is from the exact one, beside how far eager PyTorch is."""

    name: str
    ours: float
    eager: float
    allowed: float
    worst: tuple[int, ...]
    nans: int

    @property
    def ratio(self) -> float:
        if self.ours == 0:
            return 0.0
        return self.ours / self.eager if self.eager else math.inf

    @property
    def fine(self) -> bool:
        return self.nans == 0 and self.ours <= self.allowed


FACTORS = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 10.0}


def compare(
    ours: dict[str, Tensor],
    exact: dict[str, Tensor],
    eager: dict[str, Tensor],
    dtype: torch.dtype,
    floor: float = 0.0,
) -> list[Error]:
    """Demand mean |ours - exact| <= factor * mean |eager - exact| for every name, and no NaN; return the errors.

    factor is 1.1 for 16-bit dtypes and 10 for fp32. floor is an error that is always allowed: for results that eager
    PyTorch has exactly by chance (a row of one key), where any other order of operations must lose.
    """
    assert ours.keys() == exact.keys() == eager.keys(), (sorted(ours), sorted(exact), sorted(eager))
    errors = [_error(name, ours[name], exact[name], eager[name], FACTORS[dtype], floor) for name in exact]
    if not all(error.fine for error in errors):
        raise AssertionError("further from float64 than the rule allows\n" + table(errors))
    return errors


def _error(name: str, ours: Tensor, exact: Tensor, eager: Tensor, factor: float, floor: float) -> Error:
    assert ours.shape == exact.shape == eager.shape, (name, ours.shape, exact.shape, eager.shape)
    assert exact.isfinite().all() and eager.isfinite().all(), f"{name}: the yardstick itself is not finite"
    if exact.numel() == 0:
        return Error(name, 0.0, 0.0, floor, (), 0)
    off = (ours.double() - exact.double()).abs()
    limit = (eager.double() - exact.double()).abs().mean().item()
    worst = tuple(int(n) for n in torch.unravel_index(off.nan_to_num(math.inf).argmax(), off.shape))
    return Error(name, off.mean().item(), limit, factor * limit + floor, worst, int(off.isnan().sum()))


def table(errors: list[Error]) -> str:
    lines = [f"{'':14} {'error':>10} {'eager':>10} {'ratio':>8}  worst at"]
    lines += [
        f"{e.name:14} {e.ours:10.3e} {e.eager:10.3e} {e.ratio:8.3f}  {e.worst}"
        + (f"  {e.nans} NaN" if e.nans else "")
        + ("" if e.fine else "  <-- too far")
        for e in errors
    ]
    return "\n".join(lines)


def worst_ratio(errors: list[Error], label: str) -> tuple[str, tuple[str, float, str, int]]:
    """For pytest's record_property; a run ends with the worst of each label."""
    ratio, name = max(((error.ratio, error.name) for error in errors), default=(0.0, "nothing"))
    return "worst ratio", (label, ratio, name, len(errors))
