"""Fifty score functions and masks as people write them for FlexAttention: each a formula, with the tensors it captures.

The ideas are those of PyTorch's tests of flex_attention, of attention-gym's catalogue and of papers; the formulas are
written here. The same Python function runs on tensors of indices (the yardstick, in float64), in this package, and in
torch's FlexAttention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


@dataclass(frozen=True)
class Sizes:
    """Of a call: batch, query heads, key heads, queries, keys, head dim."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    queries: int = 48
    keys: int = 48
    dim: int = 16


@dataclass(frozen=True)
class Case:
    """make: (captured tensors by name, sizes) -> score_mod and mask_mod. learned, fixed: makers of captured tensors."""

    name: str
    make: Callable[[dict[str, Tensor], Sizes], Mods]
    learned: dict[str, Callable[[Sizes], Tensor]] = field(default_factory=dict)
    fixed: dict[str, Callable[[Sizes], Tensor]] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(learned: dict[str, Any] | None = None, fixed: dict[str, Any] | None = None) -> Callable[[Any], Any]:
    """Adds a maker to the table, under its name."""

    def add(make: Any) -> Any:
        CASES[make.__name__] = Case(make.__name__, make, learned or {}, fixed or {})
        return make

    return add


def of_heads(z: Sizes) -> Tensor:
    return torch.linspace(0.1, 0.9, z.heads)


def of_batch(z: Sizes) -> Tensor:
    return torch.linspace(0.5, 1.5, z.batch)


def of_queries(z: Sizes) -> Tensor:
    return torch.linspace(-0.5, 0.5, z.queries)


def of_keys(z: Sizes) -> Tensor:
    return torch.sin(torch.arange(z.keys) * 0.7)


def of_pairs(z: Sizes) -> Tensor:
    return torch.sin(torch.arange(z.queries)[:, None] * 0.3 + torch.arange(z.keys) * 0.11)


def of_distances(z: Sizes) -> Tensor:
    n = z.queries + z.keys
    return torch.cos(torch.arange(z.heads)[:, None] + torch.arange(n) * 0.2)


def documents(z: Sizes) -> Tensor:
    """Of each token; the same for queries and keys."""
    ends = torch.tensor([0.3, 0.45, 0.9]) * max(z.queries, z.keys)
    return torch.searchsorted(ends, torch.arange(max(z.queries, z.keys)).float(), right=True).int()


def lengths(z: Sizes) -> Tensor:
    return torch.tensor([z.keys - 5 * n for n in range(z.batch)], dtype=torch.int32)


def scattered(z: Sizes) -> Tensor:
    make = torch.Generator().manual_seed(5)
    kept = torch.rand(z.queries, z.keys, generator=make) < 0.4
    kept[:, 0] = True
    return kept


def causal(b, h, q, k):
    return q >= k


# ---- scores


@case()
def nothing(t, z):
    return None, None


@case()
def times_two(t, z):
    return lambda s, b, h, q, k: s * 2, None


@case()
def squared(t, z):
    return lambda s, b, h, q, k: s * s, None


@case()
def relative(t, z):
    return lambda s, b, h, q, k: s + (q - k) * 0.1, None


@case()
def relative_causal_in_the_score(t, z):
    return lambda s, b, h, q, k: torch.where(q >= k, s + (q - k) * 0.1, -float("inf")), None


@case()
def causal_in_the_score(t, z):
    return lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), None


@case()
def inverse_causal(t, z):
    return lambda s, b, h, q, k: torch.where(q <= k, s, -float("inf")), None


@case()
def alibi_by_formula(t, z):
    return lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / z.heads)) * (k - q), causal


@case(learned={"slopes": of_heads})
def alibi_learned(t, z):
    slopes = t["slopes"]
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), causal


@case()
def softcap(t, z):
    return lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0), causal


@case(learned={"cap": lambda z: torch.tensor(2.5)})
def softcap_learned(t, z):
    cap = t["cap"]
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap), causal


@case()
def trigonometric(t, z):
    return lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.cos(s) * torch.sin(s), None


@case()
def checkerboard(t, z):
    def score(s, b, h, q, k):
        s = torch.where((k - q).abs() % 2 == 1, s * 0.5, s)
        return torch.where((k - q).abs() % 2 == 0, s * 2.0, s)

    return score, None


