"""A run of tokens of a linear attention, in two parts: what it does to the state; then its results, from the state
before it. Gradients go the same way back. So who holds a part of a sequence can say what others must know of it before
it knows of theirs.

A run is cut into pieces, that are walked along at once. Their states are (batch, pieces, heads, dim, dim_v), and what
each keeps of the state before it is (batch, pieces, heads, dim or 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_engine.compiler import LinearKernels
from attention_engine.plan.launches import Step
from attention_engine.plan.linear import piece_length
from attention_engine.reference.linear import apply_decay_mod, gradient_before_run, state_of_run
from attention_engine.runtime.arguments import as_parameter
from attention_engine.runtime.ends import settle_at_exit
from attention_engine.runtime.linear_op import Backward, LinearAttention, as_given, recurred, state_dtype
from attention_engine.runtime.linear_program_kernels import LinearGradients, LinearProgramKernels, Pieces
from attention_engine.runtime.run import Memory, tensor_of


@dataclass
class Run:
    """Tokens that follow one another: q, k and v (batch, tokens, heads, dim), decay (batch, tokens, heads) or with the
    dim, custom inputs in order. Of a backward pass also d_o, the gradient of the output, and whether decay and each
    custom input want theirs. By the recurrence, which has one piece."""

    attention: LinearAttention
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    custom: Sequence[Tensor]
    d_o: Tensor | None = None
    wanted: Sequence[bool] = ()

    @property
    def _dtype(self) -> torch.dtype:
        return state_dtype(self.q, self.k, self.v, self.decay, *self.custom)

    def states(self) -> Tensor:
        """The state that each piece leaves of none, or backward the gradient before it of none after it: first."""
        program, custom, rest = self.attention.program, self.attention.named(self.custom), (self.decay, self._dtype)
        if self.d_o is None:
            return state_of_run(program, self.k, self.v, rest[0], custom, rest[1])[:, None]
        return gradient_before_run(program, self.q, self.d_o, rest[0], custom, rest[1])[:, None]

    def kept(self) -> Tensor:
        """What each piece keeps of the state before it: asked after states."""
        custom = self.attention.named(self.custom)
        logs = apply_decay_mod(self.attention.program, self.v, self.decay, custom, self._dtype)
        return logs.sum(2).exp()[:, None]

    def output(self, starts: Tensor) -> Tensor:
        """(batch, tokens, heads, dim_v), from the states before pieces."""
        return self.attention.recur(self.q, self.k, self.v, self.decay, starts[:, 0], self.custom)[0].contiguous()

    def gradients(self, starts: Tensor, ends: Tensor) -> Backward:
        """Of q, k, v, decay, no state, and custom inputs; from the states before pieces and the gradients of those
        after them."""
        given = (self.q, self.k, self.v, self.decay, None, *self.custom)
        assert self.d_o is not None
        made = recurred(self.attention, (*given[:4], starts[:, 0], *self.custom), self.d_o, ends[:, 0])
        return (*made[:4], made[0].new_empty(0), made[5])


@dataclass
class RunByKernels(Run):
    """The same by kernels; their memory lasts from the first part to the second."""

    memory: Memory = field(default_factory=dict)

    def __post_init__(self) -> None:
        custom, kernels = self._custom, self._kernels
        tensors = {"q": self.q, "k": self.k, "v": self.v} | ({} if self.d_o is None else {"do": self.d_o})
        self.memory = self._all.memory_of(kernels, tensors, self._decay, custom, {})
        each = piece_length(kernels.problem, kernels.target, *self.v.shape[:2])
        self.pieces = Pieces(-(-self.v.shape[1] // each), each)
        self.first = kernels.plan.piece_steps(self.backward)

    @property
    def backward(self) -> bool:
        """Is it one of a backward pass?"""
        return self.d_o is not None

    @property
    def _all(self) -> LinearProgramKernels:
        found: LinearProgramKernels | None = self.attention.program_kernels
        assert found is not None
        return found

    @cached_property
    def _custom(self) -> list[Tensor]:
        return [as_parameter(c) for c in self.custom]

    @cached_property
    def _decay(self) -> Tensor | None:
        return self._all.decay_of(self.decay, self.v)

    @cached_property
    def _names(self) -> frozenset[str]:
        return self.attention.names_of(self.wanted) if self.backward else frozenset()

    @cached_property
    def _kernels(self) -> LinearKernels:
        way = "backward" if self.backward else "forward"
        return self._all.kernels(self.q, self.k, self.v, self._decay, self._custom, way, self._names)

    @property
    def _sizes(self) -> tuple[int, int]:
        """The batch and the length of what is walked along."""
        return self.v.shape[0] * self.pieces.count, min(self.pieces.length, self.v.shape[1])

    def states(self) -> Tensor:
        form = "pieces", self.backward
        self._all.ready_for(self._kernels, form, self.v, self._custom, lambda: self.first, self.pieces)(self.memory)
        return tensor_of(self.memory, "d_states of pieces" if self.backward else "states of pieces")

    def kept(self) -> Tensor:
        problem, chunk = self._kernels.problem, self._kernels.tiles.states.chunk
        if not self.attention.program.decays:
            return self.v.new_ones(self.v.shape[0], self.pieces.count, problem.heads, 1, dtype=torch.float32)
        sums = tensor_of(self.memory, f"sums of {chunk}")
        if problem.per_channel:
            of_chunks = sums[:, :, chunk - 1 :: chunk]
        else:
            of_chunks = (sums.sum(0) if problem.splits else sums)[..., chunk - 1 :: chunk, None]
        each = self.pieces.length // chunk
        missing = self.pieces.count * each - of_chunks.shape[2]
        whole: Tensor = pad(of_chunks, (0, 0, 0, missing)).unflatten(2, (self.pieces.count, each))
        return whole.sum(3, dtype=torch.float64).exp2().float().transpose(1, 2)

    def output(self, starts: Tensor) -> Tensor:
        self._finish({"initial": starts})
        return tensor_of(self.memory, "o")

    def gradients(self, starts: Tensor, ends: Tensor) -> Backward:
        settle_at_exit(self.v.device)
        self._finish({"initial": starts, "d_last": ends})
        plan, memory, wanted = self._kernels.plan, self.memory, self._names
        custom = self._all.custom_gradients(plan.reads_of(*self._sizes, wanted), self.v, self._custom, memory)
        of_decay = tensor_of(memory, "d_decay") if self.decay is not None and plan.of_decay(wanted) else None
        dq, dk, dv = (tensor_of(memory, f"d{name}") for name in "qkv")
        found = LinearGradients(dq, dk, dv, of_decay, None, custom)
        return as_given(self.attention, found, self.decay, None, self.custom)

    def _finish(self, states: dict[str, Tensor]) -> None:
        self.memory |= {name: state.float().contiguous() for name, state in states.items()}
        form = "rest", self.backward, self._names
        given = self._kernels, form, self.v, self._custom, self._steps
        self._all.ready_for(*given, self.pieces, self.first)(self.memory)

    def _steps(self) -> list[Step]:
        plan = self._kernels.plan
        if self.backward:
            return [*self.first, *plan.backward_steps(*self._sizes, self._names, True, True, pieces=True)]
        return [*self.first, *plan.forward_steps(*self._sizes, True, False, pieces=True)]


def run_of(attention: LinearAttention, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Run:
    """A run, by whatever runs such calls. rest: as of a Run."""
    return (RunByKernels if attention.launches(q, k, v) else Run)(attention, q, k, v, *rest)  # type: ignore[arg-type]
