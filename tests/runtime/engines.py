"""What the tests of the runtime share: small engines, their tensors, and results beside float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, meta_tensor
from attention_engine.library import OnlineSoftmax

Axes = Mapping[str, tuple]
HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24
BACKENDS = ("reference", "interpret")
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def scaled(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def late(b, h, q_idx, kv_idx):
    """The first two rows keep nothing."""
    return q_idx >= kv_idx + 2


def build(axes: Axes | None = None, *, dtype: torch.dtype = torch.float32, **options: Any) -> AttentionEngine:
    """A softmax attention on 4 heads that share 2 of keys, unless the options say otherwise."""
    given = {"score_mod": scaled, "mask_mod": causal, "online_func": OnlineSoftmax(), "backend": "interpret", **options}
    metas = (
        meta_tensor(None, HEADS, None, DIM, dtype=dtype),
        meta_tensor(None, KV_HEADS, None, DIM, dtype=dtype),
        meta_tensor(None, KV_HEADS, None, DIM_V, dtype=dtype),
    )
    return AttentionEngine(metas, CustomIO(axes or {}), **given)


def qkv(
    q_len: int = 11,
    kv_len: int | None = None,
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (batch, length, heads, dim), which ask for gradients."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    sizes = ((q_len, HEADS, DIM), (kv_len, KV_HEADS, DIM), (kv_len, KV_HEADS, DIM_V))
    q, k, v = (torch.randn(batch, *size, generator=generator).to(dtype).requires_grad_() for size in sizes)
    return q, k, v


def weighted_sum(o: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """A loss that weighs every entry of the output differently."""
    return (o.double() * torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)).sum()


Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def results(engine: AttentionEngine, *inputs: Tensor, loss: Loss = weighted_sum, **options: Any) -> list[Tensor]:
    """The output, the rows, and the gradient of each input that asks for one; inputs stay as they are."""
    o, rows = engine(*inputs, return_rowscales=True, **options)
    wanted = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(loss(o, rows), wanted, allow_unused=True)
    gradients = [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted)]
    return [o.detach(), *(r.detach() for r in rows.values()), *gradients]


def exactly(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The same inputs in float64."""
    return [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]


def close(found: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    """Every tensor within the tolerance, absolute and relative; -inf where it must be."""
    assert len(found) == len(exact)
    for a, b in zip(found, exact):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


def same(found: list[Tensor], again: list[Tensor]) -> None:
    """Every tensor equal to the last bit."""
    assert len(found) == len(again)
    for a, b in zip(found, again):
        assert torch.equal(a, b), (a - b).abs().max()


def agrees(axes: Axes | None, *inputs: Tensor, loss: Loss = weighted_sum, **options: Any) -> list[Tensor]:
    """Holds an engine on the interpreter to the reference in float64; returns what the interpreter made."""
    call = {n: options.pop(n) for n in ("block_mask",) if n in options}
    dtype = inputs[0].dtype
    found = results(build(axes, dtype=dtype, **options), *inputs, loss=loss, **call)
    reference = build(axes, dtype=dtype, **{**options, "backend": "reference", "deterministic": False})
    close(found, results(reference, *exactly(inputs), loss=loss, **call), CLOSE[dtype])
    return found


def graphs(counter):
    """How many graphs with an operation in them a compiler got. Where heads are taken from sizes that may change, torch
    2.13 compiles an empty one first, once."""
    held = ("call_function", "call_method", "call_module")
    return sum(any(node.op in held for node in graph.graph.nodes) for graph in counter.graphs)
