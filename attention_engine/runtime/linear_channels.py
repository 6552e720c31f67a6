"""Runs the kernels of a linear attention with a decay for each channel.

Tensors are (batch, length, heads, dim) here, decay too; a state is (batch, heads, dim, dim_v), fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from attention_engine.compiler import Kernel, Target
from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearProblem
from attention_engine.runtime.linear_launch import LinearGradients, LinearLauncher
from attention_engine.runtime.linear_launch import _Pass as Pass
from attention_engine.runtime.linear_launch import _strided_decay as strided_decay
from attention_engine.runtime.linear_plan import LinearKernels
from attention_engine.tuner.linear_channels import default_channel_tiles

Reads = tuple[tuple[Expr, ...], tuple[Expr, ...], tuple[Expr, ...]]


class ChannelKernels(LinearKernels):
    """The kernels of a program with a decay for each channel."""

    def sum_channel_decays(self) -> Kernel:
        """Decays summed within chunks."""
        return self._of_role("decays.sum_decays", "sums")

    def scores(self) -> Kernel:
        """The weights of pairs."""
        return self._of_role("scores.scores", "scores")

    def states(self, reverse: bool, starts: bool, overlaps: bool, initial: bool = False) -> Kernel:
        """States before chunks, or in reverse the gradients of those after them."""
        tile = self.tiles.states
        return self._kernel("channels.states.states", tile, reverse, starts, overlaps, initial, tile=tile)

    def channel_rows(self, role: str, reads: tuple[Expr, ...]) -> Kernel:
        """The output, or the gradient of v."""
        tile = self.tiles.rows[role]
        return self._kernel("channels.rows.channel_rows", role, tile, reads, tile=tile)

    def gradients(self, of_decay: bool, parts: int, reads: Reads) -> Kernel:
        """The gradients of q, k and decay."""
        tile = self.tiles.rows["gradients"]
        return self._kernel("channels.gradients.channel_gradients", tile, of_decay, parts, reads, tile=tile)

    def _of_role(self, builder: str, role: str) -> Kernel:
        tile = self.tiles.rows[role]
        return self._kernel(f"channels.{builder}", tile, tile=tile)


class ChannelLauncher(LinearLauncher):
    """LinearLauncher for calls with a decay for each channel."""

    per_channel: ClassVar[bool] = True

    def kernels_of(self, problem: LinearProblem, target: Target) -> ChannelKernels:
        """The kernels for a problem."""
        return ChannelKernels(self.program, problem, self.tiles or default_channel_tiles(problem, target), target)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
        ends: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The output, contiguous, and the last state (an empty tensor unless `ends`)."""
        return _ChannelPass(self, {"q": q, "k": k, "v": v}, decay, initial, custom).forward(ends)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
        d_output: Tensor, d_last: Tensor | None, wanted: frozenset[str],
    ) -> LinearGradients:  # fmt: skip
        """Gradients of everything; wanted: which of "decay" and the custom inputs are asked for."""
        tensors = {"q": q, "k": k, "v": v, "do": d_output}
        return _ChannelPass(self, tensors, decay, initial, custom).backward(d_last, wanted)


