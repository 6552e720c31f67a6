"""Sums along the diagonals of a tile of pairs (keys, queries): gradients of reads at query - key.

target: fp32 (batch, heads, strips, queries + keys), where entry query - key + keys - 1 is a diagonal's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import FLOAT, LANES, Corners, Place, Sizes, add_columns, named
from attention_engine.kernels.ends import past_end
from attention_engine.kernels.pair_maths import PairMaths
from attention_engine.kernels.warps import COMPUTE
from attention_engine.passes.ends import find_ends
from attention_engine.passes.read_places import CustomSums
from attention_engine.plan.forms import Tile

PITCH = 8  # numbers of 16 bits between the rows of a held tile: eight rows of eight then lie in different banks


@dataclass(frozen=True)
class Diagonal:
    """One of a kernel's sums along diagonals, and the factor of what is added: some number where pairs add to it."""

    summed: CustomSums
    tile: Tile
    number: int
    factor: float | None


@dataclass(frozen=True)
class Diagonals:
    """All of them, where a block adds to them: each with the factor of what is added."""

    targets: Sequence[tuple[Any, float]]
    place: Place
    sizes: Sizes


@T.macro
def sum_diagonals(of: Diagonal, maths: PairMaths, buffers: Any, source: Any) -> None:
    """Adds the sums of a tile's diagonals (keys, queries) to those of their heads.

    A lane walks down its diagonal; lanes start at different columns, so that they read different banks.
    """
    summed, tile, factor, place, sizes = of.summed, of.tile, of.factor, maths.place, maths.sizes
    q0, kv0 = maths.q0, maths.kv0
    target = buffers[f"diagonal{of.number}"]
    strip = kv0 // tile.kv if summed.ordered else 0
    for d in T.Parallel(-(-(tile.kv + tile.q) // tile.threads) * tile.threads):
        total = T.alloc_var(FLOAT)
        total = 0.0
        for i in T.serial(tile.q):
            column = (i + d) % tile.q
            row = column - d + (tile.kv - 1)
            if T.And(row >= 0, row < tile.kv):
                total = total + T.cast(source[T.max(T.min(row, tile.kv - 1), 0), column], FLOAT)
        at = q0 - kv0 + d - (tile.kv - 1) + sizes.kv - 1  # query - key + keys - 1
        if T.And(T.And(d < tile.kv + tile.q - 1, at >= 0), at < sizes.q + sizes.kv):
            if summed.ordered:
                target[place.batch, place.head, strip, at] += total * factor
            else:
                T.atomic_add(target[place.batch, place.head, strip, at], total * factor)


@T.macro
def add_to_diagonal(summed: CustomSums, target: Any, place: Place, strip: Any, at: Any, value: Any) -> None:
    """Adds to the sum of a diagonal, if there is such a one; in the same order in every run, or by an atomic."""
    if T.And(at >= 0, at < target.shape[3]):
        if summed.ordered:
            target[place.batch, place.head, strip, at] += value
        else:
            T.atomic_add(target[place.batch, place.head, strip, at], value)


class SkewedSums:
    """The same sums at a quarter of the instructions, in kernels for Hopper (`HopperKeys.skewed_sums`).

    The tile is held in shared memory, in the dtype of q. A thread walks down part of the rows, a column further in
    each, and back to the first column once: so all threads walk as far, each over two diagonals. The parts of a
    diagonal are then joined in their order. Tiles in which every read is clamped to the end of early queries, or of
    late ones, add up key by key: the block adds those sums to diagonals of the first, or last, query, which are read at
    the same entry. Each thread keeps its own part of a key's sum over all steps. Where steps take several heads in
    turn, each adds its own.
    """

    def __init__(self, summed: CustomSums, tile: Tile, heads: int, dtype: str) -> None:
        self.summed, self.tile = summed, tile
        self.parts = tile.threads // tile.q
        self.rows = -(-tile.kv // self.parts)  # that a thread walks down: no more than there are columns
        self.ends = [find_ends(read) for read, _ in summed.diagonals]
        self.clamped = all(e is not None for e in self.ends) and not tile.shared_weights  # keys whole in a warpgroup
        self.over_steps = self.clamped and heads == 1
        shape = [tile.kv, LANES] if self.over_steps else [tile.kv]
        self.far = [T.alloc_fragment(shape, FLOAT) for _ in range(2 if self.over_steps else int(self.clamped))]
        self.joined = T.alloc_fragment([tile.kv], FLOAT) if self.over_steps else None
        self.held = named("held_gradients", T.alloc_shared([tile.kv, tile.q + PITCH], dtype))
        self.walked = named("walked_sums", T.alloc_shared([2, tile.threads], FLOAT))

    def is_clamped(self, place: Place, corners: Corners, late: bool) -> Any:
        """Is every read at the end of late (or early) queries in the whole tile?"""
        past: Any = None
        for ends in self.ends:
            assert ends is not None
            one = past_end(place, ends, corners, late)
            past = one if past is None else T.And(past, one)
        return past


@T.macro
def start_sums(sums: SkewedSums) -> None:
    """Before the first step."""
    if sums.over_steps:
        for far in sums.far:
            T.fill(far, 0)


@T.macro
def hold(sums: SkewedSums, gradients: Any, place: Place, corners: Corners) -> None:
    """Before the threads meet: keeps the tile, or the sums of its keys where it is clamped."""
    if sums.clamped:
        if sums.is_clamped(place, corners, False):
            _sum_far(sums, gradients, sums.far[0])
        else:
            if sums.is_clamped(place, corners, True):
                _sum_far(sums, gradients, sums.far[-1])
            else:
                T.copy(gradients, sums.held[:, 0 : sums.tile.q])
    else:
        T.copy(gradients, sums.held[:, 0 : sums.tile.q])


@T.macro
def _sum_far(sums: SkewedSums, gradients: Any, far: Any) -> None:
    """Key by key; over steps, by as many parts as threads have."""
    if sums.over_steps:
        add_columns(far, gradients, sums.tile.kv, sums.tile.q)
    else:
        T.reduce_sum(gradients, far, dim=1, clear=True)


@T.macro
def add_held(sums: SkewedSums, into: Diagonals, corners: Corners) -> None:
    """After the threads met, so that steps add to a diagonal in turn: adds what is held."""
    if sums.clamped:
        clamped = T.Or(sums.is_clamped(into.place, corners, False), sums.is_clamped(into.place, corners, True))
        if clamped:
            if not sums.over_steps:
                (q0, kv0), _ = corners
                _add_far(sums, sums.far[0], into, q0, kv0)
        else:
            _walk(sums)
            _join(sums, into, corners)
    else:
        _walk(sums)
        _join(sums, into, corners)


@T.macro
def finish_sums(sums: SkewedSums, into: Diagonals, kv0: Any) -> None:
    """After the last step."""
    if sums.over_steps:
        T.reduce_sum(sums.far[0], sums.joined, dim=1)
        _add_far(sums, sums.joined, into, 0, kv0)
        T.reduce_sum(sums.far[1], sums.joined, dim=1)
        _add_far(sums, sums.joined, into, into.sizes.q - 1, kv0)


@T.macro
def _add_far(sums: SkewedSums, far: Any, into: Diagonals, query: Any, kv0: Any) -> None:
    """Adds the sum of each key to its diagonal with a query."""
    strip = kv0 // sums.tile.kv if sums.summed.ordered else 0
    for j in T.Parallel(sums.tile.kv):
        for target, factor in into.targets:
            add_to_diagonal(
                sums.summed, target, into.place, strip, query - kv0 - j + into.sizes.kv - 1, far[j] * factor
            )  # fmt: skip


@T.macro
def _walk(sums: SkewedSums) -> None:
    tile, rows, held = sums.tile, sums.rows, sums.held
    for d in T.Parallel(tile.threads):
        before = T.alloc_var(FLOAT)
        after = T.alloc_var(FLOAT)
        before = 0.0
        after = 0.0
        row0 = d // tile.q * rows
        column0 = d % tile.q
        for i in T.unroll(rows):
            if T.And(d < sums.parts * tile.q, row0 + i < tile.kv):
                if column0 + i < tile.q:
                    before = before + T.cast(held[row0 + i, column0 + i], FLOAT)
                else:
                    after = after + T.cast(held[row0 + i, column0 + i - tile.q], FLOAT)
        sums.walked[0, d] = before
        sums.walked[1, d] = after
    T.fence_proxy_async()  # or TileLang sets one before each step's first product, where it waits for dQ's additions
    T.sync_threads(COMPUTE, tile.threads)


@T.macro
def _join(sums: SkewedSums, into: Diagonals, corners: Corners) -> None:
    tile = sums.tile
    (q0, kv0), _ = corners
    strip = kv0 // tile.kv if sums.summed.ordered else 0
    turns = -(-tile.kv // tile.q) * tile.q  # whole rounds of columns, so that none is negative
    for d in T.Parallel(-(-(tile.kv + tile.q) // tile.threads) * tile.threads):
        total = T.alloc_var(FLOAT)
        total = 0.0
        diagonal = d - (tile.kv - 1)  # query - key in the tile
        for part in T.unroll(sums.parts):
            column0 = (diagonal + part * sums.rows + turns) % tile.q
            if diagonal == column0 - part * sums.rows:
                total = total + sums.walked[0, part * tile.q + column0]
            if diagonal == column0 - part * sums.rows - tile.q:
                total = total + sums.walked[1, part * tile.q + column0]
        if d < tile.kv + tile.q - 1:
            for target, factor in into.targets:
                at = q0 - kv0 + diagonal + into.sizes.kv - 1
                add_to_diagonal(sums.summed, target, into.place, strip, at, total * factor)
