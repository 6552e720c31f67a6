"""Attention to keys and values in a cache: what such a call is held against, and how it runs. Inference alone.

Lengths, tables and starts are read on the device: nothing waits for it, and a CUDA graph replays with other ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import CachedKernels
from attention_engine.errors import OptionsClash
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.expr import Expr
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import Program
from attention_engine.passes.absent_pairs import leave_out_absent
from attention_engine.passes.cached_places import STARTS, check_rows, densely, reads_rows
from attention_engine.plan.buffers import own_length
from attention_engine.plan.cached_buffers import Cache
from attention_engine.plan.launches import Step
from attention_engine.plan.targets import Target
from attention_engine.reference.cached import Requests, attend_cached, attend_packed, gather, starts_of
from attention_engine.runtime.arguments import MOST_PLANS, as_parameter, stride_steps, with_strides
from attention_engine.runtime.cached_again import Direct, Given, SeenCaches, launch_again, viewed, with_starts
from attention_engine.runtime.cached_inputs import (
    CachedCall,
    check_caches,
    check_gradients,
    check_out,
    check_packing,
    check_parts,
    check_tensors,
)
from attention_engine.runtime.captured import axes_now, check_captured, sizes_of, specs_of, tensors_now
from attention_engine.runtime.inputs import check_custom, is_cast, order_custom, type_of
from attention_engine.runtime.op import unwatched, watched
from attention_engine.runtime.program_kernels import CUSTOM_NAMES, NAMES, allows_tf32, stride_unit
from attention_engine.runtime.run import Kept, Memory, Ready, tensor_of

if TYPE_CHECKING:
    from attention_engine.runtime.shown import Shown

Results: TypeAlias = tuple[Tensor, list[Tensor]]


@dataclass
class CachedAttention:
    """One traced program that runs on caches. interpret: kernels on CPU tensors; by_kernels: or the reference?
    scale: the user's `combine`, if there is one."""

    program: Program
    specs: Sequence[CustomSpec]
    by_kernels: bool
    interpret: bool
    device: Arch | None
    scale: Expr | None
    _kernels: dict[object, CachedKernels] = field(default_factory=dict)
    _ready: dict[object, Ready] = field(default_factory=dict)
    _kept: Kept = field(default_factory=Kept)

    def __post_init__(self) -> None:
        self.program = leave_out_absent(self.program)
        self.axes = {s.name: tuple(s.axes) for s in self.specs}
        check_rows(self.program, self.axes)
        self.by_rows = reads_rows(self.program, self.axes)
        self.dense = densely(self.program, self.axes)
        self.rows = [name for name, _ in self.program.finals]

    def __call__(self, call: CachedCall, out: Tensor | None) -> Results:
        """The output (batch, queries, heads, dim_v) and the returned rows (batch, heads, queries)."""
        if not self.by_kernels or not (call.q.numel() and call.k.numel() and call.capacity):
            found, rows = self.by_reference(call)
            return (found if out is None else out.copy_(found)), rows
        return self._by_kernels(call, out)

    def by_reference(self, call: CachedCall, dtype: torch.dtype | None = None) -> Results:
        """The same in plain PyTorch. dtype: to compute in, if not in at least fp32."""
        k = gather(call.k, call.table)
        v = k[..., : call.dim_v] if call.v is None else gather(call.v, call.table)
        lengths = call.lengths
        custom = {s.name: c for s, c in zip(self.specs, call.custom, strict=True)}
        if call.cu is not None:
            return attend_packed(self.dense, call.q, k, v, call.cu, (lengths, call.starts), custom, dtype)
        starts = starts_of(lengths, call.q.shape[1], call.starts)
        requests = Requests(starts, lengths, torch.zeros_like(lengths))
        return attend_cached(self.dense, call.q, k, v, requests, custom, dtype)

    def target(self, q: Tensor) -> Target:
        """What the kernels must be compiled for, of the device."""
        return "interpret" if self.interpret else self.device or detect(q.device)

    def problem(self, call: CachedCall, custom: Sequence[Tensor]) -> Problem:
        """What the kernels must be compiled for, of the call."""
        shapes = [
            (spec.name, CUSTOM_NAMES[tensor.dtype], tuple(spec.axes) or (1,))
            for spec, tensor in zip(self.specs, custom, strict=True)
        ]
        if self.by_rows:
            shapes.append((STARTS, "int32", ("batch",)))
        dim, q = call.q.shape[3], call.q
        tf32 = q.dtype is torch.float32 and allows_tf32()
        unit = stride_unit(dim, call.dim_v)
        return Problem(q.shape[2], call.k.shape[2], dim, call.dim_v, NAMES[q.dtype], tf32, unit, tuple(shapes))

    def kernels(self, call: CachedCall, custom: Sequence[Tensor]) -> CachedKernels:
        """The kernels for such a call."""
        q, cache = call.q, self._cache(call)
        key = (
            q.dtype, q.device, q.shape[2:], call.k.shape[2], call.dim_v, cache, allows_tf32(),
            *[c.dtype for c in custom],
        )  # fmt: skip
        found = self._kernels.get(key)
        if found is None:
            problem = self.problem(call, custom)
            found = self._kernels[key] = CachedKernels(self.program, problem, cache, self.target(q), self.scale)
        return found

    def _cache(self, call: CachedCall) -> Cache:
        page = 0 if call.table is None else call.k.shape[1]
        return Cache(page, call.v is None, call.starts is not None or self.by_rows, call.cu is not None)

    def _by_kernels(self, call: CachedCall, out: Tensor | None) -> Results:
        custom = [as_parameter(c) for c in call.custom]
        kernels, q = self.kernels(call, custom), call.q
        unit = kernels.problem.stride_unit
        memory: Memory = {f"custom_{s.name}": c for s, c in zip(self.specs, custom, strict=True)}
        memory |= {"q": with_strides(q, unit), "k": with_strides(call.k, unit), "kv_lengths": call.lengths.contiguous()}
        if call.v is not None:
            memory["v"] = with_strides(call.v, unit)
        if call.table is not None:
            table = call.table if call.table.stride(1) == 1 else call.table.contiguous()
            memory["page_table"] = [table.stride(0), table]
        if kernels.plan.cache.starts:
            count = q.shape[1] if call.cu is None else call.cu[1:] - call.cu[:-1]
            memory["q_starts"] = starts_of(call.lengths, count, call.starts).contiguous()
        if call.cu is not None:
            memory["cu_seqlens_q"] = call.cu.contiguous()
        if self.by_rows:
            starts = tensor_of(memory, "q_starts")
            memory[f"custom_{STARTS}"] = starts if call.cu is None else starts - call.cu[:-1]
        self._ready_for(call, kernels, custom)(memory)
        found, rows = tensor_of(memory, "o"), [tensor_of(memory, f"row_{name}") for name in self.rows]
        return (found if out is None else out.copy_(found)), rows

    def _parts(self, call: CachedCall, kernels: CachedKernels) -> tuple[int, bool]:
        """How many parts: of each row, or dealt to all requests together."""
        sizes = call.requests, call.q.shape[1], call.capacity, call.parts
        dealt = kernels.plan.dealt_parts(*sizes)
        return (dealt, True) if dealt else (kernels.plan.parts_of(*sizes), False)

    def _steps(self, call: CachedCall, kernels: CachedKernels) -> Sequence[Step]:
        return kernels.plan.steps(*self._parts(call, kernels), call.q.shape[1])

    def _ready_for(self, call: CachedCall, kernels: CachedKernels, custom: Sequence[Tensor]) -> Ready:
        """The launches of a call of such shapes."""
        table, parts = 0 if call.table is None else call.table.shape[1], self._parts(call, kernels)
        key = (kernels, call.q.shape, call.requests, call.k.shape, table, parts, *[c.shape for c in custom])
        found = self._ready.get(key)
        if found is None:
            if len(self._ready) >= MOST_PLANS:
                self._ready.clear()
            batch, queries = call.requests, call.q.shape[1]
            lengths = {"batch": batch, "q_length": queries, "kv_length": call.capacity, "parts": parts[0]}
            lengths |= {"pages": call.k.shape[0], "pages_of_a_request": table, **self._own_lengths(custom)}
            steps = kernels.plan.steps(*parts, queries)
            found = self._ready[key] = Ready(steps, kernels.kernel, lengths, {}, call.q.device, self._kept)
        return found

    def direct(self, call: CachedCall, names: Sequence[str]) -> Direct | None:
        """The launches of all calls of such shapes and strides, nothing left to look up; None where more is to be done
        than to launch. names: of the custom inputs that a call gives, in its order."""
        if call.q.dtype is torch.float32:  # where torch has a switch for tf32
            return None
        if not self.by_kernels or not (call.q.numel() and call.k.numel() and call.capacity):
            return None
        custom = [as_parameter(c) for c in call.custom]
        kernels, unit = self.kernels(call, custom), stride_unit(call.q.shape[3], call.dim_v)
        strided = [t for t in (call.q, call.k, call.v) if t is not None]
        strides = [stride_steps(t.shape, t.stride(), unit) for t in strided]
        alone = [t for t in (call.lengths, call.starts, call.cu) if t is not None]
        fits = all(t.is_contiguous() for t in alone) and (call.table is None or call.table.stride(1) == 1)
        makes_starts = self.by_rows and call.starts is None
        if (self.by_rows and call.cu is not None) or not fits or any(s is None for s in strides):
            return None
        given: dict[str, Sequence[int]] = {n: s for n, s in zip("qkv", strides, strict=False) if s is not None}
        given["kv_lengths"] = ()
        if call.table is not None:
            given["page_table"] = (call.table.stride(0),)
        if kernels.plan.cache.starts:
            given["q_starts"] = ()
        if call.cu is not None:
            given["cu_seqlens_q"] = ()
        own = [f"custom_{name}" for name in [*names, *([STARTS] if self.by_rows else [])]]
        given |= dict.fromkeys(own, ())
        ready, steps = self._ready_for(call, kernels, custom), self._steps(call, kernels)
        converts = any(parameter is not c for parameter, c in zip(custom, call.custom, strict=True))
        launch = launch_again(kernels, ready, steps, given, own, self.rows, converts)
        return with_starts(launch, call.q.shape[1], makes_starts) if self.by_rows else launch

    def _own_lengths(self, custom: Sequence[Tensor]) -> Mapping[str, int]:
        return {
            own_length(spec.name, axis).name: size
            for spec, tensor in zip(self.specs, custom, strict=True)
            for axis, size in zip(spec.axes, tensor.shape, strict=False) if isinstance(axis, str)
        }  # fmt: skip


