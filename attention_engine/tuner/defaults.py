"""The tile that each problem class gets where nothing was tuned: data/*.json, in the form of tune files.

A key there names a class: kernel, arch, dtype ("16-bit" or "float32"), the largest dim and dim_v that the tile serves,
and how it was found ("measured": a GPU's name, or "no": by what fits without spills).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention_engine.arch import Arch
from attention_engine.errors import TileDoesNotFit
from attention_engine.frontend.meta import Lengths
from attention_engine.ir.problem import Problem, Tile
from attention_engine.passes.by_hand import (
    backward_fits,
    backward_persists,
    forward_fits,
    pairs_are_light,
    scores_are_light,
    scores_are_of_places,
    weights_take_special_functions,
)
from attention_engine.passes.maths import Maths
from attention_engine.passes.read_places import plan_custom_sums
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.plan.attention import Tiles
from attention_engine.plan.targets import Target
from attention_engine.tuner.entries import Entry, parse
from attention_engine.tuner.problems import KERNEL_NAMES, KernelName
from attention_engine.tuner.space import demand

FOLDER = Path(__file__).parent / "data"
ROOMY = 160 * 1024  # bytes of shared memory a block: A100, H100 and B200 have more, the others 99 KB


@functools.cache
def entries(family: str) -> tuple[Entry, ...]:
    """The default tiles of a family of GPUs."""
    path = FOLDER / f"{family}.json"
    return tuple(parse(path.read_text(), str(path)))


def family(target: Target) -> str:
    """Whose defaults a GPU runs with; the interpreter stands for Hopper."""
    if not isinstance(target, Arch) or target.has_wgmma:
        return "sm_90a"
    return "sm_80" if target.shared_memory_per_block > ROOMY else "sm_89"


def default_entry(kernel: KernelName, problem: Problem, target: Target) -> Entry:
    """The default of a kernel: of the classes that hold the problem, the one with the smallest dims."""
    dtype = "float32" if problem.dtype == "float32" else "16-bit"
    fitting = [
        entry for entry in entries(family(target))
        if (entry.key["kernel"], entry.key["dtype"]) == (kernel, dtype)
        and problem.dim <= entry.key["dim"] and problem.dim_v <= entry.key["dim_v"]
    ]  # fmt: skip
    if not fitting:
        raise TileDoesNotFit(problem.dim, problem.dim_v, problem.dtype, f"have no tile for {family(target)}")
    return min(fitting, key=lambda entry: entry.key["dim"] + entry.key["dim_v"])


def default_tiles(problem: Problem, maths: Maths | None, target: Target, hints: Lengths | None = None) -> Tiles:
    """Tiles that fit the target and are good for the problem; without maths, for kernels that run any.

    hints: batch, queries and keys that calls will likely have; those of a call change no default, or it would compile.
    """
    found = [default_entry(kernel, problem, target).tile for kernel in KERNEL_NAMES]
    tiles = Tiles(*(tile for tile in found if isinstance(tile, Tile)))  # these tables hold no others
    if maths is None or not isinstance(target, Arch) or not target.has_wgmma:
        return tiles
    return _placed_by_hand(problem, maths, target, tiles, hints)


def hints_matter(dim: int, dim_v: int) -> bool:
    """Do hints change a default of these head dims?"""
    return (dim, dim_v) in BRIEF or (dim, dim_v) in AHEAD


def _placed_by_hand(problem: Problem, maths: Maths, target: Arch, tiles: Tiles, hints: Lengths | None) -> Tiles:
    """The kernels with a group of warps that copies, where there are such; which tiles don't spill is tested."""
    forward = maths.forward_of(problem.dtype)
    if forward_fits(problem, forward):
        tiles = replace(tiles, forward=_forward_by_hand(problem, forward, target, hints))
    schedule = maths.backward_schedule
    axes = {name: axes for name, _, axes in problem.custom}
    summed = plan_custom_sums(schedule.pair_gradients if schedule else (), axes, ordered=False)
    if schedule and backward_fits(problem, schedule, summed):
        light, heavy = BACKWARD[problem.dim, problem.dim_v]
        tile = light if pairs_are_light(schedule, summed, (problem.dim, problem.dim_v)) else heavy
        if plan_tiles(schedule.mask).mapped and not (summed.of_keys or summed.diagonals):
            tile = replace(tile, persistent=backward_persists(problem, tile))  # documents on an H100: 4 to 5 % faster
        skewed = replace(tile, skewed_sums=bool(summed.diagonals))
        room = demand("backward", problem, skewed).shared_bytes <= target.shared_memory_per_block
        tiles = replace(tiles, backward=skewed if room else tile)
    return tiles


