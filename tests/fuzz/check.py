"""Runs the script of a draw on a backend and holds every output and gradient against plain torch in float64."""

from __future__ import annotations

import linecache
import math
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_engine.errors import AttentionEngineError

Named = dict[str, Tensor]
FACTORS = {torch.bfloat16: 1.1, torch.float16: 1.1, torch.float32: 10.0}  # of eager PyTorch's mean error
MANY, FACTOR_FEW = 4096, 2.0  # of fewer numbers the mean of their errors is partly luck
AGAIN = 6  # more draws of tensors where the first looks wrong
FLOOR = 0.1  # of a unit in the last place, for what eager PyTorch has exactly by chance
UNITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}  # fp32: of sums of hundreds
NOISE = 4e-6  # of fp32 sums of products of normal numbers, where the exact result is 0
UNIT = 2.0**-24  # what fp32 rounds off a number
SIGNS = 4  # draws of the signs of what fp32 sums lose


@dataclass(frozen=True)
class Outcome:
    """kind: "right", "wrong", "refused", "internal error"; of: the name of the worst result, or of the error."""

    kind: str
    of: str
    ratio: float = 0.0
    detail: str = ""


def run(text: str, backend: str, device: str = "cpu") -> Outcome:
    """What comes of a script. One that looks wrong is drawn again: the mean of a few numbers' errors may be luck."""
    try:
        names = names_of(text)
    except Exception:  # noqa: BLE001 - the fuzzer's own mistake
        return Outcome("broken script", "script", detail=traceback.format_exc())
    return run_names(names, backend, device)


def names_of(text: str) -> dict[str, Any]:
    """The script's names."""
    file = f"<fuzz {abs(hash(text))}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "fuzz"}
    exec(compile(text, file, "exec"), names)
    return names


def run_names(names: dict[str, Any], backend: str, device: str = "cpu") -> Outcome:
    """The same for a script that has run."""
    found: list[dict[str, Measured]] = []
    for turn in range(1 + AGAIN):
        ours = attempt(names, backend, device)
        if isinstance(ours, Outcome):
            return ours
        exact, some, moved = plain_results(names, torch.float64, device)
        eager, _, _ = plain_results(names, torch.float32, device)
        dtype, rows = names["DTYPE"], names["ROWS"]
        found.append(
            {n: Measured.of(ours[n], exact[n], eager[n], dtype, n in rows, some, moved.get(n, 0.0)) for n in exact}
        )
        means = {n: Measured.mean([one[n] for one in found]) for n in exact}
        worst = max(means, key=lambda n: means[n].ratio)
        if means[worst].ratio <= 1:
            return Outcome("right", worst, means[worst].ratio, means[worst].said)
        _other_tensors(names, turn)
    wrong = [f"{n}: {m.said}" for n, m in means.items() if m.ratio > 1]
    return Outcome("wrong", worst, means[worst].ratio, "\n".join(wrong))


def attempt(names: dict[str, Any], backend: str, device: str) -> Named | Outcome:
    """What the engine gives, or how it fails."""
    try:
        return our_results(names, backend, device)
    except AttentionEngineError as error:
        return Outcome("refused", type(error).__name__, detail=str(error))
    except Exception as error:  # noqa: BLE001 - it is what is looked for
        return Outcome("internal error", type(error).__name__, detail=traceback.format_exc())


def _other_tensors(names: dict[str, Any], turn: int) -> None:
    """Other numbers in the floating tensors; integers and masks stay."""
    make = torch.Generator().manual_seed(turn)

    for name in (*"qkv", "d_o"):
        names[name] = torch.randn(names[name].shape, generator=make).to(names[name].dtype)
    for name in names["d_rows"]:
        names["d_rows"][name] = torch.randn(names["d_rows"][name].shape, generator=make)


def _leaves(names: dict[str, Any], dtype: torch.dtype | None, device: str) -> tuple[Named, Named]:
    """q, k, v and learned custom inputs, which gradients are asked of; all custom inputs."""
    given = {n: names[n] for n in "qkv"} | names["custom"]
    given = {n: x.to(device) for n, x in given.items()}
    if dtype is torch.float64:
        given = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    wanted = [*"qkv", *names["LEARNED"]]
    given = {n: x.detach().clone().requires_grad_(n in wanted) for n, x in given.items()}
    return {n: given[n] for n in wanted}, {n: given[n] for n in names["custom"]}


def _in_memory(x: Tensor, form: str) -> Tensor:
    """The same numbers with other strides."""
    if form == "wider":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.transpose(1, 2).contiguous().transpose(1, 2) if form == "turned" else x


def our_results(names: dict[str, Any], backend: str, device: str) -> Named:
    """Outputs, rows and gradients of the engine, o as (batch, queries, heads, dim_v)."""
    leaves, custom = _leaves(names, None, device)
    q, k, v = (_in_memory(leaves[n], names["FORM"]) for n in "qkv")
    turned = names["LAYOUT"] == "bhsd"
    if turned:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found = names["engine"](backend)(q, k, v, **custom, return_rowscales=bool(names["ROWS"]))
    o, rows = found if names["ROWS"] else (found, {})
    o = o.transpose(1, 2) if turned else o
    return _with_gradients(names, leaves, o, rows, device)


