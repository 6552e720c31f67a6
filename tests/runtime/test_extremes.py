"""Gradients of a row's extremes, against plain torch in float64; amax shares its gradient evenly among ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, meta_tensor
from tests.runtime.engines import close

BATCH, HEADS, DIM, DIM_V = 2, 4, 16, 24
BACKENDS = ("interpret", "reference")


def tensors(queries: int, keys: int, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(5)
    sizes = (queries, HEADS, DIM), (keys, kv_heads, DIM), (keys, kv_heads, DIM_V)
    return [torch.randn(BATCH, *s, generator=make).to(dtype).requires_grad_() for s in sizes]


def metas_of(*qkv: Tensor):
    return [meta_tensor(BATCH, t.shape[2], t.shape[1], t.shape[3], dtype=t.dtype) for t in qkv]


def weighted(o: Tensor) -> Tensor:
    return (o.double() * torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)).sum()


# ---- extremes that only steady numbers: they have no gradient, and none is computed


class MLSTM(OnlineFunc):
    """xLSTM's matrix memory, all pairs at once: gates in the exponent, steadied by their own row's maximum."""

    def __init__(self):
        super().__init__({"m": float("-inf"), "n": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx, custom):
        gates = custom["forget"] + custom["enter"]  # of the query, and of the key
        m = online_rowscales["m"].max(gates.get_reduce("max"))
        rescale = (online_rowscales["m"] - m).exp()
        weights = scores * (gates - m).exp()
        return weights, {"m": m, "n": online_rowscales["n"] * rescale + weights.get_reduce("sum")}, rescale

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["n"].abs().max((-online_rowscales["m"]).exp()), {}


def plain_mlstm(q: Tensor, k: Tensor, v: Tensor, forget: Tensor, enter: Tensor) -> Tensor:
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    x = torch.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5
    keep = torch.arange(queries)[:, None] >= torch.arange(keys)
    gates = (forget[..., :, None] + enter[..., None, :]).masked_fill(~keep, -torch.inf)
    m = gates.amax(-1, keepdim=True)
    weights = x * (gates - m).exp()
    normaliser = weights.sum(-1, keepdim=True).abs().maximum((-m).exp())
    return torch.einsum("bhij,bjhd->bihd", weights / normaliser, v)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_that_their_own_maximum_steadies_need_no_detach(backend):
    qkv, make = tensors(37, 37), torch.Generator().manual_seed(6)
    sums = torch.nn.functional.logsigmoid(torch.randn(BATCH, HEADS, 37, generator=make) + 2).cumsum(-1)
    gates = [sums.requires_grad_(), (torch.randn(BATCH, HEADS, 37, generator=make) - sums.detach()).requires_grad_()]
    io = CustomIO({"forget": ("batch", "heads", "seq_len"), "enter": ("batch", "heads", "seq_len_kv")})
    engine = AttentionEngine(metas_of(*qkv), io, None, lambda b, h, i, j: i >= j, MLSTM(), backend=backend)
    o = engine(*qkv, *gates)
    found = [o.detach(), *torch.autograd.grad(weighted(o), [*qkv, *gates])]
    wide = [t.detach().double().requires_grad_() for t in (*qkv, *gates)]
    want = plain_mlstm(*wide)
    close(found, [want.detach(), *torch.autograd.grad(weighted(want), wide)], 1e-4)
