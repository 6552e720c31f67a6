"""Masks as tensors, from the functions that users write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_engine.errors import BadInput
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H, Program
from attention_engine.reference.evaluate import Evaluator
from attention_engine.runtime.captured import capturing, tensors_now

Place = torch.device | str | None


def document_ids(lengths: Sequence[int] | Tensor, total: int | None = None, device: Place = None) -> Tensor:
    """Which document each token of a packed row is of, int32 (1, total): what `library.document` reads.

    lengths: of the documents, in order. total: tokens of the row; those after the last document are one of their own.
    """
    counts = torch.as_tensor(lengths, dtype=torch.int64, device=device)
    ends = counts.cumsum(0)
    last = int(ends[-1]) if len(counts) else 0
    total = last if total is None else total
    if total < last or bool((counts < 0).any()):
        raise BadInput(f"documents of lengths {counts.tolist()} don't fit {total} tokens. Give lengths of at least 0.")
    tokens = torch.arange(total, device=counts.device)
    return torch.searchsorted(ends, tokens, right=True).to(torch.int32)[None]


def _trace(mask_mod: Callable[..., Any]) -> tuple[Program, dict[str, Tensor]]:
    """The mask's program, and the tensors that it captured by name."""
    with capturing((), {}) as capture:
        program = trace(None, mask_mod, None, CustomIO())
    return program, dict(zip(capture.names, tensors_now(list(capture.captured.values())), strict=True))


def _evaluate(mask_mod: Callable[..., Any], batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    program, custom = _trace(mask_mod)
    shape = torch.broadcast_shapes(batch.shape, head.shape, query.shape, key.shape)
    if program.mask is None:
        return torch.ones(shape, dtype=torch.bool, device=query.device)
    values = {B: batch, H: head, Q_IDX: query, KV_IDX: key}
    return Evaluator(values, custom, torch.float32, query.device)(program.mask).expand(shape)


def _sizes(mask_mod: Callable[..., Any], B_: int | None, H_: int | None) -> tuple[int, int]:
    """Batch and heads of a mask, 1 where it doesn't depend on them (or None was given)."""
    mask = _trace(mask_mod)[0].mask
    axes = mask.axes if mask is not None else frozenset()
    return (B_ or 1) if B.axes <= axes else 1, (H_ or 1) if H.axes <= axes else 1


def create_mask(
    mask_mod: Callable[..., Any], B: int | None, H: int | None, Sq: int, Skv: int, device: Place = None
) -> Tensor:
    """The mask as bool (B or 1, H or 1, Sq, Skv), True where a pair is kept: for looking at, not for the kernels."""
    batch, heads = _sizes(mask_mod, B, H)
    axes = [torch.arange(n, device=device) for n in (batch, heads, Sq, Skv)]
    return _evaluate(mask_mod, *torch.meshgrid(*axes, indexing="ij"))


def create_block_mask(
    mask_mod: Callable[..., Any], B: int | None, H: int | None, Sq: int, Skv: int, device: Place = None,
    Q_BLOCK_SIZE: int = 128, KV_BLOCK_SIZE: int = 128,
) -> Tensor:  # fmt: skip
    """Which blocks hold a kept pair: int8 (B or 1, H or 1, ceil(Sq / Q_BLOCK_SIZE), ceil(Skv / KV_BLOCK_SIZE)).

    Rows of blocks are made one after another, so memory stays at O(tiles) and one row of blocks.
    """
    batch, heads = _sizes(mask_mod, B, H)
    rows, columns = -(-Sq // Q_BLOCK_SIZE), -(-Skv // KV_BLOCK_SIZE)
    blocks = torch.zeros(batch, heads, rows, columns, dtype=torch.int8, device=device)
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    key = torch.arange(columns * KV_BLOCK_SIZE, device=device).view(1, 1, 1, -1)
    for row in range(rows):
        query = torch.arange(row * Q_BLOCK_SIZE, min((row + 1) * Q_BLOCK_SIZE, Sq), device=device).view(1, 1, -1, 1)
        kept = (_evaluate(mask_mod, b, h, query, key) & (key < Skv)).any(2)
        blocks[:, :, row] = kept.unflatten(-1, (columns, KV_BLOCK_SIZE)).any(-1)
    return blocks
