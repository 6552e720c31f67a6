"""A call of packed sequences: one of a single batch of their rows, of the program that pack_documents.py makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.passes.drop_weights import SEED
from attention_engine.runtime import op, parts
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.blocks import GivenBlocks
from attention_engine.runtime.captured import axes_now, check_captured
from attention_engine.runtime.inputs import (
    check_custom,
    check_flag,
    check_qkv,
    follow_autocast,
    heads_of,
    is_cast,
    order_custom,
    signature,
    type_of,
)
from attention_engine.runtime.packed import pack, packed_alike, repeat_tables, sizes_of_packed
from attention_engine.runtime.shown import Shown

WithRows = tuple[Tensor, dict[str, Tensor]]


def call_packed(
    engine: Shown, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], captured: Sequence[Tensor],
    starts: tuple[Tensor, Tensor | None], block_mask: GivenBlocks | None, return_rowscales: bool,
    named: Mapping[str, Tensor], seed: Tensor | None = None,
) -> Tensor | WithRows:  # fmt: skip
    """The output (rows, heads, dim) and, where they are asked for, the returned rows (heads, rows).

    captured: these tensors in place of those that the functions captured; starts: cu_seqlens of queries and of keys;
    seed: where weights are dropped.
    """
    check_flag("return_rowscales", return_rowscales)
    again = not named and block_mask is None and engine._buffers["block_mask"] is None and not is_compiling()
    present = [t for t in (q, k, v, *custom, *captured, *starts) if t is not None]
    form = "packed", packed_alike(*starts), None if seed is None else engine.dropout_p
    seen = engine._seen.get((form, signature(*present))) if again else None
    if seen is not None and not torch.is_autocast_enabled(seen.device):
        tables = repeat_tables(q, k, *starts, shares=_shares_tables(q, k, v, *custom, *captured))
        tables = tables if seed is None else (*tables, seed)
        given = (q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), *custom, *tables, *captured)
        return _results(engine, op.run(seen.key, return_rowscales, given, seen.direct), return_rowscales)
    again = again and isinstance(q, Tensor) and not is_cast(q)
    tensors = order_custom(engine.custom_io, custom, named)
    by_kernel = isinstance(q, Tensor) and q.is_cuda and op.unwatched() and engine._backend_for(q.device) != "reference"
    shares = by_kernel and _shares_tables(q, k, v, *tensors, *captured)
    rows = pack(q, k, v, *starts, engine.block_mask if block_mask is None else block_mask, by_kernel, shares)
    q, k, v = follow_autocast(rows.q, rows.k, rows.v)
    backend = engine._backend_for(q.device)
    check_qkv(engine.qkv_meta, "bshd", backend != "reference", q, k, v)
    heads = heads_of(q), heads_of(k), heads_of(v)
    engine._note_call(heads, q.dtype)
    check_custom(engine.custom_io.in_order, tensors, q, k, batch=rows.sequences)
    check_captured(engine._captured, captured, q)
    axes = axes_now(engine._captured, captured, sizes_of_packed(q)) if captured else ()
    tables, added = (rows.tables, rows.names) if seed is None else ((*rows.tables, seed), (*rows.names, SEED))
    names = [*[s.name for s in engine.custom_io.in_order], *added, *[c.name for c in engine._captured]]
    tensors = [*tensors, *tables, *captured]
    types = tuple([(n, type_of(t)) for n, t in zip(names, tensors, strict=True)])
    key = engine._key(backend, types, engine._variant(dim=heads[0][1], packing=rows.packing), axes)
    if backend != "reference" and v.shape[3] > parts.WIDEST:
        found: Sequence[Tensor] = parts.run(key, q, k, v, tensors, return_rowscales)
    else:
        engine._begin_backward(key, (q, k, v, *tensors))
        direct = None
        if again and op.unwatched():
            program_kernels = ATTENTIONS[key].program_kernels
            direct = program_kernels.direct(q, k, v, tensors) if program_kernels is not None else None
            engine._remember(form, present, key, direct)
        found = op.run(key, return_rowscales, (q, k, v, *tensors), direct)
    return _results(engine, found, return_rowscales)


def _shares_tables(*tensors: Tensor) -> bool:
    """May other calls use the tables of this one? Where autograd follows it, as it counts what torch writes."""
    return op.follows([t for t in tensors if isinstance(t, Tensor)]) and op.unwatched()


def _results(engine: Shown, found: Sequence[Tensor], return_rowscales: bool) -> Tensor | WithRows:
    output, *others = [t.squeeze(0) for t in found]  # whose gradient is a view; that of an index is a copy
    if not return_rowscales:
        return output
    return output, dict(zip([n for n, _ in engine._program.finals], others, strict=True))
