"""Attention to a part of each row's keys, and the merge of such parts: prefixes that requests share, rings, one's own
caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from attention_engine.errors import (
    AttentionEngineError,
    BadInput,
    NoMerge,
    NotYetSupported,
    OptionsClash,
    WrongIndex,
    WrongShape,
    as_given,
)
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.frontend.frames import brief
from attention_engine.frontend.tracing import place_of, trace_combine
from attention_engine.ir.expr import Expr, Op, topological
from attention_engine.ir.merge import Merge
from attention_engine.ir.pretty import formula
from attention_engine.ir.program import KV_IDX, Q_IDX, STARTS, Program, is_start
from attention_engine.passes.absent_pairs import leave_out_absent
from attention_engine.passes.derive_merge import derive_merge, merge_by_combine
from attention_engine.passes.maths import analyse_part
from attention_engine.passes.starts import Moved, own_rows, with_starts
from attention_engine.reference.dense import attend, compute_dtype
from attention_engine.reference.merge import merge_parts
from attention_engine.runtime import parts
from attention_engine.runtime.attentions import outside_autocast
from attention_engine.runtime.captured import axes_now, check_captured, specs_of, tensors_now
from attention_engine.runtime.inputs import (
    check_custom,
    check_qkv,
    check_ranks,
    follow_autocast,
    heads_of,
    order_custom,
    share_keys,
    type_of,
)
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.runtime.shown import Shown

WithRows: TypeAlias = tuple[Tensor, dict[str, Tensor]]
Starts: TypeAlias = Tensor | int


@dataclass(frozen=True, repr=False)
class Part:
    """What attention to some of a row's keys leaves. It is a pytree of its tensors.

    o: the sum of weights times values so far, fp32 (float64 of float64 inputs), laid out as the engine's outputs.
    states: the row states that a merge asks for, by name, (batch, heads, queries). inputs: the custom inputs that it
    reads. merge: how parts join. dtype: of the merged output.
    """

    o: Tensor
    states: dict[str, Tensor]
    inputs: dict[str, Tensor]
    merge: Merge
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"Part(o {tuple(self.o.shape)}, states {', '.join(self.states) or 'none'}; for {self.dtype})"


_pytree.register_pytree_node(
    Part,
    lambda part: ([part.o, part.states, part.inputs], (part.merge, part.dtype)),
    lambda tensors, known: Part(*tensors, *known),
    serialized_type_name="attention_engine.Part",
)


@dataclass(frozen=True)
class PartRunner:
    """What runs a part of one program: on kernels, or (program_kernels: None) on the reference."""

    merge: Merge
    specs: Sequence[CustomSpec]
    program_kernels: ProgramKernels | None

    @property
    def reads_places(self) -> bool:
        """Does the program ask where queries or keys stand?"""
        return any(spec.name == STARTS for spec in self.specs)

    def run(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The sums (batch, queries, heads, DV) and the states."""
        if self.program_kernels is None or not (q.numel() and k.numel() and v.numel()):
            return _densely(q, k, v, custom, self)
        found = [self.program_kernels.forward(q, k, each, custom) for each in v.split(parts.width(v.shape[3]), -1)]
        names = (name for name, _ in self.program_kernels.maths.forward_schedule.rows)
        outputs = [output for output, _ in found]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1), dict(zip(names, found[0][1], strict=True))

    def inputs(self, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        """The custom inputs that the merge reads."""
        return {s.name: t for s, t in zip(self.specs, custom, strict=True) if s.name in self._read}

    @cached_property
    def _read(self) -> set[str]:
        return {n.name for n in topological(*(e for _, e in self.merge.named())) if n.op is Op.LOAD}


@outside_autocast
def _densely(
    q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], parted: PartRunner
) -> tuple[Tensor, dict[str, Tensor]]:
    named = {s.name: c for s, c in zip(parted.specs, custom, strict=True)}
    wide = q.to(compute_dtype(q, *(c for c in custom if c.is_floating_point())))
    q, k, v = (t.transpose(1, 2) for t in (wide, k, v))
    output, rows = attend(parted.merge.part_program, q, k, v, named)
    return output.transpose(1, 2), dict(zip(parted.merge.read, rows, strict=True))


