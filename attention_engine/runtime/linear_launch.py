"""Runs the kernels of a linear attention on tensors: picks them by the tensors' problem, allocates results, launches.

Tensors are (batch, length, heads, dim) here; decay is (batch, length, heads), a state (batch, heads, dim, dim_v), fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernel, Target, pass_configs
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile, LinearTiles
from attention_engine.reference.evaluate import Evaluator, add_at
from attention_engine.reference.linear import token_indices
from attention_engine.runtime.launch import CUSTOM_NAMES, NAMES, allows_tf32, as_parameter, stride_unit
from attention_engine.runtime.plans import with_strides
from attention_engine.tuner.linear import default_linear_tiles

DISABLE_SPECIALIZATION = "tl.disable_warp_specialized"


@dataclass(frozen=True)
class LinearGradients:
    """Gradients, each None where it wasn't wanted or doesn't exist; custom: by name, fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    initial: Tensor | None
    custom: dict[str, Tensor]


class LinearKernels:
    """The kernels of a program for one problem, tile choice and target."""

    def __init__(self, program: LinearProgram, problem: LinearProblem, tiles: LinearTiles, target: Target) -> None:
        self.program, self.problem, self.tiles, self.target = program, problem, tiles, target
        self._made: dict[object, Kernel] = {}

    def _kernel(self, builder: str, *given: object, tile: LinearTile | None = None) -> Kernel:
        key = (builder, *given)
        if key not in self._made:
            configs = pass_configs(self.problem)
            if tile is not None and not tile.specialize:
                configs = {**configs, DISABLE_SPECIALIZATION: True}
            given = (self.problem, self.program, *given)
            self._made[key] = Kernel(f"linear.{builder}", given, self.target, self.problem, configs)
        return self._made[key]

    def sum_decays(self, chunk: int) -> Kernel:
        """Decays summed within chunks."""
        return self._kernel("decays.sum_decays", chunk)

    def forward(self, starts: bool, ends: bool) -> Kernel:
        """The output and the last state in one walk."""
        tile = self.tiles.forward
        return self._kernel("forward.forward", tile, starts, ends, tile=tile)

    def step(self, starts: bool) -> Kernel:
        """One token."""
        return self._kernel("step.step", self.tiles.step, starts)

    def states(self, reverse: bool, starts: bool, overlaps: bool, initial: bool = False) -> Kernel:
        """States before chunks, or in reverse the gradients of those after them."""
        tile = self.tiles.states
        return self._kernel("states.states", tile, reverse, starts, overlaps, initial, tile=tile)

    def rows(self, role: str, decay_rows: bool, reads: tuple[Expr, ...]) -> Kernel:
        """The output, or the gradient of q, k or v, from states."""
        tile = self.tiles.rows[role]
        return self._kernel("chunk.chunk_rows", role, tile, decay_rows, reads, tile=tile)

    def decay_gradients(self, tiles: tuple[int, int, int], reads: tuple[Expr, ...]) -> Kernel:
        """The gradient of decay."""
        return self._kernel("decays.decay_gradients", self.tiles.states.chunk, tiles, reads)


