"""In which units blocks over keys start, and in which order: numbers of a launch, by its lengths and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.ir.problem import Problem, padded
from attention_engine.passes.tile_plan import TilePlan
from attention_engine.plan.attention_buffers import AHEAD, APART, ENDS, MADE_BEFORE, TOGETHER, TURN
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import (
    ALL_UNITS,
    L2_BYTES,
    QUARTERS,
    heads_alternate,
    may_end_longest_first,
    may_start_apart,
    walks_turn,
)

NEVER = 1 << 30  # blocks of a turn, so that no walk turns: which walks do hangs on the batch, and so would sums' bits
LAST_UNITS = 3  # on an H100 4 x 4096 rows 5 % faster than with two, 16384 and 32768 uneven ones 0 to 2 %


@dataclass(frozen=True)
class CallSize:
    """The sizes of a call, and how many blocks the GPU runs at once (`places`)."""

    batch: int
    queries: int
    keys: int
    places: int


def pairs_of_a_unit(
    problem: Problem, tile: Tile, batch: int, queries: int, keys: int, places: int, turns: bool = False
) -> int:  # fmt: skip
    """Over how many pairs of key head and batch blocks then start longest first, on a GPU that runs so many blocks at
    once: over as many as it runs together, if the L2 cache holds their queries and gradients, or a few less, for units
    of one size. turns: walks turn, and read in step whatever the cache holds; of an even number of units the second of
    two fills up what the first one leaves."""
    if turns:
        blocks = -(-keys // tile.kv)
        pairs = batch * problem.kv_heads
        units = 2 * max(round(pairs * blocks / (2 * places)), 1) if pairs * blocks > places else 1
        return -(-pairs // min(units, pairs))
    of_a_query = problem.group * (padded(problem.dim) * 4 + (padded(problem.dim) + padded(problem.dim_v)) * 2)
    pairs, cached = batch * problem.kv_heads, L2_BYTES // (of_a_query * max(queries, 1))
    at_once = max(min(cached, round(places / -(-keys // tile.kv))), 1)
    return -(-pairs // -(-pairs // at_once))


def pairs_of_a_listed_unit(tile: Tile, pairs: int, keys: int, places: int) -> int:
    """The same where lists say how many queries a block has, in no known order: over four times as many as the GPU runs
    together. It would else end with few long blocks, most of its SMs idle: of six causal documents of 8192 tokens the
    busiest has 1.16 times the mean's steps, and 1.77 where four heads share keys; so 1.09 and 1.42, by a model of
    blocks. What blocks that run together read is less than all queries, as lists leave most of them out."""
    together = 4 * round(places / -(-keys // tile.kv))
    return -(-pairs // -(-pairs // min(max(together, 1), pairs)))


def pairs_in_order(problem: Problem, tile: Tile, pairs: int, keys: int, places: int) -> int:
    """The same where blocks add to dQ in order. Those that start together then start as those before them end: one
    after another, in the order of their keys. Twice as many pairs keep that order where few are as many as the GPU
    runs, and where heads are narrow; else what they read is more than the L2 cache holds. On an H100, of the default:
    head dim 128, causal, S 2048, 8 pairs 0.918 and 16 0.881, full, S 8192, 2 pairs 0.921 and 4 0.937; 64, full, S 2048
    and batch 2, 8 pairs 0.893 and 16 0.935."""
    at_once = max(round(places / -(-keys // tile.kv)), 1)
    twice = at_once <= 2 or max(problem.dim, problem.dim_v) <= 64
    return -(-pairs // -(-pairs // min(at_once * (1 + twice), pairs)))


def start_apart(tile: Tile, keys: int, places: int) -> bool:
    """Do they, on a GPU that runs so many blocks at once? They wait for one another in a ring, so that all blocks of a
    head must run at once: two heads have places, and few places are left beside whole heads. On an H100, bf16, of the
    default: S 1024 and 2048, batch 2, 0.909 and 0.946, in a chain 0.829 and 0.870; S 4096 and 8192 0.950 and 0.945, in
    a chain 0.924 and 0.905."""
    blocks = -(-keys // tile.kv)
    return 2 * blocks <= places and 16 * (places % blocks) <= places


def quarters_apart(problem: Problem, tile: Tile, plan: TilePlan, size: CallSize) -> int:
    """Where heads alternate, by how many quarters of a step blocks follow one another (kernels/apart.py). An addition
    is handed on in 0.85 of a step. The further apart, the more tiles are near ones, which blocks read at different
    times: the fewer blocks a head has, or the more heads a group, the sooner that costs more than waits. On an H100, of
    the default, 0.75, 1 and 1.5 steps: 32/8 heads, S 2048 and batch 8 0.909, 0.905, 0.901, S 4096 and batch 4 0.900,
    0.910, 0.917, S 8192 0.893, 0.914, 0.922, S 16384 0.897, 0.924, 0.949; 64/8 heads, S 4096 and batch 2 0.875, 0.888,
    0.876. All from the last tile on, by a kernel 2 to 6 % slower: 0.871, 0.814, 0.795 at S 2048, 4096, 8192. Where a
    head has more blocks than the GPU runs at once, those that start last are behind anyway: S 32768, 0.5, 1 and 1.5
    steps 0.886, 0.874, 0.852.

    0 where a bound is another than that of queries that see all keys up to their own: blocks may be of one length
    there, and would wait for those that start after them."""
    (bound, *others) = plan.bounds.bounds
    blocks = -(-size.keys // tile.kv)
    number = 6 if blocks >= 32 and problem.group <= 4 else 4
    if blocks > size.places:
        number = 2
    causal = not others and (bound.q, bound.kv, bound.offset, bound.starts) == (1, -1, 0, ())
    fits = 2 * rows_that_meet(problem, tile, blocks, number) <= size.places
    return number if causal and size.queries >= size.keys and fits else 0


def rows_that_meet(problem: Problem, tile: Tile, blocks: int, quarters: int) -> int:
    """Where heads alternate, how many blocks of a head that start one after another may wait for one another: a block
    waits for one that starts after it where the tile is near for both."""
    return 1 + quarters * (blocks - 1) * tile.q // (QUARTERS * problem.group * tile.kv)


def pairs_that_alternate(problem: Problem, tile: Tile, pairs: int, size: CallSize, quarters: int) -> int:
    """Over how many pairs blocks start where heads alternate: over twice as many as the GPU runs together, half of them
    of even key heads, half of odd ones. Blocks that may wait for one another take half of its places at most: others
    may run beside."""
    of_a_kind, blocks = pairs // 2, -(-size.keys // tile.kv)
    units = max(round(of_a_kind * blocks / size.places), 1)
    most = max(size.places // (2 * rows_that_meet(problem, tile, blocks, quarters)), 1)
    return 2 * min(-(-of_a_kind // min(units, of_a_kind)), most)


def pairs_that_end(tile: Tile, pairs: int, keys: int, places: int) -> int:
    """Where the last unit may start with its longest blocks, over how many pairs blocks start: 0 where it may not. Half
    as many as the GPU runs together. Were it more, those that start last would come too late for those that start
    first, and wait for; were it less, few would run at the end. All its blocks must have a place for the same reason.
    Of half of them the GPU has enough, whatever runs beside."""
    of_a_half = places // (2 * -(-keys // tile.kv))
    return -(-pairs // -(-pairs // of_a_half)) if of_a_half else 0


def order_of_pairs(problem: Problem, tile: Tile, plan: TilePlan, pairs: int, size: CallSize) -> tuple[int, int, int]:
    """Of blocks that add to dQ in order: over how many pairs they start, the number by which blocks of a head start
    apart, and whether the last of them start longest first."""
    keys, places = size.keys, size.places
    if heads_alternate(problem, tile, plan):
        quarters = quarters_apart(problem, tile, plan, size)
        return pairs_that_alternate(problem, tile, pairs, size, quarters), quarters, 0
    if may_end_longest_first(problem, tile, plan) and (together := pairs_that_end(tile, pairs, keys, places)):
        return together, 0, 1
    if may_start_apart(problem, tile, plan) and start_apart(tile, keys, places):
        return 1, 1, 0
    return pairs_in_order(problem, tile, pairs, keys, places), 0, 0


def blocks_of_a_turn(tile: Tile, keys: int, places: int, together: int) -> int:
    """After how many blocks walks turn, where they do: after a unit's, if those run together, else after as many as
    do."""
    of_a_unit = together * -(-keys // tile.kv)
    return of_a_unit if 2 * of_a_unit <= 3 * places else places


def units_ahead(tile: Tile, keys: int, places: int, together: int = 1) -> int:
    """How far ahead the unit of so many pairs is that a unit's blocks over keys prepare: not one of those that start
    with them, on a GPU that runs so many blocks at once. Of packed sequences LAST_UNITS at least: they end in turns."""
    ahead = 1 + round(places / (together * -(-keys // tile.kv)))
    return max(ahead, LAST_UNITS) if tile.within_sequences else ahead


def prepared_before(problem: Problem, tile: Tile, plan: TilePlan, keys: int, turns: bool) -> bool:
    """Does the kernel before prepare all units, so that no block prepares any? turns: do walks turn? What blocks
    prepare beside their own work costs little while memory is not busy. It is busier, the more heads a group has. And
    the shorter a sequence is, the more is prepared for each step of their work. On an H100, bf16, head dim 128, by
    blocks and by the kernel before, TFLOP/s: 64/8 heads, S 1024, batch 8 240, 271, S 2048, batch 4 445, 466, batch 8
    375, 441, S 4096, batch 2 529, 523, batch 4 519, 503; 32/8 heads, S 1024, batch 8 301, 317, S 2048, batch 4 483,
    465.

    Where blocks add in order, one that prepares holds up those that wait for it: 16 heads, causal, S 1024, batch 2 and
    8 198, 233 and 272, 309, S 2048, batch 1, 2 and 8 278, 309, 362, 367 and 428, 441, S 3072 and 4096 452, 441 and 505,
    493; full, S 1024, batch 8 423, 441, S 2048, batch 4 530, 521."""
    blocks = -(-keys // tile.kv)
    if tile.in_order:
        return blocks <= (16 if plan.later_is_longer else 8)
    return turns and blocks <= (16 if problem.group >= 6 else 8 if problem.group >= 4 else 0)


@dataclass(frozen=True)
class BlockOrder:
    """How the blocks over keys of a plan are ordered. longest_first, makes_delta, deterministic: as in the plan."""

    problem: Problem
    tile: Tile
    plan: TilePlan
    longest_first: bool
    makes_delta: bool
    deterministic: bool = False

    def numbers(self, size: CallSize, arrives: bool) -> dict[str, int]:
        """The numbers of a launch. arrives: does a gradient arrive at returned rows? Delta is then given."""
        problem, tile, keys, places = self.problem, self.tile, size.keys, size.places
        turns, pairs = walks_turn(problem, tile, self.plan), size.batch * problem.kv_heads
        together, apart, ends = pairs_of_a_unit(problem, tile, size.batch, size.queries, keys, places, turns), 0, 0
        if self.plan.mapped:
            together = max(together, pairs_of_a_listed_unit(tile, pairs, keys, places))
        ahead = units_ahead(tile, keys, places, *([together] if self.longest_first else []))
        if tile.in_order:
            together, apart, ends = order_of_pairs(problem, tile, self.plan, pairs, size)
            ahead = units_ahead(tile, keys, places, together)
        alone = tile.in_order and not self.makes_delta
        if alone or prepared_before(problem, tile, self.plan, keys, turns):
            ahead = -(-pairs // together)
        return {
            TOGETHER: together, APART: apart,
            TURN: NEVER if self.deterministic else blocks_of_a_turn(tile, keys, places, together),
            ENDS: ends, AHEAD: ahead, MADE_BEFORE: ALL_UNITS if arrives else ahead,
        }  # fmt: skip
