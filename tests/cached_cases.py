"""Thirty attentions to keys in a cache, each twice: as a user writes it for the package, and in plain torch.

`errors` runs one of them on any backend and holds its output and rows to the rule of tests/plain.py. The plain side
goes request by request over the keys that a request has, and knows nothing of caches, tiles or parts. What no request
should see (unused pages, what lies behind a length) holds NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, SymbolScalar, Var, library, meta_tensor
from tests import plain
from tests.cases import OnlineRelu2, OnlineRelu2RowSum
from tests.programs import GatedSoftmax, LiveRetention, Tempered

CAP, LEFT, SINKS, DRAFTS = 2.0, 50, 4, 6
Weigh = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


# ---- as users write it


class Entropic(OnlineFunc):
    """Softmax whose rows also return their entropy."""

    def __init__(self):
        states = {n: SymbolScalar(n, Var(v)) for n, v in {"m": "-inf", "r": "0", "t": "0"}.items()}
        super().__init__(states, {"entropy": SymbolScalar("entropy", Var("0.0"))})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m, r, t = (online_rowscales[n] for n in "mrt")
        new = m.max(scores.get_reduce("max"))
        factor, weights = (m - new).exp(), (scores - new).exp()
        t = (t + (m - new).max(-1e4) * r) * factor + (weights * (scores - new)).get_reduce("sum")
        return weights, {"m": new, "r": r * factor + weights.get_reduce("sum"), "t": t}, factor

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        r, t = online_rowscales["r"], online_rowscales["t"]
        return o / r, {"entropy": r.log() - t / r.max(1e-30)}  # of a row that keeps no key: -inf


class LogSum(OnlineFunc):
    """Softmax whose only state is the log of the sum of exponentials."""

    def __init__(self):
        super().__init__({"l": SymbolScalar("l", Var("-inf"))}, {"lse": SymbolScalar("lse", Var("0.0"))})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        old = online_rowscales["l"]
        top = old.max(scores.get_reduce("max"))
        new = top + ((old - top).exp() + (scores - top).exp().get_reduce("sum")).log()
        return (scores - new).exp(), {"l": new}, (old - new).exp()

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"lse": online_rowscales["l"]}


class OverLength(OnlineFunc):
    """x / |x|_2."""

    def __init__(self):
        super().__init__({"n": SymbolScalar("n", Var("0"))}, {"n": SymbolScalar("n", Var("0.0"))})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"n": online_rowscales["n"] + (scores * scores).get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o * (online_rowscales["n"] + 1e-6).rsqrt(), {"n": online_rowscales["n"]}


class OverLargest(OnlineFunc):
    """x / max |x|."""

    def __init__(self):
        super().__init__({"a": SymbolScalar("a", Var("1e-6"))}, {})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        a = online_rowscales["a"].max(scores.get_reduce("absmax"))
        return scores / a, {"a": a}, online_rowscales["a"] / a


def _score(of: Callable[..., Any]) -> Callable[[float], Callable[..., Any]]:
    def made(scale):
        return lambda score, custom, b, h, q_idx, kv_idx: of(score * scale, custom, b, h, q_idx, kv_idx)

    return made


# ---- in plain torch


def _known(kind: str) -> Weigh:
    def weigh(x: Tensor, keep: Tensor, custom: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        weights, lse = plain.WEIGHTS[kind](x, keep)
        return weights, {} if lse is None else {"lse": lse}

    return weigh


def _without_rows(weigh: Weigh) -> Weigh:
    return lambda x, keep, custom: (weigh(x, keep, custom)[0], {})


def _entropic(x: Tensor, keep: Tensor, _: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    weights, _ = plain.softmax(x, keep)
    return weights, {"entropy": torch.special.entr(weights).sum(-1)}


def _with_sink(x: Tensor, keep: Tensor, custom: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    sink = custom["sinks"].to(x.dtype)[:, None, None].expand(*x.shape[:-1], 1)
    weights, lse = plain.softmax(torch.cat([x, sink], -1), torch.cat([keep, torch.ones_like(keep[..., :1])], -1))
    some = keep.any(-1)  # a row that keeps no key returns what its states began with
    return weights[..., :-1], {"lse": torch.where(some, lse, sink[..., 0])}


def _gated(x: Tensor, keep: Tensor, custom: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    weights, lse = plain.softmax(x, keep)
    return weights * custom["gate"].to(x.dtype)[:, None, None], {"lse": lse}


def _over_length(x: Tensor, keep: Tensor, _: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.where(keep, x, 0.0)
    n = x.square().sum(-1)
    return x * (n + 1e-6).rsqrt()[..., None], {"n": n}


def _over_largest(x: Tensor, keep: Tensor, _: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.where(keep, x, 0.0)
    return x / x.abs().amax(-1, keepdim=True).clamp(min=1e-6), {}


@dataclass(frozen=True)
class Place:
    """Where the pairs of one request are: its number, and index tensors that broadcast to (heads, queries, keys)."""

    b: int
    h: Tensor
    i: Tensor
    j: Tensor
    n: Tensor  # the query's own row in the call


PlainScore = Callable[[Tensor, Place, dict[str, Tensor]], Tensor]
PlainMask = Callable[[Place, dict[str, Tensor]], Tensor]


def _causal(at: Place, _: dict[str, Tensor]) -> Tensor:
    return at.i >= at.j


@dataclass(frozen=True)
class Case:
    """An attention to a cache. draws: custom inputs, of (batch, heads, queries, capacity, lengths); axes: of them."""

    name: str
    weigh: Weigh
    online: type[OnlineFunc]
    mask: Callable[..., Any] | None = library.causal
    plain_mask: PlainMask = _causal
    score: Callable[[float], Callable[..., Any]] | None = None
    plain_score: PlainScore = lambda x, at, custom: x
    axes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    draws: Callable[..., dict[str, Tensor]] = lambda *_: {}
    dim_v: int = 0  # 0: as dim; else values are the first columns of keys
    from_top: bool = False  # are queries at the first places?


def _draw(**shapes: Callable[[dict[str, int]], tuple[int, ...]]) -> Callable[..., dict[str, Tensor]]:
    def draws(sizes: dict[str, int], _: Sequence[int]) -> dict[str, Tensor]:
        return {name: torch.randn(shape(sizes)) for name, shape in shapes.items()}

    return draws


def _tree(sizes: dict[str, int], lengths: Sequence[int]) -> dict[str, Tensor]:
    """A random tree of drafts for each request: each sees itself and its ancestors."""
    queries = sizes["queries"]
    tree = torch.zeros(sizes["batch"], queries, queries, dtype=torch.int32)
    for of_request in tree:
        for draft in range(queries):
            if draft:
                of_request[draft] = of_request[torch.randint(draft, ()).item()]
            of_request[draft, draft] = 1
    return {"context": torch.tensor([n - queries for n in lengths], dtype=torch.int32), "tree": tree}


def _plain_tree(at: Place, custom: dict[str, Tensor]) -> Tensor:
    first, tree = custom["context"][at.b], custom["tree"][at.b]
    i, j = at.i - first, at.j - first
    inside = (i >= 0) & (i < len(tree)) & (j >= 0) & (j < len(tree))
    return (at.j < first) | (inside & (tree[i.clamp(0, len(tree) - 1), j.clamp(0, len(tree) - 1)] != 0))


OF_HEADS = _draw(slopes=lambda s: (s["heads"],))
SOFTMAX, SIGMOID = _known("softmax"), _known("sigmoid")
CASES = {
    case.name: case
    for case in (
        Case("softmax", SOFTMAX, library.OnlineSoftmax),
        Case("softmax_full", SOFTMAX, library.OnlineSoftmax, None, lambda at, _: at.j >= 0),
        Case("window", SOFTMAX, library.OnlineSoftmax, library.sliding_window(LEFT),
             lambda at, _: (at.i >= at.j) & (at.i - at.j <= LEFT)),
        Case("window_and_first_keys", SOFTMAX, library.OnlineSoftmax,
             library.and_masks(library.causal, library.with_global(SINKS, library.sliding_window(LEFT))),
             lambda at, _: (at.i >= at.j) & ((at.i - at.j <= LEFT) | (at.j < SINKS))),
        Case("prefix", SOFTMAX, library.OnlineSoftmax, library.prefix_lm(20),
             lambda at, _: (at.i >= at.j) | (at.j < 20)),
        Case("dilated", SOFTMAX, library.OnlineSoftmax, library.and_masks(library.causal, library.dilated(3)),
             lambda at, _: (at.i >= at.j) & ((at.i - at.j) % 3 == 0)),
        Case("chunks", SOFTMAX, library.OnlineSoftmax, library.and_masks(library.causal, library.block_diagonal(48)),
             lambda at, _: (at.i >= at.j) & (at.i // 48 == at.j // 48)),
        Case("window_of_the_head", SOFTMAX, library.OnlineSoftmax,
             lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 8 * (h + 1)),
             lambda at, _: (at.i >= at.j) & (at.i - at.j <= 8 * (at.h + 1))),
        Case("padded_on_the_left", SOFTMAX, library.OnlineSoftmax,
             lambda b, h, q_idx, kv_idx, custom: (q_idx >= kv_idx) & (kv_idx >= custom["pad"][b]),
             lambda at, custom: (at.i >= at.j) & (at.j >= custom["pad"][at.b]), axes={"pad": ("batch",)},
             draws=lambda sizes, _: {"pad": torch.arange(sizes["batch"], dtype=torch.int32) * 7}),
        Case("tree", SOFTMAX, library.OnlineSoftmax, library.tree(), _plain_tree,
             axes={"context": ("batch",), "tree": ("batch", DRAFTS, DRAFTS)}, draws=_tree),
        Case("from_the_top", SOFTMAX, library.OnlineSoftmax, from_top=True),
        Case("softcap", SOFTMAX, library.OnlineSoftmax,
             score=_score(lambda s, custom, b, h, i, j: CAP * torch.tanh(s / CAP)),
             plain_score=lambda x, at, _: CAP * torch.tanh(x / CAP)),
        Case("alibi", SOFTMAX, library.OnlineSoftmax,
             score=_score(lambda s, custom, b, h, i, j: s - custom["slopes"] * (i - j).abs()),
             plain_score=lambda x, at, custom: x - custom["slopes"][at.h].to(x.dtype) * (at.i - at.j).abs(),
             axes={"slopes": ("heads",)}, draws=OF_HEADS),
        Case("bias_of_keys", SOFTMAX, library.OnlineSoftmax,
             score=_score(lambda s, custom, b, h, i, j: s + custom["bias"]),
             plain_score=lambda x, at, custom: x + custom["bias"][at.b].to(x.dtype)[at.j],
             axes={"bias": ("batch", "seq_len_kv")}, draws=_draw(bias=lambda s: (s["batch"], s["capacity"]))),
        Case("heat_of_queries", SOFTMAX, library.OnlineSoftmax,
             score=_score(lambda s, custom, b, h, i, j: s * custom["heat"]),
             plain_score=lambda x, at, custom: x * custom["heat"][at.b].to(x.dtype)[at.h, at.n],
             axes={"heat": ("batch", "heads", "seq_len")},
             draws=_draw(heat=lambda s: (s["batch"], s["heads"], s["queries"]))),
        Case("relative_bias", SOFTMAX, library.OnlineSoftmax,
             score=_score(lambda s, custom, b, h, i, j: s + custom["table"][h, (i - j).clamp(0, 15)]),
             plain_score=lambda x, at, custom: x + custom["table"].to(x.dtype)[at.h, (at.i - at.j).clamp(0, 15)],
             axes={"table": ("heads", 16)}, draws=_draw(table=lambda s: (s["heads"], 16))),
        Case("decayed", SIGMOID, library.OnlineSigmoid,
             score=_score(lambda s, custom, b, h, i, j: s * ((i - j).abs() * (1 - 2.0 ** (-5 - h)).log2()).exp2()),
             plain_score=lambda x, at, _: x * ((1 - 2.0 ** (-5.0 - at.h)) ** (at.i - at.j).abs()).to(x.dtype)),
        Case("softmax_one", _known("softmax_one"), library.OnlineSoftmaxOne),
        Case("sink", _with_sink, library.OnlineSoftmaxSink, axes={"sinks": ("heads",)},
             draws=_draw(sinks=lambda s: (s["heads"],))),
        Case("gated", _gated, GatedSoftmax, axes={"gate": ("heads",)}, draws=_draw(gate=lambda s: (s["heads"],))),
        Case("tempered", SOFTMAX, Tempered,
             plain_score=lambda x, at, custom: x * custom["heat"].to(x.dtype)[at.h]
             + custom["bias"].to(x.dtype)[at.b, at.j],
             axes={"heat": ("heads",), "bias": ("batch", "seq_len_kv")},
             draws=_draw(heat=lambda s: (s["heads"],), bias=lambda s: (s["batch"], s["capacity"]))),
        Case("entropy", _entropic, Entropic),
        Case("log_sum", SOFTMAX, LogSum),
        Case("over_length", _over_length, OverLength),
        Case("over_largest", _over_largest, OverLargest),
        Case("sigmoid", SIGMOID, library.OnlineSigmoid),
        Case("relu", _known("relu"), library.OnlineRelu),
        Case("relu2", _known("relu2"), OnlineRelu2),
        Case("relu2_row_sum", _without_rows(_known("relu2_row_sum")), OnlineRelu2RowSum),
        Case("retention", _known("retention"), library.OnlineRetention),
        Case("live_retention", _known("retention"), LiveRetention),
        Case("shared_softmax", SOFTMAX, library.OnlineSoftmax, dim_v=32),
        Case("shared_entropy", _entropic, Entropic, dim_v=32),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Requests with so many keys each, and queries; heads and their dim. page: 0, or the keys of a page."""

    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page: int = 0
    packed: tuple[int, ...] = ()  # queries of each request, one after the other

    @property
    def rows(self) -> int:
        """Queries of a batch."""
        return sum(self.packed) or self.queries