class Parted(Shown):
    """The half of an AttentionEngine that sees a part of each row's keys at a time."""

    def _begin(self) -> None:
        super()._begin()
        self._parted: dict[object, PartRunner] = {}

    def partial(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, q_starts: Starts = 0, kv_starts: Starts = 0,
                **named: Tensor) -> Part:  # fmt: skip
        """Attention to these keys alone, unfinished: what `merge` makes a whole row of.

        Args:
            q, k, v: as in a call; k and v are some of the sequence's keys and values.
            custom: custom inputs, in order or by name. Axes "seq_len" and "seq_len_kv" are the part's own rows.
            q_starts: the place of the first query in its sequence, where q_idx begins: a number, or int32 (batch,).
            kv_starts: the same of the first key.

        Returns:
            A Part: sums in fp32 and row states. Parts of the same queries join in any grouping and order. Through the
            reference they have gradients; through kernels, none.

        Raises:
            NoMerge: no formula was found that joins parts of this attention.
            BadInput: tensors that don't fit.
        """
        try:
            return self._partial(q, k, v, order_custom(self.custom_io, custom, named), q_starts, kv_starts)
        except AttentionEngineError as error:
            raise brief(error) from error.__cause__

    @overload
    def merge(self, parts: Iterable[Part], return_rowscales: Literal[False] = False) -> Tensor: ...

    @overload
    def merge(self, parts: Iterable[Part], return_rowscales: Literal[True]) -> WithRows: ...

    @overload
    def merge(self, parts: Iterable[Part], return_rowscales: bool) -> Tensor | WithRows: ...

    def merge(self, parts: Iterable[Part], return_rowscales: bool = False) -> Tensor | WithRows:
        """The output of whole rows, of parts that `partial` made of the same queries and of all their keys.

        Returns:
            What a call with all keys returns: o, or with return_rowscales (o, {name: row (B, H, Sq)}).

        Raises:
            BadInput: parts of other queries, or of other attentions.
            NoMerge: return_rowscales where only the user's `combine` joins parts.
        """
        if isinstance(parts, Part):
            raise BadInput("merge was given one part. Give a list of all: [part, ...].")
        parts = list(parts)
        _check_parts(parts)
        first, turned = parts[0], self.layout == "bshd"
        merge = first.merge
        if return_rowscales and merge.program.finals and not merge.finals:
            raise NoMerge("`combine` joins outputs alone, and no formula was found for the returned rows of all parts.")
        outputs = [p.o.transpose(1, 2) if turned else p.o for p in parts]
        states = {name: [p.states[name] for p in parts] for name in merge.read}
        output, rows = merge_parts(merge, outputs, states, first.inputs)
        output = (output.transpose(1, 2) if turned else output).to(first.dtype)
        if not return_rowscales:
            return output
        return output, dict(zip((name for name, _ in merge.finals), rows, strict=True))

    def _partial(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], q_starts: Starts, kv_starts: Starts
    ) -> Part:  # fmt: skip
        if self.block_mask is not None:
            raise OptionsClash(
                "the engine has a block_mask that is a tensor, and a part of a row can't take it.\n"
                "  Write it as a function: block_mask=lambda b, h, q_idx, kv_idx: ..."
            )
        if self._drops:
            raise NotYetSupported(
                "a part of a row drops no weights. Call engine.eval() before, or build with dropout_p=0."
            )
        captured = self._captured
        held = tensors_now(captured) if captured else []
        check_ranks(self.layout, q, k, v)
        q, k, v = follow_autocast(q, k, v)
        if self.layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if q.shape[0] != 1 and 1 in (k.shape[0], v.shape[0]):
            k, v = share_keys(q, k, v)
        backend = self._backend_for(q.device)
        check_qkv(self.qkv_meta, self.layout, backend != "reference", q, k, v)
        check_custom(self.custom_io.in_order, tensors, q, k)
        check_captured(captured, held, q)
        _check_starts(q.shape[0], q_starts=q_starts, kv_starts=kv_starts)
        parted = self._parted_of(backend, q, [*tensors, *held])
        given = [*tensors, *held, *([_starts(q, q_starts, kv_starts)] if parted.reads_places else [])]
        _refuse_gradient(parted, q, k, v, *given)
        output, states = parted.run(q, k, v, given)
        output = output.transpose(1, 2) if self.layout == "bhsd" else output
        return Part(output, states, parted.inputs(given), parted.merge, q.dtype)

    def _parted_of(self, backend: str, q: Tensor, tensors: Sequence[Tensor]) -> PartRunner:
        """What runs the parts of such calls, made when first needed."""
        captured, variant = self._captured, self._variant(None, heads_of(q)[1], drops="")
        names = [*self.custom_io.specs, *(c.name for c in captured)]
        types = tuple((n, type_of(t)) for n, t in zip(names, tensors, strict=True))
        sizes = {"batch": q.shape[0], "heads": q.shape[2], "seq_len": None, "seq_len_kv": None}
        axes = axes_now(captured, tensors[len(self.custom_io.specs) :], sizes)
        asked = (backend, types, variant, axes)
        if asked not in self._parted:
            program = self._trace(dict(types), variant)
            specs = [*self.custom_io.specs.values(), *specs_of(captured, axes)]
            how = _how_moved(program, self.custom_io.in_order)
            moved = with_starts(program, how)
            if any(map(is_start, moved.loads())):
                program, specs = moved, [*specs, CustomSpec(STARTS, how.axes_of_starts)]
            merge, program_kernels = self._merge_of(program), None
            if backend != "reference":
                maths = analyse_part(merge.part_program)
                program_kernels = ProgramKernels(maths, specs, backend == "interpret", self.device, self.deterministic)
            self._parted[asked] = PartRunner(merge, specs, program_kernels)
        return self._parted[asked]

    def _combine_of(self, program: Program) -> Expr | None:
        return trace_combine(self.online_func, program, self.custom_io, self._types)

    def _merge_of(self, program: Program) -> Merge:
        """By the user's own `combine` where there is one, else as derived."""
        program, scale = leave_out_absent(program), self._combine_of(program)
        if scale is None:
            return derive_merge(program)
        return merge_by_combine(program, scale, f"{place_of(self.online_func.combine)}: ")


