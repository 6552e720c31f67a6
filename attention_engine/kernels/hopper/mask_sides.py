"""A mask in parts: what it reads by its query alone, or its key alone, once a row, and once a key of a tile.

Were they read pair by pair, each read would wait behind the branch of its guard, and each key's would be made by all
threads that have a pair of it. A row's values are read when its item begins, into registers. A key's come with the keys
of a partial tile: the copying warp reads them while the keys are on their way, and stores them in shared memory before
it says that these are there.

Keys are handed back before their tile's mask is asked, so that values of keys have one place more than keys have
stages, at least: when a warp hands the keys of a step back, it is done with the mask of the step before.

Up to which key a row sees, and from which on, is worked out once a row, as places in the tile. A pair compares a
constant with it, in a warp that has a row which these cut; other warps ask the rest of the mask alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bind
from functools import reduce
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, Type
from attention_engine.kernels.common import Buffers, Place, block_values, named, over_rows, reader, store
from attention_engine.kernels.hopper.forward_form import ForwardForm
from attention_engine.kernels.items import Item
from attention_engine.kernels.splice import both
from attention_engine.kernels.tile_maths import TileMaths
from attention_engine.kernels.warps import WARP
from attention_engine.passes.part_mask import PartedMask
from attention_engine.plan.forms import Tile

HELD = {Type.BOOL: "int32", Type.INT: "int32", Type.LONG: "int64", Type.FLOAT: "float32"}
Parts = tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True)
class MaskSides:
    """The values of rows in registers, and those of keys in shared memory, by their variables; made in the kernel."""

    form: ForwardForm
    parted: PartedMask
    rows: dict[Expr, Any]
    keys: dict[Expr, Any]
    first: Any  # the place in a tile of the first key that each row sees, by the limits (None: there are none)
    last: Any  # and of the last

    @staticmethod
    def allocate(form: ForwardForm, scope: str) -> MaskSides | None:
        """Room for them, in this kind of shared memory; None where the mask asks for none."""
        parted = form.parted
        if parted is None:
            return None
        size = [form.places_of_keys, form.width_of_keys]
        rows = {v: T.alloc_fragment([form.tile.q], HELD[v.dtype]) for v, _ in parted.of_queries}
        keys = {v: T.alloc_shared(size, HELD[v.dtype], scope) for v, _ in parted.of_keys}
        for side, of_side in (("rows", rows), ("keys", keys)):
            for variable, buffer in of_side.items():
                named(f"{variable.name}_of_{side}", buffer)
        first = named("first_seen", T.alloc_fragment([form.tile.q], "int32")) if parted.first else None
        last = named("last_seen", T.alloc_fragment([form.tile.q], "int32"))
        return MaskSides(form, parted, rows, keys, first, last)

    def read_rows(self, buffers: Buffers, item: Item) -> None:
        """A thread reads what its rows have."""
        parts = self.parted.of_queries
        if not parts:
            return
        place = _place_of(self.form, buffers, item, parts)

        def entry(i: Any) -> None:
            values = place.splice(item.q0 + i, None, {})(*(e for _, e in parts))
            for (variable, _), value in zip(parts, values, strict=True):
                store(self.rows[variable], _held(variable, value), i)

        over_rows(self.form.tile.q, entry)

    def bring_keys(self, buffers: Buffers, item: Item, kv0: Any, step: Any) -> None:
        """The copying warp reads what the keys from kv0 on have, for a step."""
        parts = self.parted.of_keys
        place = _place_of(self.form, buffers, item, parts)
        _bring(self, place, parts, kv0, self._slot(item, step))

    def mask(self, maths: TileMaths, item: Item, step: Any, kv0: Any) -> None:
        """Masked pairs of a step's tile, from the key kv0 on, hold the fill."""
        slot, rest, first = self._slot(item, step), self.parted.rest, self.first
        asked = [] if rest is None else [rest]

        def of_row(i: Any) -> dict[Expr, Any]:
            return {v: _value(v, held[i]) for v, held in self.rows.items()}

        def limit(i: Any) -> None:
            splice = maths.place.splice(item.q0 + i, None, of_row(i))
            lasts = [self.form.sizes.kv - 1, *splice(*self.parted.last)]
            store(self.last, reduce(T.min, lasts) - kv0, i)
            if first is not None:
                store(first, reduce(T.max, splice(*self.parted.first)) - kv0, i)

        def holds(place: Place, i: Any, j: Any) -> Any:
            keys = {v: _value(v, held[slot, j]) for v, held in self.keys.items()}
            return place.splice(item.q0 + i, kv0 + j, {**of_row(i), **keys})(*asked)[0]

        def keep(place: Place, i: Any, j: Any) -> Any:
            of_register, of_thread = j // 8 * 8 + j % 2, j % 8 // 2 * 2
            kept = of_register <= self.last[i] - of_thread
            if first is not None:
                kept = both(kept, of_register >= first[i] - of_thread)
            return kept if rest is None else both(kept, holds(place, i, j))

        over_rows(self.form.tile.q, limit)
        within = None if rest is None else bind(maths.fill_unless, kv0, asked, holds)
        _where_limits_cut(self.form.tile, self.last, first, bind(maths.fill_unless, kv0, asked, keep), within)

    def _slot(self, item: Item, step: Any) -> Any:
        return item.round.stage(step, self.form.places_of_keys)[0]


def _held(variable: Expr, value: Any) -> Any:
    return T.cast(value, HELD[variable.dtype])


def _value(variable: Expr, held: Any) -> Any:
    return held != 0 if variable.dtype is Type.BOOL else held


def _place_of(form: ForwardForm, buffers: Buffers, item: Item, parts: Parts) -> Place:
    read = reader(buffers, form.known_of(item))
    values = block_values(form.values_of(*(e for _, e in parts)), item.b, item.head, read)
    return Place(item.b, item.head, values, read, form.problem.approximate)


@T.macro
def _where_limits_cut(
    tile: Tile, last: Any, first: Any | None, then: Callable[[], None], otherwise: Callable[[], None] | None
) -> None:  # fmt: skip
    """then(), where a warp has a row that sees not all of a tile's keys by its limits; or else the other."""
    cuts = T.alloc_var("bool")
    cuts = False
    for i in T.Parallel(tile.q):
        cuts = T.Or(cuts, last[i] < tile.kv - 1)
        if first is not None:
            cuts = T.Or(cuts, first[i] > 0)
    if otherwise is None:  # Python's condition, then the kernel's
        if T.any_sync(cuts) != 0:
            then()
    else:
        if T.any_sync(cuts) != 0:
            then()
        else:
            otherwise()


@T.macro
def _bring(sides: MaskSides, place: Place, parts: Parts, kv0: Any, slot: Any) -> None:
    for n in T.unroll(sides.form.width_of_keys // WARP):
        for lane in T.Parallel(WARP):
            values = place.splice(None, kv0 + (n * WARP + lane), {})(*(e for _, e in parts))
            for (variable, _), value in zip(parts, values):
                store(sides.keys[variable], _held(variable, value), slot, n * WARP + lane)
