"""What a hand-placed forward kernel is built for, and what follows from that: each choice is made here, once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, Type, topological
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.packing import QUERIES_END, number_of_sequence
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import PLACES
from attention_engine.kernels.common import Buffers, Inside, Place, Sizes, block_values, reader
from attention_engine.kernels.hopper.turns import Turns
from attention_engine.kernels.items import Item, Items, Round
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.staged import StagedReads
from attention_engine.kernels.tile_maths import of_pairs
from attention_engine.kernels.tiles import HandedList, KeyWalk, SequenceWalk, Walks
from attention_engine.kernels.warps import GROUP, WARP, Form, keeps_queries_ahead, registers, shared_bytes_left
from attention_engine.passes.drop_weights import SEED_OF_BLOCK
from attention_engine.passes.part_mask import PartedMask, part_mask
from attention_engine.passes.row_terms import reads_places_alone, terms_beside_product
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import TilePlan
from attention_engine.plan.attention_buffers import SEQUENCE_TILES, custom_shape, deals_by_counter, most_tiles
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import products_take_turns

MAKING = 40  # registers of a thread that chooses which weights are dropped
READING = 40  # and of one that reads what keys have beside the tiles that it copies
BlockValues = tuple[tuple[Expr, Expr], ...]  # variables, and what a block computes of them once


@dataclass(frozen=True)
class ForwardForm(Form):
    """A problem, its maths in order, the tile, and the walks of blocks; what the parts of a kernel ask of them."""

    problem: Problem
    schedule: ForwardSchedule
    tile: Tile
    sizes: Sizes
    plan: TilePlan
    at_once: int  # blocks that the GPU runs at once, of a persistent form
    unfinished: bool = False  # is the output stored in fp32, as it was summed?

    @cached_property
    def blocks(self) -> Any:
        """How many blocks of queries a head has."""
        return T.ceildiv(self.sizes.q, self.tile.q)

    @cached_property
    def items(self) -> Items:
        """The work items, of a persistent form."""
        if self.within_sequences:
            most = self.sizes.spell(most_tiles(self.tile, custom_shape(self.problem, PLACES)[0]))
            return Items(self.problem, self.tile, self.sizes, True, self.at_once, most)
        items = Items(self.problem, self.tile, self.sizes, self.plan.later_is_longer, self.at_once)
        return items.counted() if self.counts_items else items

    @property
    def counts_items(self) -> bool:
        """Does a counter deal the items of persistent blocks? Lists of tiles differ in length, in no known order."""
        return deals_by_counter(self.plan, self.tile, True)

    @property
    def within_sequences(self) -> bool:
        """Of packed sequences, is each block of queries of one? A block is then told by its first row."""
        return self.tile.within_sequences

    def items_of(self, buffers: Buffers) -> Items:
        """The same in the kernel, where a list may say how many blocks there are."""
        return self.items.of(name_value(buffers[SEQUENCE_TILES][0, 0])) if self.within_sequences else self.items

    def dealt(self, buffers: Buffers, block: Any, head: Any, batch: Any) -> tuple[Any, Any, Any]:
        """A block that was dealt, its head and b, as they are noted: a block by its number, or by its first row."""
        if not self.within_sequences:
            return block, head, batch
        listed = buffers[SEQUENCE_TILES]
        return name_value(listed[block + 1, 1]), head, name_value(listed[block + 1, 0])

    def first_query(self, block: Any) -> Any:
        """The first query of a block."""
        return block if self.within_sequences else block * self.tile.q

    def item(self, buffers: Buffers, block: Any, head: Any, b: Any, steps: Any, q0: Any, of: Round) -> Item:
        """The item of a block as it is noted."""
        if not self.within_sequences:
            return Item(block, head, b, steps, q0, of)
        last = Place(b, 0, {}, reader(buffers)).splice(None, None, {})(number_of_sequence(QUERIES_END))[0]
        return Item(block, head, 0, steps, q0, of, b, name_value(last))

    @cached_property
    def queries_ahead(self) -> bool:
        """Does a warp of its own bring the next item's queries while the present ones are used?"""
        return self.tile.queries_ahead and keeps_queries_ahead(self.problem, self.tile)

    @cached_property
    def drops_apart(self) -> bool:
        """Does a group of its own choose which weights are dropped (chances.py)?"""
        return self.tile.drops_apart

    @cached_property
    def threads(self) -> int:
        """The threads of a block: those that copy, those that compute, those that choose."""
        return GROUP + self.tile.threads + GROUP * self.drops_apart

    @cached_property
    def registers(self) -> tuple[int, int]:
        """Of a copying thread, and of a computing one."""
        making, blocks = MAKING * self.drops_apart, self.blocks_of_an_sm
        if self.parted is None or not self.parted.of_keys:
            return registers(self.tile.threads, making=making, blocks=blocks)
        copying = READING if self.tile.threads <= 2 * GROUP else READING - 8  # of which computing ones take as many
        return registers(self.tile.threads, copying, making, blocks)

    @property
    def blocks_of_an_sm(self) -> int:
        """How many blocks share an SM: two where each has one warpgroup, whose products then run beside the other's
        exponentials."""
        return 2 if self.tile.threads == GROUP else 1

    @cached_property
    def takes_turns(self) -> bool:
        """Do warpgroups issue the products of a step in turns?"""
        several = self.tile.threads > GROUP
        return several and (self.tile.threads > 2 * GROUP or products_take_turns(self.schedule))

    @cached_property
    def turns(self) -> Turns:
        """How the warpgroups are kept apart."""
        return Turns(self.tile.threads // GROUP, self.takes_turns)

    @cached_property
    def waits_early(self) -> bool:
        """Does a step wait for the output of the step before when it has its row maxima, not when it has weights?"""
        factors_are_early = self.schedule.rescale is None or self.schedule.rescales_early
        groups_wait = self.tile.threads == 2 * GROUP or self.tile.woven
        return self.takes_turns and groups_wait and factors_are_early

    @cached_property
    def weighs_first(self) -> bool:
        """Is what a step works out before it waits for the output of the step before held there? Else ptxas sets most
        special functions behind that wait. Groups that start apart gain by it where rows hold nothing: on an H100
        packed sigmoid 580 to 618 TFLOP/s. Softcap's softmax lost 3 %."""
        return self.takes_turns or (self.tile.threads > GROUP and self.schedule.rescale is None)

    @cached_property
    def seen(self) -> Expr | None:
        """Which keys anybody sees."""
        return key_condition(self.schedule.mask)

    @cached_property
    def _added(self) -> Expr | None:
        """What a score adds to its product, if that is known before the product is."""
        return terms_beside_product(self.schedule.score)

    @cached_property
    def starts_ahead(self) -> bool:
        """Do tiles of scores start with what is added to products, written while a group waits for its turn? Not where
        that asks for the tile's index and a list says it: the next one isn't known so early."""
        return self._added is not None and (reads_places_alone(self._added) or not self.plan.mapped)

    @cached_property
    def starts_by_index(self) -> bool:
        """Does what they start with ask which keys the tile has?"""
        return self.starts_ahead and self._added is not None and not reads_places_alone(self._added)

    @cached_property
    def values_of_start(self) -> BlockValues:
        """Those values of a block that the scores read, and so what tiles start with."""
        schedule = self.schedule
        ends = (schedule.ends.below, schedule.ends.above) if schedule.ends else ()
        return self.values_of(schedule.score, *ends)

    def values_of(self, *exprs: Expr) -> BlockValues:
        """Those values of a block that some expressions read."""
        read = topological(*exprs)
        return tuple((v, e) for v, e in self.schedule.block if v in read)

    @cached_property
    def parted(self) -> PartedMask | None:
        """The mask, parted in what its query and its key read, where memory has room for what keys read. Where a mask
        is no fill of scores, it is asked of all tiles, wherever the maths says."""
        parted = None if self.schedule.fill is None else part_mask(self.schedule.mask)
        if parted is None:
            return None
        numbers = sum(2 if v.dtype is Type.LONG else 1 for v, _ in parted.of_keys)
        wanted = 4 * numbers * self.places_of_keys * self.width_of_keys
        return parted if wanted <= shared_bytes_left(self.problem, self.tile, self.blocks_of_an_sm) else None

    @property
    def places_of_keys(self) -> int:
        """How many tiles' values of keys there is room for: a power of two, and more than keys have stages."""
        return 1 << self.tile.stages.bit_length()

    @property
    def width_of_keys(self) -> int:
        """How many keys of a tile a warp reads: each lane as many."""
        return -(-self.tile.kv // WARP) * WARP

    @cached_property
    def values_of_chances(self) -> BlockValues:
        """The seed, of the values of a block."""
        return tuple((v, e) for v, e in self.schedule.block if v is SEED_OF_BLOCK)

    def walk(self, buffers: Buffers, batch: Any, head: Any, block: Any, handed: HandedList | None = None) -> KeyWalk:
        """The walk of a block of queries over tiles of keys; handed: by a list that another warp reads."""
        walks = Walks(self.plan, self.problem, self.sizes, self.tile)
        if self.within_sequences:
            return SequenceWalk(walks, buffers, batch, block)
        return KeyWalk(walks, buffers, batch, head, block, handed)

    def place_of(self, buffers: Buffers, item: Item, block: BlockValues) -> Place:
        """Where an item's pairs are, with these of its block's values.

        What tiles start with is read without guards. A mask keeps them: without, ptxas spills in its few tiles.
        """
        read = reader(buffers, self.known_of(item) if self.starts_by_index else ())
        values = block_values(block, item.b, item.head, read)
        return Place(item.b, item.head, values, read, self.problem.approximate)

    def known_of(self, item: Item) -> Inside:
        """An item's batch and head, of which reads need no guard. Of packed sequences, which are one batch, a call says
        how many there are, and rows behind the last one have the number after it."""
        known = self.sizes.inside(self.problem, item.b, item.head)
        if self.within_sequences:
            take_for_granted(item.b >= 0)
            known = known[1:]
        for index, length in known:
            take_for_granted(T.And(index >= 0, index < length))
        return known

    def no_staged_reads(self) -> StagedReads:
        """No bias of pairs is staged: problems that have one run the twin of this kernel."""
        return StagedReads(of_pairs(self.schedule), self.problem, self.tile)
