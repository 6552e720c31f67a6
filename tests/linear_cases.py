"""Linear attentions, each twice: as a user writes it for the package, and as plain torch; the rule of tests/plain.py.

The CPU tests (interpreter, small and odd sizes) and the GPU tests share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import CustomIO, LinearAttentionEngine, meta_tensor
from tests import plain, plain_linear

Inputs = dict[str, Tensor]


def unchanged(x, custom):
    return x


def at_heads(x: Tensor) -> Tensor:
    """(heads) or (batch, heads, length) to broadcast with (batch, length, heads, dim)."""
    return x[:, None] if x.ndim == 1 else x.transpose(1, 2)[..., None]


@dataclass(frozen=True)
class Case:
    """mods: as users write them; on tensors (batch, length, heads, dim), with customs spread, they are plain torch."""

    name: str
    mods: dict[str, Callable] = field(default_factory=dict)
    axes: dict[str, tuple] = field(default_factory=dict)
    decays: bool = True
    channels: bool = False  # a decay for each channel of q and k


PER_TOKEN = ("batch", "heads", "seq_len")
CASES = {
    case.name: case
    for case in (
        Case("plain"),
        Case("no_decay", decays=False),
        Case(
            "mamba2",
            {"v": lambda x, c: x * c["dt"], "decay": lambda x, c: x * c["dt"] * c["A"]},
            {"dt": PER_TOKEN, "A": ("heads",)},
        ),
        Case(
            "shifted",  # nothing here is a factor of a row: sigmoid(0) and 0 + c are not 0, tails must not see them
            {"q": lambda x, c: x * c["s"] + 0.1, "k": lambda x, c: x.sigmoid() * c["dt"], "v": lambda x, c: x + c["c"]},
            {"s": ("heads",), "dt": PER_TOKEN, "c": PER_TOKEN},
        ),
        Case(
            "scaled_keys",
            {"k": lambda x, c: x * c["dt"], "q": lambda x, c: x * c["s"]},
            {"dt": PER_TOKEN, "s": ("heads",)},
        ),
        Case("gla", channels=True),
        Case(
            "gla_mods",
            {
                "q": lambda x, c: x * c["s"] + 0.1,
                "k": lambda x, c: x.sigmoid() * c["dt"],
                "v": lambda x, c: x + c["c"],
                "decay": lambda x, c: -(1 + (-x).exp()).log() * c["c"],
            },
            {"s": ("heads",), "dt": PER_TOKEN, "c": PER_TOKEN},
            channels=True,
        ),
    )
}


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    length: int = 64
    q_heads: int = 2
    k_heads: int = 2
    heads: int = 2
    dim: int = 64
    dim_v: int = 64

    def meta(self, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        sizes = ((self.q_heads, self.dim), (self.k_heads, self.dim), (self.heads, self.dim_v))
        return tuple(meta_tensor(self.batch, heads, self.length, dim, dtype=dtype) for heads, dim in sizes)

    def inputs(self, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
        """q, k, v, decay, the initial state, custom inputs, and the gradients that arrive; alike on every device."""
        make = torch.Generator().manual_seed(seed)
        b, t, h = self.batch, self.length, self.heads
        sizes = {"q": (b, t, self.q_heads, self.dim), "k": (b, t, self.k_heads, self.dim), "v": (b, t, h, self.dim_v)}
        found = {n: torch.randn(s, generator=make).to(dtype) for n, s in sizes.items()}
        found["q"] = (found["q"] * self.dim**-0.5).to(dtype)
        if case.decays:
            found["decay"] = -torch.rand(b, t, h, *([self.dim] if case.channels else []), generator=make)
        found["initial_state"] = torch.randn(b, h, self.dim, self.dim_v, generator=make)
        custom = {"s": (h,), "A": (h,), "dt": (b, h, t), "c": (b, h, t)}
        for name in case.axes:
            found[name] = torch.rand(custom[name], generator=make) + 0.5
        found["d_o"] = torch.randn(sizes["v"], generator=make).to(dtype)
        found["d_last"] = torch.randn(found["initial_state"].shape, generator=make)
        return {n: x.to(device) for n, x in found.items()}


def engine_for(case: Case, shape: Shape, dtype: torch.dtype, **options: Any) -> LinearAttentionEngine:
    mods = {f"{n}_mod": mod for n, mod in case.mods.items()}
    return LinearAttentionEngine(shape.meta(dtype), **mods, custom_io=CustomIO(case.axes), **options)


def plain_results(case: Case, form: Callable, inputs: Inputs, double: bool) -> Inputs:
    """Outputs and gradients of a plain form, in float64 or in the inputs' own dtypes."""

    def run(q, k, v, initial_state, decay=None, **custom):
        spread = {n: at_heads(x) for n, x in custom.items()}
        heads = v.shape[2]
        decay = q.new_zeros(v.shape[:3]) if decay is None else decay
        named = {"q": q, "k": k, "v": v, "decay": decay if case.channels else decay[..., None]}
        made = {}
        for name, x in named.items():
            each = x.repeat_interleave(heads // x.shape[2], dim=2)
            made[name] = case.mods.get(name, unchanged)(each, spread).to(x.dtype)
        logs = made["decay"] if case.channels else made["decay"][..., 0]
        return form(made["q"], made["k"], made["v"], logs, initial_state)

    return results(run, {n: x.double() for n, x in inputs.items()} if double else inputs)


def results(run: Callable, inputs: Inputs) -> Inputs:
    """o, the last state and the gradient of every input."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items() if n not in ("d_o", "d_last")}
    o, last = run(**leaves)
    gradients = torch.autograd.grad([o, last], list(leaves.values()), [inputs["d_o"], inputs["d_last"].to(last.dtype)])
    return {"o": o.detach(), "last": last.detach(), **{f"d_{n}": g for n, g in zip(leaves, gradients)}}


def engine_results(engine: LinearAttentionEngine, inputs: Inputs) -> Inputs:
    return results(lambda **leaves: engine(**leaves, output_final_state=True), inputs)


def errors(
    case: Case,
    shape: Shape,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    floor: float = 0.0,
    draws: int = 1,
    **options: Any,
) -> list[plain.Error]:
    """Outputs and all gradients by the rule; raises AssertionError with the table where one is too far off."""
    engine = engine_for(case, shape, dtype, **options)
    found: list[list[Inputs]] = [[], [], []]
    for seed in range(draws):
        inputs = shape.inputs(case, dtype, device, seed)
        draw = [engine_results(engine, inputs)]
        draw += [plain_results(case, plain_linear.parallel, inputs, double=double) for double in (True, False)]
        for kept, results_of_draw in zip(found, draw, strict=True):
            kept.append({n: x.cpu() for n, x in results_of_draw.items()})  # the GPU has no room for all draws
    stacked = [{n: torch.stack([draw[n] for draw in draws]) for n in draws[0]} for draws in found]
    return plain.compare(*stacked, dtype, floor)
