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


# ---- extremes that matter


class Over(OnlineFunc):
    """Scores over an extreme of their row, which is returned too."""

    def __init__(self, kind: str):
        start = {"max": float("-inf"), "min": float("inf"), "absmax": 0.0}[kind]
        super().__init__({"top": start}, {"top": 0.0})
        self.kind = kind

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        here, before = scores.get_reduce(self.kind), online_rowscales["top"]
        return scores, {"top": before.min(here) if self.kind == "min" else before.max(here)}, 1.0

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        top = online_rowscales["top"]
        return o / (top * top + 1), {"top": top}


EXTREMES = {
    "max": lambda x, keep: x.masked_fill(~keep, -torch.inf).amax(-1, keepdim=True),
    "min": lambda x, keep: x.masked_fill(~keep, torch.inf).amin(-1, keepdim=True),
    "absmax": lambda x, keep: x.masked_fill(~keep, 0.0).abs().amax(-1, keepdim=True),
}
MASKS = {"full": None, "causal": lambda b, h, i, j: i >= j, "late": lambda b, h, i, j: i >= j + 3,
         "dilated": lambda b, h, i, j: (i - j) % 3 == 0}  # fmt: skip


def products(q: Tensor, k: Tensor, mask) -> tuple[Tensor, Tensor]:
    """Scaled scores, and which pairs are kept."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    x = torch.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    keep = torch.ones_like(x, dtype=torch.bool) if mask is None else mask(0, 0, i, j).expand(x.shape)
    return x, keep


def plain_over(kind: str, q: Tensor, k: Tensor, v: Tensor, mask, score=lambda x: x) -> tuple[Tensor, Tensor]:
    x, keep = products(q, k, mask)
    x, some = score(x), keep.any(-1, keepdim=True)
    top = torch.where(some, EXTREMES[kind](x, keep | ~some), 0.0)
    weights = torch.where(keep, x / (top * top + 1), 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2)), top[..., 0]


def loss_of(o: Tensor, top: Tensor, some: Tensor) -> Tensor:
    return weighted(o) + torch.where(some, top, 0.0).double().sin().sum()


def hold(kind: str, qkv: list[Tensor], mask=None, tolerance: float = 3e-5, score=None, **options) -> None:
    """An engine's output, row and gradients to plain torch in float64."""
    backend = options.pop("backend", "interpret")
    mod = None if score is None else lambda s, custom, b, h, i, j: score(s * DIM**-0.5)
    engine = AttentionEngine(metas_of(*qkv), None, mod, mask, Over(kind), backend=backend, **options)
    o, rows = engine(*qkv, return_rowscales=True)
    some = products(qkv[0], qkv[1], mask)[1].any(-1)
    found = torch.autograd.grad(loss_of(o, rows["top"], some), qkv)
    wide = [t.detach().double().requires_grad_() for t in qkv]
    want, top = plain_over(kind, *wide, mask, score or (lambda x: x))
    exact = torch.autograd.grad(loss_of(want, top, some), wide)
    for name, a, b in zip(("o", "dq", "dk", "dv"), [o.detach(), *found], [want.detach(), *exact], strict=True):
        assert (a.double() - b).abs().max() <= tolerance * max(1.0, b.abs().max()), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", EXTREMES)
def test_an_extreme_has_its_gradient(kind, mask, backend):
    hold(kind, tensors(35, 67), MASKS[mask], backend=backend)