@case(learned={"scales": of_heads})
def head_scale(t, z):
    scales = t["scales"]
    return lambda s, b, h, q, k: s * scales[h], None


@case(learned={"temperatures": of_batch})
def batch_temperature(t, z):
    temperatures = t["temperatures"]
    return lambda s, b, h, q, k: s / temperatures[b], causal


@case(learned={"bias": of_keys})
def key_bias(t, z):
    bias = t["bias"]
    return lambda s, b, h, q, k: s + bias[k], None


@case(learned={"bias": of_queries})
def query_scale(t, z):
    bias = t["bias"]
    return lambda s, b, h, q, k: s * (1 + bias[q]), causal


@case(learned={"bias": of_pairs})
def pair_bias(t, z):
    bias = t["bias"]
    return lambda s, b, h, q, k: s + bias[q, k], None


@case(learned={"bias": lambda z: of_pairs(z).expand(z.batch, z.heads, -1, -1).clone()})
def full_bias(t, z):
    bias = t["bias"]
    return lambda s, b, h, q, k: s + bias[b, h, q, k], causal


@case(learned={"table": of_distances})
def relative_table(t, z):
    table, n = t["table"], z.keys
    return lambda s, b, h, q, k: s + table[h, q - k + n], None


@case(learned={"table": lambda z: torch.cos(torch.arange(8.0)[:, None] + torch.arange(z.heads))})
def t5_buckets(t, z):
    table = t["table"]

    def score(s, b, h, q, k):
        distance = torch.clamp(q - k, min=0)
        bucket = torch.where(distance < 4, distance, 4 + torch.floor(torch.log2(torch.clamp(distance, min=4) / 3.99)))
        return s + table[torch.clamp(bucket, max=7).to(torch.int32), h]

    return score, causal


@case(learned={"table": lambda z: torch.sin(torch.arange(21.0))})
def clipped_distances(t, z):
    table = t["table"]
    return lambda s, b, h, q, k: s + table[torch.clamp(q - k, -10, 10) + 10], None


@case(learned={"rows": of_queries, "keys": of_keys})
def sum_of_biases(t, z):
    rows, keys = t["rows"], t["keys"]
    return lambda s, b, h, q, k: s + rows[q] + keys[k] * 0.5, None


def of_tokens(z: Sizes) -> Tensor:
    tokens = torch.arange(z.batch * z.heads * max(z.queries, z.keys)).view(z.batch, z.heads, -1)
    return -0.1 - 0.05 * torch.sin(tokens).abs()


@case(learned={"gates": of_tokens})
def forgetting(t, z):
    total = t["gates"].cumsum(-1)
    return lambda s, b, h, q, k: s + total[b, h, q] - total[b, h, k], causal


@case(learned={"table": of_heads}, fixed={"kinds": lambda z: (torch.arange(z.keys) * 7 % z.heads).int()})
def nested_reads(t, z):
    table, kinds = t["table"], t["kinds"]
    return lambda s, b, h, q, k: s + table[kinds[k]], None


@case(learned={"slopes": of_heads}, fixed={"ids": documents})
def score_between_documents(t, z):
    slopes, ids = t["slopes"], t["ids"]
    return lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, s - slopes[h]), causal


@case()
def first_head_alone(t, z):
    return lambda s, b, h, q, k: torch.where(h == 0, s, s * 0.5 + torch.log1p((q - k).abs() + 0.0)), None


@case()
def scalable_softmax(t, z):
    return lambda s, b, h, q, k: s * torch.log(q + 2.0), causal


@case()
def logistic(t, z):
    return lambda s, b, h, q, k: torch.log(torch.sigmoid(s) + 0.01), causal


@case(learned={"mix": lambda z: torch.tensor(0.3)})
def power_of_distance(t, z):
    mix = t["mix"]
    return lambda s, b, h, q, k: s - mix * torch.sqrt(torch.abs(q - k) + 1.0), None


# ---- masks


@case()
def causal_mask(t, z):
    return None, causal


@case()
def window(t, z):
    return None, lambda b, h, q, k: (q >= k) & (q - k <= 10)


@case()
def symmetric_window(t, z):
    return None, lambda b, h, q, k: torch.abs(q - k) <= 7


@case()
def prefix_lm(t, z):
    return None, lambda b, h, q, k: (k < 12) | (q >= k)


