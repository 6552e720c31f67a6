"""Row functions beyond the shipped ones, whose parts join by formulas that nobody wrote: right ones and wrong ones.

Each says what its weights and returned rows are on a whole row, in plain torch, for those who measure against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.tracing import trace
from attention_engine.ir.program import Program

Plain = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # scores (..., keys), custom inputs by name -> weights, rows


@dataclass(frozen=True)
class RowFunction:
    """A row function as a user writes it, and what it is on a whole row."""

    func: OnlineFunc
    plain: Plain
    custom: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def trace(self) -> Program:
        return trace(None, None, self.func, CustomIO(self.custom))


def made(name: str, states: dict[str, float], fwd: Any, end: Any, rows: tuple[str, ...] = ()) -> OnlineFunc:
    """An OnlineFunc of two functions of (scores or o, states[, custom])."""
    takes_custom = fwd.__code__.co_argcount == 3

    def online_fwd(scores, online_rowscales, b, h, q_idx, custom):
        return fwd(scores, online_rowscales, custom) if takes_custom else fwd(scores, online_rowscales)

    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return end(o, online_rowscales)

    def init(self):
        OnlineFunc.__init__(self, states, dict.fromkeys(rows, 0.0))

    methods = {"online_fwd": staticmethod(online_fwd), "online_fwd_epilogue": staticmethod(online_fwd_epilogue)}
    return type(name, (OnlineFunc,), {"__init__": init, **methods})()


def softmax_step(x, s):
    """The new maximum, the factor of what came before, the exponentials, and their sum so far."""
    m = s["m"].max(x.get_reduce("max"))
    back, e = (s["m"] - m).exp(), (x - m).exp()
    return m, back, e, s["r"] * back + e.get_reduce("sum")


def lse(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def entropy_step(x, s):
    m, back, e, r = softmax_step(x, s)
    moved = s["t"] + s["r"] * (s["m"] - m).max(-1e5)  # of earlier keys, less the new maximum
    return e, {"m": m, "r": r, "t": moved * back + (e * (x - m)).get_reduce("sum")}, back


def plain_entropy(x):
    p = x.softmax(-1)
    return p, {"entropy": -(p * x.log_softmax(-1)).sum(-1)}


def one_at_the_start(x, s):
    m, back, e, r = softmax_step(x, s)
    return e, {"m": m, "r": r}, back


def plain_softmax_one(x):
    with_one = torch.cat([x, torch.zeros_like(x[..., :1])], -1)
    return with_one.softmax(-1)[..., :-1], {}


def one_number(x, s):
    top = s["lse"].max(x.get_reduce("max"))
    total = top + ((s["lse"] - top).exp() + (x - top).exp().get_reduce("sum")).log()
    return (x - total).exp(), {"lse": total}, (s["lse"] - total).exp()


def lagging(x, s):
    top = x.get_reduce("max")
    m = torch.where(top > s["m"] + 6.0, top, s["m"])
    back, e = (s["m"] - m).exp(), (x - m).exp()
    return e, {"m": m, "r": s["r"] * back + e.get_reduce("sum")}, back


def unit_length(x, s):
    n = s["n"] + x.square().get_reduce("sum")
    return x / (n + 1e-4).sqrt(), {"n": n}, ((s["n"] + 1e-4) / (n + 1e-4)).sqrt()


def length_itself(x, s):
    return x, {"length": (s["length"] * s["length"] + x.square().get_reduce("sum")).sqrt()}, 1.0


def effective_keys(x, s):
    m, back, e, r = softmax_step(x, s)
    return e, {"m": m, "r": r, "r2": s["r2"] * back.square() + e.square().get_reduce("sum")}, back


def moments(x, s):
    n = s["n"] + (x * 0.0 + 1.0).get_reduce("sum")
    mean = (s["mean"] * s["n"] + x.get_reduce("sum")) / n.max(1.0)
    between = s["n"] * (s["mean"] - mean).square()
    return x.sigmoid(), {"n": n, "mean": mean, "v": s["v"] + between + (x - mean).square().get_reduce("sum")}, 1.0


def ranged(x, s):
    m, back, e, r = softmax_step(x, s)
    return e, {"m": m, "r": r, "least": s["least"].min(x.get_reduce("min"))}, back


def over_largest(x, s):
    a = s["a"].max(x.get_reduce("absmax"))
    return x / a, {"a": a}, s["a"] / a


def softplus_step(x, s):
    p = torch.nn.functional.softplus(x)
    return p, {"r": s["r"] + p.get_reduce("sum")}, 1.0


def two_heats(x, s):
    m, back, e, r = softmax_step(x, s)
    cubes = s["c"] * (3.0 * (s["m"] - m)).exp() + (3.0 * (x - m)).exp().get_reduce("sum")
    return e, {"m": m, "r": r, "c": cubes}, back


def mixed(x, s):
    up, down = x.relu().get_reduce("sum"), (-x).relu().get_reduce("sum")
    return x, {"size": s["size"] + up + down, "balance": s["balance"] + up - down}, 1.0


def turning(x, s):
    t = s["t"] + x.get_reduce("sum")
    by = t - s["t"]
    c = s["c"] * by.cos() - s["s"] * by.sin() + (x + t).cos().get_reduce("sum")
    return x, {"t": t, "c": c, "s": s["s"] * by.cos() + s["c"] * by.sin() + (x + t).sin().get_reduce("sum")}, 1.0


def plain_turning(x):
    t = x.sum(-1, keepdim=True)
    return x, {"c": (x + t).cos().sum(-1), "s": (x + t).sin().sum(-1)}


def counted(x, s, custom):
    m = s["m"].max(x.get_reduce("max"))
    back, e = (s["m"] - m).exp(), (x - m).exp() * custom["count"]
    return e, {"m": m, "r": s["r"] * back + e.get_reduce("sum")}, back


def plain_counted(x, count):
    e = (x - x.amax(-1, keepdim=True)).exp() * count
    return e / e.sum(-1, keepdim=True), {}


def by_row_heat(x, s, custom):
    y = x.relu() * custom["heat"]
    n = s["n"] + y.square().get_reduce("sum")
    return y * (n + 1.0).rsqrt(), {"n": n}, ((s["n"] + 1.0) / (n + 1.0)).sqrt()


def plain_row_heat(x, heat):
    y = x.relu() * heat
    return y / (y.square().sum(-1, keepdim=True) + 1.0).sqrt(), {}


SOFTMAX = {"m": -math.inf, "r": 0.0}
RIGHT = {
    "entropy": RowFunction(
        made("Entropy", {**SOFTMAX, "t": 0.0}, entropy_step,
             lambda o, s: (o / s["r"], {"entropy": s["r"].log() - s["t"] / s["r"]}), ("entropy",)), plain_entropy),
    "one at the start": RowFunction(
        made("OneAtTheStart", {"m": 0.0, "r": 1.0}, one_at_the_start, lambda o, s: (o / s["r"], {})),
        plain_softmax_one),
    "one number": RowFunction(
        made("OneNumber", {"lse": -math.inf}, one_number, lambda o, s: (o, {"lse": s["lse"]}), ("lse",)),
        lambda x: (x.softmax(-1), {"lse": lse(x)})),
    "lagging maximum": RowFunction(
        made("Lagging", SOFTMAX, lagging, lambda o, s: (o / s["r"], {"lse": s["r"].log() + s["m"]}), ("lse",)),
        lambda x: (x.softmax(-1), {"lse": lse(x)})),
    "unit length": RowFunction(
        made("UnitLength", {"n": 0.0}, unit_length, lambda o, s: (o, {"n": s["n"]}), ("n",)),
        lambda x: (x / (x.square().sum(-1, keepdim=True) + 1e-4).sqrt(), {"n": x.square().sum(-1)})),
    "length itself": RowFunction(
        made("LengthItself", {"length": 0.0}, length_itself, lambda o, s: (o / (s["length"] + 1e-4), {})),
        lambda x: (x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-4), {})),
    "effective keys": RowFunction(
        made("EffectiveKeys", {**SOFTMAX, "r2": 0.0}, effective_keys,
             lambda o, s: (o / s["r"], {"keys": s["r"].square() / s["r2"]}), ("keys",)),
        lambda x: (x.softmax(-1), {"keys": 1 / x.softmax(-1).square().sum(-1)})),
    "moments": RowFunction(
        made("Moments", {"n": 0.0, "mean": 0.0, "v": 0.0}, moments,
             lambda o, s: (o, {"mean": s["mean"], "variance": s["v"] / s["n"].max(1.0)}), ("mean", "variance")),
        lambda x: (x.sigmoid(), {"mean": x.mean(-1), "variance": x.var(-1, correction=0)})),
    "range": RowFunction(
        made("Range", {**SOFTMAX, "least": math.inf}, ranged,
             lambda o, s: (o / s["r"], {"range": s["m"] - s["least"]}), ("range",)),
        lambda x: (x.softmax(-1), {"range": x.amax(-1) - x.amin(-1)})),
    "over the largest": RowFunction(
        made("OverLargest", {"a": 1e-3}, over_largest, lambda o, s: (o, {"a": s["a"]}), ("a",)),
        lambda x: (x / x.abs().amax(-1, keepdim=True).clamp(min=1e-3), {"a": x.abs().amax(-1).clamp(min=1e-3)})),
    "softplus": RowFunction(
        made("Softplus", {"r": 0.0}, softplus_step, lambda o, s: (o / s["r"], {})),
        lambda x: (torch.nn.functional.softplus(x) / torch.nn.functional.softplus(x).sum(-1, keepdim=True), {})),
    "two heats": RowFunction(
        made("TwoHeats", {**SOFTMAX, "c": 0.0}, two_heats,
             lambda o, s: (o / s["r"], {"c": s["c"].log() + 3.0 * s["m"]}), ("c",)),
        lambda x: (x.softmax(-1), {"c": lse(3.0 * x)})),
    "mixed sums": RowFunction(
        made("Mixed", {"size": 0.0, "balance": 0.0}, mixed,
             lambda o, s: (o / (1.0 + s["size"]), {"balance": s["balance"]}), ("balance",)),
        lambda x: (x / (1.0 + x.abs().sum(-1, keepdim=True)), {"balance": x.sum(-1)})),
    "turning": RowFunction(
        made("Turning", {"t": 0.0, "c": 0.0, "s": 0.0}, turning, lambda o, s: (o, {"c": s["c"], "s": s["s"]}),
             ("c", "s")), plain_turning),
    "counted keys": RowFunction(
        made("Counted", SOFTMAX, counted, lambda o, s: (o / s["r"], {})), plain_counted,
        {"count": ("batch", "seq_len_kv")}),
    "heat of the row": RowFunction(
        made("RowHeat", {"n": 0.0}, by_row_heat, lambda o, s: (o, {})), plain_row_heat, {"heat": ("seq_len",)}),
}  # fmt: skip


def lost_sum(x, s):
    m, back, e, _ = softmax_step(x, s)
    return e, {"m": m, "r": e.get_reduce("sum")}, back


def fading(x, s):
    p = x.sigmoid()
    return p, {"r": s["r"] * 0.9 + p.get_reduce("sum")}, 0.9


def forgotten_rescale(x, s):
    m, _, e, r = softmax_step(x, s)
    return e, {"m": m, "r": r}, 1.0


WRONG = {
    "lost sum": made("LostSum", SOFTMAX, lost_sum, lambda o, s: (o / s["r"], {})),
    "fading tiles": made("Fading", {"r": 0.0}, fading, lambda o, s: (o / s["r"], {})),
    "forgotten rescale": made("ForgottenRescale", SOFTMAX, forgotten_rescale, lambda o, s: (o / s["r"], {})),
}


def by_odds(x, s):
    """Softmax, right, and no formula is found for it: its exponentials are the odds of sigmoids."""
    m = s["m"].max(x.get_reduce("max"))
    back, p = (s["m"] - m).exp(), (x - m).sigmoid()
    e = p / (1.0 - p)
    return e, {"m": m, "r": s["r"] * back + e.get_reduce("sum")}, back


UNWRITTEN = made("SoftmaxByOdds", SOFTMAX, by_odds, lambda o, s: (o / s["r"], {}))
