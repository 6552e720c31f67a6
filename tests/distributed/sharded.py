"""Calls with DTensors, in processes that share batches or heads: what each of them finds out."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, attention, meta_tensor
from attention_engine import library as lib
from attention_engine.errors import AttentionEngineError
from attention_engine.runtime.sharded import Shares
from tests.distributed.attentions import Shared, attentions

HEADS, BATCHES = [Shard(2)], [Shard(0)]


def far(mine: Tensor, exact: Tensor) -> float:
    return ((mine.double() - exact.double()).abs().max() / exact.double().abs().max().clamp(min=1e-3)).item()


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(engine: AttentionEngine, given: list[Tensor], d_o: Tensor) -> list[Tensor]:
    """Output, rows, and gradients of whatever floats, whole."""
    o, rows = engine(*given, return_rowscales=True)
    rows = [rows["lse"]] if "lse" in rows else []
    loss = (o * d_o).sum() + sum(r.square().sum() for r in rows)
    found = torch.autograd.grad(loss, [t for t in given if t.requires_grad])
    return [whole_of(t).detach() for t in (o, *rows, *found)]


def drawn(shared: Shared, dtype: torch.dtype = torch.float64, length: int = 53) -> list[Tensor]:
    torch.manual_seed(1)
    heads, kv_heads = shared.heads
    made = [torch.randn(2, length, h, d).double() for h, d in ((heads, 8), (kv_heads, 8), (kv_heads, 6))]
    return [t.to(dtype) if t.is_floating_point() else t for t in (*made, *shared.custom)]


def error_of(mesh: Any, shared: Shared, placed: list[Any], layout: str, custom: Any, backend: str) -> float:
    """The error beside the same call of plain tensors. custom: how custom inputs come; None: as plain tensors."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    engine = AttentionEngine(None, CustomIO(shared.axes), **shared.given, layout=layout, backend=backend)
    whole = drawn(shared, dtype)
    if layout == "bhsd":
        whole[:3] = (t.transpose(1, 2).contiguous() for t in whole[:3])
        placed = [[Shard(1) if p == Shard(2) else p for p in each] for each in placed]
    whole = [t.requires_grad_(t.is_floating_point()) for t in whole]
    torch.manual_seed(2)
    d_o = torch.randn(*whole[0].shape[:3], 6, dtype=dtype)
    exact = results(engine, whole, d_o)
    given = [distribute_tensor(t.detach(), mesh, p) for t, p in zip(whole, placed, strict=False)]
    for t in whole[3:]:
        given.append(t.detach().clone() if custom is None else distribute_tensor(t.detach(), mesh, custom))
    given = [t.requires_grad_(t.is_floating_point()) for t in given]
    mine = results(engine, given, distribute_tensor(d_o, mesh, [Replicate()] * mesh.ndim))
    return max(far(a, b) for a, b in zip(mine, exact, strict=True))


def sharded_heads_and_batches(mesh: Any, every: bool = False) -> dict[str, float]:
    """Errors of ten attentions: heads and batches, custom inputs as DTensors and plain; or each in one of these."""
    found, everywhere = {}, [Replicate()]
    for number, (name, shared) in enumerate(attentions().items()):
        layout = ("bshd", "bhsd")[number % 2]
        keys = HEADS if shared.heads[1] % mesh.size() == 0 else everywhere
        custom = None if number % 3 else everywhere
        if every or number % 4:
            found[f"{name}, heads"] = error_of(mesh, shared, [HEADS, keys, keys], layout, custom, "reference")
        if every or number % 4 == 0:
            found[f"{name}, batches"] = error_of(mesh, shared, [BATCHES] * 3, layout, custom, "reference")
    shared = attentions()["ALiBi, causal documents"]
    found["keys whole"] = error_of(mesh, shared, [HEADS, everywhere, everywhere], "bshd", None, "reference")
    found["queries whole"] = error_of(mesh, shared, [everywhere, HEADS, HEADS], "bshd", [Shard(0)], "reference")
    found["all whole"] = error_of(mesh, shared, [everywhere] * 3, "bshd", None, "reference")
    odd = Shared((12, 3), {"score_mod": lib.scale(0.35), "mask_mod": lib.causal})
    found["three key heads"] = error_of(mesh, odd, [HEADS, everywhere, everywhere], "bshd", None, "reference")
    found["kernels"] = error_of(mesh, attentions()["retention"], [HEADS] * 3, "bshd", None, "interpret")
    return found


def sharded_everywhere(mesh: Any) -> dict[str, float]:
    """All of them."""
    return sharded_heads_and_batches(mesh, every=True)


def with_wrong_laws(mesh: Any) -> dict[str, float]:
    """The errors when a law is broken: a comparison that doesn't see it would be none."""
    shared, found = attentions(), {}
    with patch.object(Shares, "rank", lambda shares, axis: 0):
        found["starts of heads"] = error_of(mesh, shared["retention"], [HEADS] * 3, "bshd", None, "reference")
    with patch("torch.distributed.tensor.Partial", Replicate):
        shared_bias = shared["softmax one, relative bias, prefix"]
        found["sums of gradients"] = error_of(mesh, shared_bias, [BATCHES] * 3, "bshd", None, "reference")
    return found


