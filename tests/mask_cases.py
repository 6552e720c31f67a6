"""Pairs of a score function and a mask, each twice: as a user writes them for the package, and in plain torch.

`errors` runs one of them on any backend and shape and holds the output and every gradient to the rule of
tests/plain.py. The CPU tests (interpreter, odd sizes) and the GPU tests share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO
from attention_engine import library as lib
from tests import plain
from tests.cases import Shape

Make = Callable[[Shape], dict[str, Tensor]]
ONLINE = {"softmax": lib.OnlineSoftmax, "softmax_one": lib.OnlineSoftmaxOne, "sigmoid": lib.OnlineSigmoid,
          "relu": lib.OnlineRelu, "retention": lib.OnlineRetention}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A score function or a mask: for the package; in plain torch, with the custom inputs by name; these, declared."""

    ours: Callable[..., Any]
    plain: Callable[..., Tensor]
    axes: dict[str, tuple] = field(default_factory=dict)
    custom: Make = lambda shape: {}


def draw(*size: int, seed: int = 5) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# ---- masks


def packed(lengths: list[int]) -> Make:
    """The same documents, in another order for each batch."""

    def make(shape: Shape) -> dict[str, Tensor]:
        rows = []
        for b in range(shape.batch):
            order = lengths[b:] + lengths[:b]
            ids = torch.repeat_interleave(torch.arange(len(order)), torch.tensor(order))
            rows.append(ids.repeat(-(-shape.q_len // len(ids)))[: shape.q_len])  # ids come again: no neighbours
        return {"documents": torch.stack(rows).int()}

    return make


def padded(shape: Shape) -> dict[str, Tensor]:
    """The last batch has no key at all."""
    return {"lengths": torch.tensor([shape.kv_len // (b + 1) - (b > 0) for b in range(shape.batch - 1)] + [0])}


IDS = {"documents": ("batch", "seq_len")}
MASKS = {
    "none": Part(None, lambda b, h, i, j: (i >= 0) & (j >= 0)),
    "causal": Part(lib.causal, lambda b, h, i, j: i >= j),
    "offset": Part(lib.causal_from(-9), lambda b, h, i, j: j <= i - 9),  # the first nine rows keep nothing
    "two-sided window": Part(lib.sliding_window(37, 11), lambda b, h, i, j: (j >= i - 37) & (j <= i + 11)),
    "late window": Part(  # whose first tiles are masked whole, for most rows
        lambda b, h, q, k: (q - k >= 70) & (q - k < 150), lambda b, h, i, j: (j <= i - 70) & (j > i - 150),
    ),
    "global": Part(
        lib.with_global(5, lib.sliding_window(20, 20)), lambda b, h, i, j: (i < 5) | (j < 5) | ((i - j).abs() <= 20),
    ),
    "prefix": Part(lib.prefix_lm(33), lambda b, h, i, j: (j < 33) | (j <= i)),
    "dilated": Part(lib.dilated(7), lambda b, h, i, j: (j <= i) & ((i - j) % 7 == 0)),
    "block diagonal": Part(lib.block_diagonal(48), lambda b, h, i, j: i // 48 == j // 48),
    "block causal": Part(lib.block_causal(32), lambda b, h, i, j: j // 32 <= i // 32),
    "neighbourhood": Part(
        lib.neighbourhood(12, 2, 3),
        lambda b, h, i, j: ((i // 12 - j // 12).abs() <= 2) & ((i % 12 - j % 12).abs() <= 3),
    ),
    "documents": Part(
        lib.document(), lambda b, h, i, j, documents: documents[b, i] == documents[b, j],
        IDS, packed([23, 1, 40, 1, 64]),
    ),
    "causal documents": Part(
        lib.and_masks(lib.causal, lib.document()),
        lambda b, h, i, j, documents: (i >= j) & (documents[b, i] == documents[b, j]), IDS, packed([1, 90, 17, 30]),
    ),
    "padding": Part(
        lib.padding(), lambda b, h, i, j, lengths: j < lengths[b], {"lengths": ("batch",)}, padded,
    ),
    "of the head": Part(
        lambda b, h, q, k: (q >= k) & (q - k < 24 * (h + 1)), lambda b, h, i, j: (j <= i) & (j > i - 24 * (h + 1)),
    ),
    "not": Part(lib.not_mask(lib.sliding_window(40, 40)), lambda b, h, i, j: (i - j).abs() > 40),
    "or": Part(
        lib.or_masks(lib.block_diagonal(16), lib.dilated(11)),
        lambda b, h, i, j: (i // 16 == j // 16) | ((j <= i) & ((i - j) % 11 == 0)),
    ),
    "keep": Part(
        lambda b, h, q, k, custom: custom["keep"], lambda b, h, i, j, keep: keep[b, j],
        {"keep": ("batch", "seq_len_kv")},
        lambda shape: {"keep": (torch.arange(shape.kv_len) % 3 > 0).expand(shape.batch, -1).contiguous()},
    ),
}  # fmt: skip


# ---- scores


def scaled(s, custom, b, h, q_idx, kv_idx):
    return s * 0.125


def slopes(shape: Shape) -> dict[str, Tensor]:
    return {"slopes": 2.0 ** (-4 * (torch.arange(shape.heads) + 1.0) / shape.heads)}


def through_a_table(s, custom, b, h, q, k):
    return s * 0.125 + custom["bias"][h, custom["place"][q - k + 40]]


def symmetric(s, custom, b, h, q, k):
    return s * 0.125 + custom["bias"][q] + custom["bias"][k]


def image_bias(s, custom, b, h, q, k):
    return s * 0.125 + custom["image"][(q // 12 - k // 12) + 2, (q % 12 - k % 12) + 3]  # far pairs read 0


def plain_image_bias(s, b, h, i, j, image):
    row, column = i // 12 - j // 12 + 2, i % 12 - j % 12 + 3
    inside = (row >= 0) & (row < 5) & (column >= 0) & (column < 7)
    return s * 0.125 + torch.where(inside, image[row.clamp(0, 4), column.clamp(0, 6)], 0.0)


def plain_through_a_table(s, b, h, i, j, bias, place):
    at = i - j + 40
    inside = (at >= 0) & (at < len(place))
    entry = torch.where(inside, place[at.clamp(0, len(place) - 1)], 0).long()
    return s * 0.125 + bias[h, entry].to(s.dtype)


def added(name: str):
    return lambda s, custom, b, h, q, k: s * 0.125 + custom[name]


PAIR = (1, "heads", "seq_len", "seq_len_kv")
SCORES = {
    "scaled": Part(scaled, lambda s, b, h, i, j: s * 0.125),
    "softcap": Part(lib.softcap(2.0, 0.125), lambda s, b, h, i, j: 2 * torch.tanh(s * 0.125 / 2)),
    "alibi": Part(
        lib.alibi(0.125), lambda s, b, h, i, j, slopes: s * 0.125 - slopes[h] * (i - j), {"slopes": ("heads",)}, slopes,
    ),
    "relative": Part(
        lib.relative_bias("table", 30, 0.125),
        lambda s, b, h, i, j, table: s * 0.125 + table[h, (i - j).clamp(-30, 30) + 30],
        {"table": ("heads", 61)}, lambda shape: {"table": draw(shape.heads, 61)},
    ),
    "through a table": Part(
        through_a_table, plain_through_a_table, {"bias": ("heads", 9), "place": (100,)},
        lambda shape: {"bias": draw(shape.heads, 9), "place": (torch.arange(100) * 7 % 9).int()},
    ),
    "symmetric": Part(
        symmetric, lambda s, b, h, i, j, bias: s * 0.125 + bias[i] + bias[j], {"bias": ("seq_len",)},
        lambda shape: {"bias": draw(shape.q_len)},
    ),
    "of keys": Part(
        added("bias"), lambda s, b, h, i, j, bias: s * 0.125 + bias[b, h, 0, j],
        {"bias": ("batch", "heads", 1, "seq_len_kv")},
        lambda shape: {"bias": draw(shape.batch, shape.heads, 1, shape.kv_len)},
    ),
    "of pairs": Part(
        added("bias"), lambda s, b, h, i, j, bias: s * 0.125 + bias.to(s.dtype), {"bias": PAIR},
        lambda shape: {"bias": draw(1, shape.heads, shape.q_len, shape.kv_len)},
    ),
    "times pairs": Part(
        lambda s, custom, b, h, q, k: s * custom["gate"] * 0.125,
        lambda s, b, h, i, j, gate: s * gate.to(s.dtype) * 0.125,
        {"gate": ("seq_len", "seq_len_kv")}, lambda shape: {"gate": draw(shape.q_len, shape.kv_len)},
    ),
    "image": Part(image_bias, plain_image_bias, {"image": (5, 7)}, lambda shape: {"image": draw(5, 7)}),
}  # fmt: skip


PAIRS = {  # (score, mask): row function
    ("scaled", "offset"): "softmax", ("scaled", "two-sided window"): "softmax", ("scaled", "late window"): "softmax",
    ("scaled", "global"): "softmax", ("scaled", "prefix"): "softmax", ("scaled", "block causal"): "softmax",
    ("scaled", "neighbourhood"): "softmax", ("scaled", "documents"): "softmax", ("scaled", "padding"): "softmax",
    ("scaled", "of the head"): "softmax", ("scaled", "not"): "softmax", ("scaled", "keep"): "softmax",
    ("scaled", "or"): "sigmoid", ("scaled", "dilated"): "retention", ("scaled", "causal documents"): "relu",
    ("softcap", "causal documents"): "softmax", ("softcap", "late window"): "softmax_one",
    ("alibi", "causal"): "softmax", ("alibi", "causal documents"): "softmax",
    ("relative", "documents"): "softmax", ("relative", "two-sided window"): "softmax",
    ("through a table", "prefix"): "softmax", ("symmetric", "causal"): "softmax", ("symmetric", "global"): "sigmoid",
    ("of keys", "padding"): "softmax", ("of keys", "block diagonal"): "sigmoid",
    ("of pairs", "causal"): "softmax", ("of pairs", "documents"): "softmax", ("times pairs", "dilated"): "sigmoid",
    ("image", "neighbourhood"): "softmax", ("relative", "none"): "softmax",
}  # fmt: skip


def engine_for(score: str, mask: str, kind: str, shape: Shape, dtype: torch.dtype, **options: Any) -> AttentionEngine:
    axes = {**SCORES[score].axes, **MASKS[mask].axes}
    return AttentionEngine(
        shape.meta(dtype), CustomIO(axes), SCORES[score].ours, MASKS[mask].ours, ONLINE[kind](), **options
    )


def errors(
    score: str, mask: str, shape: Shape, dtype: torch.dtype, device: str = "cpu", floor: float = 0.0, **options: Any
) -> list[plain.Error]:
    """Output and all gradients by the rule; raises AssertionError with the table where one is too far off."""
    kind = PAIRS[score, mask]
    of_score, of_mask = (
        {name: x.to(device) for name, x in part.custom(shape).items()} for part in (SCORES[score], MASKS[mask])
    )
    engine = engine_for(score, mask, kind, shape, dtype, **options)

    def by(function):
        def run(q, k, v, **custom):
            mine = {name: custom[name] for name in of_score}
            return function(
                q,
                k,
                v,
                kind,
                score=lambda s, b, h, i, j: SCORES[score].plain(s, b, h, i, j, **mine).to(s.dtype),
                mask=lambda b, h, i, j: MASKS[mask].plain(b, h, i, j, **of_mask),
            )

        return run

    def ours(q, k, v, **custom):
        return engine(q, k, v, **custom, **of_mask)

    tensors = shape.tensors(dtype, device, 0)
    double = {name: x.double() for name, x in tensors.items()}
    exact_custom = {name: x.double() if x.is_floating_point() else x for name, x in of_score.items()}
    return plain.compare(
        _results(ours, tensors, of_score),
        _results(by(plain.attention), double, exact_custom),
        _results(by(plain.eager), tensors, of_score),
        dtype,
        floor,
    )


def _results(function, tensors: dict[str, Tensor], custom: dict[str, Tensor]) -> dict[str, Tensor]:
    given = {n: x.detach().clone() for n, x in {**tensors, **custom}.items() if n != "do"}
    wanted = {n: x.requires_grad_() for n, x in given.items() if x.is_floating_point()}
    o = function(**given)
    found = torch.autograd.grad(o, list(wanted.values()), tensors["do"])
    return {"o": o.detach(), **{f"d{name}": gradient for name, gradient in zip(wanted, found)}}