@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
@pytest.mark.parametrize("kind", EXTREMES)
def test_ties_share_the_gradient_evenly(kind, deterministic):
    q, k, v = tensors(33, 70)
    with torch.no_grad():
        k[:, 1::3] = k[:, ::3][:, : k[:, 1::3].shape[1]]  # pairs of equal keys, of which one reaches the end
        k[:, 40:] = k[:, :30]
        k[:, 5] = -k[:, 4]
    hold(kind, [q, k, v], deterministic=deterministic)
    hold(kind, [q, k, v], MASKS["causal"], deterministic=deterministic, score=lambda x: x.clamp(-0.5, 0.25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", EXTREMES)
def test_in_16_bits(kind, dtype):
    q, k, v = tensors(64, 96, 4, dtype)
    with torch.no_grad():
        k[:, 48:] = k[:, :48]
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    hold(kind, [q, k, v], tolerance=tolerance)
    hold(kind, [q, k, v], tolerance=tolerance, deterministic=True)


@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 1), (1, 33)])
def test_short_rows(queries, keys):
    for kind in EXTREMES:
        hold(kind, tensors(queries, keys, 1))


INPUTS = {  # name: axes, shape for (queries, keys), how plain torch adds it to (batch, heads, queries, keys)
    "of heads": (("heads",), lambda q, k: (HEADS,), lambda c: c.view(1, -1, 1, 1)),
    "of queries": (("batch", "seq_len"), lambda q, k: (BATCH, q), lambda c: c[:, None, :, None]),
    "of keys": (("heads", "seq_len_kv"), lambda q, k: (HEADS, k), lambda c: c[None, :, None]),
    "of pairs": (("heads", "seq_len", "seq_len_kv"), lambda q, k: (HEADS, q, k), lambda c: c[None]),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
@pytest.mark.parametrize("name", INPUTS)
def test_custom_inputs_get_their_gradients_through_extremes(name, deterministic):
    axes, size, spread = INPUTS[name]
    qkv = tensors(37, 67)
    with torch.no_grad():
        qkv[1][:, 1::2] = qkv[1][:, :-1:2]  # ties, but where the input parts them
    c = (torch.randn(size(37, 67), generator=torch.Generator().manual_seed(7)) * 0.5).requires_grad_()
    engine = AttentionEngine(
        metas_of(*qkv), CustomIO({"c": axes}), lambda s, custom, b, h, i, j: s * DIM**-0.5 * custom["c"].exp(),
        MASKS["causal"], Over("absmax"), backend="interpret", deterministic=deterministic,
    )  # fmt: skip
    o, rows = engine(*qkv, c, return_rowscales=True)
    some = torch.ones(BATCH, HEADS, 37, dtype=torch.bool)
    found = torch.autograd.grad(loss_of(o, rows["top"], some), [*qkv, c])
    *wide, wide_c = (t.detach().double().requires_grad_() for t in (*qkv, c))
    want, top = plain_over("absmax", *wide, MASKS["causal"], lambda x: x * spread(wide_c).exp())
    exact = torch.autograd.grad(loss_of(want, top, some), [*wide, wide_c])
    for which, a, b in zip(("dq", "dk", "dv", "dc"), found, exact, strict=True):
        assert (a.double() - b).abs().max() <= 3e-5 * max(1.0, b.abs().max()), which


def test_kernels_of_other_programs_ask_for_no_extremes():
    metas = metas_of(*tensors(8, 8))
    assert "extreme" not in AttentionEngine(metas).program()
    assert "--fmad=false" not in str(AttentionEngine(metas)._kernels("tilelang").backward.configs)


@pytest.mark.slow
def test_the_kernel_of_extremes_lowers_for_gpus_with_and_without_wgmma():
    from attention_engine.arch import A100, H100
    from attention_engine.codegen.compile import lower_kernel
    from attention_engine.plan.rules import NO_CONTRACTION

    metas = [meta_tensor(1, h, 256, 64, dtype=torch.bfloat16) for h in (4, 2, 2)]
    for arch in (H100(), A100()):
        engine = AttentionEngine(metas, None, None, MASKS["causal"], Over("absmax"), device=arch)
        kernels = engine._kernels("cuda")
        assert not kernels.tiles.backward.hopper and kernels.backward.configs[NO_CONTRACTION]
        for over_keys in (True, False):
            kernel = kernels.kernel(kernels.plan.extremes(over_keys))
            assert "--fmad=false" in lower_kernel(kernel.prim_func, arch, pass_configs=kernel.configs).flags
