"""Layouts that are dealt: how much work each piece of a sequence is, by a mask's own counts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from attention_engine.distributed.layout import PIECES_OF_A_RANK, Cost, Layout
from attention_engine.distributed.needs import KeptPieces, kept_pieces
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.reference.evaluate import Evaluator
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.inputs import type_of
from attention_engine.runtime.module import AttentionEngine

POINTS = 4096  # of each side that are asked, at least the ends of each tile: an estimate where a sequence is longer
TILE = 128  # queries and keys of a tile, where a piece has as many
ROWS = 32  # of tiles, that are looked at together
WHOLE, PARTIAL = 2, 3  # what a tile takes that is kept whole, and one whose pairs are masked one by one: H100s
SENT = 0.06  # what a key takes that another rank sends, over a whole tile: 32 heads of 8, within a node


def deal(engine: AttentionEngine, length: int, ranks: int, custom: Mapping[str, Tensor]) -> Layout:
    """A layout by the mask's own counts and by what of the keys its pieces may see, which it knows from then on."""
    pieces = min(PIECES_OF_A_RANK, max(length // ranks, 1)) * ranks
    work = work_of_pieces(engine, length, pieces, custom)
    (sizes, tensors), mask = _known(engine, custom), engine._program.mask
    if mask is None or any(t.is_inference() for t in tensors.values()):  # which tell of no writes
        return Layout.dealt(work, length, ranks)
    typed = engine._trace({name: type_of(t) for name, t in tensors.items()}, engine._variant()).mask
    kept = kept_pieces(mask, typed, length, sizes, tensors)
    return replace(Layout.dealt(work, length, ranks, _with_sends(work, kept)), kept=kept)


def _with_sends(work: Sequence[int], kept: KeptPieces) -> Cost:
    """What a rank takes for pieces of the queries: their work, and the keys that other ranks send it."""
    ends = [kept.length * n // len(work) for n in range(len(work) + 1)]
    pieces = [*itertools.pairwise(ends)]
    seen, own = [kept.seen_by(*piece) for piece in pieces], [kept.among(*piece) for piece in pieces]
    a_key = WHOLE * SENT * TILE**2 / _side(kept.length, len(work))

    def cost(held: Sequence[int]) -> float:
        there, here = (reduce(or_, (bits[n] for n in held)) for bits in (seen, own))
        return sum(work[n] for n in held) + a_key * kept.size * (there & ~here).bit_count()

    return cost


def _known(engine: AttentionEngine, custom: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The sizes of "batch" and "heads" that custom inputs have, and all tensors by name, the captured ones too."""
    captured, sizes = engine._captured, {"batch": 1, "heads": 1}
    for spec in engine.custom_io.in_order:
        if spec.name in custom:
            sizes |= {a: n for a, n in zip(spec.axes, custom[spec.name].shape, strict=True) if a in sizes}
    return sizes, {**custom, **{c.name: t for c, t in zip(captured, tensors_now(captured), strict=True)}}


def work_of_pieces(
    engine: AttentionEngine, length: int, pieces: int, custom: Mapping[str, Tensor]
) -> list[int]:  # fmt: skip
    """How much work each of so many equal pieces of the queries is by the mask: the sum over its queries of the tiles
    that their tiles see, WHOLE for each that is kept whole, PARTIAL for each that is kept in part."""
    mask, side = engine._program.mask, _side(length, pieces)
    if mask is None:
        return [1] * pieces
    sizes, tensors = _known(engine, custom)
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    asked = min(side, max(POINTS * side // length, 2))  # of a tile's rows, and of its columns
    within = torch.linspace(0, side - 1, asked, device=device).round().long()
    tiles = torch.arange(0, length, side, device=device)
    places = (tiles[:, None] + within).clamp(max=length - 1)
    b, h = (torch.arange(sizes[axis], device=device) for axis in ("batch", "heads"))
    work = []
    for queries in places.split(ROWS):
        at = {
            B: b.view(-1, 1, 1, 1),
            H: h.view(1, -1, 1, 1),
            Q_IDX: queries.reshape(1, 1, -1, 1),
            KV_IDX: places.view(1, 1, 1, -1),
        }
        kept = Evaluator(at, tensors, torch.float32, device)(mask)
        kept = kept.expand(len(b), len(h), queries.numel(), places.numel())
        pairs = kept.reshape(len(b), len(h), *queries.shape, *places.shape)
        some, whole = (each.sum((0, 1, 3)) for each in (pairs.any(5).any(3), pairs.all(5).all(3)))
        work.append(WHOLE * whole + PARTIAL * (some - whole))
    of_rows = torch.cat(work).repeat_interleave(side)[:length]
    which = _piece(torch.arange(length, device=device), length, pieces)
    return torch.zeros(pieces, dtype=torch.int64, device=device).index_add_(0, which, of_rows).tolist()


def _side(length: int, pieces: int) -> int:
    """Queries of a tile, where a sequence is cut into so many pieces."""
    return min(TILE, -(-length // pieces))


def _piece(places: Tensor, length: int, pieces: int) -> Tensor:
    """Which of the pieces, cut at length * n // pieces, each place is in."""
    ends = torch.tensor([length * n // pieces for n in range(1, pieces + 1)], device=places.device)
    return torch.searchsorted(ends, places, right=True)
