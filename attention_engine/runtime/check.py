"""engine.check(): every output and gradient beside float64 and beside the same maths in the tensors' own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_engine.reference.dense import attend

if TYPE_CHECKING:
    from attention_engine.runtime.module import AttentionEngine

LIMITS = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 10.0}


@dataclass(frozen=True)
class CheckRow:
    """One tensor: mean |ours - float64|, mean |eager - float64|, and where ours is worst."""

    name: str
    error: float
    eager: float
    worst: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Our error over eager's; 1 where both are 0."""
        return 1.0 if self.error == self.eager else self.error / max(self.eager, 1e-300)


@dataclass(frozen=True)
class CheckReport:
    """A table of CheckRows. `ok`: every ratio is within the limit of the dtype."""

    rows: tuple[CheckRow, ...]
    limit: float

    @property
    def ok(self) -> bool:
        return all(row.ratio <= self.limit or row.error < 1e-12 for row in self.rows)

    def __str__(self) -> str:
        head = f"{'':14}{'error':>10} {'eager':>10} {'ratio':>7}  worst at"
        body = [f"{r.name:14}{r.error:10.2e} {r.eager:10.2e} {r.ratio:7.2f}  {r.worst}" for r in self.rows]
        verdict = "ok" if self.ok else "NOT ok"
        return "\n".join(
            [head, *body, f"{verdict}: the limit is {self.limit} x the error of eager PyTorch in the same dtype"]
        )


def compare(
    engine: AttentionEngine, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], blocks: Tensor | None
) -> CheckReport:
    """Runs the engine, the dense maths in float64, and the dense maths in the tensors' dtype, on the same gradients."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (q, k, v, *custom)]
    output, rows = engine(*leaves, block_mask=blocks, return_rowscales=True)
    torch.manual_seed(0)
    d_output = torch.randn_like(output)
    ours = [output, *rows.values(), *_gradients(output, leaves, d_output)]
    exact = _dense(engine, leaves, d_output, torch.float64, blocks)
    eager = _dense(engine, leaves, d_output, q.dtype, blocks)
    names = ["o", *rows, "dq", "dk", "dv", *(f"d{n}" for n in engine.custom_io.specs)]
    names = names[: len(names) - len(custom)] + [
        n for n, c in zip(names[len(names) - len(custom) :], custom, strict=True) if c.is_floating_point()
    ]
    made = [_row(n, a, b, c) for n, a, b, c in zip(names, ours, exact, eager, strict=True)]
    return CheckReport(tuple(made), LIMITS.get(q.dtype, 10.0))


def _gradients(output: Tensor, leaves: Sequence[Tensor], d_output: Tensor) -> list[Tensor]:
    wanted = [t for t in leaves if t.requires_grad]
    found = torch.autograd.grad(output, wanted, d_output, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def _dense(
    engine: AttentionEngine, tensors: Sequence[Tensor], d_output: Tensor, dtype: torch.dtype, blocks: Tensor | None
) -> list[Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in tensors]
    program, names, extra = engine._dense_program(tensors, blocks)
    heads = [t if engine.layout == "bhsd" else t.transpose(1, 2) for t in leaves[:3]]
    output, rows = attend(program, *heads, dict(zip(names, [*leaves[3:], *extra], strict=True)), dtype=dtype)
    output = output if engine.layout == "bhsd" else output.transpose(1, 2)
    return [output, *rows, *_gradients(output, leaves, d_output.to(dtype))]


def _row(name: str, ours: Tensor, exact: Tensor, eager: Tensor) -> CheckRow:
    finite = exact.isfinite()
    zero = torch.zeros((), dtype=torch.float64, device=exact.device)
    ours, exact, eager = ours.detach(), exact.detach(), eager.detach()
    distance = torch.where(finite, (ours.double() - exact).abs(), zero)
    theirs = torch.where(finite, (eager.double() - exact).abs(), zero)
    if distance.numel() == 0:
        return CheckRow(name, 0.0, 0.0, ())
    flat = int(distance.nan_to_num(nan=float("inf")).argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape)) if distance.ndim else ()
    return CheckRow(name, float(distance.mean()), float(theirs.nan_to_num(nan=float("inf")).mean()), worst)
