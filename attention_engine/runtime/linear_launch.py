"""Runs the kernels of a linear attention on tensors: picks them by the tensors' problem, allocates results, launches.

Tensors are (batch, length, heads, dim) here; decay is (batch, length, heads), a state (batch, heads, dim, dim_v), fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Target
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import (
    ROLES,
    LinearProblem,
    LinearProgram,
    LinearTile,
    LinearTiles,
    column_tiles,
    parts_of,
    state_tiles,
)
from attention_engine.reference.evaluate import Evaluator, add_at
from attention_engine.reference.linear import token_indices
from attention_engine.runtime.launch import CUSTOM_NAMES, NAMES, allows_tf32, stride_unit
from attention_engine.runtime.linear_plan import LinearKernels
from attention_engine.runtime.plans import as_parameter, with_strides
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.problems import bucket


@dataclass(frozen=True)
class LinearGradients:
    """Gradients, each None where it wasn't wanted or doesn't exist; custom: by name, fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    initial: Tensor | None
    custom: dict[str, Tensor]


@dataclass
class LinearLauncher:
    """The kernels of one program on one kind of device, for every problem that comes.

    tiles: those to use, whatever the problem; choose(problem, target, (batch, length), device, default tiles, backward,
    wanted gradients beyond q, k, v, custom inputs): which tiles a direction runs with, where they may differ.
    """

    program: LinearProgram
    specs: Sequence[CustomSpec]
    interpret: bool
    device: Arch | None
    tiles: LinearTiles | None = None
    choose: Callable[..., LinearTiles] | None = None
    per_channel: ClassVar[bool] = False
    _kernels: dict[object, LinearKernels] = field(default_factory=dict)

    def target(self, tensor: Tensor) -> Target:
        """What the kernels must be compiled for, of the device."""
        return "interpret" if self.interpret else self.device or detect(tensor.device)

    def problem(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor]
    ) -> LinearProblem:  # fmt: skip
        """What the kernels must be compiled for."""
        dims = (v.shape[2], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        shapes = tuple(
            (s.name, CUSTOM_NAMES[c.dtype], tuple(s.axes) or (1,)) for s, c in zip(self.specs, custom, strict=True)
        )
        tf32 = q.dtype is torch.float32 and allows_tf32()
        decay_dtype = "" if decay is None else NAMES[decay.dtype]
        unit = stride_unit(*dims[3:])
        return LinearProblem(*dims, NAMES[q.dtype], decay_dtype, tf32, unit, shapes, self.per_channel)

    def kernels(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor],
        direction: str = "step", wanted: frozenset[str] = frozenset(),
    ) -> LinearKernels:  # fmt: skip
        """The kernels for these tensors; direction: "step", "forward" or "backward" with the wanted gradients."""
        dims = (v.shape[2], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        decay_dtype = None if decay is None else decay.dtype
        key: tuple[object, ...] = (*dims, q.dtype, decay_dtype, q.device, allows_tf32(), *(c.dtype for c in custom))
        choose = None if direction == "step" else self.choose
        if choose is not None:
            key = (*key, bucket(q.shape[0]), bucket(q.shape[1]), direction, wanted)
        if key not in self._kernels:
            problem, target = self.problem(q, k, v, decay, custom), self.target(q)
            made = self.kernels_of(problem, target)
            if choose is not None:
                sizes, names = (q.shape[0], q.shape[1]), tuple(sorted(wanted))
                back = direction == "backward"
                tiles = choose(problem, target, sizes, str(q.device), made.tiles, back, names, custom)
                made = LinearKernels(self.program, problem, tiles, target)
            self._kernels[key] = made
        return self._kernels[key]

    def kernels_of(self, problem: LinearProblem, target: Target) -> LinearKernels:
        """The kernels for a problem."""
        tiles = self.tiles or default_linear_tiles(self.program, problem, target)
        return LinearKernels(self.program, problem, tiles, target)

    def decay_of(self, decay: Tensor | None, v: Tensor) -> Tensor | None:
        """The decay tensor that kernels get; where the mod alone makes decays, zeros that tell them the length."""
        if decay is not None:
            return decay.float() if decay.dtype is torch.float64 else decay
        if not self.program.decays:
            return None
        return torch.zeros(1, 1, 1, device=v.device).expand(v.shape[:3])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
        ends: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The output, contiguous, and the last state (an empty tensor unless `ends`)."""
        return _Forward(self, {"q": q, "k": k, "v": v}, decay, initial, custom, "forward", frozenset()).run(ends)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One token, length 1: the output and the next state."""
        custom, decay = [as_parameter(c) for c in custom], self.decay_of(decay, v)
        kernels = self.kernels(q, k, v, decay, custom)
        output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        last = v.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        first = [] if state is None else [state.to(torch.float32).contiguous()]
        tensors = [x for t in (q, k, v) for x in with_strides(t, kernels.problem.stride_unit)]
        kernels.step(bool(first)).compiled(*tensors, *_strided_decay(decay), *custom, *first, output, last)
        return output, last

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
        d_output: Tensor, d_last: Tensor | None, wanted: frozenset[str],
    ) -> LinearGradients:  # fmt: skip
        """Gradients of everything; wanted: which of "decay" and the custom inputs are asked for."""
        tensors = {"q": q, "k": k, "v": v, "do": d_output}
        return _Backward(self, tensors, decay, initial, custom, "backward", wanted).run(d_last)


