"""A linear attention from all pairs of tokens at once, in any dtype: what eager PyTorch makes of the same maths.

Products are made in the tensors' dtype; decays, and what they multiply, at least in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_engine.ir.linear import LinearProgram
from attention_engine.reference.linear import Custom, apply_mods

Product = Callable[[Tensor, Tensor], Tensor]
QUERIES = 16  # so many at once: with a decay for each channel a pair has a number for each of them


def attend_pairs(
    program: LinearProgram, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Custom,
    initial_state: Tensor | None, product: Product = torch.matmul,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, the last state) of tensors as reference/linear.py takes them; differentiable. product: of matrices."""
    dtype, rows = v.dtype, torch.promote_types(v.dtype, torch.float32)
    made = apply_mods(program, q, k, v, decay, custom, rows)
    queries, keys, values = (x.to(dtype) for x in made[:3])
    sums = made[3].cumsum(2)
    batch, heads, length, dim = queries.shape
    if initial_state is None:
        initial_state = values.new_zeros(batch, heads, dim, v.shape[3])
    state, outputs = initial_state.to(rows), []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        tensors = (queries[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop], sums[:, :, :stop], state)
        outputs.append(checkpoint(_some_queries, product, *tensors, use_reentrant=False))
    if not outputs:
        return values.transpose(1, 2), state
    left = (keys.to(rows) * (sums[:, :, -1:] - sums).exp()).to(dtype)
    last = state * sums[:, :, -1, :, None].exp() + product(left.transpose(-1, -2), values).to(rows)
    return torch.cat(outputs, 2).transpose(1, 2), last


def _some_queries(product: Product, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, state: Tensor) -> Tensor:
    """The outputs of the last queries."""
    dtype, rows = v.dtype, sums.dtype
    start = k.shape[2] - q.shape[2]
    earlier = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=v.device).tril(start)[..., None]
    since = torch.where(earlier, sums[:, :, start:, None] - sums[:, :, None], -torch.inf).exp()
    if sums.shape[3] == 1:
        weights = (product(q, k.transpose(-1, -2)).to(rows) * since[..., 0]).to(dtype)
    else:
        weights = torch.einsum("bhijd,bhjd->bhij", (q.to(rows)[:, :, :, None] * since).to(dtype), k)
    of_state = product((q.to(rows) * sums[:, :, start:].exp()).to(dtype), state.to(dtype))
    return product(weights, v) + of_state
