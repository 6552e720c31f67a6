"""Which form of a kernel a problem gets, with which tile, and why: chosen once, before anything is traced."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from attention_engine.arch import Arch
from attention_engine.ir.expr import Expr
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import PRODUCT
from attention_engine.passes.maths import Maths
from attention_engine.passes.read_places import CustomSums, plan_custom_sums
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.plan.attention import Tiles
from attention_engine.plan.demand import demand
from attention_engine.plan.forms import HopperForward, HopperKeys, KernelName, Straight, Tile
from attention_engine.plan.hopper import (
    backward_persists,
    may_drop_apart,
    pairs_are_light,
    scores_are_light,
    scores_are_of_places,
    weights_take_special_functions,
    why_not_forward,
    why_not_over_keys,
)
from attention_engine.plan.long_sequences import LONG, walks_by_heads
from attention_engine.plan.room import queries_with_room
from attention_engine.plan.targets import Target

NO_SUMS = CustomSums()
Hints: TypeAlias = tuple[int, int, int]  # batch, queries and keys that calls will likely have


@dataclass(frozen=True)
class Choice:
    """A tile for each kernel; why: for kernels that have several forms, why it has this one, in words."""

    tiles: Tiles
    why: dict[KernelName, str]


def choose(problem: Problem, maths: Maths, target: Target, straight: Tiles, hints: Hints | None = None) -> Choice:
    """The forms of a problem's kernels. straight: the tiles of those that run everywhere. hints: likely lengths."""
    if not isinstance(target, Arch) or not target.has_wgmma:
        return _in_straight_lines(problem, maths, target, straight)
    within = _within_sequences(problem, maths)
    if within is None:
        forward, why_forward = _forward(problem, maths.forward_of(problem.dtype), target, straight.forward, hints)
    else:
        forward, why_forward = within, "each block of queries lies in one of the packed sequences"
    if maths.unfinished and forward.hopper:
        forward = forward.in_form(queries_ahead=False)
    if maths.beside_sends and forward.persistent:
        forward, why_forward = forward.in_form(persistent=False, queries_ahead=False), BESIDE_SENDS
    why: dict[KernelName, str] = {"forward": why_forward}
    backward, schedule = straight.backward, maths.backward_schedule
    if schedule is not None:
        backward, why["backward"] = _over_keys(problem, schedule, target, backward)
        if maths.in_blocks and backward.persistent:  # whose spare warps store dQ in 16 bits, and fp32 rows hold them up
            backward = backward.in_form(persistent=False)
        if not maths.in_blocks and (within := keys_within(problem, maths)) is not None:
            backward, why["backward"] = within, "each block of keys lies in one of the packed sequences"
            if walks_by_heads(problem, within):
                why["backward"] += f"; where these have {LONG} queries in the mean or more, {BY_HEADS}"
    return Choice(replace(straight, forward=forward, backward=backward), why)


