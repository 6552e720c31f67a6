"""Where key heads are few, blocks over keys have one query head each.

A block over keys adds up dK and dV of all query heads that share a key head. Where these blocks are fewer than the GPU
runs at once, as of a model whose heads lie on several GPUs, most of it idles. Under a causal mask the longest block may
last longer than all others. Then each query head gets a copy of its key head (`Problem.copies`): a block has one query
head, and stores its part of dK and dV in fp32. A kernel behind adds up the parts. On an H100, bf16, head dim 128,
causal, TFLOP/s of blocks of all heads and of one: 8/1 heads, batch 1, S 2048, 4096, 8192 and 16384 41 and 232, 84 and
450, 172 and 581, 337 and 643, S 2048, batch 8 279 and 382; 32/8, batch 1, S 1024 and 2048 134 and 217, 273 and 354;
8/2, S 8192, batch 1 and 2 330 and 578, 617 and 590. Blocks of two or four heads are at most a tenth faster, and would
each be one more kernel to compile.

Which of the two runs hangs on the batch, and with it the order of a sum. Where gradients are to be the same bits in
every batch, a batch of one decides for all, and only where it gains much: larger ones lose a little. Blocks of one head
also run where those of a group can't add to dQ in order, and a second kernel would make dQ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attention_engine.ir.expr import Axis
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import PLACES
from attention_engine.plan.forms import Tile
from attention_engine.plan.targets import places_of
from attention_engine.plan.units import CallSize

if TYPE_CHECKING:
    from attention_engine.plan.attention import AttentionPlan, Tiles

STORED = 3  # steps that last as long as to store a block's part of dK and dV in fp32, and to add it to others
LEAST, MUCH = 1.1, 2.0  # how many times as fast a call must be, and a batch of one that decides for all


def suits_a_head_each(plan: AttentionPlan, batch: int, queries: int, keys: int) -> bool:
    """Would blocks of one query head end a call of these lengths much sooner? Of packed sequences the batch is their
    number, and lengths are those in the mean."""
    if not may_have_a_head_each(plan):
        return False
    if plan.deterministic and plan.over_queries:
        return True
    problem, tile = plan.problem, plan.tiles.backward
    size = CallSize(1 if plan.deterministic else batch, queries, keys, places_of(plan.target))
    dealt = plan.longest_first or tile.within_sequences
    all_heads, one = (time(problem, tile, dealt, size, copies) for copies in (1, problem.group))
    return all_heads >= (MUCH if plan.deterministic else LEAST) * one


def may_have_a_head_each(plan: AttentionPlan) -> bool:
    """Is there such a kernel, as far as a plan without copies can tell? Not for packed sequences that are to have the
    same bits in every batch: theirs would hang on the lengths of others."""
    packed = any(name == PLACES for name, _, _ in plan.problem.custom)
    grouped = plan.problem.group > 1 and plan.problem.copies == 1
    return grouped and not plan.refused and plan.tiles.backward.hopper and not (plan.deterministic and packed)


def reads_copies(plan: AttentionPlan) -> bool:
    """Can a plan in which key heads have copies run? The kernel over keys alone reads copies. It makes no sums of key
    heads then, and no lists of a call are of copies."""
    sums, backward = plan.custom_sums, plan.maths.backward
    assert backward is not None, "`suits_a_head_each` asked"
    others = plan.over_queries or plan.by_queries or backward.exact_delta or backward.extremes
    of_heads = all([Axis.HEAD in read.axes for read, _ in sums.of_keys])
    return of_heads and not (others or sums.pairs or sums.by_rows) and plan.tile_plan.blocks is None


def time(problem: Problem, tile: Tile, longest_first: bool, size: CallSize, copies: int) -> float:
    """How many steps a call takes. Blocks of one length run in waves. Others start longest first, and take as long as
    the longest, or as their share of all steps, whichever is more. longest_first: have the first keys all queries, and
    the last ones nearly none (causal, or packed sequences)?"""
    blocks, tiles = -(-size.keys // tile.kv), -(-size.queries // tile.q)
    heads, stored = problem.group // copies, STORED if copies > 1 else 0
    longest, pairs = tiles * heads + stored, size.batch * problem.kv_heads * copies
    if not longest_first:
        return -(-pairs * blocks // size.places) * longest
    of_a_pair = tiles * heads * (blocks + 1) / 2 + stored * blocks
    return max(longest, pairs * of_a_pair / size.places)


def with_a_head_each(problem: Problem, tiles: Tiles) -> tuple[Problem, Tiles]:
    """The problem in which each query head has a copy of its key head. Of persistent blocks only those of packed
    sequences can store dK and dV in fp32. Others become blocks of one item each."""
    backward = tiles.backward
    backward = backward.in_form(persistent=backward.within_sequences)
    return replace(problem, kv_heads=problem.heads, copies=problem.group), replace(tiles, backward=backward)
