"""engine.check(): every output and gradient beside float64 and beside the same maths in the tensors' own dtype."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attention_engine.errors import BackwardNotDerived
from attention_engine.passes.check_cuts import check_online, random_cuts
from attention_engine.passes.maths import analyse
from attention_engine.reference.dense import attend, attend_backward
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.doubts import doubts_of
from attention_engine.runtime.launch import allows_tf32

if TYPE_CHECKING:
    from attention_engine.runtime.shown import Shown

RANDOM_CUTS = 50
FAR = 1e29  # a row this far from 0 is as it began: it kept nothing
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
class Formula:
    """A method the user wrote, beside what is derived: how far a result is off in float64, over the result's size."""

    method: str
    name: str
    distance: float

    @property
    def ok(self) -> bool:
        """Equal but for rounding."""
        return self.distance <= 1e-9

    def __str__(self) -> str:
        verdict = "agrees with" if self.ok else "is NOT"
        return f"{self.name} by your `{self.method}` {verdict} the derived one: off by {self.distance:.1e} of its size"


@dataclass(frozen=True)
class CheckReport:
    """A table of CheckRows. `ok`: every ratio is within the limit of the dtype, and so are the user's own formulas.

    notes: what else was looked at, or could not be; and what may be a mistake: those begin with "warning:".
    """

    rows: tuple[CheckRow, ...]
    limit: float
    formulas: tuple[Formula, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.ratio <= self.limit or row.error < 1e-12 for row in self.rows) and all(
            formula.ok for formula in self.formulas
        )

    def __str__(self) -> str:
        head = f"{'':14}{'error':>10} {'eager':>10} {'ratio':>7}  worst at"
        body = [f"{r.name:14}{r.error:10.2e} {r.eager:10.2e} {r.ratio:7.2f}  {r.worst}" for r in self.rows]
        verdict = "ok" if self.ok else "NOT ok"
        law = f"{verdict}: the limit is {self.limit} x the error of eager PyTorch in the same dtype"
        return "\n".join([head, *body, *map(str, self.formulas), *self.notes, law])


def compare(
    engine: Shown, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], blocks: Tensor | None
) -> CheckReport:
    """Runs the engine, the dense maths in float64, and the dense maths in the tensors' dtype, on the same gradients.

    Raises NotOnline where random cuts of a row into tiles change the result.
    """
    check_online(engine._program, tuple(random_cuts(random.Random(0), RANDOM_CUTS)))
    notes = [f"{RANDOM_CUTS} random cuts of a row into tiles give the same result"]
    named = dict(zip(engine.custom_io.specs, custom, strict=True))
    named |= dict(zip((c.name for c in engine._captured), tensors_now(engine._captured), strict=True))
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (q, k, v, *named.values())]
    given, captured = leaves[3 : 3 + len(custom)], leaves[3 + len(custom) :]
    output, rows = engine._call(leaves[0], leaves[1], leaves[2], given, captured, blocks, True, {})
    torch.manual_seed(0)
    d_output = torch.randn_like(output)
    d_rows = _through_rows(engine, rows)
    exact = _dense(engine, leaves, d_output, d_rows, torch.float64, blocks)
    with _Tf32() if rounds_products(q) else nullcontext():
        eager = _dense(engine, leaves, d_output, d_rows, q.dtype, blocks)
    ours = [output, *rows.values()]
    try:
        ours += _gradients(output, leaves, d_output)
        for name, d_row in d_rows.items():
            ours += _gradients(rows[name], leaves, d_row)
    except BackwardNotDerived as refusal:
        exact, eager = exact[: len(ours)], eager[: len(ours)]
        notes.append(f"gradients are not there to check: {refusal}")
    floating = [n for n, c in named.items() if c.is_floating_point()]
    gradients = ["dq", "dk", "dv", *(f"d{n}" for n in floating)]
    names = ["o", *rows, *gradients, *(f"{g} of {row}" for row in d_rows for g in gradients)][: len(ours)]
    every = zip(names, ours, exact, eager, strict=True)
    seen = [(n, *three) for n, *three in every if " of " not in n or any(t.any() for t in three)]  # lse reads no v
    made = [check_row(name, a, b, c) for name, a, b, c in seen]
    formulas = tuple(_formulas(engine, leaves, d_output, blocks))
    program, inputs, extra = engine._dense_program(leaves, blocks)
    first, second = (t if engine.layout == "bhsd" else t.transpose(1, 2) for t in leaves[:2])
    with torch.no_grad():
        notes += doubts_of(program, first, second, dict(zip(inputs, [*leaves[3:], *extra], strict=True)))
    return CheckReport(tuple(made), LIMITS.get(q.dtype, 10.0), formulas, tuple(notes))