def _sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dim. Of two, an addition is three times as fast as torch's reduction."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    most = parts[0] if len(parts) == 2 else parts[:-1].sum(0)
    return torch.add(most, parts[-1], out=torch.empty_like(parts[-1], dtype=dtype))


def _strided_decay(decay: Tensor | None) -> list[int | Tensor]:
    """decay as kernels take it: its strides, where there is one to walk by, and itself."""
    if decay is None:
        return []
    return [*(s if n > 1 else 1 for n, s in zip(decay.shape, decay.stride(), strict=True)), decay]


class _Pass:
    """One pass over tensors by name ("q", "k", "v", "do"): what its launches share."""

    def __init__(
        self, launcher: LinearLauncher, tensors: Mapping[str, Tensor], decay: Tensor | None, initial: Tensor | None,
        custom: Sequence[Tensor], direction: str = "step", wanted: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        q, k, v = (tensors[n] for n in "qkv")
        self.launcher, self.program, self.given = launcher, launcher.program, tensors
        self.custom, self.decay, self.initial = [as_parameter(c) for c in custom], launcher.decay_of(decay, v), initial
        self.kernels = launcher.kernels(q, k, v, self.decay, self.custom, direction, wanted)
        self.problem, self.tiles = self.kernels.problem, self.kernels.tiles
        self.strided = {n: with_strides(t, self.problem.stride_unit) for n, t in tensors.items()}
        self.batch, self.length, self.heads = v.shape[0], v.shape[1], v.shape[2]
        self.state_shape = (self.problem.dim, self.problem.dim_v)
        self.sums: dict[int, list[Tensor]] = {}
        self.wanted, self.of_decay = wanted, self.kernels.of_decay(wanted)
        self.found: dict[str, Tensor] = {}

    def _names(self, *names: str) -> list[int | Tensor]:
        return [x for n in names for x in self.strided[n]]

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.given["v"].device)

    def _new_states(self, chunks: int) -> Tensor:
        """A tensor for a state of each chunk."""
        dtype = getattr(torch, self.problem.state_dtype)
        return self._new(self.batch, self.heads, chunks, *self.state_shape, dtype=dtype)

    def _decays(self, chunk: int) -> list[Tensor]:
        """The sums of decays in chunks of this length, where there are decays."""
        if self.program.decays and chunk not in self.sums:
            parts = [2] if self.problem.splits else []
            sums = self._new(*parts, self.batch, self.heads, -(-self.length // chunk) * chunk)
            self.kernels.sum_decays(chunk).compiled(*_strided_decay(self.decay), *self.custom, sums)
            self.sums[chunk] = [sums]
        return self.sums.get(chunk, [])

    def _first(self, state: Tensor | None) -> list[Tensor]:
        return [] if state is None else [state.to(torch.float32).contiguous()]

    def _reads(self, name: str | None) -> tuple[Expr, ...]:
        return self.kernels.reads(name, self.wanted)

    def _states(
        self, left: str, right: str, first: Tensor | None, other: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(states of chunks, the state at the walk's end, overlaps with the other states)."""
        tile = self.tiles.states
        chunks = -(-self.length // tile.chunk)
        kept = self._new_states(chunks)
        last = self._new(self.batch, self.heads, *self.state_shape)
        given, others, overlap = self._first(first), [], []
        if other is not None:
            others = [other, *self._first(self.initial)]
            overlap = [self._new(self.batch, self.heads, chunks, state_tiles(self.problem, tile))]
        kernel = self.kernels.states(left == "q", bool(given), bool(others), len(others) > 1)
        inputs = (*self._names(left, right), *self.custom, *self._decays(tile.chunk))
        kernel.compiled(*inputs, *given, *others, kept, last, *overlap)
        return kept, last, overlap[0] if overlap else None

    def _rows(self, role: str, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(the output or a gradient, what its rows' state and pairs add to the gradient of decays)."""
        tile, names = self.tiles.rows[role], ROLES[role]
        own = self.given[names.own or "v"]
        parts = parts_of(self.problem, names, tile)
        result = self._new(*own.shape, dtype=own.dtype) if parts == 1 else self._new(parts, *own.shape)
        local = self._row_sums(role, tile, 2) if self.of_decay and role in ("dq", "dk") else []
        reads = self._reads(names.own)
        rows = self._row_sums(role, tile, len(reads))
        inputs = self._inputs(role, tile)
        self.kernels.rows(role, bool(local), reads).compiled(*inputs, states, result, *local, *rows)
        self._add(reads, [_sum_parts(r, r.dtype) for r in rows])
        return result if parts == 1 else _sum_parts(result, own.dtype), local

    def _walk(self, role: str, first: Tensor | None, ends: bool) -> tuple[Tensor, Tensor]:
        """(the output or a gradient, the state that the walk ends with, where asked for), in one walk."""
        tile = self.tiles.forward if role == "output" else self.tiles.walks[role]
        name = ROLES[role].own
        own = self.given[name or "v"]
        result = self._new(*own.shape, dtype=own.dtype)
        last = self._new(self.batch, self.heads, *self.state_shape) if ends else self._new(0)
        given, lasts = self._first(first), [last] if ends else []
        reads = self._reads(name)
        rows = self._row_sums(role, tile, len(reads))
        inputs = self._inputs(role, tile)
        self.kernels.walk(role, bool(given), ends, reads).compiled(*inputs, *given, result, *lasts, *rows)
        self._add(reads, [_sum_parts(r, r.dtype) for r in rows])
        return result, last

    def _inputs(self, role: str, tile: LinearTile) -> list[int | Tensor]:
        """What kernels of a role read: its tensors, the custom inputs and the sums of decays."""
        names = ROLES[role]
        used = dict.fromkeys((names.rows, names.columns, names.others, *([names.own] if names.own else [])))
        return [*self._names(*used), *self.custom, *self._decays(tile.chunk)]

    def _row_sums(self, role: str, tile: LinearTile, count: int) -> list[Tensor]:
        """Tensors for what rows are summed to: (tiles, batch, heads, padded length)."""
        _, tiles = column_tiles(self.problem, ROLES[role], tile)
        shape = (tiles, self.batch, self.heads, -(-self.length // tile.chunk) * tile.chunk)
        return [self._new(*shape) for _ in range(count)]

    def _walks(self, role: str) -> bool:
        return self.kernels.walks(role, self.batch, self.length, self.wanted)

    def _add(self, reads: Sequence[Expr], rows: Sequence[Tensor]) -> None:
        """Adds what tokens contribute, (batch, heads, padded length), to the entries that they read."""
        tensors = {s.name: c for s, c in zip(self.launcher.specs, self.custom, strict=True)}
        device = self.given["v"].device
        evaluate = Evaluator(token_indices(self.batch, self.heads, self.length, device), tensors, torch.float32, device)
        for read, row in zip(reads, rows, strict=True):
            shape = tensors[read.name].shape
            total = self.found.get(read.name)
            total = torch.zeros(shape, dtype=torch.float32, device=device) if total is None else total
            self.found[read.name] = add_at(total, read, row[:, :, : self.length, None], evaluate)


class _Forward(_Pass):
    """A forward pass: in one walk, or by states and then all chunks at once."""

    def run(self, ends: bool) -> tuple[Tensor, Tensor]:
        """The output and, where asked for, the last state."""
        if self._walks("output"):
            return self._walk("output", self.initial, ends)
        states, last, _ = self._states("k", "v", self.initial, None)
        return self._rows("output", states)[0], last if ends else self._new(0)


class _Backward(_Pass):
    """A backward pass: what is not made in one walk from states, of which the gradients come in reverse."""

    def run(self, d_last: Tensor | None) -> LinearGradients:
        """Launches all, in order."""
        walked = {role for role in ("dq", "dk", "dv") if self._walks(role)}
        states = d_states = d_initial = overlap = None
        if "dq" not in walked or self.of_decay:
            states, _, _ = self._states("k", "v", self.initial, None)
        if not {"dk", "dv"} <= walked or self.of_decay:
            d_states, d_initial, overlap = self._states("q", "do", d_last, states if self.of_decay else None)
        first = {"dq": self.initial, "dk": d_last, "dv": d_last}
        found, of_decays = {}, {}
        for role, given in first.items():
            if role in walked:
                ends = role == "dv" and self.initial is not None and d_initial is None
                found[role], last = self._walk(role, given, ends)
                d_initial = last if ends else d_initial
            else:
                found[role], of_decays[role] = self._rows(role, states if role == "dq" else d_states)
        d_decay = self._decay_gradient(of_decays["dq"], of_decays["dk"], overlap) if overlap is not None else None
        initial = d_initial if self.initial is not None else None
        return LinearGradients(found["dq"], found["dk"], found["dv"], d_decay, initial, self.found)

    def _decay_gradient(self, of_queries: list[Tensor], of_keys: list[Tensor], overlap: Tensor) -> Tensor | None:
        """The gradient of decay, where there is one, from what rows and states add to it."""
        d_decay = [self._new(self.batch, self.length, self.heads)] if self.decay is not None else []
        reads = self._reads("decay")
        rows = [self._new(*of_keys[0].shape[1:]) for _ in reads]
        self.kernels.decay_gradients(reads).compiled(
            *_strided_decay(self.decay), *self.custom, *of_queries, *of_keys, overlap, *d_decay, *rows
        )
        self._add(reads, rows)
        return d_decay[0] if d_decay else None
