"""What one call must do at least: `cost()` of both engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_engine.ir.program import KV_IDX, Q_IDX, B, H, Program
from attention_engine.reference.evaluate import Evaluator

MOST_AT_ONCE = 1 << 24  # pairs that are looked at together


@dataclass(frozen=True)
class Cost:
    """Kept pairs of all batches and query heads; FLOPs of their products (forward 2, backward 5 with the scores made
    again); bytes of q, k, v, o and their gradients, each read or written once."""

    pairs: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class LinearCost:
    """Tokens of all batches and heads; FLOPs of their products with the state (forward k^T v and q h; backward 5: the
    state and its gradient, and of both dQ, dK and dV); bytes of q, k, v, decay, states, o and their gradients, each
    read or written once."""

    tokens: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int


def linear_cost_of(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, ends: bool
) -> LinearCost:
    """The cost of a call with these tensors, (batch, length, heads, ...). ends: the last state is returned."""
    tokens, product = v.shape[0] * v.shape[1] * v.shape[2], 2 * q.shape[3] * v.shape[3]
    moved = sum(t.element_size() * t.numel() for t in (q, k, v, v, decay, initial) if t is not None)
    state = 8 if v.dtype is torch.float64 else 4
    moved += state * v.shape[0] * v.shape[2] * q.shape[3] * v.shape[3] if ends else 0
    return LinearCost(tokens, 2 * tokens * product, 5 * tokens * product, moved, 2 * moved)


def cost_of(program: Program, q: Tensor, k: Tensor, v: Tensor, custom: Mapping[str, Tensor]) -> Cost:
    """The cost of a call with these tensors, (batch, length, heads, dim), and these custom inputs by name."""
    pairs = count_kept(program, q, k, custom)
    dim, dim_v = q.shape[3], v.shape[3]
    output = q.numel() // max(dim, 1) * dim_v
    moved = q.element_size() * (q.numel() + k.numel() + v.numel() + output)
    return Cost(pairs, 2 * pairs * (dim + dim_v), 2 * pairs * (3 * dim + 2 * dim_v), moved, 2 * moved)


def count_kept(program: Program, q: Tensor, k: Tensor, custom: Mapping[str, Tensor]) -> int:
    """Pairs that the mask keeps, counted some rows at a time."""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    if program.mask is None or 0 in (batch, queries, heads, keys):
        return batch * heads * queries * keys
    place = q.device
    indices = {
        B: torch.arange(batch, device=place).view(-1, 1, 1, 1),
        H: torch.arange(heads, device=place).view(1, -1, 1, 1),
        KV_IDX: torch.arange(keys, device=place).view(1, 1, 1, -1),
    }
    together = max(MOST_AT_ONCE // (batch * heads * keys), 1)
    kept = 0
    for first in range(0, queries, together):
        rows = torch.arange(first, min(first + together, queries), device=place).view(1, 1, -1, 1)
        found = Evaluator({**indices, Q_IDX: rows}, dict(custom), torch.float32, place)(program.mask)
        shared = batch * heads * rows.numel() * keys // found.numel()  # pairs that an entry stands for
        kept += int(found.sum()) * shared
    return kept
