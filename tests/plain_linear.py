"""Linear attention in plain torch, written from the formulas: what the package's is measured against.

Nothing of the package is imported here. q, k, v are (batch, length, heads, dim) after their mods and the log decay a is
(batch, length, heads); value head h reads query head h // (H / Hq), key head h // (H / Hk). Gradients by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor


def heads_first(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch, heads, length, ...), one q and k for each value head."""
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), a.transpose(1, 2)


def recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, last state) by h = exp(a) h + k^T v, o = q h, token by token, in the dtype that comes in."""
    q, k, v, a = heads_first(q, k, v, a)
    outputs = []
    for t in range(v.shape[2]):
        state = a[:, :, t].exp()[..., None, None] * state + torch.einsum("bhd,bhe->bhde", k[:, :, t], v[:, :, t])
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
    return torch.stack(outputs, dim=1), state


def parallel(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same from all pairs at once, as a careful user of PyTorch writes it.

    Products in the dtype of q; decays, and what they multiply, at least in fp32.
    """
    dtype = v.dtype
    rows = torch.promote_types(dtype, torch.float32)
    q, k, v, a = heads_first(q, k, v, a)
    sums = a.to(rows).cumsum(-1)
    length = v.shape[2]
    earlier = torch.ones(length, length, dtype=torch.bool, device=v.device).tril()
    decay = torch.where(earlier, sums[..., :, None] - sums[..., None, :], -torch.inf).exp()
    weights = ((q @ k.transpose(-1, -2)).to(rows) * decay).to(dtype)
    o = weights @ v + ((q @ state.to(dtype)).to(rows) * sums.exp()[..., None]).to(dtype)
    left = (sums[..., -1:] - sums).exp()
    last = state.to(rows) * sums[..., -1, None, None].exp()
    last = last + ((k.to(rows) * left[..., None]).to(dtype).transpose(-1, -2) @ v).to(rows)
    return o.transpose(1, 2), last
