"""Programs on packed sequences, and each in plain torch, sequence by sequence: what packed calls are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import CustomIO, library
from tests import plain

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24
LENGTHS = (5, 0, 33, 70, 1)  # of sequences: an empty one in the middle, and one that is longer than a tile
EMPTY_ENDS = (0, 29, 0, 0, 41, 0)
UNLIKE = ((5, 30, 0, 17, 9), (40, 30, 12, 0, 23))  # of queries, of keys: no query, no key, more keys
FEWER_KEYS = ((21, 8, 40), (6, 8, 33))


@dataclass(frozen=True)
class Place:
    """Where the pairs of one sequence stand: its number, heads, places of queries and keys, and their rows."""

    b: int
    h: Tensor
    q: Tensor
    kv: Tensor
    row: Tensor
    key_row: Tensor


@dataclass(frozen=True)
class Case:
    """An engine's functions, and the same in plain torch: score(s, custom, place), mask(custom, place)."""

    name: str
    options: Mapping[str, Any]
    score: Callable[[Tensor, Mapping[str, Tensor], Place], Tensor]
    mask: Callable[[Mapping[str, Tensor], Place], Tensor] | None = None
    kind: str = "softmax"
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    make: Callable[[int, int, int], dict[str, Tensor]] = lambda sequences, queries, keys: {}
    lengths: Sequence[int] = LENGTHS
    key_lengths: Sequence[int] | None = None
    captured: Mapping[str, Tensor] = field(default_factory=dict)


SCALE = DIM**-0.5


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scaled(s: Tensor, c: Mapping[str, Tensor], at: Place) -> Tensor:
    return s * SCALE


def causal(c: Mapping[str, Tensor], at: Place) -> Tensor:
    return at.q >= at.kv


TABLE = drawn(HEADS, 80, seed=5)
OF_SEQUENCE = drawn(8, seed=6)


