"""Keys on their way round a ring of ranks: each rank attends to one rank's keys at a time, and hands them on.

Rows are joined in fp32 by the merge that is derived of any program. Backward the keys go round again, and the sums of
their gradients with them, in fp32, one step behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.distributed.block_gradients import (
    BlockGradients,
    arrived,
    goes_block_by_block,
    one_after_another,
    without,
)
from attention_engine.distributed.exchange import Ranks, Tokens
from attention_engine.distributed.layout import Run
from attention_engine.distributed.placements import Placement, of_block
from attention_engine.errors import NoMerge
from attention_engine.passes.derive_merge import derive_merge
from attention_engine.passes.maths import analyse_part
from attention_engine.reference.dense import compute_dtype
from attention_engine.reference.merge import add_weighted, join_parts, merge_into
from attention_engine.runtime.attention_op import PairAttention
from attention_engine.runtime.attentions import find
from attention_engine.runtime.parted import PartRunner
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.runtime.weighted_sum import add_by_kernel

Given = tuple[Tensor, Tensor, Tensor, list[Tensor]]  # q, k, v, and what comes behind them
MOST_PARTS = 4  # of a row that wait to be joined
Part = tuple[Tensor, dict[str, Tensor]]  # the sum of weights times values, (batch, queries, heads, DV), and states


@dataclass(frozen=True)
class RingAttention:
    """An attention in blocks: what runs a block of keys forward, how blocks join, what makes a block's gradients."""

    attention: PairAttention
    parts: PartRunner
    gradients: BlockGradients | None  # None: gradients need all of a row's keys at once, or nobody asked

    @staticmethod
    def of(key: str, wanted: Sequence[str] | None, device: Any, deterministic: bool) -> RingAttention | None:
        """None where keys must come all at once. wanted: the custom inputs that want gradients; None: nothing does."""
        attention = find(key, PairAttention)
        if attention.trained is not None and wanted is not None:
            return None
        maths, known = attention.maths, attention.program_kernels
        if wanted is not None and not goes_block_by_block(maths, wanted, known is not None):
            return None
        try:
            merge = derive_merge(maths.program.returning(maths.forward_schedule.rows))
        except NoMerge:
            return None
        program_kernels = None
        if known is not None:
            part = replace(analyse_part(merge.part_program), beside_sends=True)
            program_kernels = ProgramKernels(part, attention.specs, known.interpret, device, deterministic)
        gradients = None if wanted is None else BlockGradients.of(attention, wanted, device, deterministic)
        return RingAttention(attention, PartRunner(merge, attention.specs, program_kernels), gradients)

    def join(self, parts: Sequence[Part], custom: Sequence[Tensor]) -> Part:
        """These parts as one."""
        outputs, states = self._sides(parts)
        total, found = join_parts(self.parts.merge, outputs, states, self.parts.inputs(custom), self._add)
        return total.transpose(1, 2), found

    def finish(self, parts: Sequence[Part], custom: Sequence[Tensor], out: Tensor) -> list[Tensor]:
        """All rows that are returned or kept for the backward pass. out: where the output goes, (batch, queries, heads,
        DV)."""
        outputs, states = self._sides(parts)
        inputs = self.parts.inputs(custom)
        return merge_into(self.parts.merge, outputs, states, inputs, out.transpose(1, 2), self._add)

    def _add(self, parts: Sequence[Tensor], factors: Sequence[Tensor], out: Tensor) -> None:
        """What adds parts up, each times its factor."""
        kernels = self.parts.program_kernels
        if kernels is None:
            add_weighted(parts, factors, out)
        else:
            add_by_kernel(kernels.target(out), parts, factors, out)

    def _sides(self, parts: Sequence[Part]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        outputs = [output.transpose(1, 2) for output, _ in parts]
        return outputs, {name: [states[name] for _, states in parts] for name in self.parts.merge.read}


class Moving:
    """Tensors that go to the next rank while others of their kind come from the one before."""

    def __init__(self, ranks: Ranks, tensors: Sequence[Tensor], count: int) -> None:
        """count: how many tokens, in the second dimension, come."""
        group, self.sent = ranks.group, [t.contiguous() for t in tensors]
        self.received = [t.new_empty(t.shape[0], count, *t.shape[2:]) for t in tensors]
        to, of = (dist.get_global_rank(group, (ranks.rank + n) % ranks.size) for n in (1, -1))
        sends = [dist.P2POp(dist.isend, t, to, group) for t in self.sent]
        takes = [dist.P2POp(dist.irecv, t, of, group) for t in self.received]
        self.works = dist.batch_isend_irecv(sends + takes)

    def wait(self) -> list[Tensor]:
        """What came."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class Block:
    """Some keys that a run of queries sees: the first of them and how many in the sequence, and where their owner's
    memory has the first."""

    run: Run
    first: int
    count: int
    at: int

    @property
    def keys(self) -> slice:
        return slice(self.at, self.at + self.count)


@dataclass(frozen=True)
class Ring:
    """One call. runs: this rank's queries; seen: the range of keys that each may see. names: of the custom inputs, the
    declared ones first. prepare(first query, first key, q, k, v, custom): what comes behind q, k, v."""

    keys: Tokens
    runs: Sequence[Run]
    seen: Mapping[Run, tuple[int, int]]
    placed: Sequence[Placement]
    attention: RingAttention
    names: Sequence[str]
    prepare: Callable[..., list[Tensor]]

    @property
    def size(self) -> int:
        return self.keys.ranks.size

    def owner(self, step: int) -> int:
        """Whose keys are here in a step."""
        return (self.keys.ranks.rank - step) % self.size

    def count(self, step: int) -> int:
        """How many they are."""
        return self.keys.layout.count(self.owner(step))

    def blocks(self, step: int) -> list[Block]:
        """What is attended to in a step."""
        found = []
        for run in self.runs:
            first, stop = self.seen[run]
            for keys in self.keys.layout.runs[self.owner(step)]:
                start, end = max(first, keys.start), min(stop, keys.start + keys.count)
                if start < end:
                    found.append(Block(run, start, end - start, keys.at + start - keys.start))
        return found

    def own(self, tensors: Sequence[Tensor], block: Block) -> list[Tensor]:
        """Custom inputs of a block, or of what has their shapes."""
        return of_block(tensors, self.placed, block.run, block.first, block.count)

    def given(self, block: Block, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Given:
        """q, k, v of a block, and what comes behind them."""
        q, k, v = q[:, block.run.here], k[:, block.keys], v[:, block.keys]
        return q, k, v, self.prepare(block.run.start, block.first, q, k, v, self.own(custom, block))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The output and the rows of this rank's queries."""
        waiting: dict[Run, list[Part]] = {run: [] for run in self.runs}
        behind: dict[Run, list[Tensor]] = {}  # what comes behind q, k, v
        moving, output = None, q.new_empty(*q.shape[:3], v.shape[3])
        for step in range(self.size):
            if moving is not None:
                k, v = moving.wait()
            if step + 1 < self.size:
                moving = Moving(self.keys.ranks, [k, v], self.count(step + 1))
            for block in self.blocks(step):
                of_q, of_k, of_v, behind[block.run] = self.given(block, q, k, v, custom)
                parts = waiting[block.run]
                if len(parts) == MOST_PARTS:
                    parts[:] = [self.attention.join(parts, behind[block.run])]
                parts.append(self.attention.parts.run(of_q, of_k, of_v, behind[block.run]))
        found = [self.attention.finish(waiting[run], behind[run], output[:, run.here]) for run in self.runs]
        return output, [torch.cat(each, 2) for each in zip(*found, strict=True)]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], made: Sequence[Tensor], d_o: Tensor,
        d_rows: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of this rank's q, k, v, and of custom inputs, by name, in at least fp32."""
        gradients = self.attention.gradients
        assert gradients is not None
        wide = compute_dtype(q)
        of_runs: dict[Run, Tensor] = {}
        total = without(gradients.wanted, self.names, custom, wide)
        keys: Moving | None = None
        sums: Moving | None = None
        here = {run: gradients.of_run(run, made, d_o, d_rows) for run in self.runs}
        for step in range(self.size):
            if keys is not None:
                k, v = keys.wait()
            if step + 1 < self.size:
                keys = Moving(self.keys.ranks, [k, v], self.count(step + 1))
            dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
            for block in self.blocks(step):
                before = of_runs.get(block.run)
                found = here[block.run].of_block(*self.given(block, q, k, v, custom), before is None)
                of_runs[block.run] = found.q if before is None else before.add_(found.q)
                dk[:, block.keys] += found.k
                dv[:, block.keys] += found.v
                for name, into in zip(self.names, self.own(total, block), strict=True):
                    if name in found.custom:
                        into += found.custom[name].view(into.shape)
            if self.size > 1:  # to who has these keys next, and at last to who owns them
                sums = Moving(self.keys.ranks, self.added([dk, dv], sums), self.count(step + 1))
        if sums is not None:
            dk, dv = sums.wait()
        dq = [of_runs.get(run, q.new_zeros((), dtype=wide).expand_as(q[:, run.here])) for run in self.runs]
        named = {n: t for n, t in zip(self.names, total, strict=True) if n in gradients.wanted}
        return one_after_another(dq, 1), dk, dv, named

    def added(self, mine: Sequence[Tensor], sums: Moving | None) -> list[Tensor]:
        """Gradients of the keys that are here, with the sums of ranks that had them before."""
        return list(mine) if sums is None else [a.add_(b) for a, b in zip(mine, sums.wait(), strict=True)]


class RingFunction(torch.autograd.Function):
    """(ring, q, k, v, custom inputs with what functions capture...) -> the output and all rows."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, *given: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *custom = given
        output, rows = ring.forward(q, k, v, custom)
        ctx.ring, ctx.count = ring, len(given)
        ctx.save_for_backward(*given, output, *rows)
        ctx.set_materialize_grads(False)
        return (output, *rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        q, k, v, *custom = ctx.saved_tensors[: ctx.count]
        made, attention = ctx.saved_tensors[ctx.count :], ring.attention.attention
        dq, dk, dv, found = ring.backward(q, k, v, custom, made, *arrived(attention, made, arriving))
        leaves = zip((q, k, v), (dq, dk, dv), strict=True)
        of_custom = [
            found[name].to(t.dtype) if want else None
            for name, t, want in zip(ring.names, custom, ctx.needs_input_grad[4:], strict=True)
        ]
        return None, *(d.to(t.dtype) for t, d in leaves), *of_custom
