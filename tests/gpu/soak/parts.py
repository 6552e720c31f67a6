"""Score functions and masks of the soak, each twice: for the package, and in plain torch at chosen rows and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import library as lib

REACH, WINDOW, PREFIX, BLOCK = 64, 300, 500, 128
BLOCKS = "blocks"  # the tensor that a call takes as its block_mask
STARTS = ("cu_seqlens_q", "cu_seqlens_k")  # tensors that a packed call takes


@dataclass(frozen=True)
class Sizes:
    """What the tensors of a draw are made by. packing: how documents are cut; documents: how many a row holds."""

    batch: int
    queries: int
    keys: int
    heads: int
    scale: float
    packing: str
    documents: int


@dataclass(frozen=True)
class Part:
    """A score function or a mask.

    plain: on tensors that broadcast to (heads, rows, keys), with a number for the batch; local: a row keeps few keys.
    """

    ours: Callable[..., Any] | None
    plain: Callable[..., Tensor]
    axes: dict[str, tuple] = field(default_factory=dict)
    custom: Callable[[Sizes, torch.Generator], dict[str, Tensor]] = lambda sizes, generator: {}
    local: bool = False


def randn(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=generator, device=generator.device)


# ---- documents


def lengths_of(packing: str, count: int, total: int, generator: torch.Generator) -> list[int]:
    """Lengths of documents that fill a row of so many tokens."""
    count = max(1, min(count, total))
    if packing == "even":
        size = -(-total // count)
        return [min(size, total - start) for start in range(0, total, size)]
    shares = torch.empty(count).exponential_(generator=generator)
    if packing == "tiny":  # many of a few tokens beside some long ones
        shares = torch.where(torch.rand(count, generator=generator) < 0.8, 1e-4, shares)
    if packing == "padded":  # the tokens after the last document are one of their own
        shares[-1] = shares.sum() * 0.3
    found = (shares / shares.sum() * (total - count)).long() + 1
    found[-1] += total - found.sum()
    return [int(n) for n in found]


def documents(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """Ids of documents, int32 (batch, queries); another packing in each row."""
    make = torch.Generator().manual_seed(generator.initial_seed())
    rows = []
    for _ in range(sizes.batch):
        lengths = torch.tensor(lengths_of(sizes.packing, sizes.documents, sizes.queries, make))
        rows.append(torch.repeat_interleave(torch.arange(len(lengths)), lengths))
    return {"documents": torch.stack(rows).to(generator.device, torch.int32)}


def padded_documents(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """The same, in which the tokens of the last document are padding, -1."""
    ids = documents(sizes, generator)["documents"]
    return {"documents": torch.where(ids == ids.amax(1, keepdim=True), -1, ids).int()}


def unlike_documents(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """Documents that have more or fewer keys than queries, of some one alone, amid them one with a query at most: ids
    of queries and keys, where they start in all batches together, and how far the place of a query is ahead of its
    index: the last one stands at the last key."""
    make = torch.Generator().manual_seed(generator.initial_seed())
    device, ids, ahead, starts = generator.device, ([], []), [], [[0], [0]]
    for row in range(sizes.batch):
        count = min(sizes.documents + 1, sizes.queries, sizes.keys)
        both = []
        for total, absent in ((sizes.queries, 0), (sizes.keys, 1)):
            found = torch.tensor(lengths_of(sizes.packing, count, total, make))
            found = torch.cat([found, found.new_zeros(count + 1 - len(found))])  # the last has none of either
            if count > 2 and row % 2 == absent:
                found[0], found[1] = 0, found[0] + found[1]
            if count > 3 and not absent:  # of queries, all but one go to the next
                amid = count // 2
                left = (found[amid] - 1).clamp(min=0)
                found[amid], found[amid + 1] = found[amid] - left, found[amid + 1] + left
            both.append(found)
        ends = [lengths.cumsum(0) for lengths in both]
        for side, lengths in enumerate(both):
            ids[side].append(torch.repeat_interleave(torch.arange(count + 1), lengths))
            starts[side] += (ends[side] + starts[side][-1]).tolist()
        ahead.append((ends[1] - ends[0])[ids[0][-1]])
    found = {"documents": torch.stack(ids[0]), "keys_documents": torch.stack(ids[1]), "ahead": torch.stack(ahead)}
    found |= {name: torch.tensor(of) for name, of in zip(STARTS, starts, strict=True)}
    return {n: x.to(device, torch.int32) for n, x in found.items()}


def of_one_document(b: int, i: Tensor, j: Tensor, documents: Tensor, keys_documents: Tensor) -> Tensor:
    return documents[b, i] == keys_documents[b, j]


def unpadded(b: Any, h: Any, q_idx: Any, kv_idx: Any, custom: Any) -> Any:
    ids = custom["documents"]
    return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx]) & (ids[b, q_idx] >= 0)


def lengths(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """How many keys each batch has; one batch may have none."""
    found = torch.randint(0, sizes.keys + 1, (sizes.batch,), generator=generator, device=generator.device)
    found[-1] = sizes.keys
    return {"lengths": found}


def blocks(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """Which blocks exist: about a third of them, a diagonal among them, but for one row of blocks in some."""
    size = (1, sizes.heads, -(-sizes.queries // BLOCK), -(-sizes.keys // BLOCK))
    found = torch.rand(size, generator=generator, device=generator.device) < 0.3
    found |= torch.eye(size[2], size[3], dtype=torch.bool, device=generator.device)
    found[:, 0, -1] = False
    return {BLOCKS: found.to(torch.int8)}


IDS = {"documents": ("batch", "seq_len")}
UNLIKE_IDS = {"documents": ("batch", "seq_len"), "keys_documents": ("batch", "seq_len_kv")}
MASKS = {
    "full": Part(None, lambda b, h, i, j: (i >= 0) & (j >= 0)),
    "causal": Part(lib.causal, lambda b, h, i, j: i >= j),
    "window": Part(
        lib.sliding_window(WINDOW, 0), lambda b, h, i, j: (i >= j) & (i - j <= WINDOW), local=True,
    ),
    "two-sided window": Part(
        lib.sliding_window(WINDOW, 50), lambda b, h, i, j: (i - j <= WINDOW) & (j - i <= 50), local=True,
    ),
    "prefix": Part(lib.prefix_lm(PREFIX), lambda b, h, i, j: (j < PREFIX) | (i >= j)),
    "documents": Part(
        lib.document(), lambda b, h, i, j, documents: documents[b, i] == documents[b, j], IDS, documents, local=True,
    ),
    "causal documents": Part(
        lib.and_masks(lib.causal, lib.document()),
        lambda b, h, i, j, documents: (i >= j) & (documents[b, i] == documents[b, j]), IDS, documents, local=True,
    ),
    "causal documents, padding": Part(
        unpadded,
        lambda b, h, i, j, documents: (i >= j) & (documents[b, i] == documents[b, j]) & (documents[b, i] >= 0),
        IDS, padded_documents, local=True,
    ),
    # These are packed ones' alone; i is a query's place.
    "causal unlike documents": Part(
        lib.causal, lambda b, h, i, j, at, **ids: (i >= j) & of_one_document(b, at, j, **ids), UNLIKE_IDS,
        unlike_documents, local=True,
    ),
    "window in unlike documents": Part(
        lib.sliding_window(WINDOW, 0),
        lambda b, h, i, j, at, **ids: (i >= j) & (i - j <= WINDOW) & of_one_document(b, at, j, **ids), UNLIKE_IDS,
        unlike_documents, local=True,
    ),
    "lengths": Part(lib.padding(), lambda b, h, i, j, lengths: j < lengths[b], {"lengths": ("batch",)}, lengths),
    "blocks": Part(None, lambda b, h, i, j, blocks: blocks[0, h, i // BLOCK, j // BLOCK] != 0, custom=blocks),
}  # fmt: skip


# ---- scores


def relative(s: Tensor, scale: float, b: int, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
    return s * scale + table[h, (i - j).clamp(-REACH, REACH) + REACH].to(s.dtype)


def decayed(s: Tensor, scale: float, b: int, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    gamma = 1 - torch.exp2(-5.0 - h.double())
    return s * scale * (gamma ** (i - j).abs()).to(s.dtype)


def our_decayed(scale: float) -> Callable[..., Any]:
    def score_mod(score: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale * ((q_idx - kv_idx).abs() * (1 - 2.0 ** (-5 - h)).log2()).exp2()

    return score_mod


def our_biased(scale: float) -> Callable[..., Any]:
    return lambda score, custom, b, h, q_idx, kv_idx: score * scale + custom["bias"]


def our_shifted(scale: float) -> Callable[..., Any]:
    return lambda score, custom, b, h, q_idx, kv_idx: score * scale - math.log(4096)


@dataclass(frozen=True)
class Score(Part):
    """ours: of the scale; plain: (products, scale, b, h, i, j, **custom)."""


def our_capped(scale: float) -> Callable[..., Any]:
    """Softcap, and then ALiBi."""

    def score_mod(score: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return CAP * (score * (scale / CAP)).tanh() - custom["slopes"][h] * (q_idx - kv_idx).abs()

    return score_mod


def slopes(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    return {"slopes": 2.0 ** (-8 * (torch.arange(sizes.heads, device=generator.device) + 1.0) / sizes.heads)}


CAP = 2.0
SCORES = {
    "scaled": Score(lib.scale, lambda s, scale, b, h, i, j: s * scale),
    "softcap": Score(
        lambda scale: lib.softcap(CAP, scale), lambda s, scale, b, h, i, j: CAP * torch.tanh(s * scale / CAP)
    ),
    "alibi": Score(
        lib.alibi,
        lambda s, scale, b, h, i, j, slopes: s * scale - slopes[h].to(s.dtype) * (i - j),
        {"slopes": ("heads",)},
        slopes,
    ),
    "capped alibi": Score(
        our_capped,
        lambda s, scale, b, h, i, j, slopes: CAP * torch.tanh(s * scale / CAP) - slopes[h].to(s.dtype) * (i - j).abs(),
        {"slopes": ("heads",)},
        slopes,
    ),
    "relative": Score(
        lambda scale: lib.relative_bias("table", REACH, scale),
        relative,
        {"table": ("heads", 2 * REACH + 1)},
        lambda sizes, generator: {"table": randn(generator, sizes.heads, 2 * REACH + 1)},
    ),
    "bias": Score(
        our_biased,
        lambda s, scale, b, h, i, j, bias: s * scale + bias[0, h, i, j].to(s.dtype),
        {"bias": (1, "heads", "seq_len", "seq_len_kv")},
        lambda sizes, generator: {"bias": randn(generator, 1, sizes.heads, sizes.queries, sizes.keys)},
    ),
    "shifted": Score(our_shifted, lambda s, scale, b, h, i, j: s * scale - math.log(4096)),
    "decayed": Score(our_decayed, decayed),
}
