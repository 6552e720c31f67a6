"""Calls that hold a part of an attention, whose batches, heads, queries and keys stand where the call says.

Starts are an int32 tensor on the device, (1 or batch, 4): where b, h, q_idx and kv_idx begin. It is one custom input
more: a call neither compiles for a number nor waits for one, and a CUDA graph reads what stands there when it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attention_engine.errors import OptionsClash
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.program import OF_KEYS, OF_QUERIES, QUERY_PLACES, STARTS, Program
from attention_engine.passes.drop_weights import SEED
from attention_engine.passes.starts import AXES, Moved, copies_of, own_rows, with_starts
from attention_engine.runtime import op, parts
from attention_engine.runtime.attention_op import PairAttention
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.captured import axes_now, check_captured, tensors_now
from attention_engine.runtime.dropout import seed_tensor
from attention_engine.runtime.gpu import stream_of
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
from attention_engine.runtime.kept_lists import hold

if TYPE_CHECKING:
    from attention_engine.runtime.module import AttentionEngine

# the axes whose indices are moved; has each batch its own start? each query its own place?
Starts: TypeAlias = tuple[tuple[str, ...], bool, bool] | None


LISTS = "lists of tiles"  # what holds them, in what is made for calls alike
WHOLE = -1  # no length: what functions capture is whole, and as long as it is


@dataclass(frozen=True)
class Portion:
    """Which part of an attention a call holds.

    starts: int32 (1 or batch, 4), where its b, h, q_idx and kv_idx begin. moved: which of the axes "batch", "heads",
    "seq_len" and "seq_len_kv" do so elsewhere than at 0. whole: the sizes of these axes in the whole attention, which
    custom inputs have that come whole. places: int32 (queries,), where each query stands, in place of its start.
    beside_sends: do sends to other GPUs take SMs while it runs forward? keys_from: where kv_idx starts, as the host
    knows it. unwritten: custom inputs and captured tensors that are what they were when `made` was empty; made: where
    copies of them, and lists of tiles that kernels make of these, are kept for calls alike.
    """

    starts: Tensor
    moved: tuple[str, ...]
    whole: Mapping[str, int]
    places: Tensor | None = None
    beside_sends: bool = False
    keys_from: int = 0
    unwritten: Collection[str] = ()
    made: dict[object, Any] = field(default_factory=dict)


def moved_of(program: Program, axes: Mapping[str, tuple[int | str, ...]], starts: Starts) -> Moved:
    """Which indices of a program are moved, and which dimensions of custom inputs with these axes hold own rows."""
    assert starts is not None
    indices = tuple(index for index, axis in AXES.items() if axis in starts[0])
    own = own_rows(program, axes, indices)
    return Moved(indices, starts[1], own, starts[2], copies_of(program, axes, own) if starts[2] else frozenset())


def moved(program: Program, specs: Sequence[CustomSpec], starts: Starts) -> tuple[Program, list[CustomSpec]]:
    """A program and its custom inputs for such calls."""
    how = moved_of(program, {spec.name: spec.axes for spec in specs}, starts)
    found = [CustomSpec(spec.name, how.axes_of(spec.name, spec.axes)) for spec in specs]
    listed = [CustomSpec(QUERY_PLACES, ("seq_len",))] if how.listed else []
    axes = {spec.name: spec.axes for spec in specs}
    for copy in sorted(how.copies, key=lambda copy: copy.name):
        listed.append(CustomSpec(copy.name, how.axes_of_copy(copy, axes[copy.of])))
    return with_starts(program, how), [*found, CustomSpec(STARTS, how.axes_of_starts), *listed]


def call_portion(
    engine: AttentionEngine, part: Portion, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor],
    named: Mapping[str, Tensor] | None = None, return_rowscales: bool = False,
    dropout_seed: int | Tensor | None = None, held: Sequence[Tensor] | None = None,
) -> Any:  # fmt: skip
    """What `engine(q, k, v, *custom)` gives of the part. Custom inputs come whole, but for own rows (passes/starts.py),
    which come as the part does. held: what the engine's functions capture; None: it is read now."""
    if engine.block_mask is not None:
        raise OptionsClash(
            "the engine has a block_mask that is a tensor, and a call with a part of an attention can't take it.\n"
            "  Write it as a function: block_mask=lambda b, h, q_idx, kv_idx: ..."
        )
    tensors = order_custom(engine.custom_io, custom, named or {})
    check_ranks(engine.layout, q, k, v)
    q, k, v = follow_autocast(q, k, v)
    if engine.layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if q.shape[0] != 1 and 1 in (k.shape[0], v.shape[0]):
        k, v = share_keys(q, k, v)
    if held is None:
        held = tensors_now(engine._captured) if engine._captured else []
    key, given = prepare_portion(engine, part, q, k, v, tensors, held, dropout_seed)
    if ATTENTIONS[key].by_kernels and v.shape[3] > parts.WIDEST:
        return engine._results(parts.run(key, q, k, v, given, return_rowscales), return_rowscales)
    engine._begin_backward(key, (q, k, v, *given))
    return engine._results(op.run(key, return_rowscales, (q, k, v, *given)), return_rowscales)


