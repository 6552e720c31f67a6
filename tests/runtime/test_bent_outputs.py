"""Epilogues that are no factor of the output, against plain torch in float64: tanh(o / r), o * sigmoid(o), o + bias."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, library, meta_tensor
from attention_engine.arch import H100
from tests import plain
from tests.runtime.engines import close, same

BACKENDS = ("interpret", "reference")
BATCH, HEADS = 2, 4


@dataclass(frozen=True)
class Bent:
    """ours: of o, the states and custom inputs; plain: of normalised o, lse and the gate as (1, 1, heads, 1)."""

    ours: Callable
    plain: Callable
    reads: bool = False


BENDS = {
    "tanh": Bent(lambda o, m, r, c: torch.tanh(o / r), lambda o, lse, c: torch.tanh(o)),
    "silu": Bent(lambda o, m, r, c: o / r * torch.sigmoid(o / r), lambda o, lse, c: o * torch.sigmoid(o)),
    "gated relu": Bent(lambda o, m, r, c: torch.relu(o * c["gate"] / r), lambda o, lse, c: torch.relu(o * c), True),
    "shifted": Bent(lambda o, m, r, c: o / r + c["gate"], lambda o, lse, c: o + c, True),
    "of its lse": Bent(
        lambda o, m, r, c: torch.tanh(o / r + 0.1 * (m + r.log())) * (1 + (m + r.log()).square()).rsqrt(),
        lambda o, lse, c: torch.tanh(o + 0.1 * lse) / (1 + lse.square()).sqrt(),
    ),
    "cubed": Bent(lambda o, m, r, c: (o / r) ** 3 + 2 * (o / r), lambda o, lse, c: o**3 + 2 * o),
}
MASKS = {"full": None, "causal": lambda b, h, i, j: i >= j, "late": lambda b, h, i, j: i >= j + 3}


def softmax(bent: Bent) -> OnlineFunc:
    class Softmax(library.OnlineSoftmax):
        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx, custom):
            m, r = online_rowscales["m"], online_rowscales["r"]
            return bent.ours(o, m, r, custom), {"lse": m + r.log()}

    return Softmax()


def tensors(queries: int, keys: int, kv_heads: int, dtype: torch.dtype, dim: int = 16, dim_v: int = 24) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    sizes = (queries, HEADS, dim), (keys, kv_heads, dim), (keys, kv_heads, dim_v)
    found = [torch.randn(BATCH, *s, generator=make).to(dtype).requires_grad_() for s in sizes]
    return [*found, torch.randn(HEADS, generator=make).requires_grad_()]


def engine_of(bent: Bent, q: Tensor, k: Tensor, v: Tensor, mask=None, **options) -> AttentionEngine:
    metas = [meta_tensor(BATCH, t.shape[2], t.shape[1], t.shape[3], dtype=q.dtype) for t in (q, k, v)]
    return AttentionEngine(metas, CustomIO({"gate": ("heads",)}), None, mask, softmax(bent), **options)


def ours(bent: Bent, inputs: list[Tensor], mask=None, **options) -> list[Tensor]:
    """The output, and the gradients of all inputs, of a loss of the output and lse."""
    o, rows = engine_of(bent, *inputs[:3], mask, **options)(*inputs, return_rowscales=True)
    return [o.detach(), *gradients(o, rows["lse"], inputs, bent)]


def gradients(o: Tensor, lse: Tensor, inputs: list[Tensor], bent: Bent) -> list[Tensor]:
    seed = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    kept = lse > -1e9  # a row that keeps nothing has the lse it began with
    loss = (o.double() * seed).sum() + torch.where(kept, lse, 0.0).double().sin().sum()
    found = torch.autograd.grad(loss, inputs if bent.reads else inputs[:3])
    return [*found, torch.zeros(HEADS)][:4]


def exact(bent: Bent, inputs: list[Tensor], mask=None) -> list[Tensor]:
    q, k, v, gate = (t.detach().double().requires_grad_() for t in inputs)
    o, lse = plain.attention(q, k, v, "softmax", mask=mask, return_lse=True)
    kept = (lse > -math.inf).transpose(1, 2)[..., None]
    safe = torch.where(kept[..., 0].transpose(1, 2), lse, 0.0)
    bend = bent.plain(o, safe.transpose(1, 2)[..., None], gate.view(1, 1, HEADS, 1))
    bend = torch.where(kept, bend, 0.0)
    return [bend.detach(), *gradients(bend, lse, [q, k, v, gate], bent)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", BENDS)
def test_an_output_that_is_bent_has_its_gradients(name, mask, backend):
    inputs = tensors(35, 67, 2, torch.float32)
    close(ours(BENDS[name], inputs, MASKS[mask], backend=backend), exact(BENDS[name], inputs, MASKS[mask]), 3e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BENDS)
def test_in_16_bits_the_errors_are_those_of_16_bits(name, dtype):
    inputs = tensors(64, 64, 4, dtype)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(ours(BENDS[name], inputs, backend="interpret"), exact(BENDS[name], inputs), strict=True):
        assert (a.double() - b).abs().max() <= tolerance * max(1.0, b.abs().max())


@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 1), (1, 33)])
def test_short_rows(queries, keys):
    inputs = tensors(queries, keys, 1, torch.float32)
    for name in ("tanh", "of its lse"):
        close(ours(BENDS[name], inputs, backend="interpret"), exact(BENDS[name], inputs), 3e-5)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"layout": "bhsd"}], ids=["deterministic", "bhsd"])
def test_options_change_nothing(options):
    inputs = tensors(20, 20, 2, torch.float32)
    want = ours(BENDS["gated relu"], inputs, backend="interpret")
    turned = options.get("layout") == "bhsd"
    metas = [meta_tensor(BATCH, t.shape[2], t.shape[1], t.shape[3], dtype=t.dtype) for t in inputs[:3]]
    online_func, io = softmax(BENDS["gated relu"]), CustomIO({"gate": ("heads",)})
    engine = AttentionEngine(metas, io, None, None, online_func, backend="interpret", **options)
    given = [t.transpose(1, 2) for t in inputs[:3]] if turned else inputs[:3]
    o, rows = engine(*given, inputs[3], return_rowscales=True)
    o = o.transpose(1, 2) if turned else o
    close([o.detach(), *gradients(o, rows["lse"], inputs, BENDS["gated relu"])], want, 1e-6)


def test_values_wider_than_a_kernel_has_room_for():
    inputs = tensors(9, 17, 2, torch.float32, dim_v=272)
    close(ours(BENDS["of its lse"], inputs, backend="interpret"), exact(BENDS["of its lse"], inputs), 3e-5)


def test_no_keys_and_no_queries_give_nothing():
    for queries, keys in ((0, 5), (5, 0)):
        inputs = tensors(queries, keys, 2, torch.float32)
        engine = engine_of(BENDS["shifted"], *inputs[:3], backend="interpret")
        o = engine(*inputs)
        assert not o.any()
        assert not any(g.any() for g in torch.autograd.grad(o.sum(), inputs[:3]))


def test_calls_without_gradients_run_one_fused_kernel():
    inputs = tensors(20, 20, 2, torch.float32)
    engine = engine_of(BENDS["tanh"], *inputs[:3], backend="interpret")
    assert "tanh" in engine.source("forward")
    for _ in range(3):  # seen calls too
        with torch.no_grad():
            without = engine(*inputs)
        with_gradients = engine(*inputs)
        assert with_gradients.requires_grad and not without.requires_grad
        close([without], [with_gradients.detach()], 1e-6)
    detached = [t.detach() for t in inputs]
    same([engine(*detached)], [without])


def test_gradients_of_gradients():
    inputs = tensors(7, 9, 2, torch.float32)
    seconds = []
    wide = [t.detach().double().requires_grad_() for t in inputs]
    for backend, given in (("interpret", inputs), ("reference", wide)):
        o = engine_of(BENDS["silu"], *inputs[:3], backend=backend)(*given)
        (dq,) = torch.autograd.grad(o.square().sum(), given[0], create_graph=True)
        seconds.append(list(torch.autograd.grad(dq.square().sum(), given[:3])))
    close(*seconds, 1e-4)


def test_forward_mode():
    inputs = tensors(7, 9, 2, torch.float32)

    def tangent(backend: str, q: Tensor, *others: Tensor) -> Tensor:
        engine = engine_of(BENDS["tanh"], *inputs[:3], backend=backend)
        return torch.func.jvp(lambda q: engine(q, *others), (q,), (torch.ones_like(q),))[1].detach()

    exactly = [t.detach().double() for t in inputs]
    close([tangent("interpret", *inputs)], [tangent("reference", *exactly)], 1e-5)


def test_torch_func_grad_and_checkpoints():
    from torch.utils.checkpoint import checkpoint

    inputs = tensors(12, 9, 2, torch.float32)
    engine = engine_of(BENDS["gated relu"], *inputs[:3], backend="interpret")
    want = torch.autograd.grad(engine(*inputs).sin().sum(), inputs)
    found = torch.func.grad(lambda *given: engine(*given).sin().sum(), (0, 1, 2, 3))(*(t.detach() for t in inputs))
    close(list(found), list(want), 1e-6)
    again = torch.autograd.grad(checkpoint(engine, *inputs, use_reentrant=False).sin().sum(), inputs)
    same(list(again), list(want))


def test_torch_compile():
    inputs = tensors(12, 9, 2, torch.float32)
    engine = engine_of(BENDS["gated relu"], *inputs[:3], backend="interpret")
    want = torch.autograd.grad(engine(*inputs).sin().sum(), inputs)
    compiled = torch.compile(lambda *given: engine(*given).sin().sum(), fullgraph=True, backend="aot_eager")
    close(list(torch.autograd.grad(compiled(*inputs), inputs)), list(want), 1e-6)


def test_outputs_that_leave_the_range_of_fp16_are_bent_in_fp32():
    """Weights without a normaliser, which the epilogue brings back."""

    class Squares(OnlineFunc):
        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            return scores**4, {}, 1.0

        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
            return torch.tanh(o * 1e-6), {}

    q, k, v, _ = tensors(16, 16, 4, torch.float16)
    metas = [meta_tensor(BATCH, t.shape[2], t.shape[1], t.shape[3], dtype=t.dtype) for t in (q, k, v)]
    engine = AttentionEngine(metas, None, lambda s, c, b, h, i, j: s * 4.0, None, Squares(), backend="interpret")
    o = engine(q, k, v)
    found = [o.detach(), *torch.autograd.grad(o.double().sin().sum(), (q, k, v))]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    x = torch.einsum("bihd,bjhd->bhij", *wide[:2]) * 4.0
    inner = torch.einsum("bhij,bjhd->bihd", x**4, wide[2])
    assert inner.abs().max() > 65504
    want = torch.tanh(inner * 1e-6)
    for a, b in zip(found, [want.detach(), *torch.autograd.grad(want.sin().sum(), wide)], strict=True):
        assert (a.double() - b).abs().max() <= 4e-3 * max(1.0, b.abs().max())


def test_beside_a_formula_of_the_users_own_an_epilogue_must_be_a_factor():
    class ByHand(library.OnlineSoftmax):
        @staticmethod
        def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
            return (scores - final_rowscales["lse"]).exp()

        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
            m, r = online_rowscales["m"], online_rowscales["r"]
            return torch.tanh(o / r), {"lse": m + r.log()}

    q, k, v, _ = tensors(5, 5, 2, torch.float32)
    metas = [meta_tensor(BATCH, t.shape[2], t.shape[1], t.shape[3], dtype=t.dtype) for t in (q, k, v)]
    o = AttentionEngine(metas, None, None, None, ByHand(), backend="interpret")(q, k, v)
    with pytest.raises(NotImplementedError) as caught:
        o.sum().backward()
    assert str(caught.value) == (
        "the epilogue's output is tanh(o / row_sum(exp(score - row_max(score)))), which is not the output so far times "
        "a factor of the row.\n  Return o times or divided by row values; apply the rest to the engine's output."
    )


def test_the_programs_and_their_tiles_are_shown():
    inputs = tensors(5, 5, 2, torch.float32)
    engine = engine_of(BENDS["tanh"], *inputs[:3], device=H100())
    told = engine.program()
    assert "# with gradients: this program, and what is made of its o and rows" in told
    assert re.search(r"\d  output = tanh\(o\)\n +\d+  d_o = do \* \(1 - output \* output\)", told), told
    assert "no backward pass" not in engine.explain()
    assert "torch makes the output of what these kernels make" in engine.explain()
