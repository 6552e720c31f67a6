"""The tiles worth trying for a kernel: all that its instructions can run, less those that a GPU's limits forbid.

What is known before compiling (threads, registers of accumulators, a lower bound of shared memory) is judged here; what
a compiled kernel really takes, by `judge`. Every tile that falls has a reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from attention_engine.arch import Arch
from attention_engine.codegen.compile import Resources
from attention_engine.ir.problem import Problem, padded
from attention_engine.plan.demand import demand
from attention_engine.plan.forms import ROW_PAD, HopperForward, HopperKeys, KernelName, Straight, Tile
from attention_engine.plan.hopper import backward_persists
from attention_engine.plan.targets import Target, as_arch
from attention_engine.tuner.entries import AnyTile

ROWS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
FORWARD_FORMS = (
    *(HopperForward(persistent, False, lazy) for persistent, lazy in itertools.product((False, True), repeat=2)),
    HopperForward(persistent=True, queries_ahead=True),
)
MOVING = (16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 256)  # the tile that a block walks over
THREADS = (32, 64, 128, 256, 384)
STAGES = (1, 2, 3)
OTHER_REGISTERS = 40  # per thread, beside the accumulators: addresses, row values, counters
# The same where kernels are placed by hand. Compiled at head dim 128 forward, tiles that leave 32 spill nothing (48
# bytes where persistent and lazy), those that leave 24 spill 48 bytes and more; backward, those that leave 32 (80
# queries) spill nothing, and those that leave 16 (96) spill 580 bytes.
OTHER_BY_HAND: dict[KernelName, int] = {"forward": 25, "backward": 24, "queries": OTHER_REGISTERS}
MOST_SPILLED = 64  # bytes a thread may spill: a few values outside the loop cost nothing that can be measured


@dataclass(frozen=True)
class Space:
    """The tiles to try, and those that were rejected with the reason."""

    tiles: tuple[AnyTile, ...]
    rejected: tuple[tuple[AnyTile, str], ...]


def register_limit(arch: Arch, tile: Tile) -> int:
    """Registers a thread may have; where copies have threads of their own (TMA), those keep 24 each."""
    copying = 128 if arch.has_wgmma and tile.stages else 0
    threads = tile.threads + copying
    share = (arch.registers_per_sm - 24 * copying) // tile.threads if copying else arch.registers_per_sm // threads
    return min(share // 8 * 8, arch.max_registers_per_thread)


def reason_against(kernel: KernelName, problem: Problem, arch: Arch, tile: Tile) -> str | None:
    """Why a tile isn't worth trying, as far as arithmetic tells; None: it may be."""
    if (reason := _reason_it_cannot_run(kernel, problem, arch, tile)) is not None:
        return reason
    limit = register_limit(arch, tile)
    needed = demand(kernel, problem, tile).registers
    registers = needed + (OTHER_BY_HAND[kernel] if tile.hopper else OTHER_REGISTERS)
    if registers > limit:
        return f"needs some {registers} registers a thread, and there are {limit}"
    return None


def refusal(kernel: KernelName, problem: Problem, target: Target, default: Tile, tile: Tile) -> str | None:
    """Why a problem's kernel can't run with a tile that someone wrote down; None: it can, if slowly."""
    if tile == default:
        return None
    if tile.hopper and not (default.hopper and tile in _placed_by_hand(default)):
        return "no kernel placed by hand has this form for this problem"
    if tile.shared_weights and (kernel != "backward" or problem.dtype == "float32"):
        return "only a 16-bit backward pass over keys hands weights on through shared memory"
    return _reason_it_cannot_run(kernel, problem, as_arch(target), tile)


def _reason_it_cannot_run(kernel: KernelName, problem: Problem, arch: Arch, tile: Tile) -> str | None:
    if (reason := _shape_reason(kernel, problem, arch, tile)) is not None:
        return reason
    needs = demand(kernel, problem, tile)
    most = arch.shared_memory_per_block
    if needs.shared_bytes > most:
        return f"needs at least {needs.shared_bytes} bytes of shared memory, and there are {most}"
    if tile.queries_ahead and needs.shared_bytes + 2 * tile.q * padded(problem.dim) > most:
        return "has no room for a second tile of queries"
    if kernel != "forward" and tile.q > ROW_PAD:
        return f"{tile.q} queries pass the end of rows, which are padded for tiles of {ROW_PAD}"
    return None


