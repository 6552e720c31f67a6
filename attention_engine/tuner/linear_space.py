"""The tiles worth trying for a kernel of linear attention, and which to try first; as space.py and cost.py for others.

Kernels are told by their direction and what they make: "forward walk", "forward states", "forward output";
"backward states", "backward dq" and, in one walk, "backward walk dq" (dk, dv alike).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attention_engine.arch import Arch
from attention_engine.ir.linear import (
    ROLES,
    LinearProblem,
    LinearProgram,
    LinearTile,
    LinearTiles,
    Role,
    column_tiles,
    heads_a_block,
    parts_of,
    state_tiles,
    tile_of_state,
)
from attention_engine.ir.problem import padded
from attention_engine.plan.demand import Demand
from attention_engine.plan.targets import Target, as_arch
from attention_engine.tuner.cost import CLOCK, PEAK_TFLOPS
from attention_engine.tuner.problems import bucket, common_key
from attention_engine.tuner.space import OTHER_REGISTERS, Space

STEP_CYCLES = 1500  # barriers, latencies and the arithmetic of rows of a step, which nothing hides in one block
L2_BYTES = 40  # a cycle and SM


def role_of(kernel: str) -> str:
    """The role that a kernel makes: "output", "dq", "dk" or "dv"; "states" for a walk that keeps states."""
    last = kernel.split()[-1]
    return "output" if last == "walk" else last


def is_walk(kernel: str) -> bool:
    """Does the kernel make its result in one walk?"""
    return "walk" in kernel.split()


def tile_of(tiles: LinearTiles, kernel: str) -> LinearTile:
    """A kernel's tile."""
    role = role_of(kernel)
    if role == "states":
        return tiles.states
    if not is_walk(kernel):
        return tiles.rows[role]
    return tiles.forward if role == "output" else tiles.walks[role]


def with_tile(tiles: LinearTiles, kernel: str, tile: LinearTile) -> LinearTiles:
    """The tiles with a kernel's replaced. States' chunk is everyone's who reads them."""
    role = role_of(kernel)
    if role == "states":
        return replace(tiles, states=tile, rows={n: replace(t, chunk=tile.chunk) for n, t in tiles.rows.items()})
    if not is_walk(kernel):
        return replace(tiles, rows={**tiles.rows, role: tile})
    return replace(tiles, forward=tile) if role == "output" else replace(tiles, walks={**tiles.walks, role: tile})


