"""A linear attention of packed sequences: they are cut into chunks, each a batch of the kernels that there are.

    1. every chunk by itself leaves a state;
    2. the state before each chunk is the sum of those that the sequence's earlier chunks left, each faded by the decays
       between them, and of the sequence's initial state: one matrix product, of a matrix of chunks by chunks that is 0
       between sequences;
    3. every chunk runs again from the state before it.

So the kernels run twice, and nothing of a sequence can reach another. Where chunks lie is found on the device; how many
there may be, and their length, is known from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_engine.errors import NotYetSupported
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.linear import DECAY_LIMIT, LinearProgram
from attention_engine.passes.pack_mods import VALID
from attention_engine.reference.dense import compute_dtype
from attention_engine.reference.linear import apply_decay_mod
from attention_engine.runtime import op

CHUNK = 256  # rows of a chunk: two walks of it cost less than states of shorter ones, and short sequences pad to it


def of_rows(specs: Iterable[CustomSpec]) -> list[str]:
    """The custom inputs that have a number for each packed row."""
    return [s.name for s in specs if s.name != VALID and ("seq_len" in s.axes or "seq_len_kv" in s.axes)]


def refuse_both(specs: Iterable[CustomSpec]) -> None:
    """NotYetSupported: a custom input of sequences and of packed rows, which say the sequence already."""
    for name in of_rows(s for s in specs if "batch" in s.axes):
        raise NotYetSupported(
            f"custom input {name!r} has an axis for sequences and one for their packed rows.\n"
            '  Leave "batch" out: a row is of one sequence.'
        )


def chunked_specs(specs: Sequence[CustomSpec]) -> list[CustomSpec]:
    """The custom inputs as they are in chunks."""
    rows = of_rows(specs)
    return [CustomSpec(s.name, ("batch", *s.axes)) if s.name in rows else s for s in specs]


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of packed sequences lie.

    rows: (chunks * CHUNK,) the packed row of each row of each chunk; behind the end of the sequence, its last one.
    valid: is it before the end? places: (rows,) where each packed row went; held: is it of a sequence? sequence: of
    each chunk (of one that isn't used, the last); number: of the chunk in its sequence, -1 where it isn't used; last:
    of each sequence, its last chunk; some: has it rows?
    """

    rows: Tensor
    valid: Tensor
    places: Tensor
    held: Tensor
    sequence: Tensor
    number: Tensor
    last: Tensor
    some: Tensor

    @property
    def count(self) -> int:
        """How many there may be."""
        return self.number.shape[0]

    def cut(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """(rows, ...) as (chunks, CHUNK, ...); the rows' axis goes first."""
        moved = tensor.movedim(axis, 0)
        found = _rows(moved.contiguous(), self.rows, self.valid, self.places, self.held, False)
        return found.view(self.count, CHUNK, *moved.shape[1:])

    def join(self, tensor: Tensor) -> Tensor:
        """(chunks, CHUNK, ...) as (rows, ...), 0 behind the last sequence."""
        flat = tensor.reshape(self.count * CHUNK, *tensor.shape[2:])
        return _rows(flat, self.places, self.held, self.rows, self.valid, True)


class _Rows(torch.autograd.Function):
    """Rows of a tensor, (from which rows, which are there, and the same of the way back): its gradient is the way back,
    so that nothing is added up by atomics."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, rows: Tensor, there: Tensor, back: Tensor, held: Tensor, fill: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, there, back, held)
        ctx.fill = fill
        found = tensor.index_select(0, rows)
        return torch.where(there.view(-1, *[1] * (tensor.ndim - 1)), found, 0) if fill else found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, there, back, held = ctx.saved_tensors
        return _rows(gradient.contiguous(), back, held, rows, there, True), None, None, None, None, None


_rows: Callable[..., Tensor] = _Rows.apply


def find_chunks(starts: Tensor, rows: int) -> Chunks:
    """Where chunks lie. starts: (sequences + 1) int32, of at least one sequence."""
    sequences, device = starts.shape[0] - 1, starts.device
    starts = starts.long()
    lengths = starts[1:] - starts[:-1]
    counts = (lengths + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    first = ends - counts
    chunks = torch.arange(rows // CHUNK + sequences, device=device)
    found = torch.searchsorted(ends, chunks, right=True)
    sequence = found.clamp(max=sequences - 1)
    used = found < sequences
    number = torch.where(used, chunks - first[sequence], -1)
    begin = starts[sequence] + number.clamp(min=0) * CHUNK
    every = begin[:, None] + torch.arange(CHUNK, device=device)
    end = starts[1:][sequence][:, None]
    valid = ((every < end) & used[:, None]).reshape(-1)
    inside = torch.minimum(every, end - 1).clamp(0, max(rows - 1, 0)).reshape(-1)
    packed = torch.arange(rows, device=device)
    of_row = torch.searchsorted(starts[1:].contiguous(), packed, right=True).clamp(max=sequences - 1)
    held = packed < starts[-1]
    places = torch.where(held, first[of_row] * CHUNK + packed - starts[of_row], 0)
    return Chunks(inside, valid, places, held, sequence, number, (ends - 1).clamp(min=0), counts > 0)


def cut_custom(specs: Sequence[CustomSpec], custom: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
    """Custom inputs as chunks have them: numbers of rows cut, numbers of sequences given to each of their chunks."""
    found = []
    rows = of_rows(specs)
    for spec, tensor in zip(specs, custom, strict=True):
        if spec.name in rows:
            axis = next(n for n, a in enumerate(spec.axes) if a in ("seq_len", "seq_len_kv"))
            found.append(chunks.cut(tensor, axis).movedim(1, axis + 1).contiguous())
        elif "batch" in spec.axes:
            axis = spec.axes.index("batch")
            found.append(tensor.movedim(axis, 0)[chunks.sequence].movedim(0, axis))
        else:
            found.append(tensor)
    return found


def states_before(left: Tensor, decays: Tensor | None, initial: Tensor | None, chunks: Chunks) -> Tensor:
    """The state before each chunk, (chunks, heads, dim, dim_v), from those that chunks by themselves left, their log
    decays (chunks, heads, dim or 1), or None, and the sequences' initial states."""
    dtype = left.dtype
    number, sequence = chunks.number, chunks.sequence
    earlier = (sequence[:, None] == sequence) & (number[:, None] > number) & (number >= 0)
    totals = left.new_zeros(left.shape[0], left.shape[1], 1, dtype=torch.float64) if decays is None else decays.double()
    upto = totals.cumsum(0)
    before = upto - totals
    between = before[:, None] - upto  # (to, from, heads, dim or 1)
    fades = between.masked_fill(~earlier[:, :, None, None], -torch.inf).exp().to(dtype)
    if fades.shape[3] == 1:
        found = torch.einsum("tfh,fhde->thde", fades[..., 0], left)
    else:
        found = torch.einsum("tfhd,fhde->thde", fades, left)
    if initial is not None:
        begins = torch.arange(chunks.count, device=left.device) - number.clamp(min=0)  # the sequence's first chunk
        faded = (before - before[begins]).exp().to(dtype)
        found = found + faded[..., None] * initial[sequence].to(dtype)
    return found


def of_no_rows(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, sequences: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `run_packed` gives where no sequence has a row, or where there is no sequence: states stay as they were."""
    linked = sum(t[:0].sum() for t in (q, k, v, decay) if t is not None)  # whose gradients are 0, not missing
    output = torch.zeros_like(v[0]) + linked
    if initial is None:
        initial = torch.zeros(sequences, v.shape[2], q.shape[3], v.shape[3], device=v.device)
    return output, initial.to(compute_dtype(q))


def run_packed(
    program: LinearProgram, key: str, chunks: Chunks, tensors: Sequence[Tensor | None], initial: Tensor | None,
    custom: Mapping[str, Tensor], ends: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output (rows, heads, dim_v) and, where it is asked for, the last state of each sequence.

    tensors: q, k, v and decay, cut into chunks; custom: too, with all that the program reads, in order.
    """
    q, k, v, decay = tensors
    assert v is not None
    rest = [*custom.values()]
    _, left = op.run(key, True, (q, k, v, decay, None, *rest))
    totals = None
    if program.decays:
        logs = apply_decay_mod(program, v, decay, custom, left.dtype).clamp(min=DECAY_LIMIT)
        totals = logs.sum(2, dtype=torch.float64)  # (chunks, heads, dim or 1)
    before = states_before(left, totals, initial, chunks)
    output, *last = op.run(key, ends, (q, k, v, decay, before, *rest))
    joined = chunks.join(output)
    if not ends:
        return joined, None
    final = last[0][chunks.last]
    start = torch.zeros_like(final) if initial is None else initial.to(final.dtype)
    return joined, torch.where(chunks.some[:, None, None, None], final, start)
