"""The masks and scores of docs/flex-gallery.md as they are timed: of 8192 queries and keys, 16 heads and two batches.

python -m benchmarks.flex --gallery
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


def masks(device: str, length: int) -> dict[str, Callable[..., Any]]:
    """By the names that they have on the page; the parts of each are as long as a length of thousands has them."""
    index, ends = torch.arange(length, device=device), torch.tensor([700, 2100, 2500, 5200, 7000], device=device)
    documents = torch.searchsorted(ends, index, right=True).int()
    lengths, offset = torch.tensor([6000, 8000], device=device), torch.tensor(1024, device=device)
    kept = (index[:, None] * 7 + index * 11) % 5 < 2
    return {
        "causal": lambda b, h, q, k: q >= k,
        "from an offset": lambda b, h, q, k: q + offset >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "both sides": lambda b, h, q, k: (q - k).abs() <= 512,
        "prefix": lambda b, h, q, k: (k < 2048) | (q >= k),
        "documents": lambda b, h, q, k: documents[q] == documents[k],
        "documents, causal": lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k),
        "padding": lambda b, h, q, k: k < lengths[b],
        "first tokens and window": lambda b, h, q, k: ((k < 4) | (q - k < 1024)) & (q >= k),
        "global tokens": lambda b, h, q, k: (q < 128) | (k < 128) | ((q - k).abs() <= 512),
        "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
        "dilated window": lambda b, h, q, k: ((q - k).abs() <= 1024) & ((q - k) % 2 == 0),
        "strided": lambda b, h, q, k: ((k % 128 == 127) | (q // 128 == k // 128)) & (q >= k),
        "blocks": lambda b, h, q, k: q // 1024 == k // 1024,
        "causal blocks": lambda b, h, q, k: q // 1024 >= k // 1024,
        "chunks": lambda b, h, q, k: (q // 2048 == k // 2048) & (q >= k),
        "image, 6 wide": lambda b, h, q, k: ((q // 96 - k // 96).abs() <= 6) & ((q % 96 - k % 96).abs() <= 6),
        "any pairs": lambda b, h, q, k: kept[q, k],
        "the later half": lambda b, h, q, k: (q >= k) & torch.where(q < 4096, k >= 0, k >= 4096),
        "not itself": lambda b, h, q, k: torch.logical_and(q >= k, ~(q == k)) | (q == 0),
    }


def scores(device: str, length: int, heads: int) -> dict[str, Callable[..., Any]]:
    """The same of scores."""
    index = torch.arange(length, device=device)
    slope = torch.exp2(-torch.arange(1, heads + 1, device=device) * 8.0 / heads)
    table, rows = torch.randn(257, device=device), torch.linspace(0.5, 1.5, length, device=device)
    columns, forgotten = torch.cos(index * 0.5), (-0.01 - 0.01 * torch.sin(index * 0.8) ** 2).cumsum(0)
    documents = (index // 1500).int()
    return {
        "ALiBi": lambda s, b, h, q, k: s - slope[h] * (q - k).abs(),
        "relative": lambda s, b, h, q, k: s + (k - q) * 0.001,
        "softcap of a ramp": lambda s, b, h, q, k: torch.tanh((s * k - 12) / 4),
        "clipped distances": lambda s, b, h, q, k: s * table[torch.clamp(q - k, -128, 128) + 128],
        "rows and columns": lambda s, b, h, q, k: s * rows[q] + columns[k],
        "forgetting": lambda s, b, h, q, k: s + forgotten[q] - forgotten[k],
        "by the query": lambda s, b, h, q, k: s * torch.log(q + 1.0) - 2.0,
        "checkerboard": lambda s, b, h, q, k: torch.where((q + k) % 2 == 0, s, -s),
        "other documents": lambda s, b, h, q, k: torch.where(documents[q] == documents[k], s, s - 2.0),
        "logistic": lambda s, b, h, q, k: torch.log(torch.sigmoid(s * (q - k) * 0.01)),
    }


def gallery(device: str, length: int, heads: int) -> dict[str, Mods]:
    """All of them, as score_mod and mask_mod; "mask " or "score " stands before a name."""
    of_masks = {f"mask {name}": (None, mask) for name, mask in masks(device, length).items()}
    return {**of_masks, **{f"score {name}": (score, None) for name, score in scores(device, length, heads).items()}}