def plain_results(names: dict[str, Any], wide: torch.dtype, device: str) -> tuple[Named, Tensor, dict[str, float]]:
    """The same in plain torch; which rows keep a key; in float64, how far rounding may move each gradient."""
    leaves, custom = _leaves(names, wide if wide is torch.float64 else None, device)
    o, rows, some, factor, z = names["plain"](leaves["q"], leaves["k"], leaves["v"], custom, wide)
    rows = {n: rows[n] for n in names["ROWS"]}
    moved = _moved(names, leaves, (o, z), factor, device) if wide is torch.float64 else {}
    return _with_gradients(names, leaves, o, rows, device), some, moved


def _moved(
    names: dict[str, Any], leaves: Named, made: tuple[Tensor, Tensor], factor: Tensor, device: str
) -> dict[str, float]:
    """The mean of what the rounding of each row's delta, the sum of o * dO, changes in each gradient.

    made: o, and z of which it is made: where the epilogue bends the output, z * dZ stands for o * dO.

    Every fused kernel, FlashAttention too, takes delta of an o that was rounded to its dtype, and sums in fp32. What
    multiplies a row of weights (1 over their sum) gets its gradient of delta: d log(factor) * delta. Eager PyTorch sums
    over weights instead, and in a row of one key, whose weight is 1, the gradient of a score is exactly 0 by that.
    """
    if not factor.requires_grad:
        return {}
    o, z = made
    (arriving,) = torch.autograd.grad(o, z, names["d_o"].to(device, o.dtype), retain_graph=True)
    z = z.detach()
    off = ((z.to(names["DTYPE"]).to(z.dtype) - z) * arriving).sum(-1, keepdim=True)
    lost = UNIT * (z * arriving).abs().sum(-1, keepdim=True)
    make = torch.Generator().manual_seed(0)
    totals = dict.fromkeys(leaves, 0.0)
    for _ in range(SIGNS):
        signs = (torch.randint(0, 2, off.shape, generator=make) * 2 - 1).to(off)
        moves = (off + signs * lost).expand(factor.shape)
        found = torch.autograd.grad(factor.log(), list(leaves.values()), moves, retain_graph=True, allow_unused=True)
        for name, gradient in zip(leaves, found, strict=True):
            totals[name] += 0.0 if gradient is None else float(gradient.abs().mean()) / SIGNS
    return {f"d{name}": total for name, total in totals.items()}


def _with_gradients(names: dict[str, Any], leaves: Named, o: Tensor, rows: Named, device: str) -> Named:
    outputs, arriving = [o], [names["d_o"].to(device, o.dtype)]
    for name, row in rows.items():  # a row that keeps nothing may have any number
        outputs.append(row)
        arriving.append(torch.where(_kept(names, device), names["d_rows"][name].to(device), 0.0).to(row.dtype))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving, allow_unused=True)
    found = {"o": o.detach()} | {n: x.detach() for n, x in rows.items()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def _kept(names: dict[str, Any], device: str) -> Tensor:
    if "some" not in names:
        given = {n: names[n].to(device).float() for n in "qkv"}
        with torch.no_grad():
            custom = {n: x.to(device) for n, x in names["custom"].items()}
            names["some"] = names["plain"](given["q"], given["k"], given["v"], custom, torch.float32)[2]
    found: Tensor = names["some"]
    return found


@dataclass(frozen=True)
class Measured:
    """Mean errors of a result, ours, eager PyTorch's and what the rounding of delta makes (_moved); the mean of its
    size, and how many numbers it has.
    """

    ours: float
    eager: float
    moved: float
    size: float
    count: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, ours: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype, row: bool, some: Tensor, moved: float
    ) -> Measured:
        """row: a returned row, of which only rows that keep a key count."""
        if ours.shape != exact.shape:
            return cls(math.inf, 0.0, 0.0, 0.0, exact.numel(), dtype)
        if row:
            ours, exact, eager = (torch.where(some, x.double(), 0.0) for x in (ours, exact, eager))
        ours, exact, eager = (x.double() for x in (ours, exact, eager))
        if exact.numel() == 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0, dtype)
        assert exact.isfinite().all(), "plain torch in float64 is not finite"
        off, limit = (ours - exact).abs().nan_to_num(math.inf), (eager - exact).abs().nan_to_num(0.0)
        return cls(float(off.mean()), float(limit.mean()), moved, float(exact.abs().mean()), exact.numel(), dtype)

    @classmethod
    def mean(cls, found: list[Measured]) -> Measured:
        """Of several draws, the numbers of all."""
        names = ("ours", "eager", "moved", "size")
        ours, eager, moved, size = (sum(getattr(m, n) for m in found) / len(found) for n in names)
        return cls(ours, eager, moved, size, sum(m.count for m in found), found[0].dtype)

    @property
    def ratio(self) -> float:
        """The error over what is allowed. Errors that know nothing of each other add up in squares."""
        factor = FACTORS[self.dtype] * (1.0 if self.count >= MANY else FACTOR_FEW)
        return self.ours / (factor * math.hypot(self.eager, self.moved) + FLOOR * UNITS[self.dtype] * self.size + NOISE)

    @property
    def said(self) -> str:
        yardsticks = f"eager {self.eager:.2e}, by rounding {self.moved:.2e}"
        return f"error {self.ours:.2e}, {yardsticks}, {self.ratio:.2f} of what is allowed"