def prepare_portion(
    engine: AttentionEngine, part: Portion, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor],
    held: Sequence[Tensor], dropout_seed: int | Tensor | None = None,
) -> tuple[str, list[Tensor]]:  # fmt: skip
    """The key of what runs a portion, and what it takes behind q, k, v, (batch, length, heads, dim); raises what does
    not fit. held: what the engine's functions capture."""
    captured, backend = engine._captured, engine._backend_for(q.device)
    metas = None if "heads" in part.moved else engine.qkv_meta
    check_qkv(metas, engine.layout, backend != "reference", q, k, v)
    check_captured(captured, held, q)
    sizes = {"batch": q.shape[0], "heads": q.shape[2], "seq_len": q.shape[1], "seq_len_kv": k.shape[1]}
    known = {axis: WHOLE if axis in part.moved else size for axis, size in sizes.items()}
    variant = engine._variant(None, heads_of(q)[1])
    seeds = [seed_tensor(dropout_seed, q.device)] if engine._drops else []
    names = [*engine.custom_io.specs, *[SEED for _ in seeds], *[one.name for one in captured]]
    types = tuple((n, type_of(t)) for n, t in zip(names, [*tensors, *seeds, *held], strict=True))
    starts = part.moved, part.starts.shape[0] != 1, part.places is not None
    key = engine._key(backend, types, variant, axes_now(captured, held, known) if captured else (), starts)
    check_custom(ATTENTIONS[key].specs[: len(tensors)], tensors, q, k, part.whole)
    if part.beside_sends:
        key = beside_sends(key)
    given = [*tensors, *seeds, *held]
    if part.places is None:
        return key, [*given, part.starts]
    found = dict(zip(names, given, strict=True))
    copies = [_copied(spec, found, part, k.shape[1]) for spec in ATTENTIONS[key].specs[len(given) + 2 :]]
    if part.unwritten:
        tensors = [part.starts, part.places, *copies]
        which = LISTS, *map(id, tensors)
        part.made[which] = hold(tensors, part.made.get(which))
    return key, [*given, part.starts, part.places, *copies]


def _copied(spec: CustomSpec, given: Mapping[str, Tensor], part: Portion, keys: int) -> Tensor:
    """A launch's own rows of a custom input: kept ones, or a copy."""
    if spec.name.removeprefix(OF_QUERIES).removeprefix(OF_KEYS) not in part.unwritten:
        return _copy(spec, given, part, keys)
    known = spec.name, id(part.places), part.keys_from, keys, stream_of(part.starts.device)
    if known not in part.made:
        part.made[known] = _copy(spec, given, part, keys)
    found: Tensor = part.made[known]
    return found


def _copy(spec: CustomSpec, given: Mapping[str, Tensor], part: Portion, keys: int) -> Tensor:
    """What lies behind the end of a custom input is 0, as reads there are."""
    if spec.name.startswith(OF_QUERIES):
        assert part.places is not None
        return given[spec.name.removeprefix(OF_QUERIES)].index_select(spec.axes.index("seq_len"), part.places)
    whole, dim = given[spec.name.removeprefix(OF_KEYS)], spec.axes.index("seq_len_kv")
    there = max(min(keys, whole.shape[dim] - part.keys_from), 0)
    found = whole.narrow(dim, part.keys_from if there else 0, there)
    missing = [*whole.shape[:dim], keys - there, *whole.shape[dim + 1 :]]
    return found if there == keys else torch.cat([found, found.new_zeros(missing)], dim)


def beside_sends(key: str) -> str:
    """The key of the same attention, whose forward kernels run beside sends."""
    found, one = f"{key} beside sends", ATTENTIONS[key]
    if found not in ATTENTIONS:
        assert isinstance(one, PairAttention)
        maths, known = replace(one.maths, beside_sends=True), one.program_kernels
        kernels = None if known is None else known.of(maths)
        trained = None if one.trained is None else beside_sends(one.trained)
        ATTENTIONS[found] = replace(one, key=found, maths=maths, program_kernels=kernels, trained=trained)
    return found
