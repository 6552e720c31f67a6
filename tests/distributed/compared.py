"""Attentions that ranks share beside one process that has the whole sequence: the errors of each case, on each rank."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attention_engine import AttentionEngine, CustomIO
from attention_engine import library as lib
from attention_engine.distributed import ContextParallel, Layout, methods, needs, split
from attention_engine.distributed.cost import groups_of
from attention_engine.distributed.exchange import Ranks
from tests.distributed.attentions import BATCH, DIM, DIM_V, LENGTH, Shared, attentions

EXACT = 1e-13


def layouts(ranks: int) -> dict[str, str | Layout]:
    """Three ways to split a sequence, none of them even."""
    return {
        "contiguous": "contiguous", "zigzag": "zigzag",
        "dealt": Layout.dealt([n + 1 for n in range(8)], LENGTH, ranks),
    }  # fmt: skip


def engine_of(shared: Shared, backend: str, **options) -> AttentionEngine:
    return AttentionEngine(None, CustomIO(shared.axes), **shared.given, backend=backend, **options)


def draw_qkv(shared: Shared, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    heads, kv_heads = shared.heads
    return [torch.randn(BATCH, LENGTH, h, d, dtype=torch.float64).to(dtype)
            for h, d in ((heads, DIM), (kv_heads, DIM), (kv_heads, DIM_V))]  # fmt: skip


def leaves_of(tensors, dtype):
    made = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    return [t.clone().requires_grad_(t.is_floating_point()) for t in made]


def gradients(o: Tensor, rows: dict[str, Tensor], leaves: list[Tensor], d_o: Tensor, d_rows: dict[str, Tensor]):
    outs = [(o, d_o), *((row, d_rows[name]) for name, row in rows.items() if row.requires_grad)]
    wanted = [t for t in leaves if t.requires_grad]
    found = torch.autograd.grad([out for out, _ in outs], wanted, [d.to(out.dtype) for out, d in outs])
    return [g.double() for g in found]


def of_one(shared: Shared, dtype: torch.dtype, backend: str):
    """Output, rows, and gradients of q, k, v and custom inputs, of a process that has all of the sequence."""
    leaves = leaves_of([*draw_qkv(shared, dtype), *shared.custom], dtype)
    o, rows = engine_of(shared, backend)(*leaves, return_rowscales=True)
    torch.manual_seed(2)
    d_o, d_rows = torch.randn(o.shape, dtype=torch.float64), {n: torch.randn(r.shape).double() for n, r in rows.items()}
    if "lse" not in rows:
        rows = {}
    return o, rows, gradients(o, rows, leaves, d_o, d_rows), d_o, d_rows


def of_ranks(shared: Shared, mesh, method: str, balance, dtype, backend: str, d_o, d_rows):
    """The same of ranks: each hands in its own tokens, and what they have is put together. Keys of two go round too."""
    attention = ContextParallel(engine_of(shared, backend), mesh, method, balance)
    whole = leaves_of([*draw_qkv(shared, dtype), *shared.custom], dtype)
    attention.places(LENGTH)
    own = {"pair": 2, "gate": 2, "keys": 1}  # the dimension of this rank's tokens
    custom = [attention.shard(t, own[n]) if n in own else t for n, t in zip(shared.axes, whole[3:], strict=True)]
    with patch.object(split, "SMALLEST_RING", 2):
        o, rows = attention(*(attention.shard(t, 1) for t in whole[:3]), *custom, return_rowscales=True)
    rows = {n: r for n, r in rows.items() if "lse" in rows}
    d_rows = {name: attention.shard(d_rows[name], 2) for name in rows}
    found = gradients(o, rows, whole, attention.shard(d_o, 1), d_rows)
    for gradient in found:  # a leaf is whole: each rank adds its own tokens', or its part
        dist.all_reduce(gradient)
    with torch.no_grad():
        return attention.unshard(o, 1), {n: attention.unshard(r, 2) for n, r in rows.items()}, found


def far(mine: Tensor, exact: Tensor) -> float:
    return ((mine.double() - exact.double()).abs().max() / exact.double().abs().max().clamp(min=1e-3)).item()


def compare_all(mesh, every: bool = True, once: bool = False) -> dict[str, float]:
    """The error of each attention, layout and method in float64, beside one process; or each in one of the layouts.
    once: each attention in one layout by one method."""
    found = {}
    for number, (name, shared) in enumerate(attentions().items()):
        o, rows, grads, d_o, d_rows = of_one(shared, torch.float64, "reference")
        for turn, (layout, balance) in enumerate(layouts(mesh.size()).items()):
            for shift, method in enumerate(split.METHODS):
                if (not every and (number + shift) % 3 != turn) or (once and number // 3 % 3 != shift):
                    continue
                short = patch.object(
                    methods, "ALIGNED", 8
                )  # so that so short a sequence has keys that a run leaves out
                in_turns = patch.object(methods, "WORTH", 0 if shift % 2 == 0 else methods.WORTH)
                with short, in_turns, patch.object(Ranks, "nodes", 1 + (number + turn) % 2):  # sent directly, or not
                    mine = of_ranks(shared, mesh, method, balance, torch.float64, "reference", d_o, d_rows)
                errors = [far(mine[0], o), *(far(mine[1][n], r) for n, r in rows.items())]
                errors += [far(a, b) for a, b in zip(mine[2], grads, strict=True)]
                found[f"{name}, {layout}, {method}"] = max(errors)
    return found


def compare_kernels(mesh, every: bool = True) -> dict[str, tuple[float, float]]:
    """Errors of interpreted kernels in fp32 beside float64: of ranks, and of one process; of three attentions, or of
    the one that all methods have."""
    found = {}
    for name in ("ALiBi, causal documents", "sinks, window", "gate of rows, bias of keys"):
        if not every and name != "sinks, window":
            continue
        shared = attentions()[name]
        o, _, grads, d_o, d_rows = of_one(shared, torch.float64, "reference")
        one = of_one(shared, torch.float32, "interpret")
        ways = [(method, "auto") for method in split.METHODS]
        if name == "sinks, window":
            ways.append(("gather", layouts(mesh.size())["dealt"]))  # of three runs, which one launch lists
        else:
            ways.remove(("ring", "auto"))  # gradients need all keys at once
        for method, balance in ways:
            mine = of_ranks(shared, mesh, method, balance, torch.float32, "interpret", d_o, d_rows)
            for n, exact in enumerate([o, *grads]):
                errors = [(each[0] if n == 0 else each[2][n - 1]).double() - exact for each in (mine, one)]
                layout = balance if balance == "auto" else "dealt"
                found[f"{name}, {method}, {layout}, {n}"] = tuple(e.square().mean().sqrt().item() for e in errors)
    return found


def captures(table: Tensor):
    return lambda s, custom, b, h, q, k: s + table[h, q] * table[h, k]


def other_calls(mesh) -> dict[str, float]:
    """What else a call may be: other keys than queries, heads before lengths, what a function captures."""
    torch.manual_seed(3)
    draw, found = torch.randn, {}
    q, k, v = (draw(1, n, h, 8, dtype=torch.float64) for n, h in ((37, 4), (53, 2), (53, 2)))
    for method in ("gather", "ring", "heads"):
        engine = AttentionEngine(mask_mod=lib.causal_from(16), backend="reference")
        attention = ContextParallel(engine, mesh, method)
        mine = attention(attention.shard(q), attention.shard(k), attention.shard(v))
        found[f"lengths, {method}"] = far(attention.unshard(mine), engine(q, k, v))
        engine = AttentionEngine(score_mod=captures(draw(4, 53, dtype=torch.float64)), layout="bhsd")
        attention = ContextParallel(engine, mesh, method, "zigzag")
        turned = [t.transpose(1, 2) for t in (k.repeat(1, 1, 2, 1), k, v)]
        mine = attention(*(attention.shard(t, 2) for t in turned))
        found[f"captured, {method}"] = far(attention.unshard(mine, 2), engine(*turned))
    places = attention.places(53)
    assert torch.equal(attention.shard(torch.arange(53), 0), places) and len(places) in (26, 27)
    return found


def compare_more(mesh) -> dict[str, float]:
    """Meshes of two dimensions, of which one has one rank; dropped weights, which are those of one process."""
    found = {}
    for name in ("gate of rows, bias of keys", "sinks, window"):
        shared = attentions()[name]
        o, _, grads, d_o, d_rows = of_one(shared, torch.float64, "reference")
        for shape in ((2, 1), (1, 2)):
            of_two = init_device_mesh("cpu", shape, mesh_dim_names=("between", "within"))
            for method in split.PAIRS[2 * (name == "sinks, window") :][:2]:
                mine = of_ranks(shared, of_two, method, "zigzag", torch.float64, "reference", d_o, d_rows)
                errors = [far(mine[0], o), *(far(a, b) for a, b in zip(mine[2], grads, strict=True))]
                found[f"{name}, {shape}, {method}"] = max(errors)
    q, k, v = torch.randn(3, 1, 53, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    engine = AttentionEngine(mask_mod=lib.causal, dropout_p=0.4)
    for method in ("gather", "ring", "heads"):
        attention = ContextParallel(engine, mesh, method)
        mine = attention(*(attention.shard(t) for t in (q, k, v)), dropout_seed=7)
        found[f"dropout, {method}"] = far(attention.unshard(mine), engine(q, k, v, dropout_seed=7))
    return found | {"groups of heads": in_groups(mesh)}


def in_groups(mesh) -> float:
    """Eight heads, of each rank in two groups; an output and gradients."""
    engine = AttentionEngine(mask_mod=lib.causal, backend="reference")
    q, k, v, d_o = torch.randn(4, 2, LENGTH, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    attention = ContextParallel(engine, mesh, "heads")
    results = []
    with patch.object(methods, "WORTH", 0):
        for call, own in ((engine, lambda t: t), (attention, attention.shard)):
            leaves = [own(t).clone().requires_grad_() for t in (q, k, v)]
            o = call(*leaves)
            results.append([o.detach(), *torch.autograd.grad(o, leaves, own(d_o))])
    groups = [groups_of(8, key_heads, mesh.size()) for key_heads in (8, 1)]
    assert groups == [(1, 2, 1) if mesh.size() == 2 else (1, 1), (1,)]
    return max(far(attention.unshard(mine), exact) for exact, mine in zip(*results, strict=True))


def compare_needs(mesh) -> dict[str, tuple[float, int, int]]:
    """Of documents over a dealt layout, and of a window: the error beside one process, and how many numbers this rank
    sent, and would send of all keys. Once documents were written all keys are sent."""
    torch.manual_seed(6)
    ids = torch.tensor([[0] * 40 + [1] * 9 + [2] * 24 + [3] * 11 + [4] * 44])
    length, found, sent = ids.shape[1], {}, []
    q, k, v, d_o = torch.randn(4, 1, length, 4, 8, dtype=torch.float64)
    packed = AttentionEngine(
        None, CustomIO({"documents": ("batch", "seq_len")}), None, lib.and_masks(lib.causal, lib.document()),
        backend="reference",
    )  # fmt: skip
    window = AttentionEngine(mask_mod=lib.sliding_window(17, 3), backend="reference")
    exchange = Ranks.begin_exchange

    def counted(ranks, sends, takes):
        sent.append(sum(t.numel() for t, _ in sends))
        return exchange(ranks, sends, takes)

    def results(call, tensors):
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        o = call(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, tensors[3])]

    with patch.object(needs, "CLOSE", 2), patch.object(Ranks, "begin_exchange", counted):
        layout = ContextParallel(packed, mesh).deal(length, documents=ids)
        ways = {"window": ("contiguous", window, ()), "documents": (layout, packed, (ids,))}
        for name, (balance, engine, custom) in (ways | {"written": ways["documents"]}).items():
            if name == "written":
                ids[:, 40:60] = 3  # a document of two parts
            attention = ContextParallel(engine, mesh, "gather", balance)
            sent.clear()
            mine = results(lambda *t, a=attention, c=custom: a(*t, *c), [attention.shard(t) for t in (q, k, v, d_o)])
            others = mesh.size() - 1
            all_keys = 2 * others * (attention.layout(length).count(attention.split.rank) + length // (others + 1)) * 32
            exact, total = results(lambda *t, e=engine, c=custom: e(*t, *c), (q, k, v, d_o)), sum(sent)
            error = max(far(attention.unshard(a), b) for a, b in zip(mine, exact, strict=True))
            found[name] = error, total, all_keys
    return found


def compare_nodes(mesh, every: bool = True) -> dict[str, float]:
    """Two nodes of two ranks each: heads within a node and keys between them, and the other way round; all attentions,
    layouts and methods, or four of them."""
    found, nodes = {}, init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    for number, name in enumerate(("ALiBi, causal documents", "sinks, window", "gate of rows, bias of keys")):
        if number and not every:
            continue
        shared = attentions()[name]
        o, rows, grads, d_o, d_rows = of_one(shared, torch.float64, "reference")
        for layout in ("contiguous", "zigzag") if every else ("zigzag",):
            for method in split.PAIRS:
                mine = of_ranks(shared, nodes, method, layout, torch.float64, "reference", d_o, d_rows)
                errors = [far(mine[0], o), *(far(mine[1][n], r) for n, r in rows.items())]
                errors += [far(a, b) for a, b in zip(mine[2], grads, strict=True)]
                found[f"{name}, {layout}, {method}"] = max(errors)
    return found
