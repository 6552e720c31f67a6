"""Linear attention in plain torch, written from the formulas: what the package's is measured against.

Nothing of the package is imported here. q, k, v are (batch, length, heads, dim) after their mods and the log decay a is
(batch, length, heads), or (batch, length, heads, dim) with one for each channel; value head h reads query head
h // (H / Hq), key head h // (H / Hk). Gradients by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def heads_first(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch, heads, length, ...), one q and k for each value head."""
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), a.transpose(1, 2)


def recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, last state) by h = exp(a) h + k^T v, o = q h, token by token, in the dtype that comes in."""
    q, k, v, a = heads_first(q, k, v, a)
    outputs = []
    keep = (a if a.ndim == 4 else a[..., None]).exp()[..., None]
    for t in range(v.shape[2]):
        state = keep[:, :, t] * state + torch.einsum("bhd,bhe->bhde", k[:, :, t], v[:, :, t])
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
    return torch.stack(outputs, dim=1), state


def parallel(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same from all pairs at once, as a careful user of PyTorch writes it.

    Products in the dtype of q; decays, and what they multiply, at least in fp32.
    """
    if a.ndim == 4:
        return parallel_channels(q, k, v, a, state)
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


def parallel_channels(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a decay for each channel, a few queries at a time: each pair has a decay for each channel."""
    dtype = v.dtype
    rows = torch.promote_types(dtype, torch.float32)
    q, k, v, a = heads_first(q, k, v, a)
    sums = a.to(rows).cumsum(2)
    made = []
    for start in range(0, v.shape[2], 16):
        stop = min(start + 16, v.shape[2])
        tile = (q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], sums[:, :, :stop], state)
        made.append(checkpoint(_some_queries, *tile, use_reentrant=False))
    left = (sums[:, :, -1:] - sums).exp()
    last = state.to(rows) * sums[:, :, -1, :, None].exp()
    last = last + ((k.to(rows) * left).to(dtype).transpose(-1, -2) @ v).to(rows)
    return torch.cat(made, 2).transpose(1, 2), last


def _some_queries(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, state: Tensor) -> Tensor:
    """The outputs of the last queries of k."""
    dtype, rows = v.dtype, sums.dtype
    start, stop = k.shape[2] - q.shape[2], k.shape[2]
    earlier = torch.ones(q.shape[2], stop, dtype=torch.bool, device=v.device).tril(start)[..., None]
    since = sums[:, :, start:, None] - sums[:, :, None]
    faded = (q.to(rows)[:, :, :, None] * torch.where(earlier, since, -torch.inf).exp()).to(dtype)
    weights = torch.einsum("bhijd,bhjd->bhij", faded, k)
    return weights @ v + (q.to(rows) * sums[:, :, start:].exp()).to(dtype) @ state.to(dtype)