def with_cache(
    engine: Shown, tensors: Given, custom: Sequence[Tensor], named: Mapping[str, Tensor], parts: int | None,
    return_rowscales: bool,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """AttentionEngine.with_cache. tensors: those of cached_again.GIVEN."""
    q, k, v, lengths, table, starts, cu, out = tensors
    form = (
        engine.training, v is None, v is k, table is None, starts is None, cu is None, out is None, parts, len(custom),
        tuple(named) if named else (),
    )  # fmt: skip
    seen: SeenCaches = engine._cached_seen
    captured = engine._captured if seen.captured is None else seen.captured
    if custom or named or captured:
        tensors = (*tensors, *custom, *named.values(), *tensors_now(captured))
    made = None if watched() else seen.launch(form, tensors, return_rowscales)
    if made is not None:
        return (made[0], dict(zip(seen.rows, made[1:], strict=True))) if return_rowscales else made[0]
    ordered, packed = order_custom(engine.custom_io, custom, named), cu is not None
    call, attention = prepare(engine, (q, k, v), ordered, (lengths, table, starts), cu, parts)
    check_out(engine.layout, out, call)
    of_call = out[None] if packed and out is not None else _turned(engine, out)
    found, rows = attention(call, of_call)
    if not is_cast(call.q) and unwatched() and (of_call is None or of_call.is_contiguous()):
        names = [*[s.name for s in engine.custom_io.in_order[: len(custom)]], *named, *[c.name for c in captured]]
        launch = viewed(attention.direct(call, names), engine.layout == "bhsd", packed)
        seen.keep(form, tensors, launch)
        seen.captured, seen.rows = captured, attention.rows
    if packed:
        rows = [row[0] for row in rows]
    output = out if out is not None else found[0] if packed else _turned(engine, found)
    return (output, dict(zip(attention.rows, rows, strict=True))) if return_rowscales else output


def prepare(
    engine: Shown, tensors: tuple[Tensor, Tensor, Tensor | None], custom: Sequence[Tensor],
    places: tuple[Tensor, Tensor | None, Tensor | None], cu_seqlens_q: Tensor | None, parts: int | None,
) -> tuple[CachedCall, CachedAttention]:  # fmt: skip
    """A call that passed every check, and what runs it."""
    (q, k, v), (lengths, table, starts) = tensors, places
    _check_options(engine, parts, cu_seqlens_q)
    check_tensors(engine.layout, q, k, v, table is not None, cu_seqlens_q is not None)
    if engine.layout == "bhsd":
        k, v = k.transpose(1, 2), None if v is None else v.transpose(1, 2)
    q = q[None] if cu_seqlens_q is not None else _turned(engine, q)
    custom = [*custom, *tensors_now(engine._captured)]
    check_gradients((q, k, v, *custom))
    dim_v = v.shape[3] if v is not None else engine.qkv_meta[2].dim if engine.qkv_meta else q.shape[3]
    call = CachedCall(q, k, v, dim_v, lengths, table, starts, parts, custom, cu_seqlens_q)
    backend = engine._backend_for(q.device)
    check_caches(engine.qkv_meta, backend != "reference", call)
    return call, _attention(engine, backend, call)


def _check_options(engine: Shown, parts: int | None, cu_seqlens_q: Tensor | None) -> None:
    if engine._buffers["block_mask"] is not None:
        raise OptionsClash(
            "this engine has a block_mask of fixed lengths, and requests in a cache have lengths of their own.\n"
            "  Say it as a mask_mod: custom inputs may hold what it reads."
        )
    if engine.training and engine.dropout_p:
        raise OptionsClash(
            "with_cache drops no weights, and this engine does in train() mode. Call engine.eval() first."
        )
    check_parts(parts)
    check_packing(cu_seqlens_q)


def _turned(engine: Shown, tensor: Tensor | None) -> Any:
    return tensor.transpose(1, 2) if tensor is not None and engine.layout == "bhsd" else tensor


def _attention(engine: Shown, backend: str, call: CachedCall) -> CachedAttention:
    """What runs such a call: the program for the types of its tensors, traced when first needed."""
    variant = engine._variant(None, call.q.shape[3], drops="")
    io, keys = engine._io(variant), call.keys()
    declared = len(io.in_order)
    queries = call.q if call.cu is None else call.q.expand(call.requests, -1, -1, -1)
    check_custom(io.in_order, call.custom[:declared], queries, keys)
    captured = call.custom[declared:]
    check_captured(engine._captured, captured, call.q)
    sizes = {**sizes_of(queries, keys), "seq_len": None, "seq_len_kv": None}  # captured tensors are read at places
    axes = axes_now(engine._captured, captured, sizes)
    names = [*[s.name for s in io.in_order], *[c.name for c in engine._captured]]
    types = tuple((n, type_of(t)) for n, t in zip(names, call.custom, strict=True))
    asked = (backend, types, variant, axes)
    found = engine._cached.get(asked)
    if found is None:
        program = engine._trace(dict(types), variant)
        specs = [*io.in_order, *specs_of(engine._captured, axes)]
        scale, interpret = engine._combine_of(program), backend == "interpret"
        found = CachedAttention(program, specs, backend != "reference", interpret, engine.device, scale)
        engine._cached[asked] = found
    return found
