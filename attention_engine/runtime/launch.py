"""Runs a program's kernels on tensors: picks them by the tensors' problem, allocates results, launches.

Tensors are (batch, length, heads, dim) here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernels, Maths, Target, Tiles
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.problem import Problem, padded
from attention_engine.runtime.custom_gradients import CustomGradients
from attention_engine.runtime.tile_maps import TileMaps
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
    _maps: TileMaps = field(default_factory=TileMaps)

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

    def kernels(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], wanted: Collection[str] = ()
    ) -> Kernels:
        """The kernels for these tensors; wanted: the custom inputs whose gradients are asked for."""
        key = (
            tuple(wanted),
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
            problem, target, maths = self.problem(q, k, v, custom), self.target(q), self.maths.wanting(wanted)
            tiles = self.tiles or default_tiles(problem, maths, target)
            found = Kernels(maths, problem, tiles, target, self.deterministic)
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
        maps = self._maps(kernels, kernels.tiles.forward, True, q, k, custom)
        kernels.forward.compiled(*inputs, *maps, output, *rows)
        return output, rows

    def _inputs(
        self, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]
    ) -> list[int | Tensor]:
        unit = kernels.problem.stride_unit
        return [*with_strides(q, unit), *with_strides(k, unit), *with_strides(v, unit), *custom]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], output: Tensor, rows: Sequence[Tensor],
        d_output: Tensor, d_finals: Mapping[str, Tensor], wanted: Collection[str],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k, v, contiguous, and of the wanted custom inputs that are read, by name."""
        given, custom = custom, [as_parameter(c) for c in custom]
        kernels = self.kernels(q, k, v, custom, wanted)
        backward = kernels.maths.backward
        if backward is None:
            assert self.maths.refusal is not None
            raise self.maths.refusal
        rows_by_name = dict(zip((n for n, _ in self.maths.forward_schedule.rows), rows, strict=True))
        saved = [rows_by_name[n] for n, _ in backward.saved]
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
        if backward.exact_delta:
            exact = q.new_empty(batch, heads, queries, dtype=torch.float32)
            maps = self._maps(kernels, kernels.tiles.queries, True, q, k, custom)
            kernels.exact_delta.compiled(*inputs, *maps, *gradient, *row_values, exact)
            kernels.preprocess(finals, delta_given=True).compiled(
                *inputs, exact, *saved, *arriving, delta, *row_values
            )
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        gradients = CustomGradients(kernels, q, k, dict(zip((s.name for s in self.specs), custom, strict=True)))
        maps = self._maps(kernels, kernels.tiles.backward, False, q, k, custom)
        kernels.backward.compiled(
            *inputs, *maps, *gradient, *row_values, dk, dv, *workspace, *gradients.sums_over_keys()
        )
        if kernels.over_queries:
            sums = gradients.sums_over_queries()
            maps = self._maps(kernels, kernels.tiles.queries, True, q, k, custom)
            kernels.backward_queries.compiled(*inputs, *maps, *gradient, *row_values, dq, *sums)
        else:
            kernels.postprocess.compiled(dq, *workspace)
        gradients.walk_pairs([*inputs, *gradient, *row_values])
        found = gradients.collect(saved, delta, d_finals)
        named = {s.name: found[s.name].view(c.shape) for s, c in zip(self.specs, given, strict=True) if s.name in found}
        return dq, dk, dv, named
