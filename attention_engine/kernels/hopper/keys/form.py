"""What a hand-placed kernel over keys is built for, and what follows from that: each choice is made here, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attention_engine.ir.expr import Axis, Expr, topological
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import STARTS, Backward, is_start, row_variable
from attention_engine.kernels.apart import Halves, Ring
from attention_engine.kernels.bounds import NO_NUMBERS
from attention_engine.kernels.common import Buffers, Sizes
from attention_engine.kernels.items import KeyBlocks
from attention_engine.kernels.pair_maths import factor_of
from attention_engine.kernels.tiles import HandedQueries, QueryWalk, SequenceQueryWalk, Walks
from attention_engine.kernels.warps import COLUMNS_SHARED, GROUP, ROWS_WHOLE, WARP, Form, registers
from attention_engine.kernels.workspace import transposes_dq
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.schedule import BackwardSchedule, keeps_products
from attention_engine.passes.tile_plan import TilePlan
from attention_engine.plan.attention_buffers import APART
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import (
    makes_delta,
    may_start_apart,
    rows_of_delta,
    vanishes_with_weights,
    walks_by_heads,
)

COPYING, COPYING_LISTS = 24, 40  # registers of a copying thread; more where persistent blocks read lists
CHOOSING = 40  # registers of a thread that chooses which weights are dropped


@dataclass(frozen=True)
class KeyForm(Form):
    """A problem, its maths in order, the tile, and the walks of blocks; what the parts of a kernel ask of them.

    rows: the rows of numbers that pairs read. summed: the sums that make gradients of custom inputs. with_dq: do blocks
    add to dQ? vectors: are four sums of dQ added at once? wide: are dK and dV fp32?
    """

    problem: Problem
    schedule: BackwardSchedule
    rows: Backward
    tile: Tile
    sizes: Sizes
    plan: TilePlan
    blocks: KeyBlocks
    summed: CustomSums
    with_dq: bool
    vectors: bool
    wide: bool = False

    @cached_property
    def persistent(self) -> bool:
        """Do blocks walk over items?"""
        return self.blocks.at_once > 0

    @cached_property
    def prepares(self) -> bool:
        """Do blocks prepare for later ones? Where they add to dQ in order, they make delta at most."""
        return self.with_dq and (not self.tile.in_order or self.delta is not None)

    @cached_property
    def apart(self) -> Ring | Halves | None:
        """Where blocks of a head start their walks, if they may start apart."""
        if not (self.with_dq and may_start_apart(self.problem, self.tile, self.plan)):
            return None
        number, blocks = self.sizes.variable(APART), self.blocks.blocks
        return Halves(number, blocks, self.problem.group) if self.blocks.alternates else Ring(number, blocks)

    @cached_property
    def names_while_copying(self) -> bool:
        """Where blocks add to dQ in order, does the copying warp write their names on tickets? The thread that looks at
        tickets would else write a step's name, which takes 1.2 us, before it looks at the next one. On an H100, heads
        that alternate: up to 3 % faster. Where all blocks meet the same tiles, one after another, 4 to 6 % slower: a
        name is written some 0.2 us later, and each block's start waits for all names before."""
        return self.tile.in_order and self.blocks.alternates

    @cached_property
    def leaders(self) -> int:
        """How many threads begin the copies by which dK and dV leave: a warp of each warpgroup."""
        return self.tile.threads // GROUP * WARP

    @cached_property
    def threads(self) -> int:
        """The threads of a block: those that copy, those that compute, those that choose which weights are dropped."""
        return GROUP + self.tile.threads + GROUP * self.tile.drops_apart

    @cached_property
    def registers(self) -> tuple[int, int]:
        """Of a copying and of a computing thread."""
        lists = self.plan.mapped or self.within
        copying = COPYING_LISTS if self.persistent and lists else COPYING
        return registers(self.tile.threads, copying, CHOOSING * self.tile.drops_apart)

    @cached_property
    def crosses(self) -> bool:
        """Is a step's dK on its way while the next step begins? Of packed sequences, and of listed blocks of keys that
        warpgroups share, whose operands lie in shared memory anyway. Where pairs keep their products beside the
        weights, registers are too few for it."""
        listed = self.tile.shared_weights and self.plan.blocks is not None
        return (self.within or listed) and self.is_light

    @cached_property
    def hides_additions(self) -> bool:
        """Do additions to dQ leave while the next step begins, too: does nothing that its first products need wait for
        them?"""
        return self.crosses and self.within

    @cached_property
    def issues_dv_early(self) -> bool:
        """Is a step's dV issued before threads meet? Its operand is a thread's own, and it is made while they wait for
        one another. On an H100, head dims 64 and 128, full and causal: 1 to 4 % faster."""
        return self.hides_additions or (self.is_plain_grid and self.dims in ((64, 64), (128, 128)))

    @cached_property
    def shares_behind_dv(self) -> bool:
        """Do gradients go to shared memory once dV is issued? dV reads none of it: what is stored before it takes a
        fence before it, beside the one that dQ takes. H100, head dim 128: 1 to 4 % faster; 64: 1 to 2 % slower."""
        early = self.issues_dv_early and not self.hides_additions
        return early and self.shares_gradients and self.dims == (128, 128)

    @cached_property
    def holds_early_rows(self) -> bool:
        """Does the row that a step's weights read come to registers before the additions to dQ of the step before? Its
        loads would else stand behind those in the same queue, and the weights wait for them. On an H100, head dim 128:
        1 % fewer cycles; 64: 2 % more. With two query heads a key head and walks that turn, products would wait for one
        another (ptxas C7512)."""
        crowded = self.problem.group == 2 and (self.blocks.turn is not None or self.blocks.alternates)
        return self.has_few_rows and self.dims == (128, 128) and len(self.early_rows) == 1 and not crowded

    @cached_property
    def has_few_rows(self) -> bool:
        """Are there registers for rows of numbers? Where a mask has one bound at most and pairs read no custom inputs
        but where queries and keys start: others' products would wait for registers (ptxas C7512)."""
        read = any(name != STARTS for name, *_ in self.problem.custom)
        return self.is_plain_grid and not (self.plan.mapped or read or len(self.plan.bounds.bounds) > 1)

    @cached_property
    def holds_late_rows(self) -> bool:
        """Does the row that gradients of products read come to registers while those of weights are made? On an H100,
        head dim 128: 1 to 2 % faster; rows that weights read lose 5 to 10 % by it."""
        return self.has_few_rows and self.dims == (128, 128) and len(self.late_rows) == 1

    @cached_property
    def is_plain_grid(self) -> bool:
        """Are blocks those of a grid, whose warpgroups have keys of their own, of light maths?"""
        return not (self.persistent or self.tile.shared_weights) and self.is_light

    @cached_property
    def is_light(self) -> bool:
        """Do pairs keep neither their products beside the weights, nor weights to drop some of, and make dQ?"""
        return self.with_dq and not keeps_products(self.schedule) and self.schedule.dropped is None

    @property
    def dims(self) -> tuple[int, int]:
        """Of queries and of values."""
        return self.problem.dim, self.problem.dim_v

    @property
    def within(self) -> bool:
        """Of packed sequences, is each block of keys of one? A block is then told by its first row."""
        return self.tile.within_sequences

    @cached_property
    def row_names(self) -> list[str]:
        """The rows of numbers that come with queries or with their gradients."""
        return [name for name, _ in self.rows.rows]

    @cached_property
    def early_rows(self) -> list[str]:
        """Those that weights are made of: they come with the queries."""
        schedule = self.schedule
        exprs = (schedule.weights,) if schedule.mask is None else (schedule.weights, schedule.mask)
        wanted = topological(*exprs)
        return [name for name in self.row_names if row_variable(name) in wanted]

    @cached_property
    def late_rows(self) -> list[str]:
        """The others: they come with the gradients of the output."""
        return [name for name in self.row_names if name not in self.early_rows]

    @cached_property
    def delta(self) -> tuple[str, Expr] | None:
        """The row that delta is needed for, if blocks make it for later ones."""
        if self.with_dq and makes_delta(self.problem, self.rows, self.schedule, self.summed, self.tile):
            return rows_of_delta(self.rows)[0]
        return None

    @cached_property
    def transposes_dq(self) -> bool:
        """Is dQ held as (dim, queries)?"""
        return transposes_dq(self.tile, self.dim)

    @cached_property
    def dq_shape(self) -> tuple[int, int]:
        """Of a tile's dQ."""
        return (self.dim, self.tile.q) if self.transposes_dq else (self.tile.q, self.dim)

    @cached_property
    def dq_policy(self) -> Any:
        """How warpgroups share a tile's dQ, where it is held as (queries, dim)."""
        return ROWS_WHOLE if self.tile.q == self.tile.threads // 2 else COLUMNS_SHARED

    @cached_property
    def policy(self) -> Any:
        """How warpgroups share the other products: each has keys of its own, or they share keys."""
        return COLUMNS_SHARED if self.tile.shared_weights else ROWS_WHOLE

    @cached_property
    def factors(self) -> list[float]:
        """What the gradients of products are multiplied with in each sum of diagonals."""
        factors = [factor_of(self.schedule, expr) for _, expr in self.summed.diagonals]
        return [factor for factor in factors if factor is not None]  # plan/hopper.py asks for it: all are

    @cached_property
    def skews(self) -> bool:
        """Are diagonals summed by walks over a copy of the tile (diagonals.py)?"""
        return self.tile.skewed_sums and len(self.summed.diagonals) > 0

    @cached_property
    def shares_gradients(self) -> bool:
        """Do all threads read the gradients of products, for dQ or for sums of diagonals?"""
        return self.with_dq or len(self.summed.diagonals) > 0

    @cached_property
    def gradients_vanish(self) -> bool:
        """Is the gradient of a product 0 where its weight is?"""
        return vanishes_with_weights(self.schedule)

    @cached_property
    def seen(self) -> Expr | None:
        """Which keys anybody sees."""
        return key_condition(self.schedule.mask)

    @cached_property
    def only_head(self) -> bool:
        """Has a block's key head one query head? What that head's block values are is then known before a step."""
        return self.problem.group == 1

    @cached_property
    def of_heads(self) -> list[tuple[Expr, Expr]]:
        """The values of a block that its query heads share, known before its steps. Of several heads of a part these
        are starts that pairs read: a step's reads would stand behind the additions of the step before, in the same
        queue. Where pairs read more, registers are too few."""
        if self.only_head:
            return list(self.schedule.block)
        shared = [(v, e) for v, e in self.schedule.block if Axis.HEAD not in e.axes]
        early = self.of_pairs if self.has_few_rows else ()
        return shared if self.within else [(v, e) for v, e in shared if is_start(e) and v in early]

    @cached_property
    def of_steps(self) -> list[tuple[Expr, Expr]]:
        """The values of a block that each step makes, for its head. Starts that a mask alone reads are none of them:
        they are read where a partial tile asks for them."""
        before = dict(self.of_heads)
        return [(v, e) for v, e in self.schedule.block if v not in before and (v in self.of_pairs or not is_start(e))]

    @cached_property
    def of_pairs(self) -> Collection[Expr]:
        """What weights and gradients read, whatever the mask says."""
        schedule = self.schedule
        return topological(schedule.weights, schedule.product_gradient, *(e for _, e in schedule.pair_gradients))

    @cached_property
    def holds_row(self) -> bool:
        """Does a variable hold the row of a block's first head over all steps? Without rows of numbers ptxas would
        spill four bytes for it."""
        return len(self.row_names) > 0

    @cached_property
    def walks_back_in_order(self) -> bool:
        """Do blocks that add to dQ in order walk from the last queries to the first? Where all meet the same tiles they
        need not: those of grouped heads then hold one number less, without which their products wait for one another
        (ptxas C7512)."""
        alike = not self.plan.bounds.bounds and self.problem.group > 1
        return self.tile.in_order and not (self.blocks.latest_first or self.blocks.alternates or alike)

    def walk(
        self, buffers: Buffers, batch: Any, kv_head: Any, block: Any, handed: HandedQueries | None = None,
        sizes: Sizes | None = None, known: Mapping[Expr, Any] = NO_NUMBERS, index: Any = None,
    ) -> QueryWalk:  # fmt: skip
        """The walk of a block of keys over tiles of queries; handed: one that another warp begins; batch: b, of which
        these numbers are known; index: the block's in the grid, by which walks may turn."""
        of = Walks(self.plan, self.problem, sizes or self.sizes, self.tile, self.apart)
        if self.within:
            return SequenceQueryWalk(of, buffers, batch, kv_head, block, handed, known)
        backwards = self.blocks.walks_back(index) if index is not None else None
        if self.blocks.alternates:
            backwards = kv_head % 2 == 0
        elif self.walks_back_in_order:
            backwards = True
        by_heads = walks_by_heads(self.problem, self.tile, self.plan)
        return QueryWalk(of, buffers, batch, kv_head, block, handed, backwards, by_heads)
