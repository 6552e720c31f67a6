"""What one call must do at least: `cost()` of both engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_engine.arch import Arch
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H, Program
from attention_engine.reference.evaluate import Evaluator
from attention_engine.runtime.pictures import percent

MOST_AT_ONCE = 1 << 24  # pairs that are looked at together
SHARE_OF_PEAK = {"float16": 1.0, "bfloat16": 1.0, "float32": 1 / 6}  # three products of tf32, at half the speed


@dataclass(frozen=True, repr=False)
class _Bounded:
    """What both costs print: a table with units and, of a GPU, the bound that its numbers set.

    arch: the GPU, None: not known. dtype: of the tensors.
    """

    arch: Arch | None = field(default=None, compare=False, kw_only=True)
    dtype: str = field(default="", compare=False, kw_only=True)

    def work(self) -> str:
        """How much there is of what is counted."""
        raise NotImplementedError

    def _of(self, direction: str) -> tuple[int, int]:
        return getattr(self, f"{direction}_flops"), getattr(self, f"{direction}_bytes")

    def intensity(self, direction: str) -> float:
        """FLOPs for each byte that must move; direction: "forward" or "backward"."""
        flops, moved = self._of(direction)
        return flops / max(moved, 1)

    def bounds(self, direction: str) -> dict[str, float]:
        """Seconds that the GPU takes at least, by what sets the bound: "compute" and "memory", as far as known."""
        flops, moved = self._of(direction)
        arch, found = self.arch, {}
        if arch is not None and arch.peak_tflops is not None and self.dtype in SHARE_OF_PEAK:
            found["compute"] = flops / (arch.peak_tflops * 1e12 * SHARE_OF_PEAK[self.dtype])
        if arch is not None and arch.bandwidth_tb_s is not None:
            found["memory"] = moved / (arch.bandwidth_tb_s * 1e12)
        return found

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "forward", "backward")]
        each = [self._of(direction) for direction in ("forward", "backward")]
        rows.append(("products", *(_unit(flops, "FLOP") for flops, _ in each)))
        rows.append(("bytes moved", *(_unit(moved, "B") for _, moved in each)))
        rows.append(("intensity", *(f"{self.intensity(d):.1f} FLOP/B" for d in ("forward", "backward"))))
        bounds = [self.bounds(d) for d in ("forward", "backward")]
        if self.arch is not None and all(bounds):
            for what in bounds[0]:
                rows.append((f"{what} bound", *(_time(b[what]) for b in bounds)))
            rows.append(("at least", *(f"{_time(max(b.values()))} ({max(b, key=b.__getitem__)})" for b in bounds)))
        table = [f"{name:15}{left:>22}{right:>22}" for name, left, right in rows]
        return "\n".join([self.work(), *table, self._of_arch()])

    def _of_arch(self) -> str:
        if self.arch is None:
            return "bounds: no GPU is here; give one, engine.cost(..., device=attention_engine.arch.H100())"
        numbers = [f"{self.arch.peak_tflops:g} TFLOP/s of 16-bit products" if self.arch.peak_tflops else ""]
        numbers += [f"{self.arch.bandwidth_tb_s:g} TB/s" if self.arch.bandwidth_tb_s else ""]
        said = " and ".join(n for n in numbers if n) or "its speed is not known"
        slower = "; fp32 products are three of tf32, which has half that speed" if self.dtype == "float32" else ""
        return f"bounds: of {self.arch.name}, {said}{slower}"


@dataclass(frozen=True, repr=False)
class Cost(_Bounded):
    """Kept pairs of all batches and query heads; FLOPs of their products (forward 2, backward 5 with the scores made
    again); bytes of q, k, v, o and their gradients, each read or written once. all_pairs: kept or not."""

    pairs: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    all_pairs: int = field(default=0, compare=False)

    @property
    def share(self) -> float:
        """The share of pairs that the mask keeps."""
        return self.pairs / self.all_pairs if self.all_pairs else 1.0

    def work(self) -> str:
        """How many pairs are kept."""
        return f"{_spaced(self.pairs)} of {_spaced(self.all_pairs)} pairs kept ({percent(self.share)})"


@dataclass(frozen=True, repr=False)
class LinearCost(_Bounded):
    """Tokens of all batches and heads; FLOPs of their products with the state (forward k^T v and q h; backward 5: the
    state and its gradient, and of both dQ, dK and dV); bytes of q, k, v, decay, states, o and their gradients, each
    read or written once."""

    tokens: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int

    def work(self) -> str:
        """How many tokens there are."""
        return f"{_spaced(self.tokens)} tokens of all batches and heads"


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _unit(number: float, unit: str) -> str:
    """In thousands: 17.2 GFLOP."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 1000 or prefix == "P":
            return f"{number:.4g} {prefix}{unit}"
        number /= 1000
    raise AssertionError


def linear_cost_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    ends: bool,
    arch: Arch | None = None,
) -> LinearCost:
    """The cost of a call with these tensors, (batch, length, heads, ...). ends: the last state is returned."""
    tokens, product = v.shape[0] * v.shape[1] * v.shape[2], 2 * q.shape[3] * v.shape[3]
    moved = sum(t.element_size() * t.numel() for t in (q, k, v, v, decay, initial) if t is not None)
    state = 8 if v.dtype is torch.float64 else 4
    moved += state * v.shape[0] * v.shape[2] * q.shape[3] * v.shape[3] if ends else 0
    dtype = str(q.dtype).removeprefix("torch.")
    return LinearCost(
        tokens, 2 * tokens * product, 5 * tokens * product, moved, 2 * moved, arch=arch, dtype=dtype
    )  # fmt: skip


def cost_of(
    program: Program, q: Tensor, k: Tensor, v: Tensor, custom: Mapping[str, Tensor], arch: Arch | None = None
) -> Cost:
    """The cost of a call with these tensors, (batch, length, heads, dim), and these custom inputs by name."""
    pairs = count_kept(program, q, k, custom)
    dim, dim_v = q.shape[3], v.shape[3]
    output = q.numel() // max(dim, 1) * dim_v
    moved = q.element_size() * (q.numel() + k.numel() + v.numel() + output)
    every = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    return Cost(
        pairs, 2 * pairs * (dim + dim_v), 2 * pairs * (3 * dim + 2 * dim_v), moved, 2 * moved, every, arch=arch,
        dtype=str(q.dtype).removeprefix("torch."),
    )  # fmt: skip


def count_kept(program: Program, q: Tensor, k: Tensor, custom: Mapping[str, Tensor]) -> int:
    """Pairs that the mask keeps, counted some rows at a time."""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    if program.mask is None or 0 in (batch, queries, heads, keys):
        return batch * heads * queries * keys
    place = q.device
    indices = {
        B: torch.arange(batch, device=place).view(-1, 1, 1, 1),
        H: torch.arange(heads, device=place).view(1, -1, 1, 1),
        KV_IDX: torch.arange(keys, device=place).view(1, 1, 1, -1),
    }
    together = max(MOST_AT_ONCE // (batch * heads * keys), 1)
    kept = 0
    for first in range(0, queries, together):
        rows = torch.arange(first, min(first + together, queries), device=place).view(1, 1, -1, 1)
        found = Evaluator({**indices, Q_IDX: rows}, dict(custom), torch.float32, place)(program.mask)
        shared = batch * heads * rows.numel() * keys // found.numel()  # pairs that an entry stands for
        kept += int(found.sum()) * shared
    return kept