@dataclass
class LinearLauncher:
    """The kernels of one program on one kind of device, for every problem that comes."""

    program: LinearProgram
    specs: Sequence[CustomSpec]
    interpret: bool
    device: Arch | None
    tiles: LinearTiles | None = None
    per_channel: ClassVar[bool] = False
    _kernels: dict[object, LinearKernels] = field(default_factory=dict)

    def target(self, tensor: Tensor) -> Target:
        """What the kernels must be compiled for, of the device."""
        return "interpret" if self.interpret else self.device or detect(tensor.device)

    def kernels(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor]) -> LinearKernels:
        """The kernels for these tensors."""
        decay_dtype = "" if decay is None else NAMES[decay.dtype]
        dims = (v.shape[2], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        key = (*dims, q.dtype, decay_dtype, q.device, allows_tf32(), *(c.dtype for c in custom))
        if key not in self._kernels:
            shapes = tuple(
                (s.name, CUSTOM_NAMES[c.dtype], tuple(s.axes) or (1,)) for s, c in zip(self.specs, custom, strict=True)
            )
            tf32 = q.dtype is torch.float32 and allows_tf32()
            problem = LinearProblem(
                *dims, NAMES[q.dtype], decay_dtype, tf32, stride_unit(*dims[3:]), shapes, self.per_channel
            )
            self._kernels[key] = self.kernels_of(problem, self.target(q))
        return self._kernels[key]

    def kernels_of(self, problem: LinearProblem, target: Target) -> LinearKernels:
        """The kernels for a problem."""
        return LinearKernels(self.program, problem, self.tiles or default_linear_tiles(problem, target), target)

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
        return _Forward(self, {"q": q, "k": k, "v": v}, decay, initial, custom).run(ends)

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
        return _Backward(self, tensors, decay, initial, custom).run(d_last, wanted)


def _strided_decay(decay: Tensor | None) -> list[int | Tensor]:
    """decay as kernels take it: its strides, where there is one to walk by, and itself."""
    if decay is None:
        return []
    return [*(s if n > 1 else 1 for n, s in zip(decay.shape, decay.stride(), strict=True)), decay]


class _Pass:
    """One pass over tensors by name ("q", "k", "v", "do"): what its launches share."""

    def __init__(
        self, launcher: LinearLauncher, tensors: Mapping[str, Tensor], decay: Tensor | None, initial: Tensor | None,
        custom: Sequence[Tensor],
    ) -> None:  # fmt: skip
        q, k, v = (tensors[n] for n in "qkv")
        self.launcher, self.program, self.given = launcher, launcher.program, tensors
        self.custom, self.decay, self.initial = [as_parameter(c) for c in custom], launcher.decay_of(decay, v), initial
        self.kernels = launcher.kernels(q, k, v, self.decay, self.custom)
        self.problem, self.tiles = self.kernels.problem, self.kernels.tiles
        self.strided = {n: with_strides(t, self.problem.stride_unit) for n, t in tensors.items()}
        self.batch, self.length, self.heads = v.shape[0], v.shape[1], v.shape[2]
        self.state_shape = (self.problem.dim, self.problem.dim_v)
        self.sums: dict[int, list[Tensor]] = {}
        self.wanted: frozenset[str] = frozenset()
        self.of_decay = False
        self.found: dict[str, Tensor] = {}

    def _names(self, *names: str) -> list[int | Tensor]:
        return [x for n in names for x in self.strided[n]]

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.given["v"].device)

    def _decays(self, chunk: int) -> list[Tensor]:
        """The sums of decays in chunks of this length, where there are decays."""
        if self.program.decays and chunk not in self.sums:
            sums = self._new(self.batch, self.heads, -(-self.length // chunk) * chunk)
            self.kernels.sum_decays(chunk).compiled(*_strided_decay(self.decay), *self.custom, sums)
            self.sums[chunk] = [sums]
        return self.sums.get(chunk, [])

    def _first(self, state: Tensor | None) -> list[Tensor]:
        return [] if state is None else [state.to(torch.float32).contiguous()]

    def _reads(self, name: str) -> tuple[Expr, ...]:
        return tuple(r for r in self.program.loads(name) if r.name in self.wanted)

    def _walk(
        self, left: str, right: str, first: Tensor | None, other: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(states of chunks, the state at the walk's end, overlaps with the other states)."""
        tile = self.tiles.states
        chunks = -(-self.length // tile.chunk)
        kept = self._new(self.batch, self.heads, chunks, *self.state_shape, dtype=self.given["v"].dtype)
        last = self._new(self.batch, self.heads, *self.state_shape)
        given, others, overlap = self._first(first), [], []
        if other is not None:
            from attention_engine.kernels.linear.states import state_tiles

            others = [other, *self._first(self.initial)]
            overlap = [self._new(self.batch, self.heads, chunks, state_tiles(self.problem, tile))]
        kernel = self.kernels.states(left == "q", bool(given), bool(others), len(others) > 1)
        inputs = (*self._names(left, right), *self.custom, *self._decays(tile.chunk))
        kernel.compiled(*inputs, *given, *others, kept, last, *overlap)
        return kept, last, overlap[0] if overlap else None

    def _rows(self, role: str, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(the output or a gradient, what its rows' state and pairs add to the gradient of decays)."""
        from attention_engine.kernels.linear.chunk import ROLES, column_tiles, parts_of

        tile, names = self.tiles.rows[role], ROLES[role]
        own = self.given[names.own or "v"]
        parts, (_, tiles) = parts_of(self.problem, names, tile), column_tiles(self.problem, names, tile)
        result = self._new(*own.shape, dtype=own.dtype) if parts == 1 else self._new(parts, *own.shape)
        shape = (tiles, self.batch, self.heads, -(-self.length // tile.chunk) * tile.chunk)
        local = [self._new(*shape) for _ in range(2)] if self.of_decay and role in ("dq", "dk") else []
        reads = self._reads(names.own) if names.own else ()
        rows = [self._new(*shape) for _ in reads]
        used = dict.fromkeys((names.rows, names.columns, names.others, *([names.own] if names.own else [])))
        inputs = (*self._names(*used), *self.custom, *self._decays(tile.chunk))
        self.kernels.rows(role, bool(local), reads).compiled(*inputs, states, result, *local, *rows)
        self._add(reads, [r.sum(0) for r in rows])
        return result if parts == 1 else result.sum(0).to(own.dtype), local

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
        if not self.in_one_walk():
            states, last, _ = self._walk("k", "v", self.initial, None)
            return self._rows("output", states)[0], last if ends else self._new(0)
        output = torch.empty(self.given["v"].shape, dtype=self.given["v"].dtype, device=self.given["v"].device)
        last = self._new(self.batch, self.heads, *self.state_shape) if ends else self._new(0)
        first, lasts = self._first(self.initial), [last] if ends else []
        inputs = (*self._names("q", "k", "v"), *self.custom, *self._decays(self.tiles.forward.chunk))
        self.kernels.forward(bool(first), ends).compiled(*inputs, *first, output, *lasts)
        return output, last

    def in_one_walk(self) -> bool:
        """One walk moves the least memory, but has one block for each head and tile of v: are they enough for the GPU?

        Where they are few and the walk long, the states' walk is shorter and all chunks then run at once.
        """
        plan, target = self.tiles.plan, self.kernels.target
        if plan != "auto":
            return plan == "walk"
        blocks = self.batch * self.heads * -(-self.problem.dim_v // self.tiles.forward.outer)
        short = self.length <= 8 * self.tiles.forward.chunk
        return short or isinstance(target, str) or 2 * blocks >= target.sm_count


class _Backward(_Pass):
    """A backward pass: states forward, their gradients in reverse, then the chunks' own."""

    def run(self, d_last: Tensor | None, wanted: frozenset[str]) -> LinearGradients:
        """Launches all, in order."""
        self.wanted = wanted
        decay_reads = {r.name for r in self.program.loads("decay")}
        self.of_decay = self.program.decays and ("decay" in wanted or bool(decay_reads & wanted))
        states, _, _ = self._walk("k", "v", self.initial, None)
        d_states, d_initial, overlap = self._walk("q", "do", d_last, states if self.of_decay else None)
        dq, of_queries = self._rows("dq", states)
        dk, of_keys = self._rows("dk", d_states)
        dv, _ = self._rows("dv", d_states)
        d_decay = None
        if overlap is not None:
            tiles = (of_queries[0].shape[0], of_keys[0].shape[0], overlap.shape[-1])
            d_decay = self._new(self.batch, self.length, self.heads)
            reads = self._reads("decay")
            rows = [self._new(*of_keys[0].shape[1:]) for _ in reads]
            self.kernels.decay_gradients(tiles, reads).compiled(
                *_strided_decay(self.decay), *self.custom, *of_queries, *of_keys, overlap, d_decay, *rows
            )
            self._add(reads, rows)
        return LinearGradients(dq, dk, dv, d_decay, d_initial if self.initial is not None else None, self.found)