def sharded_in_two_dimensions(mesh: Any) -> dict[str, float]:
    """Batches over one dimension of a mesh and heads over the other; heads over both."""
    size, found = mesh.size(), {}
    for shape in ((2, 2),) if size == 4 else ((1, size), (size, 1)):
        two = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        for name in ("retention", "gate of rows, bias of keys"):
            for placed in ([Shard(0), Shard(2)], [Shard(2), Shard(2)]):
                shared = attentions()[name]
                placed_keys = [p if p == Shard(0) else Replicate() for p in placed]
                both = [placed, placed_keys, placed_keys]
                found[f"{name}, {shape}, {placed}"] = error_of(two, shared, both, "bshd", None, "reference")
    return found


def captured_and_dropped(mesh: Any) -> dict[str, float]:
    """What functions capture, with its gradient; weights that are dropped; heads that metas describe."""
    torch.manual_seed(3)
    table = torch.randn(4, 53, dtype=torch.float64, requires_grad=True)
    q, k, v = torch.randn(3, 2, 53, 4, 8, dtype=torch.float64)
    engine = AttentionEngine(score_mod=lambda s, custom, b, h, q, k: s + table[h, q] * table[h, k])
    exact = engine(q, k, v)
    (wanted,) = torch.autograd.grad(exact.square().sum(), [table])
    found = {}
    for name, placed in (("heads", HEADS), ("batches", BATCHES)):
        given = [distribute_tensor(t, mesh, placed) for t in (q, k, v)]
        o = engine(*given)
        (mine,) = torch.autograd.grad(o.square().sum(), [table])
        found[f"captured, {name}"] = max(far(whole_of(o), exact), far(whole_of(mine), wanted))
        dropping = AttentionEngine(mask_mod=lib.causal, dropout_p=0.4)
        o = dropping(*given, dropout_seed=7)
        found[f"dropout, {name}"] = far(whole_of(o), dropping(q, k, v, dropout_seed=7))
    described = AttentionEngine((meta_tensor(2, 4, 53, 8),) * 3, mask_mod=lib.causal, backend="reference")
    given = [distribute_tensor(t, mesh, HEADS) for t in (q, k, v)]
    found["metas"] = far(whole_of(described(*given)), described(q, k, v))
    found["plain, then sharded"] = far(whole_of(engine(*given)), engine(q, k, v))
    return found


def refused_placements(mesh: Any) -> dict[str, str]:
    """What each placement that no rank could attend with says."""
    q, k, v = torch.randn(3, 2, 8, 4, 8)
    found: dict[str, str] = {}
    engine = AttentionEngine(mask_mod=lib.causal, backend="reference")

    def said(name: str, *placed: Any, given: Any = (q, k, v), engine: Any = engine, **named: Any) -> None:
        made = [t if p is None else distribute_tensor(t, mesh, p) for t, p in zip(given, placed, strict=True)]
        with pytest.raises(AttentionEngineError) as error:
            engine(*made, **named)
        found[name] = f"{type(error.value).__name__}: {error.value}"

    tokens, everywhere = [Shard(1)], [Replicate()]
    said("tokens", tokens, tokens, tokens)
    said("tokens of keys", everywhere, tokens, tokens)
    said("entries", *[[Shard(3)]] * 3)
    said("both", HEADS, BATCHES, BATCHES)
    said("plain", HEADS, None, HEADS)
    said("three heads", *[everywhere, HEADS, HEADS], given=[t[:, :, :3] for t in (q, k, v)])
    said("three batches", *[BATCHES] * 3, given=[torch.cat([t, t[:1]]) for t in (q, k, v)])
    said("packed", *[HEADS] * 3, cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32))
    turned = AttentionEngine(layout="bhsd", backend="reference")
    said("tokens, bhsd", *[[Shard(2)]] * 3, engine=turned)
    said("linear", *[HEADS] * 3, engine=LinearAttentionEngine())
    said("attention()", *[HEADS] * 3, engine=attention)
    said("part", *[HEADS] * 3, engine=engine.partial)
    said("check", *[HEADS] * 3, engine=engine.check)
    said("rows of blocks", *[HEADS] * 2, given=(q, k), engine=engine.block_rows)
    said("cache", *[HEADS] * 3, engine=engine.with_cache, kv_lengths=torch.tensor([8, 8], dtype=torch.int32))
    parts = [DTensor.from_local(t, mesh, [Partial()], run_check=False) for t in (q, k, v)]
    with pytest.raises(AttentionEngineError) as error:
        engine(*parts)
    found["partial"] = f"{type(error.value).__name__}: {error.value}"
    return found


def everything(mesh: Any) -> tuple[Any, ...]:
    """All of it, in a process of its own."""
    return (
        sharded_heads_and_batches(mesh), sharded_in_two_dimensions(mesh), captured_and_dropped(mesh),
        refused_placements(mesh), with_wrong_laws(mesh),
    )  # fmt: skip
