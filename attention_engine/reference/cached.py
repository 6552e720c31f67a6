"""Attention to keys in a cache, on torch tensors: each request's keys are gathered, then attended to densely.

Tensors are (batch, length, heads, dim) here; a cache of pages is (pages, keys of a page, heads, dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_engine.ir.program import Program
from attention_engine.reference.dense import attend


def gather(cache: Tensor, table: Tensor | None) -> Tensor:
    """The keys (or values) of each request one after the other; a page that is not there is any."""
    if table is None:
        return cache
    if cache.shape[0] == 0:
        return cache.new_zeros(table.shape[0], table.shape[1] * cache.shape[1], *cache.shape[2:])
    return cache[table.long().clamp(0, cache.shape[0] - 1)].flatten(1, 2)


@dataclass(frozen=True)
class Requests:
    """Where requests are, one number for each: the place of its first query, its keys, its first query's row."""

    starts: Tensor
    lengths: Tensor
    rows: Tensor


def attend_cached(
    program: Program, q: Tensor, k: Tensor, v: Tensor, requests: Requests, custom: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The output (batch, queries, heads, DV), and the returned rows (batch, heads, queries).

    program: of `cached_places.densely`; k, v: gathered. What lies behind a request's keys may hold anything. dtype: to
    compute in, if not in at least fp32.
    """
    inputs = {**custom, "_q_starts": requests.starts, "_kv_lengths": requests.lengths, "_q_rows": requests.rows}
    output, rows = attend(program, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), inputs, dtype=dtype)
    return output.transpose(1, 2).contiguous(), [row.contiguous() for row in rows]


def attend_packed(
    program: Program, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, given: tuple[Tensor, Tensor | None],
    custom: Mapping[str, Tensor], dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The same of packed queries (1, rows, heads, dim); cu: where each request's begin; given: lengths, starts."""
    lengths, starts = given
    rows, counts = cu[:-1].long(), (cu[1:] - cu[:-1]).long()
    most = int(counts.max()) if len(counts) else 0
    own = torch.arange(max(most, 1), device=q.device)
    there = own < counts[:, None]
    at = (rows[:, None] + own).clamp(max=max(q.shape[1] - 1, 0))
    begins = lengths - counts.to(lengths.dtype) if starts is None else starts
    requests = Requests(begins, lengths, rows.to(torch.int32))
    source = q[0] if q.shape[1] else q.new_zeros(1, *q.shape[2:])  # indices need a row, if nobody asks for one
    output, found = attend_cached(program, source[at], k, v, requests, custom, dtype)
    packed = output.new_zeros(q.shape[1], *output.shape[2:])
    packed[at[there]] = output[there]
    packed_rows = [row.new_zeros(row.shape[1], q.shape[1]) for row in found]
    for target, row in zip(packed_rows, found, strict=True):
        target[:, at[there]] = row.transpose(0, 1)[:, there]
    return packed[None], [row[None] for row in packed_rows]


def starts_of(lengths: Tensor, queries: int | Tensor, given: Tensor | None) -> Tensor:
    """Where the queries of each request start: as given, else so that the last one is the last key."""
    return (lengths - queries).to(torch.int32) if given is None else given