class _ChannelPass(Pass):
    """One pass, forward or backward: sums of decays, weights of pairs, states, then all chunks at once."""

    kernels: ChannelKernels

    def __init__(
        self, launcher: ChannelLauncher, tensors: Mapping[str, Tensor], decay: Tensor | None, initial: Tensor | None,
        custom: Sequence[Tensor],
    ) -> None:  # fmt: skip
        super().__init__(launcher, tensors, decay, initial, custom)
        chunk = self.tiles.states.chunk
        self.chunks = -(-self.length // chunk)
        padded = self.chunks * chunk
        self.decay_sums = self._new(self.batch, self.heads, padded, self.problem.dim)
        self.kernels.sum_channel_decays().compiled(*strided_decay(self.decay), *self.custom, self.decay_sums)
        self.scores = self._new(self.batch, self.heads, padded, chunk)
        self.kernels.scores().compiled(*self._names("q", "k"), *self.custom, self.decay_sums, self.scores)

    def forward(self, ends: bool) -> tuple[Tensor, Tensor]:
        """The output and, where asked for, the last state."""
        states, last, _ = self._states(False, self.initial, None)
        output = self._new(*self.given["v"].shape, dtype=self.given["v"].dtype)
        inputs = (*self._names("q", "v"), *self.custom, self.decay_sums, states, self.scores)
        self.kernels.channel_rows("output", ()).compiled(*inputs, output)
        return output, last if ends else self._new(0)

    def backward(self, d_last: Tensor | None, wanted: frozenset[str]) -> LinearGradients:
        """Gradients of everything."""
        self.wanted = wanted
        self.of_decay = "decay" in wanted or bool({r.name for r in self.program.loads("decay")} & wanted)
        states, _, _ = self._states(False, self.initial, None)
        d_states, d_initial, overlap = self._states(True, d_last, states if self.of_decay else None)
        dv = self._value_gradient(d_states)
        dq, dk, d_decay = self._token_gradients(states, d_states, overlap)
        return LinearGradients(dq, dk, dv, d_decay, d_initial if self.initial is not None else None, self.found)

    def _states(
        self, reverse: bool, first: Tensor | None, other: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(states of chunks, the state at the walk's end, overlaps with the other states)."""
        from attention_engine.kernels.linear.channels.states import value_tiles

        kept = self._new_states(self.chunks)
        last = self._new(self.batch, self.heads, *self.state_shape)
        given, others, overlap = self._first(first), [], []
        if other is not None:
            others = [other, *self._first(self.initial)]
            parts = value_tiles(self.problem, self.tiles.states)
            overlap = [self._new(self.batch, self.heads, self.chunks, parts, self.problem.dim)]
        kernel = self.kernels.states(reverse, bool(given), bool(others), len(others) > 1)
        inputs = (*self._names(*(("q", "do") if reverse else ("k", "v"))), *self.custom, self.decay_sums)
        kernel.compiled(*inputs, *given, *others, kept, last, *overlap)
        return kept, last, overlap[0] if overlap else None

    def _row_sums(self, reads: Sequence[Expr], tiles: int) -> list[Tensor]:
        return [self._new(tiles, *self.scores.shape[:3]) for _ in reads]

    def _value_gradient(self, d_states: Tensor) -> Tensor:
        from attention_engine.kernels.linear.channels.rows import width_tiles

        reads = self._reads("v")
        rows = self._row_sums(reads, width_tiles(self.problem, self.tiles.rows["dv"]))
        dv = self._new(*self.given["v"].shape, dtype=self.given["v"].dtype)
        inputs = (*self._names("k", "do", "v"), *self.custom, self.decay_sums, d_states, self.scores)
        self.kernels.channel_rows("dv", reads).compiled(*inputs, dv, *rows)
        self._add(reads, [r.sum(0) for r in rows])
        return dv

    def _token_gradients(
        self, states: Tensor, d_states: Tensor, overlap: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        from attention_engine.kernels.linear.channels.gradients import column_tiles

        reads = (self._reads("q"), self._reads("k"), self._reads("decay") if overlap is not None else ())
        tiles = column_tiles(self.problem, self.tiles.rows["gradients"])
        rows = [self._row_sums(r, tiles) for r in reads]
        shape = (self.batch, self.length, self.heads, self.problem.dim)
        made = {n: self._new(*shape, dtype=self._gradient_dtype(n)) for n in ("q", "k")}
        decay, overlaps, d_decay = [], [], []
        if overlap is not None:
            decay, overlaps, d_decay = strided_decay(self.decay), [overlap], [self._new(*shape)]
        kernel = self.kernels.gradients(overlap is not None, overlaps[0].shape[3] if overlaps else 0, reads)
        inputs = (*self._names("q", "k", "v", "do"), *decay, *self.custom, self.decay_sums, states, d_states, *overlaps)
        kernel.compiled(*inputs, made["q"], made["k"], *d_decay, *(t for each in rows for t in each))
        for each, sums in zip(reads, rows, strict=True):
            self._add(each, [r.sum(0) for r in sums])
        return self._grouped("q", made["q"]), self._grouped("k", made["k"]), d_decay[0] if d_decay else None

    def _gradient_dtype(self, name: str) -> torch.dtype:
        return self.given[name].dtype if self.problem.heads_of(name) == self.heads else torch.float32

    def _grouped(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient of a tensor whose heads several heads of v share: the sum of theirs."""
        own = self.given[name]
        if own.shape[2] == self.heads:
            return gradient
        return gradient.unflatten(2, (own.shape[2], -1)).sum(3).to(own.dtype)
