"""Nine attentions, each twice: as a user writes it for the package, and as plain torch.

`errors` runs one of them on any backend, in any dtype and shape, and holds every output and gradient to the rule of
tests/plain.py. The CPU tests (interpreter, small and odd sizes) and the GPU tests share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, SymbolScalar, Var, meta_tensor
from attention_engine.library import OnlineRelu, OnlineRetention, OnlineSigmoid, OnlineSoftmax, OnlineSoftmaxOne
from attention_engine.runtime.attentions import ATTENTIONS
from tests import plain

CAP = 2.0  # low enough to bend most scores
EPS = 1e-6
DRAWS = 4


# ---- as users write it


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def scaled(scale):
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return score * scale

    return score_mod


def softcapped(scale):
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return CAP * torch.tanh(score * scale / CAP)

    return score_mod


def alibi(scale):
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return score * scale - custom["slopes"] * (q_idx - kv_idx).abs()

    return score_mod


def biased(scale):
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return score * scale + custom["bias"]

    return score_mod


def decayed(scale):
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        gamma = 1 - 2.0 ** (-5 - h)
        return score * scale * ((q_idx - kv_idx).abs() * gamma.log2()).exp2()

    return score_mod


class OnlineRelu2(OnlineFunc):
    """max(x, 0)^2."""

    def __init__(self):
        super().__init__(online_rowscales={}, final_rowscales={})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        scores = scores.relu()
        return scores * scores, {}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {}


class OnlineRelu2RowSum(OnlineFunc):
    """max(x, 0)^2 over its row sum."""

    def __init__(self):
        super().__init__(
            online_rowscales={"r": SymbolScalar("r", Var("0.0"))},
            final_rowscales={"r": SymbolScalar("r", Var("0.0"))},
        )

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        scores = scores.relu().square()
        return scores, {"r": online_rowscales["r"] + scores.get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"] + EPS
        return o / r, {"r": r}


# ---- the two side by side


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # a row of plain.WEIGHTS
    online_func: type[OnlineFunc]
    score_mod: Callable[[float], Callable] = scaled  # from the scale
    plain_score: Callable[[float, dict[str, Tensor]], plain.Score] = lambda scale, custom: plain.scaled(scale)
    axes: dict[str, tuple] = field(default_factory=dict)  # of the custom inputs, in order
    custom: Callable[[int, int], dict[str, Tensor]] = lambda heads, length: {}


CASES = {
    case.name: case
    for case in (
        Case("softmax", "softmax", OnlineSoftmax),
        Case("softmax_one", "softmax_one", OnlineSoftmaxOne),
        Case("softcap", "softmax", OnlineSoftmax, softcapped, lambda scale, custom: plain.softcapped(scale, CAP)),
        Case(
            "alibi",
            "softmax",
            OnlineSoftmax,
            alibi,
            lambda scale, custom: plain.alibi(scale, custom["slopes"]),
            {"slopes": ("heads",)},
            lambda heads, length: {"slopes": 2.0 ** (-8 * (torch.arange(heads) + 1.0) / heads)},
        ),
        Case(
            "sigmoid_bias",
            "sigmoid",
            OnlineSigmoid,
            biased,
            lambda scale, custom: plain.biased(scale, custom["bias"]),
            {"bias": (1,)},
            lambda heads, length: {"bias": torch.tensor([-math.log(max(length, 1))])},
        ),
        Case("relu", "relu", OnlineRelu),
        Case("relu2", "relu2", OnlineRelu2),
        Case("relu2_row_sum", "relu2_row_sum", OnlineRelu2RowSum),
        Case("retention", "retention", OnlineRetention, decayed, lambda scale, custom: plain.decayed(scale)),
    )
}


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    q_len: int = 128
    kv_len: int = 128
    heads: int = 4
    kv_heads: int = 4
    dim: int = 64
    dim_v: int = 64

    def tensors(self, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
        """q, k, v and the gradient of the output, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        sizes = {
            "q": (self.batch, self.q_len, self.heads, self.dim),
            "k": (self.batch, self.kv_len, self.kv_heads, self.dim),
            "v": (self.batch, self.kv_len, self.kv_heads, self.dim_v),
            "do": (self.batch, self.q_len, self.heads, self.dim_v),
        }
        return {name: torch.randn(size, generator=generator).to(device, dtype) for name, size in sizes.items()}

    def meta(self, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        return (
            meta_tensor(self.batch, self.heads, self.q_len, self.dim, dtype=dtype),
            meta_tensor(self.batch, self.kv_heads, self.kv_len, self.dim, dtype=dtype),
            meta_tensor(self.batch, self.kv_heads, self.kv_len, self.dim_v, dtype=dtype),
        )


def engine_for(case: Case, shape: Shape, dtype: torch.dtype, causal: bool, **options: Any) -> AttentionEngine:
    return AttentionEngine(
        shape.meta(dtype),
        CustomIO(case.axes),
        score_mod=case.score_mod(shape.dim**-0.5),
        mask_mod=causal_mask if causal else None,
        online_func=case.online_func(),
        **options,
    )


def ran_with_few_key_heads() -> int:
    """How many kernels over keys whose blocks have one query head each (plan/few_key_heads.py) were compiled."""
    known = [a.program_kernels for a in ATTENTIONS.values() if a.program_kernels is not None]
    others = [vars(kernels).get("of_few_key_heads") for each in known for kernels in each._kernels.values()]
    return sum("compiled" in vars(other.backward) for other in others if other is not None)


def errors(
    case: Case,
    shape: Shape,
    dtype: torch.dtype,
    causal: bool,
    *,
    device: str = "cpu",
    seed: int = 0,
    floor: float = 0.0,
    draws: int = 1,
    **options: Any,
) -> list[plain.Error]:
    """Output and all gradients by the rule; raises AssertionError with the table where one is too far off.

    The gradient of a custom input is a number or a few, and the error of one number is luck: such a case is drawn
    several times (any, `draws` times), and the errors are means over all draws.
    """
    custom = {name: value.to(device) for name, value in case.custom(shape.heads, shape.kv_len).items()}
    engine = engine_for(case, shape, dtype, causal, **options)

    def exact(q, k, v, **custom):
        score = case.plain_score(shape.dim**-0.5, custom)
        return plain.attention(q, k, v, case.kind, causal=causal, score=score)

    def eager(q, k, v, **custom):
        score = case.plain_score(shape.dim**-0.5, custom)
        return plain.eager(q, k, v, case.kind, causal=causal, score=score)

    def ours(q, k, v, **custom):
        return engine(q, k, v, *custom.values())

    found: list[list[dict[str, Tensor]]] = [[], [], []]
    for draw in range(max(draws, DRAWS if custom else 1)):
        tensors = shape.tensors(dtype, device, seed + draw)
        double = [{name: value.double() for name, value in given.items()} for given in (tensors, custom)]
        found[0].append(_results(ours, tensors, custom))
        found[1].append(_results(exact, *double))
        found[2].append(_results(eager, tensors, custom))
    stacked = [{name: torch.stack([draw[name] for draw in draws]) for name in draws[0]} for draws in found]
    return plain.compare(*stacked, dtype, floor)


def _results(
    function: Callable[..., Tensor],
    tensors: dict[str, Tensor],
    custom: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The output and the gradient of every floating input."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in {**tensors, **custom}.items() if n != "do"}
    o = function(**leaves)
    gradients = torch.autograd.grad(o, list(leaves.values()), tensors["do"])
    return {"o": o.detach(), **{f"d{name}": gradient for name, gradient in zip(leaves, gradients)}}