def _shape_reason(kernel: KernelName, problem: Problem, arch: Arch, tile: Tile) -> str | None:
    rows = tile.kv if kernel == "backward" else tile.q
    warps = tile.threads // arch.warp
    wgmma = arch.has_wgmma and problem.dtype != "float32"
    if tile.threads > arch.max_threads_per_block:
        return f"{tile.threads} threads are more than a block may have, {arch.max_threads_per_block}"
    if tile.threads % arch.warp:
        return f"{tile.threads} threads are no whole warps of {arch.warp}"
    if wgmma and tile.threads % 128:
        return "wgmma wants whole warpgroups of 128 threads"
    if tile.queries_ahead and problem.dim != problem.dim_v:
        return "an output that leaves by a tile of queries is as wide as they are"
    if isinstance(tile.form, HopperKeys) and (reason := _reason_by_hand(problem, tile)) is not None:
        return reason
    if wgmma and kernel == "backward" and not tile.hopper:
        for side, length in (("queries", tile.q), ("keys", tile.kv if tile.shared_weights else 64)):
            if length > 64 and length % 64:
                return f"{length} {side} don't cut into the 64 rows that a warpgroup takes of a product"
    if tile.shared_weights:
        return None if rows * tile.q % (256 * warps) == 0 else f"{warps} warps can't share so few pairs"
    step = 64 * (warps // 4) if wgmma else 16 * warps
    if rows % step:
        return f"{rows} rows don't cut into {step}, what {tile.threads} threads take at a time"
    return None


def _reason_by_hand(problem: Problem, tile: Tile) -> str | None:
    """Against a tile of the kernel over keys that is placed by hand."""
    if padded(problem.dim) % 128 and tile.q % 64:
        return f"{tile.q} rows of dQ don't cut into 64, and dQ transposed wants head dims in units of 128"
    if tile.persistent and not backward_persists(problem, tile):
        return "blocks walk over items at head dims 128 alone, where warpgroups have keys of their own"
    if tile.shared_weights and (tile.q % 32 or tile.kv != 64):
        return "warpgroups share 64 keys, and queries in units of 16 each"
    return None


def space(kernel: KernelName, problem: Problem, target: Target, default: Tile) -> Space:
    """The tiles to try, the default first whatever it is."""
    arch = as_arch(target)
    kept, rejected = [default], []
    for tile in (*_placed_by_hand(default), *_tiles(kernel, problem, arch)):
        if tile == default:
            continue
        reason = reason_against(kernel, problem, arch, tile)
        if reason is None:
            kept.append(tile)
        else:
            rejected.append((tile, reason))
    return Space(tuple(kept), tuple(rejected))


def _tiles(kernel: KernelName, problem: Problem, arch: Arch) -> Iterator[Tile]:
    stages = (0,) if problem.dtype == "float32" else STAGES
    handing = (False, True) if kernel == "backward" and problem.dtype != "float32" else (False,)
    for rows, moving, threads, count, shared in itertools.product(ROWS, MOVING, THREADS, stages, handing):
        q, kv = (moving, rows) if kernel == "backward" else (rows, moving)
        yield Tile(q, kv, threads, count, Straight(shared))


def _placed_by_hand(default: Tile) -> Iterator[Tile]:
    """Tiles of the kernels in kernels/hopper/, where the default is one of those: forward 64 queries a warpgroup,
    backward 64 keys for each or for all."""
    match default.form:
        case Straight():
            return
        case HopperForward(woven=woven):  # where pairs suit that
            forms = (*FORWARD_FORMS, *[HopperForward(persistent=True, woven=True)] * woven)
            for groups, kv, form in itertools.product((2, 3), MOVING, forms):
                yield Tile(64 * groups, kv, 128 * groups, 2, form)
        case HopperKeys(persistent=persists, skewed_sums=skews):  # with lists of tiles; where diagonals are summed
            skewed, walking = ((False, True) if has else (False,) for has in (skews, persists))
            for q, shared, skew, walks in itertools.product(MOVING, (False, True), skewed, walking):
                yield Tile(q, 64 if shared else 128, 256, 2, HopperKeys(shared, walks, skew))
        case _:
            assert_never(default.form)


def judge(resources: Resources, arch: Arch) -> str | None:
    """Why a compiled kernel isn't worth running; None: it is."""
    if resources.shared_bytes > arch.shared_memory_per_block:
        return f"needs {resources.shared_bytes} bytes of shared memory, and there are {arch.shared_memory_per_block}"
    spilled = resources.spill_stores + resources.spill_loads
    return f"spills {spilled} bytes a thread" if spilled > MOST_SPILLED else None