def _in_straight_lines(problem: Problem, maths: Maths, target: Target, straight: Tiles) -> Choice:
    """Tiles of half the queries where a mask needs the registers of a GPU's usual ones."""
    forward, backward, schedule = straight.forward, straight.backward, maths.backward_schedule
    why: dict[KernelName, str] = {}
    copied_apart = isinstance(target, Arch) and target.has_tma  # by warps that leave registers to those who compute
    if forward == CROWDED_FORWARD and _bounds_are_many(maths.forward_of(problem.dtype).mask):
        forward, why["forward"] = replace(forward, q=forward.q // 2), NEEDS_REGISTERS
    wide = problem.tile_dims == (128, 128) and backward == CROWDED_BACKWARD and not copied_apart
    if wide and schedule is not None and _bounds_are_many(schedule.mask):
        backward, why["backward"] = replace(backward, q=backward.q // 2), NEEDS_REGISTERS
    return Choice(replace(straight, forward=forward, backward=backward), why)


def _bounds_are_many(mask: Expr | None) -> bool:
    """Does it want a list of tiles, or bounds on both sides?"""
    plan = plan_tiles(mask)
    return plan.mapped or len(plan.bounds.bounds) > 1


def hints_matter(dim: int, dim_v: int) -> bool:
    """Do hints change the choice at these head dims?"""
    dims = padded(dim), padded(dim_v)
    return dims in BRIEF or dims in AHEAD


def _forward(
    problem: Problem, schedule: ForwardSchedule, target: Arch, straight: Tile, hints: Hints | None
) -> tuple[Tile, str]:
    if (reason := why_not_forward(problem, schedule)) is not None:
        return straight, f"not for Hopper: {reason}"
    dims, plan, light = problem.tile_dims, plan_tiles(schedule.mask), scores_are_light(schedule)
    if plan.blocks is not None and plan.bounds_say_the_rest and plan.blocks.q % 128 == 64:
        return _of_64_queries(dims, plan.blocks.kv, schedule)
    q, kv = _queries_and_keys(problem, schedule, plan)
    apart = may_drop_apart(problem, schedule)
    # causal retention: 5 % faster
    lazy = schedule.rescale is not None and dims == (64, 64) and not weights_take_special_functions(schedule)
    tile = Tile(q, kv, 2 * q, 2, HopperForward(lazy_rescale=lazy, drops_apart=apart))
    if _narrow(plan) and dims in NARROW and not apart:
        tile = replace(tile, kv=64, stages=NARROW[dims])
    ahead = dims in AHEAD and not _narrow(plan) and (plan.mapped or _steps(kv, plan, hints) <= AHEAD[dims])
    if plan.mapped:
        walks = dims in SHARED_OUT
        return tile.in_form(persistent=walks, queries_ahead=ahead and walks), "lists of tiles differ in length"
    if plan.later_is_longer and dims in UNEVEN:
        # ALiBi at 64: as fast on an H100, and a register less, which would else be spilled
        crowded = scores_are_of_places(schedule) and dims == (64, 64) and not lazy
        tile = replace(tile, kv=UNEVEN[dims] or kv).in_form(persistent=True, queries_ahead=ahead or crowded)
        return tile, "later queries see more keys"
    if light and schedule.rescale is not None and dims in SHARED_OUT:
        tile = tile.in_form(persistent=True, queries_ahead=ahead)
        if hints is not None and not apart:
            tile = _with_fewer_waves(tile, problem, target, hints)
        return tile.in_form(woven=_suits_woven(tile, schedule)), "pairs need few registers"
    return tile, "a block for each tile of queries: all take as long"


def _of_64_queries(dims: tuple[int, int], keys: int, schedule: ForwardSchedule) -> tuple[Tile, str]:
    """For lists of blocks of 64 queries and so many keys."""
    if dims in ALONE and keys % 64 == 0 and schedule.dropped is None:
        tile = Tile(64, 64, 128, ALONE[dims], HopperForward())
        return tile, "a call lists blocks of 64 queries: a warpgroup has one, and two of them share an SM"
    return Tile(64, 64, 128, 2), "a call lists blocks of 64 queries, and most tiles for Hopper have more"


def _queries_and_keys(problem: Problem, schedule: ForwardSchedule, plan: TilePlan) -> tuple[int, int]:
    """Of a tile for Hopper, where a call lists no narrow blocks."""
    dims = problem.tile_dims
    if may_drop_apart(problem, schedule):
        return 128, 128
    if dims == (128, 128) and schedule.rescale is None and not plan.mapped and not plan.bounds.bounds:
        return 192, 80  # sigmoid and ReLU under full masks: 5 and 2 % faster on an H100
    light = scores_are_light(schedule) or (scores_are_of_places(schedule) and dims == (64, 64))
    return FORWARD[dims][0 if light else 1]


def _within_sequences(problem: Problem, maths: Maths) -> Tile | None:
    """The tile of a forward pass over packed sequences whose blocks lie in one of them; None where that can't be: its
    mask wants a list of tiles, or shared memory has no room for a tile of the output beside the others."""
    dims = problem.tile_dims
    if dims not in SHARED_OUT or maths.within is None:
        return None
    schedule = maths.forward_within_of(problem.dtype)
    if why_not_forward(problem, schedule) is not None:
        return None
    q, kv = FORWARD[dims][0 if scores_are_light(schedule) else 1]
    return Tile(q, kv, 2 * q, 2, HopperForward(persistent=True, within_sequences=True))


def keys_within(problem: Problem, maths: Maths) -> Tile | None:
    """The tile of a backward pass over keys of packed sequences whose blocks lie in one of them; None where that can't
    be, or where a kernel over queries is to make dQ, for sums of rows."""
    schedule = maths.backward_within
    if schedule is None or maths.backward is None or maths.backward.row_gradients:
        return None
    tile = _own_keys(64).in_form(persistent=True, within_sequences=True)
    fits = backward_persists(problem, tile) and why_not_over_keys(problem, schedule, NO_SUMS) is None
    return tile if fits else None


def _narrow(plan: TilePlan) -> bool:
    """Does a call list blocks of 64 keys, so that a tile of more would hold keys that are not listed?"""
    return plan.blocks is not None and plan.bounds_say_the_rest and plan.blocks.kv % 128 == 64


def _steps(kv: int, plan: TilePlan, hints: Hints | None) -> float:
    """How many tiles of keys a block of queries has, by the mask's bounds; infinitely many where nothing hints."""
    return math.inf if hints is None else hints[2] / kv / (2 if plan.later_is_longer else 1)


def _with_fewer_waves(tile: Tile, problem: Problem, target: Arch, hints: Hints) -> Tile:
    """The tile of BRIEF, if its last wave leaves that much fewer SMs idle than this one's."""
    brief, cost = BRIEF.get(problem.tile_dims, (tile, 1.0))
    batch, queries, _ = hints

    def time(a: Tile, of_a_row: float) -> float:
        blocks = batch * problem.heads * -(-queries // a.q)
        return -(-blocks // target.sm_count) * a.q * of_a_row

    return brief if time(brief, cost) < time(tile, 1.0) else tile


def _suits_woven(tile: Tile, schedule: ForwardSchedule) -> bool:
    """Do three warpgroups wait for the output when they have their row maxima, and take sums in the order of columns?

    Where a pair is a product and an exponential, and none is masked. On an H100, softmax at head dim 64, full, S 2048,
    8192 and 16384: 391 to 402, 540 to 550, 558 to 572 TFLOP/s; causal 306 to 299, 505 to 498, 534 to 530.
    """
    plain = schedule.score is PRODUCT and schedule.mask is None and schedule.dropped is None
    exponential = schedule.rescales_early and weights_take_special_functions(schedule)
    return tile.threads == 384 and plain and exponential


def _over_keys(problem: Problem, schedule: BackwardSchedule, target: Arch, straight: Tile) -> tuple[Tile, str]:
    axes = {name: axes for name, _, axes in problem.custom}
    summed = plan_custom_sums(schedule.pair_gradients, axes, ordered=False)
    if (reason := why_not_over_keys(problem, schedule, summed)) is not None:
        return straight, f"not for Hopper: {reason}"
    dims = problem.tile_dims
    light = pairs_are_light(schedule, summed, dims)
    tile, why = BACKWARD[dims][0 if light else 1], f"pairs need {'few' if light else 'many'} registers"
    plan = plan_tiles(schedule.mask)
    mapped = plan.mapped
    if dims in NARROW and _narrow(plan) and not (summed.of_keys or summed.diagonals):
        tile, why = replace(SHARED_KEYS, stages=3), "a call lists blocks of 64 keys"
    if dims in DROPPED and not mapped and may_drop_apart(problem, schedule):
        tile = _own_keys(DROPPED[dims]).in_form(drops_apart=True)
        why = "a group of its own chooses which weights are dropped"
    if mapped and not (summed.of_keys or summed.diagonals):
        walks = backward_persists(problem, tile)  # documents on an H100: 4 to 5 % faster
        tile, why = tile.in_form(persistent=walks), f"{why}, and lists of tiles differ in length"
        if (queries := queries_with_room(problem, schedule, tile)) < tile.q:
            tile, why = replace(tile, q=queries), f"{why}, and pairs hold many numbers"
    skewed = tile.in_form(skewed_sums=bool(summed.diagonals))
    room = demand("backward", problem, skewed).shared_bytes <= target.shared_memory_per_block
    return skewed if room else tile, why


# By head dims, for maths of pairs that need few registers, and for others: queries and keys of a tile; 64 queries for
# each warpgroup, of which three have 160 registers a thread, and two 240.
FORWARD = {(32, 32): ((192, 128), (128, 128)), (64, 64): ((192, 128), (128, 128)), (96, 96): ((128, 128),) * 2,
           (128, 128): ((128, 128),) * 2, (160, 160): ((128, 128),) * 2, (192, 128): ((128, 128),) * 2,
           (128, 256): ((128, 96),) * 2, (256, 256): ((128, 80),) * 2}  # fmt: skip
# By head dims, another tile for full masks and light maths where its fewer waves count for more, and how much longer
# its rows take. On an H100, 32 heads in all, beside woven blocks: 18 % faster at S 1024, 2 and 5 % slower at 2048 and
# 4096; its queries come ahead: 3 % faster at 2048.
BRIEF = {(64, 64): (Tile(128, 176, 256, 2, HopperForward(persistent=True, queries_ahead=True)), 1.16)}
# By head dims, where blocks are persistent because later queries see more keys, and how many keys a tile then has, if
# others. On an H100, causal at S 2048 and 8192: 3 to 17 % faster; 128/256 and 256/256 at S 4096: 14 and 6 %.
UNEVEN = {
    (32, 32): 0,
    (64, 64): 0,
    (96, 96): 0,
    (128, 128): 0,
    (160, 160): 0,
    (192, 128): 96,
    (128, 256): 112,
    (256, 256): 0,
}
# By head dims, where blocks are persistent under full masks and lists of tiles too. On an H100, D 128: full masks at
# S 1024 and 2048 9 and 3 % faster, at 8192 2 % slower; documents of 1024 at S 8192 7 % and uneven ones 13 % faster.
SHARED_OUT = ((64, 64), (128, 128))
# By head dims, up to how many steps of a block of queries, by the metas' lengths, its queries come ahead; with lists of
# tiles they do. On an H100, full masks: 8 steps 4 % faster, 16 2 %, 64 1 % slower; causal: 4 steps 4 %, 8 1 %, 32 1 %
# slower; documents of 8 steps 2 %. Head dim 64 in blocks of 192 queries: 1 to 2 % slower.
AHEAD = {(128, 128): 16}


# By head dims, in how many stages tiles of 64 keys come, where a call lists blocks of so many; queries come with their
# item. On an H100, S 32768, 64 blocks of each block of queries: 574 TFLOP/s, 537 with three stages and queries ahead.
NARROW = {(64, 64): 4, (128, 128): 4}
# The same where blocks of 64 queries are listed, and two blocks share an SM.
ALONE = {(64, 64): 3, (128, 128): 2}


def _own_keys(q: int) -> Tile:
    """The tile of a kernel over keys whose two warpgroups have 64 keys each."""
    return Tile(q, 128, 256, 2, HopperKeys())


# By head dims, the queries of a tile where a group of its own chooses which weights are dropped: computing threads have
# 224 registers then, and with 64 queries products wait for one another (ptxas C7512). On an H100, S 8192: 8 to 9 %
# faster than where computing threads choose. At head dims 64 it is no faster.
DROPPED = {(128, 128): 48}
# Tiles in straight lines that leave no registers for masks with lists of tiles or two bounds: forward at head dims 64,
# backward at 128. Compiled for sm_80: forward documents 255 registers and 160 bytes spilled, with 64 queries 200 and
# none; backward windows 255 and 8, trees 255 and 40; with 32 queries 230 and 240, none.
CROWDED_FORWARD, CROWDED_BACKWARD = Tile(128, 64, 128, 2), Tile(64, 64, 256, 2, Straight(shared_weights=True))
NEEDS_REGISTERS = "its mask needs registers"
BY_HEADS = "another kernel takes one head after another, not all heads of a tile"
OF_ANY_SEQUENCE = "another kernel makes dQ, and a block of keys may hold several of the packed sequences"
BESIDE_SENDS = "copies to other GPUs take SMs beside it"
SHARED_KEYS = Tile(64, 64, 256, 2, HopperKeys(shared_weights=True))  # the warpgroups share the keys
# By head dims, for light maths of pairs and for others.
BACKWARD = {
    (32, 32): (_own_keys(128), _own_keys(64)), (96, 96): (_own_keys(64), _own_keys(64)),
    (160, 160): (_own_keys(64), SHARED_KEYS),
    (64, 64): (_own_keys(128), _own_keys(64)), (128, 128): (_own_keys(80), _own_keys(64)),
    (128, 64): (_own_keys(80), _own_keys(64)), (64, 128): (_own_keys(64), _own_keys(64)),
    (192, 128): (_own_keys(64), SHARED_KEYS), (128, 256): (_own_keys(32), SHARED_KEYS),
    (256, 256): (SHARED_KEYS, SHARED_KEYS),
}  # fmt: skip
