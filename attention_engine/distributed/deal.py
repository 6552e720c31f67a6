"""Layouts that are dealt: how much work each piece of a sequence is, by a mask's own counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attention_engine.distributed.layout import PIECES_OF_A_RANK, Layout
from attention_engine.distributed.needs import kept_pieces
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.reference.evaluate import Evaluator
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.inputs import type_of
from attention_engine.runtime.module import AttentionEngine

POINTS = 4096  # of each side that are asked: the count of a piece is an estimate where a sequence is longer


def deal(engine: AttentionEngine, length: int, ranks: int, custom: Mapping[str, Tensor]) -> Layout:
    """A layout by the mask's own counts, which knows what of the keys its pieces may see."""
    pieces = min(PIECES_OF_A_RANK, max(length // ranks, 1)) * ranks
    layout = Layout.dealt(kept_pairs(engine, length, pieces, custom), length, ranks)
    (sizes, tensors), mask = _known(engine, custom), engine._program.mask
    if mask is None or any(t.is_inference() for t in tensors.values()):  # which tell of no writes
        return layout
    typed = engine._trace({name: type_of(t) for name, t in tensors.items()}, engine._variant()).mask
    return replace(layout, kept=kept_pieces(mask, typed, length, sizes, tensors))


def _known(engine: AttentionEngine, custom: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The sizes of "batch" and "heads" that custom inputs have, and all tensors by name, the captured ones too."""
    captured, sizes = engine._captured, {"batch": 1, "heads": 1}
    for spec in engine.custom_io.in_order:
        if spec.name in custom:
            sizes |= {a: n for a, n in zip(spec.axes, custom[spec.name].shape, strict=True) if a in sizes}
    return sizes, {**custom, **{c.name: t for c, t in zip(captured, tensors_now(captured), strict=True)}}


def kept_pairs(engine: AttentionEngine, length: int, pieces: int, custom: Mapping[str, Tensor]) -> list[int]:
    """How many pairs, in proportion, the mask keeps in each of so many equal pieces of the queries."""
    mask, step = engine._program.mask, -(-length // POINTS)
    if mask is None:
        return [1] * pieces
    sizes, tensors = _known(engine, custom)
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    places = torch.arange(0, length, step, device=device)
    b, h = (torch.arange(sizes[axis], device=device) for axis in ("batch", "heads"))
    found = torch.zeros(pieces, dtype=torch.int64, device=device)
    for queries in places.split(64):
        at = {
            B: b.view(-1, 1, 1, 1),
            H: h.view(1, -1, 1, 1),
            Q_IDX: queries.view(1, 1, -1, 1),
            KV_IDX: places.view(1, 1, 1, -1),
        }
        kept = Evaluator(at, tensors, torch.float32, device)(mask)
        kept = kept.expand(len(b), len(h), len(queries), len(places)).sum((0, 1, 3))
        found.index_add_(0, _piece(queries, length, pieces), kept)
    return found.tolist()


def _piece(places: Tensor, length: int, pieces: int) -> Tensor:
    """Which of the pieces, cut at length * n // pieces, each place is in."""
    ends = torch.tensor([length * n // pieces for n in range(1, pieces + 1)], device=places.device)
    return torch.searchsorted(ends, places, right=True)
