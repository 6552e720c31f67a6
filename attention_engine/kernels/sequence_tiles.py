"""Lists the tiles of packed sequences, each of which lies in one: of queries those with the fewest steps first.

A sequence has a run of slots, as many as its tiles or one more: it begins at (its first row // the tile's queries +
its number), which needs no sum over the sequences before it. One block finds the sequence of each slot by bisection,
and sorts the slots that hold a tile by their steps, in CLASSES classes: persistent blocks are dealt the longest first.
Tiles of keys stay in memory's order, so that blocks which run together share queries.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.packing import FIRST_QUERY, KEYS_END, KEYS_START, QUERIES_END
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import PLACES
from attention_engine.kernels.common import Sizes, build, store
from attention_engine.kernels.packed_tables import last_that
from attention_engine.kernels.tiles import SequenceWalk, Walks
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.attention_buffers import KEY_TILES, SEQUENCE_TILES
from attention_engine.plan.forms import Tile

CLASSES = 128  # of steps: what has about as many is not told apart
TOGETHER = 512  # slots that are looked at together, one a thread
NO_TILE = -1  # the class of a slot that holds none


def sequence_tiles(problem: Problem, mask: Expr, tile: Tile) -> Any:
    """The PrimFunc: (query length, key length, numbers of sequences, sequence_tiles)."""
    sizes = Sizes(problem)
    parameters = sizes.declare(attention_buffers.list_sequence_tiles(problem, tile))
    walks = Walks(plan_tiles(mask), problem, sizes, tile)

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(1, threads=TOGETHER):
            classes = T.alloc_shared([TOGETHER], "int32")
            counts = T.alloc_shared([CLASSES], "int32")
            begins = T.alloc_shared([CLASSES], "int32")
            last = buffers[f"custom_{PLACES}"].shape[0] - 1
            slots = T.floordiv(sizes.q, tile.q) + last + 1
            for c in T.Parallel(CLASSES):
                counts[c] = 0
            for turn in T.serial(T.ceildiv(slots, TOGETHER)):
                classify(walks, buffers, turn * TOGETHER, slots, last, classes)
                add_counts(classes, slots - turn * TOGETHER, counts)
            for c in T.Parallel(CLASSES):
                before = T.alloc_var("int32")
                before = 0
                for other in T.serial(c):
                    before = before + counts[other]
                begins[c] = before
                if c == CLASSES - 1:
                    store(buffers[SEQUENCE_TILES], before + counts[c], 0, 0)
            for turn in T.serial(T.ceildiv(slots, TOGETHER)):
                classify(walks, buffers, turn * TOGETHER, slots, last, classes)
                write(walks, buffers, turn * TOGETHER, last, classes, begins)
                add_counts(classes, slots - turn * TOGETHER, begins)

    return build("sequence_tiles", parameters, body)


def find_sequence(places: Any, slot: Any, last: Any, tile_q: int) -> Any:
    """The sequence that a slot belongs to."""
    return last_that(lambda n: T.floordiv(places[n, FIRST_QUERY], tile_q) + n <= slot, last)


@T.macro
def classify(walks: Walks, buffers: Any, first: Any, slots: Any, last: Any, classes: Any) -> None:
    """The classes of slots, by the steps of their tiles."""
    places, tile_q = buffers[f"custom_{PLACES}"], walks.tile.q
    most = T.ceildiv(walks.sizes.kv, walks.tile.kv)
    for n in T.Parallel(TOGETHER):
        classes[n] = NO_TILE
        if first + n < slots:
            sequence = find_sequence(places, first + n, last, tile_q)
            q0 = first_query(places, first + n, sequence, tile_q)
            if q0 < places[sequence, QUERIES_END]:
                walk = SequenceWalk(walks, buffers, sequence, q0)
                classes[n] = T.truncdiv(walk.count * (CLASSES - 1), T.max(most, 1))


def first_query(places: Any, slot: Any, sequence: Any, tile_q: int) -> Any:
    """The first query of a slot's tile."""
    begin = places[sequence, FIRST_QUERY]
    return begin + (slot - T.floordiv(begin, tile_q) - sequence) * tile_q


@T.macro
def add_counts(classes: Any, slots: Any, counts: Any) -> None:
    """Adds to each class how many of these slots are of it."""
    for c in T.Parallel(CLASSES):
        found = T.alloc_var("int32")
        found = 0
        for n in T.serial(T.min(slots, TOGETHER)):
            found = found + T.if_then_else(classes[n] == c, 1, 0)
        counts[c] = counts[c] + found


@T.macro
def write(walks: Walks, buffers: Any, first: Any, last: Any, classes: Any, begins: Any) -> None:
    """Writes the tiles of slots, each class from where it begins on."""
    places, tile_q, listed = buffers[f"custom_{PLACES}"], walks.tile.q, buffers[SEQUENCE_TILES]
    for n in T.Parallel(TOGETHER):
        if classes[n] != NO_TILE:
            rank = T.alloc_var("int32")
            rank = begins[classes[n]]
            for other in T.serial(n):
                rank = rank + T.if_then_else(classes[other] == classes[n], 1, 0)
            sequence = find_sequence(places, first + n, last, tile_q)
            listed[rank + 1, 0] = sequence
            listed[rank + 1, 1] = first_query(places, first + n, sequence, tile_q)


def key_tiles(problem: Problem, tile: Tile) -> Any:
    """The PrimFunc: (key length, numbers of sequences, key_tiles)."""
    sizes = Sizes(problem)
    parameters = sizes.declare(attention_buffers.list_key_tiles(problem, tile))

    @T.macro
    def body(buffers: Any) -> None:
        with T.Kernel(1, threads=TOGETHER):
            holds = T.alloc_shared([TOGETHER], "int32")
            before = T.alloc_var("int32")
            before = 0
            places, listed = buffers[f"custom_{PLACES}"], buffers[KEY_TILES]
            last = places.shape[0] - 1
            slots = T.floordiv(sizes.kv, tile.kv) + last + 1
            for turn in T.serial(T.ceildiv(slots, TOGETHER)):
                for n in T.Parallel(TOGETHER):
                    holds[n] = 0
                    if turn * TOGETHER + n < slots:
                        found = KeySlot(places, turn * TOGETHER + n, last, tile.kv, sizes.kv)
                        holds[n] = T.if_then_else(found.first < found.end, 1, 0)
                for n in T.Parallel(TOGETHER):
                    if holds[n] == 1:
                        rank = T.alloc_var("int32")
                        rank = before
                        for other in T.serial(n):
                            rank = rank + holds[other]
                        found = KeySlot(places, turn * TOGETHER + n, last, tile.kv, sizes.kv)
                        listed[rank + 1, 0] = found.sequence
                        listed[rank + 1, 1] = found.first
                        listed[rank + 1, 2] = found.end
                for other in T.serial(TOGETHER):
                    before = before + holds[other]
            if T.get_thread_binding() == 0:
                listed[0, 0] = before

    return build("key_tiles", parameters, body)


class KeySlot:
    """A slot of tiles of keys: its sequence, its first key, and one past its sequence's last."""

    def __init__(self, places: Any, slot: Any, last: Any, tile_kv: int, keys: Any) -> None:
        self.sequence = last_that(lambda n: T.floordiv(0 - places[n, KEYS_START], tile_kv) + n <= slot, last)
        begin = 0 - places[self.sequence, KEYS_START]
        self.first = begin + (slot - T.floordiv(begin, tile_kv) - self.sequence) * tile_kv
        self.end = T.if_then_else(self.sequence < last, places[self.sequence, KEYS_END], keys)
