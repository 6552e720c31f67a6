"""The tiles, registers and barriers of a Hopper backward block over keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import FLOAT, named
from attention_engine.kernels.diagonals import SkewedSums
from attention_engine.kernels.hopper.barriers import Ring
from attention_engine.kernels.hopper.chances import Chances
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.keys.items import NOTES, Notes
from attention_engine.kernels.hopper.keys.order import Order
from attention_engine.kernels.hopper.keys.pair_operands import PairOperands, operands_of
from attention_engine.kernels.hopper.keys.spare_warps import SpareMemory
from attention_engine.kernels.key_sums import KeySum, key_sums_of
from attention_engine.kernels.warps import TMA_FLOATS, WARP


@dataclass(frozen=True)
class Results:
    """What a block adds up, in registers: dK and dV over all steps, a step's dQ, and sums for custom inputs."""

    dk: Any
    dv: Any
    dq: Any
    skewed: SkewedSums | None
    key_sums: list[KeySum]

    @staticmethod
    def allocate(form: KeyForm) -> Results:
        """Made in the kernel."""
        tile, summed = form.tile, form.summed
        return Results(
            dk=named("dk", T.alloc_fragment([tile.kv, form.dim], FLOAT)),
            dv=named("dv", T.alloc_fragment([tile.kv, form.dim_v], FLOAT)),
            dq=named("dq", T.alloc_fragment(form.dq_shape, FLOAT)) if form.with_dq else None,
            skewed=SkewedSums(summed, tile, form.problem.group, form.problem.dtype) if form.skews else None,
            key_sums=key_sums_of(form.problem, tile, summed),
        )


@dataclass(frozen=True)
class KeyMemory:
    """All of it.

    keys and values come once an item, queries and gradients of the output (dO) once a step; rows: rows of numbers by
    name, which come with either of those. added: a barrier for each item that may be noted, since the warp that waits
    for one may be late by an item: the block has added all to dQ. entries: of a list, one for each stage. entries and
    item_notes: of a persistent block alone.
    """

    keys: Ring
    values: Ring
    queries: Ring
    output_gradients: Ring
    rows: dict[str, Any]
    pairs: PairOperands
    results: Results
    added: Any
    spare: SpareMemory
    entries: Any
    item_notes: Notes | None
    order: Order | None  # where blocks add to dQ one after another
    chances: Chances | None  # where a group of its own chooses which weights are dropped

    @property
    def notes(self) -> Notes:
        """The notes of a persistent block."""
        assert self.item_notes is not None, "the blocks of a grid note no items"
        return self.item_notes

    @staticmethod
    def allocate(form: KeyForm) -> KeyMemory:
        """Made in the kernel."""
        tile, stages, dtype, persistent = form.tile, form.tile.stages, form.problem.dtype, form.persistent
        k = named("k", T.alloc_shared([tile.kv, form.dim], dtype))
        v = named("v", T.alloc_shared([tile.kv, form.dim_v], dtype))
        q = named("q_tile", T.alloc_shared([stages, tile.q, form.dim], dtype))
        do = named("do_tile", T.alloc_shared([stages, tile.q, form.dim_v], dtype))
        row_length = -(-tile.q // TMA_FLOATS) * TMA_FLOATS
        rows = {n: named(f"{n}_tile", T.alloc_shared([stages, row_length], FLOAT)) for n in form.row_names}
        pairs, results = operands_of(form, rows), Results.allocate(form)
        k_full = named("k_full", T.alloc_barrier(arrive_count=WARP))
        v_full = named("v_full", T.alloc_barrier(arrive_count=WARP))
        k_empty = named("k_empty", T.alloc_barrier(arrive_count=form.leaders)) if persistent else None
        v_empty = named("v_empty", T.alloc_barrier(arrive_count=form.leaders)) if persistent else None
        queries = Ring(q, *_barriers(form, "q"))
        output_gradients = Ring(do, *_barriers(form, "do"))
        items_noted = NOTES if persistent else 1
        added = named("added", T.alloc_barrier(arrive_count=[1] * items_noted)) if form.with_dq else None
        return KeyMemory(
            keys=Ring(k, k_full, k_empty), values=Ring(v, v_full, v_empty), queries=queries,
            output_gradients=output_gradients, rows=rows, pairs=pairs, results=results, added=added,
            spare=SpareMemory.allocate(form),
            entries=named("entries", T.alloc_shared([stages], "int32")) if persistent and form.plan.mapped else None,
            item_notes=Notes(tile) if persistent else None, order=Order.allocate(form),
            chances=Chances.allocate(tile, tile.q),
        )  # fmt: skip


def _barriers(form: KeyForm, name: str) -> tuple[Any, Any]:
    """The barriers of what comes in stages: full and empty."""
    full = named(f"{name}_full", T.alloc_barrier(arrive_count=[WARP] * form.tile.stages))
    return full, named(f"{name}_empty", T.alloc_barrier(arrive_count=[form.warps] * form.tile.stages))