@case(fixed={"prefixes": lambda z: torch.tensor([5 + 9 * n for n in range(z.batch)], dtype=torch.int32)})
def prefix_of_each_batch(t, z):
    prefixes = t["prefixes"]
    return None, lambda b, h, q, k: (k < prefixes[b]) | (q >= k)


@case(fixed={"ids": documents})
def document_mask(t, z):
    ids = t["ids"]
    return None, lambda b, h, q, k: ids[q] == ids[k]


@case(fixed={"ids": documents})
def document_causal(t, z):
    ids = t["ids"]
    return None, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


@case(fixed={"lengths": lengths})
def padding(t, z):
    counts = t["lengths"]
    return None, lambda b, h, q, k: k < counts[b]


@case()
def dilated(t, z):
    return None, lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0)


@case()
def dilated_window(t, z):
    return None, lambda b, h, q, k: ((q - k).abs() <= 12) & ((q - k) % 2 == 0)


@case()
def block_diagonal(t, z):
    return None, lambda b, h, q, k: q // 16 == k // 16


@case()
def chunked_causal(t, z):
    return None, lambda b, h, q, k: (q // 12 == k // 12) & (q >= k)


@case()
def global_and_window(t, z):
    return None, lambda b, h, q, k: (q < 3) | (k < 3) | ((q - k).abs() <= 5)


@case()
def neighbourhood_of_an_image(t, z):
    wide = 8
    return None, lambda b, h, q, k: (torch.abs(q // wide - k // wide) <= 2) & (torch.abs(q % wide - k % wide) <= 2)


@case()
def sink_tokens(t, z):
    return None, lambda b, h, q, k: ((k < 2) | (q - k < 9)) & (q >= k)


@case()
def windows_by_head(t, z):
    return None, lambda b, h, q, k: torch.logical_and(q >= k, q - k < 4 * (h + 1))


@case()
def strided_heads(t, z):
    return None, lambda b, h, q, k: ((k % 4 == h) | (q == k)) & ~(k > q)


@case(fixed={"kept": scattered})
def any_pairs(t, z):
    kept = t["kept"]
    return None, lambda b, h, q, k: kept[q, k]


@case(fixed={"offset": lambda z: torch.tensor(3, dtype=torch.int32)})
def offset_causal(t, z):
    offset = t["offset"]
    return None, lambda b, h, q, k: q + offset >= k


@case(learned={"slopes": of_heads}, fixed={"ids": documents})
def documents_with_alibi_and_softcap(t, z):
    slopes, ids = t["slopes"], t["ids"]

    def score(s, b, h, q, k):
        return 5.0 * torch.tanh(s / 5.0) - slopes[h] * (q - k)

    return score, lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]) & (q - k < 20)


assert len(CASES) == 50, len(CASES)


def tensors_of(one: Case, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """The captured tensors of a case, the learned ones asking for gradients."""
    learned = {n: make(sizes).to(device, dtype).requires_grad_() for n, make in one.learned.items()}
    return {**learned, **{n: make(sizes).to(device) for n, make in one.fixed.items()}}


def qkv_of(sizes: Sizes, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    """q, k, v (batch, heads, length, dim)."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(sizes.heads, sizes.queries), (sizes.kv_heads, sizes.keys), (sizes.kv_heads, sizes.keys)]
    made = [torch.randn(sizes.batch, *shape, sizes.dim, generator=make, dtype=torch.float64) for shape in shapes]
    return [t.to(device, dtype).requires_grad_() for t in made]


def plain(mods: Mods, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Output and lse by whole matrices of scores, in the dtype of q; a row that keeps no pair has output 0."""
    score_mod, mask_mod = mods
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    place = [
        torch.arange(n, device=q.device, dtype=torch.int32).view([-1 if axis == at else 1 for axis in range(4)])
        for at, n in enumerate((*q.shape[:3], k.shape[2]))
    ]
    x = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if q.dtype is torch.float64 else usual)  # of an integer times a float
    x = x if score_mod is None else score_mod(x, *place).expand(x.shape)
    torch.set_default_dtype(usual)
    if mask_mod is not None:
        x = torch.where(mask_mod(*place), x, -math.inf)
    some = (x > -math.inf).any(-1, keepdim=True)
    lse = torch.where(some, x, 0.0).logsumexp(-1, keepdim=True)
    weights = torch.where(some, (x - lse).exp(), 0.0)
    return weights.to(v.dtype) @ v, torch.where(some, lse, -math.inf)[..., 0]