def _how_moved(program: Program, declared: Sequence[CustomSpec]) -> Moved:
    """Queries and keys begin at places; custom inputs along them hold the part's own rows."""
    own = own_rows(program, {spec.name: spec.axes for spec in declared}, (Q_IDX, KV_IDX))
    for read in program.loads():
        axes = next((spec.axes for spec in declared if spec.name == read.name), ())
        for n, axis in enumerate(axes):
            if axis in ("seq_len", "seq_len_kv") and (read.name, n) not in own:
                raise WrongIndex(
                    f"custom input {read.name!r} has the axis {axis!r}, along which a part has rows of its own, and is "
                    f"read at {formula(read)}.\n  Declare the axis as a length: it is then whole, and read at places."
                )
    return Moved((Q_IDX, KV_IDX), True, own)


def _check_starts(batch: int, **starts: Starts) -> None:
    for name, start in starts.items():
        if not isinstance(start, Tensor):
            if type(start) is not int or not -(2**31) <= start < 2**31:
                raise BadInput(
                    f"{name} is {as_given(start)}. Give a place: an integer, or int32 of shape ({batch},), one for "
                    "each batch."
                )
        elif start.is_floating_point() or start.dtype is torch.bool or start.shape not in ((), (1,), (batch,)):
            raise WrongShape(
                f"{name} is {start.dtype} of shape {tuple(start.shape)}. Give a number, or integers of shape "
                f"({batch},), one for each batch."
            )


def _starts(q: Tensor, q_starts: Starts, kv_starts: Starts) -> Tensor:
    """Where the indices of each batch begin, int32 (batch, 4): b and h at 0."""
    found = torch.zeros(q.shape[0], 4, dtype=torch.int32, device=q.device)
    for column, start in ((2, q_starts), (3, kv_starts)):
        if isinstance(start, Tensor):
            found[:, column] = start.reshape(-1)
        elif start != 0:
            found[:, column].fill_(start)  # nothing is copied from the host, and nobody waits
    return found


def _refuse_gradient(parted: PartRunner, *tensors: Tensor) -> None:
    if parted.program_kernels is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise NotYetSupported(
            "a part of a row has no gradient through kernels. Call it under torch.no_grad(), or build the engine with\n"
            '  backend="reference". A call with all keys, engine(q, k, v), has gradients.'
        )


def _check_parts(parts: Sequence[Part]) -> None:
    """BadInput unless these are parts of the same rows of one attention."""
    if not parts or not all(isinstance(part, Part) for part in parts):
        raise BadInput("merge was given no parts. Give a list of what engine.partial returned.")
    first = parts[0]
    for number, part in enumerate(parts):
        if dict(part.merge.named()) != dict(first.merge.named()):
            raise BadInput(f"part {number} is of another attention than part 0. Merge parts of one engine.")
        if part.o.shape != first.o.shape:
            raise WrongShape(
                f"part {number} is of shape {tuple(part.o.shape)}, and part 0 of {tuple(first.o.shape)}. Parts are of "
                "the same queries."
            )