def at_table(s: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s * SCALE + TABLE[h, q_idx] * OF_SEQUENCE[b] + TABLE[h, kv_idx]


class Warm(library.OnlineSoftmax):
    """A softmax whose temperature is the sequence's, and whose output is gated by the query's place."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx, custom):
        return library.OnlineSoftmax.online_fwd(scores * custom["warm"], online_rowscales, b, h, q_idx)

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o, finals = library.OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o / (q_idx + 41), finals


CASES = [
    Case("causal", {"mask_mod": library.causal}, scaled, causal),
    Case("causal, empty ends", {"mask_mod": library.causal}, scaled, causal, lengths=EMPTY_ENDS),
    Case("full, unlike lengths", {}, scaled, lengths=UNLIKE[0], key_lengths=UNLIKE[1]),
    Case("causal, unlike lengths", {"mask_mod": library.causal}, scaled, causal,
         lengths=UNLIKE[0], key_lengths=UNLIKE[1]),
    Case("causal, fewer keys", {"mask_mod": library.causal}, scaled, causal,
         lengths=FEWER_KEYS[0], key_lengths=FEWER_KEYS[1]),
    Case("sigmoid in a window",
         {"scale": SCALE, "mask_mod": library.sliding_window(20), "online_func": library.OnlineSigmoid()}, scaled,
         lambda c, at: (at.q - at.kv <= 20) & (at.q >= at.kv), "sigmoid"),
    Case("ALiBi", {"score_mod": library.alibi(SCALE), "mask_mod": library.causal},
         lambda s, c, at: s * SCALE - c["slopes"][at.h] * (at.q - at.kv).abs(), causal,
         axes={"slopes": ("heads",)}, make=lambda n, q, k: {"slopes": drawn(HEADS).abs()}),
    Case("ALiBi, unlike lengths", {"score_mod": library.alibi(SCALE), "mask_mod": library.causal},
         lambda s, c, at: s * SCALE - c["slopes"][at.h] * (at.q - at.kv).abs(), causal,
         axes={"slopes": ("heads",)}, make=lambda n, q, k: {"slopes": drawn(HEADS).abs()},
         lengths=UNLIKE[0], key_lengths=UNLIKE[1]),
    Case("softcap", {"score_mod": library.softcap(3.0, SCALE), "mask_mod": library.causal},
         lambda s, c, at: 3.0 * torch.tanh(s * SCALE / 3.0), causal),
    Case("a number of each sequence",
         {"score_mod": lambda s, c, b, h, i, j: s * SCALE + c["bias"] * (j + 1) * 0.1, "mask_mod": library.causal},
         lambda s, c, at: s * SCALE + c["bias"][at.b] * (at.kv + 1) * 0.1, causal,
         axes={"bias": ("batch",)}, make=lambda n, q, k: {"bias": drawn(n)}),
    Case("numbers of rows",
         {"score_mod": lambda s, c, b, h, i, j: s * SCALE * c["of_row"] + c["of_key"], "mask_mod": library.causal},
         lambda s, c, at: s * SCALE * c["of_row"][at.row] + c["of_key"][at.h, at.key_row], causal,
         axes={"of_row": ("seq_len",), "of_key": ("heads", "seq_len_kv")},
         make=lambda n, q, k: {"of_row": drawn(q), "of_key": drawn(HEADS, k, seed=2)},
         lengths=UNLIKE[0], key_lengths=UNLIKE[1]),
    Case("a bias of pairs", {"score_mod": lambda s, c, b, h, i, j: s * SCALE + c["bias"]},
         lambda s, c, at: s * SCALE + c["bias"][at.h, at.row, at.key_row],
         axes={"bias": ("heads", "seq_len", "seq_len_kv")}, make=lambda n, q, k: {"bias": drawn(HEADS, q, k)},
         lengths=EMPTY_ENDS),
    Case("a table of places", {"score_mod": lambda s, c, b, h, i, j: s * SCALE + c["near"][h, i - j] + c["at"][b, j],
                               "mask_mod": library.causal},
         lambda s, c, at: s * SCALE + c["near"][at.h, (at.q - at.kv).clamp(0)] + c["at"][at.b, at.kv], causal,
         axes={"near": ("heads", 90), "at": ("batch", 90)},
         make=lambda n, q, k: {"near": drawn(HEADS, 90), "at": drawn(n, 90, seed=3)}),
    Case("padded keys of each sequence", {"mask_mod": library.padding()}, scaled,
         lambda c, at: at.kv < c["lengths"][at.b],
         axes={"lengths": ("batch",)}, make=lambda n, q, k: {"lengths": torch.tensor([3, 4, 20, 66, 0])}),
    Case("retention, dilated",
         {"scale": SCALE, "mask_mod": library.dilated(3), "online_func": library.OnlineRetention()}, scaled,
         lambda c, at: (at.q >= at.kv) & ((at.q - at.kv) % 3 == 0), "retention"),
    Case("softmax one, blocks", {"mask_mod": library.block_causal(8), "online_func": library.OnlineSoftmaxOne()},
         scaled, lambda c, at: at.q // 8 >= at.kv // 8, "softmax_one", lengths=FEWER_KEYS[0],
         key_lengths=FEWER_KEYS[1]),
    Case("ReLU, a prefix",
         {"scale": SCALE, "mask_mod": library.prefix_lm(4), "online_func": library.OnlineRelu()}, scaled,
         lambda c, at: (at.kv < 4) | (at.q >= at.kv), "relu"),
    Case("captured tables", {"score_mod": at_table, "mask_mod": library.causal},
         lambda s, c, at: s * SCALE + TABLE[at.h, at.q] * OF_SEQUENCE[at.b] + TABLE[at.h, at.kv], causal),
    Case("a temperature, gated", {"scale": SCALE, "mask_mod": library.causal, "online_func": Warm()},
         lambda s, c, at: s * SCALE * c["warm"][at.b], causal, axes={"warm": ("batch",)},
         make=lambda n, q, k: {"warm": drawn(n).abs() + 0.5}),
]  # fmt: skip


def starts(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def tensors(
    case: Case, dtype: torch.dtype, more: int = 0, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k, v and custom inputs, which ask for gradients; more: rows behind the last sequence."""
    queries, keys = sum(case.lengths) + more, sum(case.key_lengths or case.lengths) + more
    sizes = ((queries, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, DIM_V))
    qkv = [drawn(*size, seed=10 + n).to(device, dtype).requires_grad_() for n, size in enumerate(sizes)]
    custom = {n: t.to(device) for n, t in case.make(len(case.lengths), queries, keys).items()}
    return qkv, {n: t.requires_grad_(t.is_floating_point()) for n, t in custom.items()}


def sequence_by_sequence(case: Case, qkv: Sequence[Tensor], custom: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The output in plain torch: float64, or as a careful user writes it in another dtype."""
    q, k, v = (t.to(dtype) for t in qkv)
    custom = {n: t.double() if t.is_floating_point() and dtype is torch.float64 else t for n, t in custom.items()}
    out = []
    begin = begin_k = 0
    for b, (rows, keys) in enumerate(zip(case.lengths, case.key_lengths or case.lengths, strict=True)):
        of_q, of_k = slice(begin, begin + rows), slice(begin_k, begin_k + keys)

        def place(h: Tensor, i: Tensor, j: Tensor, at: tuple[int, ...] = (b, keys - rows, begin, begin_k)) -> Place:
            return Place(at[0], h, i + at[1], j, i + at[2], j + at[3])

        def score(s: Tensor, _: Tensor, h: Tensor, i: Tensor, j: Tensor, place: Any = place) -> Tensor:
            return case.score(s, custom, place(h, i, j)).to(s.dtype)

        def mask(_: Tensor, h: Tensor, i: Tensor, j: Tensor, place: Any = place) -> Tensor:
            return torch.ones_like(i * j, dtype=torch.bool) if case.mask is None else case.mask(custom, place(h, i, j))

        if rows and keys:
            one = (q[None, of_q], k[None, of_k], v[None, of_k])
            run = plain.attention if dtype is torch.float64 else plain.eager
            found = run(*one, case.kind, score=score, mask=mask)[0]
            gated = isinstance(case.options.get("online_func"), Warm)
            places = torch.arange(rows, device=q.device)[:, None, None] + keys - rows
            out.append(found / (places + 41) if gated else found)
        else:
            out.append(q.new_zeros(rows, HEADS, DIM_V))
        begin, begin_k = begin + rows, begin_k + keys
    return torch.cat([*out, q.new_zeros(q.shape[0] - begin, HEADS, DIM_V)])


def with_gradients(o: Tensor, qkv: Sequence[Tensor], custom: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output and every gradient, by name."""
    names = ["dq", "dk", "dv", *[f"d{n}" for n, t in custom.items() if t.requires_grad]]
    leaves = [*qkv, *[t for t in custom.values() if t.requires_grad]]
    d_o = drawn(*o.shape, seed=20).to(o)
    return {"o": o.detach(), **dict(zip(names, torch.autograd.grad(o, leaves, d_o), strict=True))}


def io_of(case: Case) -> CustomIO:
    return CustomIO(case.axes)
