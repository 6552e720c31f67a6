"""A first guess at the time of a tile, to try the likely ones first. The whole model:

1. A block makes one tile of pairs a step; steps are the walked tiles that the mask leaves, of all blocks together.
2. Matrix work of a step: products * 2 * pairs * dim FLOPs at the SM's share of the peak, less where a side is short.
3. Exponentials and the other per-pair arithmetic: about 1 / 16 + 12 / 128 cycles a pair and SM.
4. Bytes of a step: the walked tiles come from the L2 cache at 40 bytes a cycle and SM; the held ones are read once.
5. A step takes its longest part, and half of the rest where two blocks or two warpgroups share the SM, all of it else.
6. Occupancy: blocks an SM holds, by shared memory, registers and threads.
7. Waves: blocks over the SMs' places, rounded up; the last wave is as long as a full one.
8. A step costs 300 cycles of barriers and loop besides, more where copies don't run two stages ahead, and an eighth of
   its time where weights go through shared memory. A third stage buys little and costs memory.
9. Where an SM holds one block, nothing hides some 3000 cycles of its start and end, but a persistent kernel does.
10. The time is waves * blocks an SM holds * steps of a block * the time of a step.
11. Its order is what counts: measuring decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.arch import Arch
from attention_engine.ir.problem import Problem
from attention_engine.plan.demand import demand
from attention_engine.plan.forms import KernelName, Tile
from attention_engine.tuner.space import OTHER_REGISTERS

CLOCK = 1.7e9  # cycles a second
PEAK_TFLOPS = 100.0  # of a GPU whose peak nobody has looked up: it cancels in the order
UNHIDDEN = 3000  # cycles: a launch, the way of the first tiles, the output's
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "queries": (2, 1)}  # products over dim, over dim_v


@dataclass(frozen=True)
class Work:
    """The size of a call: batch, queries and keys, and the part of all pairs that the mask keeps."""

    batch: int
    queries: int
    keys: int
    kept: float = 1.0


def blocks_per_sm(kernel: KernelName, problem: Problem, arch: Arch, tile: Tile) -> int:
    """How many blocks an SM holds at once."""
    needs = demand(kernel, problem, tile)
    threads = tile.threads + (128 if arch.has_wgmma and tile.stages else 0)
    registers = (needs.registers + OTHER_REGISTERS) * threads
    by_memory = arch.shared_memory_per_sm // (needs.shared_bytes + arch.shared_memory_kept)
    return max(1, min(by_memory, arch.registers_per_sm // registers, arch.max_threads_per_sm // threads))


def cycles(kernel: KernelName, problem: Problem, arch: Arch, tile: Tile, work: Work) -> float:
    """The model's cycles for one call."""
    pairs, size = tile.q * tile.kv, 4 if problem.dtype == "float32" else 2
    over_dim, over_dim_v = PRODUCTS[kernel]
    flops = 2 * pairs * (over_dim * problem.dim + over_dim_v * problem.dim_v)
    rate = (arch.peak_tflops or PEAK_TFLOPS) * 1e12 / arch.sm_count / CLOCK
    short = min(tile.kv / 64, 1.0) * min(tile.q / 64, 1.0)
    matrix = flops / (rate * (0.4 + 0.6 * short)) * (8 if problem.splits else 1)
    scalar = pairs * (1 / 16 + 12 / 128)
    walked, held = (tile.q, tile.kv) if kernel == "backward" else (tile.kv, tile.q)
    dims = problem.dim + problem.dim_v
    copies = walked * dims * size / 40 + (walked * problem.dim * 4 / 40 if kernel == "backward" else 0)
    together = blocks_per_sm(kernel, problem, arch, tile)
    longest = max(matrix, scalar, copies)
    rest = (matrix + scalar + copies - longest) * (0.5 if together > 1 or tile.threads > 128 else 1.0)
    step = (longest + rest) * (9 / 8 if tile.shared_weights else 1.0) * (1.02 if tile.stages > 2 else 1.0)
    step += 300 * {0: 2.0, 1: 1.5}.get(tile.stages, 1.0)
    rows, columns = (work.keys, work.queries) if kernel == "backward" else (work.queries, work.keys)
    heads = problem.kv_heads if kernel == "backward" else problem.heads
    turns = problem.group if kernel == "backward" else 1
    steps = turns * work.kept * -(-columns // walked) + held / walked / 2 + held * dims * size / 40 / step
    if together == 1 and not tile.persistent:
        steps += UNHIDDEN / step
    blocks = -(-rows // held) * heads * work.batch
    waves = -(-blocks // (arch.sm_count * together))
    return waves * together * steps * step