def in_pages(cache: Tensor, lengths: Sequence[int], page: int) -> tuple[Tensor, Tensor]:
    """Keys in pages in a random order, and the table; what nobody reads is NaN, and -1 in the table."""
    batch, most, heads, dim = cache.shape
    count = -(-most // page)
    order = torch.randperm(batch * count + 3)[: batch * count].view(batch, count).to(torch.int32)
    store = torch.full((batch * count + 3, page, heads, dim), math.nan, dtype=cache.dtype)
    table = torch.full((batch, count + 1), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for n in range(-(-length // page)):
            held = cache[b, n * page : min((n + 1) * page, length)]
            store[order[b, n], : len(held)] = held
            table[b, n] = order[b, n]
    return store, table


def plain_rows(
    case: Case, q: Sequence[Tensor], k: Tensor, v: Tensor, lengths: Sequence[int], custom: dict[str, Tensor],
    dtype: torch.dtype, rows: torch.dtype, packed: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Output and returned rows in plain torch: products in dtype, row numbers in `rows`. q: of each request."""
    found: dict[str, list[Tensor]] = {}
    before = 0  # rows of the requests before, where they are packed
    for b, length in enumerate(lengths):
        queries, heads, dim = q[b].shape
        of_q, of_k, of_v = (t.to(dtype).transpose(0, 1) for t in (q[b], k[b, :length], v[b, :length]))
        of_k, of_v = (t.repeat_interleave(heads // t.shape[0], 0) for t in (of_k, of_v))
        own = torch.arange(queries, device=k.device)[:, None]
        first = 0 if case.from_top else length - queries
        places = torch.arange(heads, device=k.device)[:, None, None], own + first, torch.arange(length, device=k.device)
        at = Place(b, *places, own + before)
        before += queries if packed else 0
        products = of_q @ of_k.transpose(-1, -2) * dim**-0.5
        keep = case.plain_mask(at, custom).expand(products.shape)
        if length == 0:  # reductions over nothing
            products, keep, of_v = (torch.nn.functional.pad(t, pad) for t, pad in (
                (products, (0, 1)), (keep, (0, 1)), (of_v, (0, 0, 0, 1))))  # fmt: skip
        else:
            products = case.plain_score(products, at, custom)
        weights, of_rows = case.weigh(products.to(rows), keep, custom)
        output = (weights.to(of_v.dtype) @ of_v).transpose(0, 1)
        for name, value in {"o": output, **of_rows}.items():
            found.setdefault(name, []).append(value)
    if packed:
        return {name: torch.cat(values, 0 if name == "o" else 1) for name, values in found.items()}
    return {name: torch.stack(values) for name, values in found.items()}


Given = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]  # q and the caches, and custom inputs


def inputs(name: str, shape: Shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Given:
    """The tensors of an attention; keys lie one after the other, those behind a length too."""
    case = CASES[name]
    torch.manual_seed(len(name) + shape.queries + seed)
    batch, most = len(shape.lengths), max(shape.lengths) + 3
    capacity = most if not shape.page else (-(-most // shape.page) + 1) * shape.page
    q = torch.randn(1 if shape.packed else batch, shape.rows, shape.heads, shape.dim, dtype=dtype)
    k, v = (torch.randn(batch, most, shape.kv_heads, shape.dim, dtype=dtype) for _ in range(2))
    sizes = {"batch": batch, "heads": shape.heads, "queries": shape.rows, "capacity": capacity}
    custom = {n: t.to(device) for n, t in case.draws(sizes, shape.lengths).items()}
    if case.dim_v:
        v = k[..., : case.dim_v]
    return (q.to(device), k.to(device), v.to(device)), custom


def judge(name: str, shape: Shape, given: Given, ours: dict[str, Tensor]) -> list[plain.Error]:
    """The errors of results, held to the rule."""
    (q, k, v), custom = given
    of_q, dtype = q[0].split(shape.packed) if shape.packed else q, q.dtype
    exact, eager = (
        plain_rows(CASES[name], of_q, k, v, shape.lengths, custom, *dtypes, packed=bool(shape.packed))
        for dtypes in ((torch.float64, torch.float64), (dtype, torch.float32))
    )
    return plain.compare(ours, *(_finite(found) for found in (exact, eager)), dtype, floor=1e-7)


def errors(
    name: str, shape: Shape, dtype: torch.dtype, backend: str = "auto", parts: int | None = None, device: str = "cpu"
) -> list[plain.Error]:  # fmt: skip
    """The errors of an attention, held to the rule."""
    given = inputs(name, shape, dtype, device)
    return judge(name, shape, given, caller(name, shape, given, backend, parts)())


def _finite(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The log of an empty row is -inf, or what stands for it: which is exact."""
    return {name: value.masked_fill(value < -1e29, 0.0) for name, value in found.items()}


def caller(
    name: str, shape: Shape, given: Given, backend: str, parts: int | None
) -> Callable[[], dict[str, Tensor]]:  # fmt: skip
    """A call of the package, which has output and rows, from a cache whose unused entries are NaN."""
    case, ((q, k, v), custom) = CASES[name], given
    device, scale = q.device, shape.dim**-0.5
    lengths = torch.tensor(shape.lengths, dtype=torch.int32)
    k, v = k.cpu().clone(), v.cpu().clone()
    for b, length in enumerate(shape.lengths):
        k[b, length:], v[b, length:] = math.nan, math.nan
    table = None
    if shape.page:
        state = torch.get_rng_state()
        k, table = in_pages(k, shape.lengths, shape.page)
        torch.set_rng_state(state)  # so that values lie in the same pages
        v, _ = in_pages(v, shape.lengths, shape.page)
        table = table.to(device)
    metas = None
    if case.dim_v:
        sizes = [(shape.heads, shape.dim), (shape.kv_heads, shape.dim), (shape.kv_heads, case.dim_v)]
        metas = tuple(meta_tensor(None, h, None, d, dtype=q.dtype) for h, d in sizes)
    engine = AttentionEngine(
        metas, CustomIO(case.axes), case.score(scale) if case.score else None, case.mask, case.online(),
        scale=None if case.score is None else 1.0, backend=backend,
    )  # fmt: skip
    starts = torch.zeros(len(shape.lengths), dtype=torch.int32, device=device) if case.from_top else None
    cu = None
    if shape.packed:
        q, cu = q[0], torch.tensor([0, *itertools.accumulate(shape.packed)], dtype=torch.int32, device=device)
    k, v, lengths = k.to(device), None if case.dim_v else v.to(device), lengths.to(device)

    def call() -> dict[str, Tensor]:
        output, rows = engine.with_cache(
            q, k, v, **custom, kv_lengths=lengths, page_table=table, cu_seqlens_q=cu, q_starts=starts,
            num_splits=parts, return_rowscales=True,
        )  # fmt: skip
        return _finite({"o": output, **{n: t for n, t in rows.items() if n in ("lse", "entropy", "n")}})

    return call
