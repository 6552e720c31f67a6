"""Calls with a cache: keys in pages, and the output in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def in_pages(cache: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Keys of all requests in pages, in a random order, and the table."""
    batch, keys, heads, dim = cache.shape
    order = torch.randperm(batch * keys // page, device=cache.device)
    store = torch.empty(len(order), page, heads, dim, device=cache.device, dtype=cache.dtype)
    store[order] = cache.view(len(order), page, heads, dim)
    return store, order.view(batch, -1).to(torch.int32)


def exact(program: str, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The output in float64, causal from the bottom right, request by request. program: "sigmoid", or its rows are
    those of softmax."""
    found = []
    for b, length in enumerate(lengths.tolist()):
        of_q = q[b].double().unflatten(1, (k.shape[2], -1))
        of_k, of_v = (t[b, :length].double() for t in (k, v))
        scores = torch.einsum("qhgd,khd->hgqk", of_q, of_k) * q.shape[3] ** -0.5
        place = torch.arange(length - q.shape[1], length, device=q.device)[:, None]
        keep = place >= torch.arange(length, device=q.device)
        if program == "sigmoid":
            weights = torch.where(keep, scores.sigmoid(), 0.0)
        else:
            weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
        found.append(torch.einsum("hgqk,khd->qhgd", weights, of_v).flatten(1, 2))
    return torch.stack(found)


def error(found: Tensor, wanted: Tensor) -> str:
    """The relative L2 error."""
    return f"{float((found.double() - wanted).norm() / wanted.norm()):.1e}"