def _through_rows(engine: Shown, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is sent back through each returned row that has a gradient; nothing through rows that keep no pair."""
    backward = engine._maths().trained.backward
    lacking = dict(backward.undifferentiated) if backward is not None else {}
    sent = {n: torch.where(row.detach().abs() < FAR, torch.randn_like(row), 0.0) for n, row in rows.items()}
    return {n: d for n, d in sent.items() if n not in lacking}


def _gradients(output: Tensor, leaves: Sequence[Tensor], d_output: Tensor) -> list[Tensor]:
    wanted = [t for t in leaves if t.requires_grad]
    if not output.requires_grad:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad(output, wanted, d_output, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def _dense(
    engine: Shown, tensors: Sequence[Tensor], d_output: Tensor, d_rows: Mapping[str, Tensor],
    dtype: torch.dtype, blocks: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    leaves = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in tensors]
    program, names, extra = engine._dense_program(tensors, blocks)
    q, k, v = (t if engine.layout == "bhsd" else t.transpose(1, 2) for t in leaves[:3])
    output, rows = attend(program, q, k, v, dict(zip(names, [*leaves[3:], *extra], strict=True)), dtype=dtype)
    output = output if engine.layout == "bhsd" else output.transpose(1, 2)
    named = dict(zip((n for n, _ in program.finals), rows, strict=True))
    through = [g for n, d in d_rows.items() for g in _gradients(named[n], leaves, d.to(named[n].dtype))]
    return [output, *rows, *_gradients(output, leaves, d_output.to(dtype)), *through]


def _formulas(engine: Shown, tensors: Sequence[Tensor], d_output: Tensor, blocks: Tensor | None) -> Iterator[Formula]:
    """Gradients by the user's `forward` and `backward`, beside autograd's through the row as `online_fwd` makes it."""
    program, names, extra = engine._dense_program(tensors, blocks)
    written = [name for name in ("forward", "backward") if getattr(program, name) is not None]
    if not written:
        return
    leaves = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    custom = dict(zip(names, [*leaves[3:], *extra], strict=True))
    q, k, v = (t if engine.layout == "bhsd" else t.transpose(1, 2) for t in leaves[:3])
    d_output = (d_output if engine.layout == "bhsd" else d_output.transpose(1, 2)).double()
    output, _ = attend(program, q, k, v, custom)
    derived = torch.autograd.grad(output, (q, k, v), d_output, allow_unused=True)
    maths = analyse(program)
    if maths.backward is None:
        return
    with torch.no_grad():
        output, saved = attend(program.returning(maths.backward.saved), q, k, v, custom)
        delta = (output * d_output).sum(-1)
        found = attend_backward(program, maths.backward, q, k, v, custom, saved, delta, d_output, {})
    for name, ours, want in zip(("dq", "dk", "dv"), (found.q, found.k, found.v), derived, strict=True):
        want = torch.zeros_like(ours) if want is None else want
        # dV is made of the weights alone, which `forward` says where it is written
        method = written[0] if name == "dv" else written[-1]
        if name != "dv" or "forward" in written:
            yield Formula(method, name, float((ours - want).norm() / want.norm().clamp_min(1e-300)))


def rounds_products(q: Tensor) -> bool:
    """Must eager PyTorch be told to take tf32 products where kernels do? On a CPU it doesn't heed the switch."""
    return q.dtype is torch.float32 and q.device.type == "cpu" and allows_tf32()


def product_as_kernels(q: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Matrix products of eager PyTorch for tensors like q."""
    return _Tf32Product.apply if rounds_products(q) else torch.matmul


class _Tf32(TorchFunctionMode):
    """Products of fp32 tensors as tensor cores make them where torch allows tf32, for tensors on a CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            return _Tf32Product.apply(*args)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _Tf32Product(torch.autograd.Function):
    """a @ b of operands rounded to tf32, and so its gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _tf32(a) @ _tf32(b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return (
            (_tf32(gradient) @ _tf32(b).transpose(-1, -2)).sum_to_size(a.shape),
            (_tf32(a).transpose(-1, -2) @ _tf32(gradient)).sum_to_size(b.shape),
        )


def _tf32(tensor: Tensor) -> Tensor:
    """fp32 numbers rounded to the 10 bits after the point that tf32 keeps."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def check_row(name: str, ours: Tensor, exact: Tensor, eager: Tensor) -> CheckRow:
    """One row of the table; what is infinite in float64, or as a row begins, is left out."""
    finite = exact.abs() < FAR
    zero = torch.zeros((), dtype=torch.float64, device=exact.device)
    ours, exact, eager = ours.detach(), exact.detach(), eager.detach()
    distance = torch.where(finite, (ours.double() - exact).abs(), zero)
    theirs = torch.where(finite, (eager.double() - exact).abs(), zero)
    if distance.numel() == 0:
        return CheckRow(name, 0.0, 0.0, ())
    flat = int(distance.nan_to_num(nan=float("inf")).argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape)) if distance.ndim else ()
    return CheckRow(name, float(distance.mean()), float(theirs.nan_to_num(nan=float("inf")).mean()), worst)
