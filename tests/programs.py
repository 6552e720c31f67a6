"""Programs that the tests of ir, passes and reference share, as a user writes them, with their custom inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc, SymbolScalar, Var
from attention_engine.frontend.tracing import trace
from attention_engine.ir.program import Program
from attention_engine.library import OnlineRelu, OnlineRetention, OnlineSigmoid, OnlineSoftmax, OnlineSoftmaxOne

BATCH, HEADS = 2, 4


class Relu2(OnlineFunc):
    """max(x, 0)^2."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores.relu() ** 2, {}, 1


class Relu2RowSum(OnlineFunc):
    """max(x, 0)^2 over its row sum."""

    def __init__(self):
        super().__init__({"r": 0.0}, {"r": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        f = scores.relu().square()
        return f, {"r": online_rowscales["r"] + f.get_reduce("sum")}, SymbolScalar("o_scale", Var("1"))

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / (online_rowscales["r"] + 1e-6), {"r": online_rowscales["r"]}


class SinkSoftmax(OnlineSoftmax):
    """Softmax whose rows may look at a sink of their head, which has no value: a custom input of the epilogue."""

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx, custom):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_sink = m.max(custom["sink"])
        total = r * (m - m_sink).exp() + (custom["sink"] - m_sink).exp()
        return o * (m - m_sink).exp() / total, {"lse": total.log() + m_sink}


class HandSoftmax(OnlineSoftmax):
    """Softmax with the backward pass written by hand, as upstream's users do."""

    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"]).exp()

    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
        return (dp - doosum_rowscales) * scores


class Tempered(OnlineSoftmax):
    """Softmax of scores times a custom input of the head, plus one of the key, both read by online_fwd."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx, custom):
        return OnlineSoftmax.online_fwd(scores * custom["heat"] + custom["bias"], online_rowscales, b, h, q_idx)


class LiveRetention(OnlineRetention):
    """Retention whose normaliser has its gradient."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        w = online_rowscales["w"] + scores.get_reduce("abssum")
        r = w.max(1.0)
        return scores / r, {"w": w, "r": r}, online_rowscales["r"] / r


class GatedSoftmax(OnlineSoftmax):
    """Softmax times a gate of the head, which may be 0."""

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx, custom):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o * custom["gate"], rows


class MeanRelu(OnlineFunc):
    """max(x, 0) over the number of keys, which no state of the weights holds."""

    def __init__(self):
        super().__init__({"n": 0.0}, {"n": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores.relu(), {"n": online_rowscales["n"] + (scores * 0.0 + 1.0).get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["n"], {"n": online_rowscales["n"]}


def scaled(score, custom, b, h, q_idx, kv_idx):
    return score * 0.4


def softcapped(score, custom, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(score * 0.4 / 2.0)


def with_alibi(score, custom, b, h, q_idx, kv_idx):
    return score * 0.4 - custom["slopes"] * (q_idx - kv_idx)


def with_bias(score, custom, b, h, q_idx, kv_idx):
    return score * 0.4 + custom["bias"]


def with_relative_bias(score, custom, b, h, q_idx, kv_idx):
    return score * 0.4 + custom["table"][h, (q_idx - kv_idx) + 6]  # out of range for far pairs: reads 0


def decayed(score, custom, b, h, q_idx, kv_idx):
    gamma = 1 - 2.0 ** (-5 - h)
    return score * 0.4 * ((q_idx - kv_idx).abs() * gamma.log2()).exp2()


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx <= 2) & (kv_idx - q_idx <= 1)


def late(b, h, q_idx, kv_idx):
    """Rows below 2 keep nothing."""
    return q_idx >= kv_idx + 2


MASKS: dict[str, Callable[..., Any] | None] = {"full": None, "causal": causal, "window": window, "late": late}


@dataclass(frozen=True)
class Example:
    """An attention and the tensors of its custom inputs (their axes are those of `axes`)."""

    online_func: Callable[[], OnlineFunc | None]
    score_mod: Callable[..., Any] | None = scaled
    axes: Mapping[str, tuple] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def trace(self, mask: Callable[..., Any] | None = None) -> Program:
        return trace(self.score_mod, mask, self.online_func(), CustomIO(self.axes))

    def custom(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in self.shapes.items()}


EXAMPLES = {
    "identity": Example(lambda: None),
    "unscaled identity": Example(lambda: None, None),
    "softmax": Example(OnlineSoftmax),
    "softmax one": Example(OnlineSoftmaxOne),
    "softcap": Example(OnlineSoftmax, softcapped),
    "alibi": Example(OnlineSoftmax, with_alibi, {"slopes": ("heads",)}, {"slopes": (HEADS,)}),
    "sigmoid bias": Example(OnlineSigmoid, with_bias, {"bias": (1,)}, {"bias": (1,)}),
    "pair bias": Example(
        OnlineSoftmax, with_bias, {"bias": (1, "heads", "seq_len", "seq_len_kv")}, {"bias": (1, HEADS, 7, 9)}
    ),
    "relative bias": Example(OnlineSoftmax, with_relative_bias, {"table": ("heads", 10)}, {"table": (HEADS, 10)}),
    "relu": Example(OnlineRelu),
    "relu2": Example(Relu2),
    "relu2 row sum": Example(Relu2RowSum),
    "retention": Example(OnlineRetention, decayed),
    "live retention": Example(LiveRetention, decayed),
    "sink": Example(SinkSoftmax, scaled, {"sink": ("heads",)}, {"sink": (HEADS,)}),
    "tempered": Example(
        Tempered, scaled, {"heat": ("heads",), "bias": ("batch", "seq_len_kv")}, {"heat": (HEADS,), "bias": (BATCH, 9)}
    ),
    "gated": Example(GatedSoftmax, scaled, {"gate": ("heads",)}, {"gate": (HEADS,)}),
    "softmax by hand": Example(HandSoftmax),
    "mean relu": Example(MeanRelu),
}