def linear_key(
    kernel: str, program: LinearProgram, problem: LinearProblem, target: Target, lengths: tuple[int, int],
    wanted: tuple[str, ...], chunk: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a tune file calls the problem. lengths: batch and tokens; wanted: the gradients asked for beyond q, k, v.

    Batch and heads count here, since a walk has one block for each; for kernels that read states, `chunk` does, the
    chunk length of those.
    """
    key: dict[str, Any] = {
        "kernel": f"linear {kernel}",
        "program": program.fingerprint,
        "dtype": "tf32" if problem.tf32 else problem.dtype,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "heads": [problem.heads, problem.q_heads, problem.k_heads],
        "batch": bucket(lengths[0]),
        "length": bucket(lengths[1]),
    }
    key |= {} if chunk is None else {"chunk": chunk}
    return key | common_key(target, problem.custom, wanted if kernel.startswith("backward") else ())


@dataclass(frozen=True)
class _Work:
    """A step of a kernel, and how many: multiply-adds, bytes copied, steps of a block, blocks of one head."""

    products: int
    bytes: int
    steps: int
    blocks: int


def demand(kernel: str, problem: LinearProblem, tile: LinearTile) -> Demand:
    """The least that a tile takes; the compiler adds to it."""
    size = {"float32": 4}.get(problem.dtype, 2) * (2 if problem.splits else 1)
    chunk, stages, role = tile.chunk, max(tile.stages, 1), role_of(kernel)
    if role == "states":
        dim, dim_v = tile_of_state(problem, tile)
        shared = stages * chunk * (dim + dim_v) + chunk * dim_v
        return Demand(shared * size, (dim * dim_v + chunk * dim_v) // tile.threads)
    form = ROLES[role]
    summed, width = padded(problem.dim_of(form.rows)), column_tiles(problem, form, tile)[0]
    weights = 0 if tile.in_registers else chunk * chunk
    if is_walk(kernel):
        shared = stages * chunk * (2 * summed + width) + chunk * width + summed * width + weights
        return Demand(shared * size, (summed * width + 2 * chunk * width + chunk * chunk) // tile.threads)
    inner, total = min(tile.inner, summed), 2 if _shares(problem, form, tile) else 1
    shared = stages * inner * (2 * chunk + width) + chunk * width + weights
    return Demand(shared * size, (total * chunk * width + chunk * chunk * 3 // 2) // tile.threads)


def _shares(problem: LinearProblem, role: Role, tile: LinearTile) -> bool:
    return role.own in ("q", "k") and heads_a_block(problem, role, tile) > 1


def reason_against(kernel: str, problem: LinearProblem, arch: Arch, tile: LinearTile) -> str | None:
    """Why a tile isn't worth trying, as far as arithmetic tells; None: it may be."""
    if (reason := _reason_it_cannot_run(kernel, problem, arch, tile)) is not None:
        return reason
    registers = demand(kernel, problem, tile).registers + OTHER_REGISTERS
    limit = min(arch.registers_per_sm // (tile.threads * tile.blocks), arch.max_registers_per_thread)
    return f"needs some {registers} registers a thread, and there are {limit}" if registers > limit else None


def refusal(kernel: str, problem: LinearProblem, target: Target, default: LinearTile, tile: LinearTile) -> str | None:
    """Why a problem's kernel can't run with a tile that someone wrote down; None: it can, if slowly."""
    return None if tile == default else _reason_it_cannot_run(kernel, problem, as_arch(target), tile)


def _reason_it_cannot_run(kernel: str, problem: LinearProblem, arch: Arch, tile: LinearTile) -> str | None:
    wgmma = arch.has_wgmma and problem.dtype != "float32"
    warps = tile.threads // arch.warp
    step = 64 * (warps // 4) if wgmma else 16 * warps
    if tile.threads > arch.max_threads_per_block or (wgmma and tile.threads % 128):
        unit = "warpgroups of 128" if wgmma else "warps"
        return f"{tile.threads} threads aren't whole {unit}, at most {arch.max_threads_per_block}"
    if not is_walk(kernel) and tile.inner % 32 and tile.inner < padded(problem.dim):
        return f"a step of {tile.inner} of the summed dim is no multiple of 32"
    if role_of(kernel) != "states" and tile.in_registers and tile.chunk % step:
        return f"{tile.chunk} rows don't cut into {step}, what {tile.threads} threads take at a time"
    needs = demand(kernel, problem, tile)
    shared = arch.shared_memory_per_sm // tile.blocks - arch.shared_memory_kept
    most = shared if tile.blocks > 1 else arch.shared_memory_per_block
    if needs.shared_bytes > most:
        return f"needs at least {needs.shared_bytes} bytes of shared memory, and there are {most}"
    return None


def linear_space(
    kernel: str, problem: LinearProblem, target: Target, tiles: LinearTiles, lengths: tuple[int, int]
) -> Space:
    """The tiles to try, the default first whatever it is, then likely ones first."""
    arch, default = as_arch(target), tile_of(tiles, kernel)
    kept: list[LinearTile] = []
    rejected: list[tuple[LinearTile, str]] = []
    for tile in dict.fromkeys(_clipped(kernel, problem, t) for t in _tiles(kernel, problem, default)):
        reason = reason_against(kernel, problem, arch, tile)
        if tile == _clipped(kernel, problem, default):
            continue
        if reason is None:
            kept.append(tile)
        else:
            rejected.append((tile, reason))
    kept.sort(key=lambda tile: cycles(kernel, problem, arch, tile, lengths))
    return Space((default, *kept), tuple(rejected))


def _clipped(kernel: str, problem: LinearProblem, tile: LinearTile) -> LinearTile:
    """The tile no wider than the problem, so that equal kernels have equal tiles."""
    role = role_of(kernel)
    if role == "states":
        return replace(tile, inner=tile_of_state(problem, tile)[0], outer=tile_of_state(problem, tile)[1])
    summed = padded(problem.dim_of(ROLES[role].rows))
    inner = summed if is_walk(kernel) else min(tile.inner, summed)
    return replace(tile, inner=inner, outer=column_tiles(problem, ROLES[role], tile)[0])


def _tiles(kernel: str, problem: LinearProblem, default: LinearTile) -> Iterator[LinearTile]:
    role, fp32 = role_of(kernel), problem.dtype == "float32"
    chunks = (32,) if fp32 else (64, 128)
    threads, blocks = ((64, 128), (1,)) if fp32 else ((128, 256), (1, 2, 3))
    if is_walk(kernel):
        copies = ((0, False),) if fp32 else ((0, False), (1, True), (2, False))
        for chunk, outer, many, (stages, own), count, held in itertools.product(
            chunks, (32, 64, 128), threads, copies, blocks, (True, False)
        ):
            yield LinearTile(chunk, default.inner, outer, many, stages, 1, held, own, count)
        return
    if role == "states":
        for chunk, inner, outer, many, stages, count in itertools.product(
            chunks, (64, 128, 256), (32, 64, 128), threads, (0,) if fp32 else (1, 2), blocks
        ):
            yield LinearTile(chunk, inner, outer, many, stages, blocks=count)
        return
    yield from _row_tiles(problem, default, role, threads)


def _row_tiles(
    problem: LinearProblem, default: LinearTile, role: str, threads: tuple[int, ...]
) -> Iterator[LinearTile]:  # fmt: skip
    """Tiles of results by chunks. Warps of their own copy only where all products stand in one loop, over heads."""
    fp32, form, chunk = problem.dtype == "float32", ROLES[role], default.chunk
    group = min(problem.heads // n for n in (problem.q_heads, problem.k_heads))
    ahead = ((1, True), (2, True)) if group > 1 else ((2, False), (3, False))
    summed = padded(problem.dim_of(form.rows))
    for inner, outer, many, (stages, copies), heads, blocks in itertools.product(
        (32, 64, 128), (32, 64, 128, 256), threads, ((0, False), *(() if fp32 else ahead)),
        (1, 8, 16, 40) if group > 1 else (1,), (1, 2, 3, 4),
    ):  # fmt: skip
        tile = LinearTile(chunk, inner, outer, many, stages, heads, default.in_registers, copies, blocks)
        if not copies or (inner >= summed and heads_a_block(problem, form, tile) > 1):
            yield tile


def _work(kernel: str, problem: LinearProblem, tile: LinearTile, tokens: int) -> _Work:
    chunk, role = tile.chunk, role_of(kernel)
    chunks = -(-tokens // chunk)
    if role == "states":
        dim, dim_v = tile_of_state(problem, tile)
        moved = chunk * (dim + dim_v) + dim * dim_v
        return _Work(chunk * dim * dim_v, 2 * moved, chunks, state_tiles(problem, tile))
    form = ROLES[role]
    summed = padded(problem.dim_of(form.rows))
    width, tiles = column_tiles(problem, form, tile)
    products = chunk * (chunk * (summed + width) + summed * width)
    rows = chunk * 2 * summed
    if is_walk(kernel):
        return _Work(products + chunk * summed * width, 2 * (rows + 2 * chunk * width), chunks, tiles)
    heads = heads_a_block(problem, form, tile)
    entry = 2 + (8 if parts_of(problem, form, tile) > 1 else 2)  # loaded, and stored; parts are fp32 and read again
    each = chunk * width * entry // heads
    return _Work(products, 2 * (rows + summed * width) + each, heads, tiles * -(-chunks // heads))


def cycles(kernel: str, problem: LinearProblem, arch: Arch, tile: LinearTile, lengths: tuple[int, int]) -> float:
    """The model's cycles for one call. A step's products and copies add up, unless copies run ahead or blocks share an
    SM; so do the latencies of a step. Blocks run in waves. Its order is what counts: measuring decides."""
    batch, tokens = lengths
    work, needs = _work(kernel, problem, tile, tokens), demand(kernel, problem, tile)
    rate = (arch.peak_tflops or PEAK_TFLOPS) * 1e12 / arch.sm_count / CLOCK
    matrix, copies = 2 * work.products / rate, work.bytes / L2_BYTES
    threads = tile.threads + (128 if arch.has_wgmma and tile.stages and tile.specialize else 0)
    by_memory = arch.shared_memory_per_sm // (needs.shared_bytes + arch.shared_memory_kept)
    by_registers = arch.registers_per_sm // ((needs.registers + OTHER_REGISTERS) * threads)
    together = max(1, min(by_memory, by_registers, arch.max_threads_per_sm // threads))
    alone = (max(matrix, copies) if tile.stages else matrix + copies) + STEP_CYCLES
    step = max(alone, together * max(matrix, copies))
    waves = -(-work.blocks * batch * problem.heads // (arch.sm_count * together))
    return waves * work.steps * step
