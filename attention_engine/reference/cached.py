"""Attention to keys in a cache, on torch tensors: each request's keys are gathered, then attended to densely.

Tensors are (batch, length, heads, dim) here; a cache of pages is (pages, keys of a page, heads, dim).
"""

from __future__ import annotations

from collections.abc import Mapping

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


def attend_cached(
    program: Program, q: Tensor, k: Tensor, v: Tensor, places: tuple[Tensor, Tensor], custom: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The output (batch, queries, heads, DV), and the returned rows (batch, heads, queries).

    program: of `cached_places.densely`; k, v: gathered; places: where each request's queries start and its number of
    keys. What lies behind that number may hold anything.
    """
    starts, lengths = places
    inputs = {**custom, "_q_starts": starts, "_kv_lengths": lengths}
    output, rows = attend(program, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), inputs)
    return output.transpose(1, 2).contiguous(), [row.contiguous() for row in rows]


def starts_of(lengths: Tensor, queries: int, given: Tensor | None) -> Tensor:
    """Where the queries of each request start: as given, else so that the last one is the last key."""
    return (lengths - queries).to(torch.int32) if given is None else given