def _forward_by_hand(problem: Problem, schedule: ForwardSchedule, target: Arch, hints: Lengths | None) -> Tile:
    dims = problem.dim, problem.dim_v
    plan, light = plan_tiles(schedule.mask), scores_are_light(schedule)
    of_places = scores_are_of_places(schedule)
    q, kv = FORWARD[dims][0 if light or (of_places and dims == (64, 64)) else 1]
    if dims == (128, 128) and schedule.rescale is None and not plan.mapped and not plan.bounds.bounds:
        q, kv = 192, 80  # sigmoid and ReLU under full masks: 5 and 2 % faster on an H100
    tile = Tile(q, kv, 2 * q, 2, specialised=True)
    if schedule.rescale is not None and dims == (64, 64) and not weights_take_special_functions(schedule):
        tile = replace(tile, lazy_rescale=True)  # causal retention: 5 % faster
    ahead = dims in AHEAD and (plan.mapped or _steps(kv, plan, hints) <= AHEAD[dims])
    if plan.mapped:
        return replace(tile, persistent=dims in SHARED_OUT, queries_ahead=ahead)
    if plan.later_is_longer:
        return replace(tile, **UNEVEN.get(dims, {}), queries_ahead=ahead)
    if light and schedule.rescale is not None and dims in SHARED_OUT:
        tile = replace(tile, persistent=True, queries_ahead=ahead)
        return tile if hints is None else _with_fewer_waves(tile, problem, target, hints)
    return tile


def _steps(kv: int, plan: TilePlan, hints: Lengths | None) -> float:
    """How many tiles of keys a block of queries has, by the mask's bounds; infinitely many where nothing hints."""
    return math.inf if hints is None else hints[2] / kv / (2 if plan.later_is_longer else 1)


def _with_fewer_waves(tile: Tile, problem: Problem, target: Arch, hints: Lengths) -> Tile:
    """The tile of BRIEF, if its last wave leaves that much fewer SMs idle than this one's."""
    brief, cost = BRIEF.get((problem.dim, problem.dim_v), (tile, 1.0))
    batch, queries, _ = hints

    def time(a: Tile, of_a_row: float) -> float:
        blocks = batch * problem.heads * -(-queries // a.q)
        return -(-blocks // target.sm_count) * a.q * of_a_row

    return brief if time(brief, cost) < time(tile, 1.0) else tile


# By head dims, for maths of pairs that need few registers, and for others: queries and keys of a tile; 64 queries for
# each warpgroup, of which three have 160 registers a thread, and two 240.
FORWARD = {(64, 64): ((192, 128), (128, 128)), (128, 128): ((128, 128),) * 2, (192, 128): ((128, 128),) * 2,
           (128, 256): ((128, 96),) * 2, (256, 256): ((128, 80),) * 2}  # fmt: skip
# By head dims, another tile for full masks and light maths where its fewer waves count for more, and how much longer
# its rows take. On an H100, 32 heads in all: 15 and 24 % faster at S 512 and 1024, as fast at 2048, 8 % slower at 8192;
# its queries come ahead: 3 % faster at 2048.
BRIEF = {(64, 64): (Tile(128, 176, 256, 2, specialised=True, persistent=True, queries_ahead=True), 1.09)}
# By head dims, what changes where later queries see more keys. On an H100, causal at S 2048 and 8192: 3 to 17 % faster;
# 128/256 and 256/256 at S 4096: 14 and 6 %.
UNEVEN: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"persistent": True}, (128, 128): {"persistent": True}, (192, 128): {"persistent": True, "kv": 96},
    (128, 256): {"persistent": True, "kv": 112}, (256, 256): {"persistent": True},
}  # fmt: skip
# By head dims, where blocks are persistent under full masks and lists of tiles too. On an H100, D 128: full masks at
# S 1024 and 2048 9 and 3 % faster, at 8192 2 % slower; documents of 1024 at S 8192 7 % and uneven ones 13 % faster.
SHARED_OUT = ((64, 64), (128, 128))
# By head dims, up to how many steps of a block of queries, by the metas' lengths, its queries come ahead; with lists of
# tiles they do. On an H100, full masks: 8 steps 4 % faster, 16 2 %, 64 1 % slower; causal: 4 steps 4 %, 8 1 %, 32 1 %
# slower; documents of 8 steps 2 %. Head dim 64 in blocks of 192 queries: 1 to 2 % slower.
AHEAD = {(128, 128): 16}


def _own_keys(q: int) -> Tile:
    """The tile of a kernel over keys whose two warpgroups have 64 keys each."""
    return Tile(q, 128, 256, 2, specialised=True)


SHARED_KEYS = Tile(64, 64, 256, 2, shared_weights=True, specialised=True)  # the warpgroups share the keys
# By head dims, for light maths of pairs and for others.
BACKWARD = {
    (64, 64): (_own_keys(128), _own_keys(64)), (128, 128): (_own_keys(80), _own_keys(64)),
    (128, 64): (_own_keys(80), _own_keys(64)), (64, 128): (_own_keys(64), _own_keys(64)),
    (192, 128): (_own_keys(64), SHARED_KEYS), (128, 256): (_own_keys(32), SHARED_KEYS),
    (256, 256): (SHARED_KEYS, SHARED_KEYS),
}  # fmt: skip


def where_from(kernel: KernelName, problem: Problem, target: Target) -> str:
    """How the default of a kernel was found."""
    measured = default_entry(kernel, problem, target).key["measured"]
    return f"measured on {measured}" if measured != "no" else "chosen by what fits without spills, not measured"
