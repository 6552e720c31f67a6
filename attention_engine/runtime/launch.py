"""Runs a program's kernels on tensors: picks them by the tensors' problem, allocates results, launches.

Tensors are (batch, length, heads, dim) here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernels, Maths, Target, Tiles
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import DELTA, KV_IDX, Q_IDX, B, Expr, H, final_gradient, final_variable
from attention_engine.passes.row_sums import RowSums
from attention_engine.reference.evaluate import Evaluator, add_at
from attention_engine.tuner.defaults import default_tiles

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CUSTOM_NAMES = {
    **NAMES,
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int8: "int8",
}


def allows_tf32() -> bool:
    """May fp32 products be rounded to tf32, by torch's own switch?"""
    return torch.backends.cuda.matmul.allow_tf32


def stride_unit(*dims: int) -> int:
    """The unit that strides are counted in: 8 elements where head dims allow it."""
    return 8 if all(d % 8 == 0 for d in dims) else 1


def with_strides(tensor: Tensor, unit: int) -> list[int | Tensor]:
    """The strides in units and the tensor; a copy where a stride doesn't fit a kernel's wide reads."""
    strides = [
        step if size > 1 else unit * tensor.shape[3]
        for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False)
    ]
    aligned = tensor.data_ptr() % 16 == 0 or unit == 1
    if tensor.stride(3) != 1 or not aligned or any(s <= 0 or s % unit for s in strides):
        return with_strides(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor), unit)
    return [*(s // unit for s in strides), tensor]


def as_parameter(tensor: Tensor) -> Tensor:
    """A custom input as kernels take it."""
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.uint8)
    elif tensor.dtype is torch.float64:
        tensor = tensor.float()
    tensor = tensor.contiguous()
    return tensor.view(1) if tensor.ndim == 0 else tensor


@dataclass
class Launcher:
    """The kernels of one program on one kind of device, for every problem that comes."""

    maths: Maths
    specs: Sequence[CustomSpec]
    interpret: bool
    device: Arch | None
    deterministic: bool
    tiles: Tiles | None = None
    _kernels: dict[object, Kernels] = field(default_factory=dict)

    def problem(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Problem:
        """What the kernels must be compiled for."""
        shapes = []
        for spec, tensor in zip(self.specs, custom, strict=True):
            axes = spec.axes if spec.axes else (1,)
            shapes.append((spec.name, CUSTOM_NAMES[tensor.dtype], tuple(axes)))
        tf32 = q.dtype is torch.float32 and allows_tf32()
        dim, dim_v = q.shape[3], v.shape[3]
        return Problem(q.shape[2], k.shape[2], dim, dim_v, NAMES[q.dtype], tf32, stride_unit(dim, dim_v), tuple(shapes))

    def target(self, tensor: Tensor) -> Target:
        """What the kernels must be compiled for, of the device."""
        if self.interpret:
            return "interpret"
        return self.device or detect(tensor.device)

    def kernels(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Kernels:
        """The kernels for these tensors."""
        key = (
            q.dtype,
            q.shape[2],
            k.shape[2],
            q.shape[3],
            v.shape[3],
            q.device,
            allows_tf32(),
            *(c.dtype for c in custom),
        )
        found = self._kernels.get(key)
        if found is None:
            problem, target = self.problem(q, k, v, custom), self.target(q)
            found = Kernels(
                self.maths,
                problem,
                self.tiles or default_tiles(problem, self.maths, target),
                target,
                self.deterministic,
            )
            self._kernels[key] = found
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output, contiguous, and every row that the program returns or saves, fp32 (batch, heads, queries)."""
        custom = [as_parameter(c) for c in custom]
        kernels = self.kernels(q, k, v, custom)
        batch, queries, heads, _ = q.shape
        output = q.new_empty(batch, queries, heads, v.shape[3])
        rows = [q.new_empty(batch, heads, queries, dtype=torch.float32) for _ in self.maths.forward_schedule.rows]
        inputs = self._inputs(kernels, q, k, v, custom)
        kernels.forward.compiled(*inputs, output, *rows)
        return output, rows

    def _inputs(
        self, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]
    ) -> list[int | Tensor]:
        unit = kernels.problem.stride_unit
        return [*with_strides(q, unit), *with_strides(k, unit), *with_strides(v, unit), *custom]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], output: Tensor, rows: Sequence[Tensor],
        d_output: Tensor, d_finals: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k, v, contiguous, and of the custom inputs that are read, fp32, by name."""
        given, custom = custom, [as_parameter(c) for c in custom]
        kernels = self.kernels(q, k, v, custom)
        backward = self.maths.backward
        if backward is None:
            assert self.maths.refusal is not None
            raise self.maths.refusal
        written = dict(zip((n for n, _ in self.maths.forward_schedule.rows), rows, strict=True))
        saved = [written[n] for n, _ in backward.saved]
        finals = tuple(n for n in d_finals if n in dict(self.maths.program.finals))
        batch, queries, heads, dim = q.shape
        pad = kernels.row_pad
        length = -(-queries // pad) * pad
        inputs = self._inputs(kernels, q, k, v, custom)
        gradient = with_strides(d_output, kernels.problem.stride_unit)
        delta, *row_values = (
            q.new_empty(batch, heads, length, dtype=torch.float32) for _ in range(1 + len(backward.rows))
        )
        workspace = []
        if not kernels.over_queries:
            workspace = [q.new_empty(batch, heads, length * padded(dim), dtype=torch.float32)]
        arriving = [d_finals[n].to(torch.float32).contiguous() for n in finals]
        kernels.preprocess(finals).compiled(
            *inputs, output, *gradient, *saved, *arriving, delta, *row_values, *workspace
        )
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        names = list(dict.fromkeys(load.name for load in kernels.scattered))
        tensors = {spec.name: c for spec, c in zip(self.specs, custom, strict=True)}
        found = {n: torch.zeros(tensors[n].shape, dtype=torch.float32, device=q.device) for n in names}
        kernels.backward.compiled(*inputs, *gradient, *row_values, dk, dv, *workspace, *(found[n] for n in names))
        if kernels.over_queries:
            assert kernels.row_sums is not None
            sums = [q.new_empty(batch, heads, queries, dtype=torch.float32) for _ in kernels.row_sums.sums]
            kernels.backward_queries.compiled(*inputs, *gradient, *row_values, dq, *sums)
            self._row_sums(kernels.row_sums, sums, found, saved, delta, q, k, tensors)
        else:
            kernels.postprocess.compiled(dq, *workspace)
        self._row_gradients(found, saved, delta, d_finals, q, k, tensors)
        return (
            dq,
            dk,
            dv,
            {s.name: found[s.name].view(c.shape) for s, c in zip(self.specs, given, strict=True) if s.name in found},
        )

    def _row_sums(self, plan: RowSums, sums: list[Tensor], found: dict[str, Tensor], saved: list[Tensor], delta: Tensor,
                  q: Tensor, k: Tensor, tensors: dict[str, Tensor]) -> None:  # fmt: skip
        """Gradients of reads from their row sums."""
        assert self.maths.backward is not None
        rows = {final_variable(n): r[..., None] for (n, _), r in zip(self.maths.backward.saved, saved, strict=True)}
        evaluate = Evaluator({**self._indices(q, k), **rows}, tensors, torch.float32, q.device)
        for gradient in plan.gradients:
            total = sums[gradient.index]
            if plan.delta is not None:
                rounding = sums[plan.delta] - delta[..., : q.shape[1]]
                for correction in gradient.corrections:
                    slope = evaluate(correction.slope).expand(*rounding.shape, 1)[..., 0]
                    total = total + torch.where(rounding == 0, 0.0, rounding * slope * sums[correction.index])
            self._add(found, gradient.load, total, q, k, tensors)

    def _row_gradients(
        self, found: dict[str, Tensor], saved: list[Tensor], delta: Tensor, d_finals: Mapping[str, Tensor], q: Tensor,
        k: Tensor, tensors: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Gradients of reads outside the sums (a sink): from rows alone, so torch makes them."""
        backward = self.maths.backward
        assert backward is not None
        if not backward.row_gradients:
            return
        values: dict[Expr, Tensor] = {
            final_variable(n): r[..., None] for (n, _), r in zip(backward.saved, saved, strict=True)
        }
        values[DELTA] = delta[..., : q.shape[1], None]
        silent = values[DELTA] == 0
        for name, _ in self.maths.program.finals:
            arriving = d_finals.get(name)
            values[final_gradient(name)] = (
                torch.zeros_like(values[DELTA]) if arriving is None else arriving[..., None].float()
            )
            silent = silent & (values[final_gradient(name)] == 0)
        evaluate = Evaluator({**self._indices(q, k), **values}, tensors, torch.float32, q.device)
        for load, expr in backward.row_gradients:
            value = evaluate(expr).expand(values[DELTA].shape)
            self._add(found, load, torch.where(silent, 0.0, value)[..., 0], q, k, tensors)  # an empty row adds nothing

    def _indices(self, q: Tensor, k: Tensor) -> dict[Expr, Tensor]:
        sizes = (
            (B, q.shape[0], (-1, 1, 1, 1)),
            (H, q.shape[2], (1, -1, 1, 1)),
            (Q_IDX, q.shape[1], (1, 1, -1, 1)),
            (KV_IDX, k.shape[1], (1, 1, 1, -1)),
        )
        return {v: torch.arange(n, device=q.device).view(shape) for v, n, shape in sizes}

    def _add(
        self, found: dict[str, Tensor], load: Expr, values: Tensor, q: Tensor, k: Tensor, tensors: dict[str, Tensor]
    ) -> None:
        """Adds what each row contributes, (batch, heads, queries), to the entries that it read."""
        evaluate = Evaluator(self._indices(q, k), tensors, torch.float32, q.device)
        total = found.setdefault(load.name, torch.zeros(tensors[load.name].shape, dtype=torch.float32, device=q.device))
        found[load.name] = add_at(total, load, values[..., None], evaluate)
