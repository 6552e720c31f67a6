"""Row kernels around the backward pass: delta and what pairs read of a row before it; dQ in its dtype after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr, VarKind, topological
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import DELTA, Backward, final_variable
from attention_engine.kernels.common import (
    FLOAT,
    Buffers,
    Place,
    Sizes,
    build,
    over_rows,
    padded_length,
    reader,
    store,
    window,
)
from attention_engine.kernels.items import KeyBlocks
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.warps import SPARE
from attention_engine.plan import attention_buffers
from attention_engine.plan.forms import ROW_PAD, Tile
from attention_engine.plan.hopper import rows_of_delta

ENTRIES = 4096  # of the output that a block multiplies with its gradient: many blocks at once keep memory busy
VECTOR = 4  # sums that a thread writes or reads at once
PREPARED, FINISHED = range(2)  # columns of the counters
PAUSE = 1000  # ns between looks at a counter


def take_sums_for_granted(buffers: Buffers, row: Any, first: Any, size: int) -> None:
    """Spares the guards of a tile's sums, from `first` on, and says that rows begin at whole vectors."""
    count, length = buffers["workspace"].shape
    take_for_granted(T.And(row >= 0, row < count))
    take_for_granted(T.And(first >= 0, first + size <= length))
    take_for_granted(length % VECTOR == 0)


def counter(buffers: Buffers, unit: Any, which: int) -> Any:
    """One of a unit's counters."""
    return buffers["counters"][1 + unit, which]


def dealt(buffers: Buffers) -> Any:
    """The counter of blocks that were begun."""
    return buffers["counters"][0, 0]


@T.macro
def wait_until_finished(buffers: Buffers, unit: Any) -> None:
    """Until a unit's blocks have added all to its sums."""
    while T.atomic_load(counter(buffers, unit, FINISHED), memory_order="acquire") < 0:
        T.call_extern("void", "__nanosleep", PAUSE)


@T.macro
def bring_to_rows(
    sums: Any, first: Any, rows: Any, problem: Problem, tile: Tile, scale: float, vectors: bool
) -> None:  # fmt: skip
    """Rows of dQ = scale * sums, which stand in a tile from `first` on: those that threads hold."""
    for x in T.Parallel(int(sums.shape[0])):
        query, d = workspace_entry(first + x, tile, padded(problem.dim), vectors)
        rows[query, d] = T.cast(sums[x] * scale, problem.dtype)


def transposes_dq(tile: Tile, dim: int) -> bool:
    """Does the kernel over keys hold dQ as (dim, queries)? Two warpgroups take 64 rows each, 80 queries don't fit."""
    return tile.hopper and dim % 128 == 0


def workspace_offset(i: Any, d: Any, tile: Tile, dim: int, vectors: bool) -> Any:
    """Where dQ[i, d] of a tile stands, so that the atomics of a warp meet consecutive addresses; those of a piece of
    queries (tiles.py) stand together, and tiles may begin at any.

    With vectors (sm_90 has 16-byte reductions), the four numbers of a thread stand together; else 32 lanes do.
    """
    transposed, height = transposes_dq(tile, dim), _height(vectors)
    if transposed:
        i, d = d, i
        block = d // 8 * (dim // height) + i // height
    else:
        block = i // height * (dim // 8) + d // 8
    if vectors:
        return block * 128 + (i % 8) * 16 + ((d % 8) // 2) * 4 + ((i % 16) // 8) * 2 + d % 2
    return block * 64 + (d % 2) * 32 + (i % 8) * 4 + (d % 8) // 2


def workspace_entry(x: Any, tile: Tile, dim: int, vectors: bool) -> tuple[Any, Any]:
    """The query and head dim of a tile that stand at x: the inverse of `workspace_offset`."""
    transposed, height = transposes_dq(tile, dim), _height(vectors)
    block, of_block = x // (height * 8), x % (height * 8)
    across = dim // height if transposed else dim // 8
    i, d = (block % across, block // across) if transposed else (block // across, block % across)
    if vectors:
        lane = of_block // 4
        i, d = i * 16 + x % 4 // 2 * 8 + lane // 4, d * 8 + lane % 4 * 2 + x % 2
    else:
        lane = of_block % 32
        i, d = i * 8 + lane // 4, d * 8 + lane % 4 * 2 + of_block // 32
    return (d, i) if transposed else (i, d)


def _height(vectors: bool) -> int:
    """Rows of an accumulator's block of eight columns whose sums stand together."""
    return 16 if vectors else 8


def reads_delta(backward: Backward) -> bool:
    """Does the backward pass need dO . o?"""
    exprs = [e for _, e in (*backward.rows, *backward.row_gradients)]
    return bool(exprs) and DELTA in topological(*exprs)


def preprocess(
    problem: Problem, backward: Backward, finals: tuple[str, ...], tile: Tile | None, pad: int,
    longest_first: bool = False, delta_given: bool = False, first_only: bool = False, threads: int = 128,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., o, do, saved..., d_final..., delta, rows..., [workspace, [counters,
    [pairs_of_a_unit], units_ahead]]) -> delta and what follows it.

    finals: the returned rows that a gradient arrives at. Rows are padded to a multiple of `pad`, with zeros. tile: the
    tile of the backward kernel whose workspace this one zeroes; None if there is none. A kernel for Hopper, whose
    blocks start as KeyBlocks says (longest_first), needs counters, and zeroes for its first units alone. delta_given:
    delta, fp32 (batch, heads, queries), is an argument in the place of o and do. first_only: this kernel makes the row
    of delta for the first units alone, and the main kernel makes the others' (hopper/keys/spare_warps.py); delta itself
    is wanted nowhere.
    """
    sizes = Sizes(problem)
    given = "given" if delta_given else ""
    parameters = sizes.declare(attention_buffers.preprocess(problem, backward, finals, tile, pad, longest_first, given))
    blocks = KeyBlocks.of(problem, tile, sizes, longest_first) if tile is not None else None
    dim_v = max(1 << (problem.dim_v - 1).bit_length(), 16)  # rows of a power of two share threads evenly
    length = min(max(ENTRIES // dim_v, 16), ROW_PAD)
    of_delta = rows_of_delta(backward)
    without_delta = [named for named in backward.rows if named not in of_delta]

    @T.macro
    def multiply(buffers: Any, batch: Any, head: Any, row0: Any, delta: Any) -> None:
        product = T.alloc_fragment([length, dim_v], FLOAT)
        output = T.alloc_fragment([length, dim_v], problem.dtype)
        gradient = T.alloc_fragment([length, dim_v], problem.dtype)
        T.copy(window(buffers["o"], batch, head, row0, length, dim_v), output)
        T.copy(window(buffers["do"], batch, head, row0, length, dim_v), gradient)
        for i, d in T.Parallel(length, dim_v):
            product[i, d] = T.cast(output[i, d], FLOAT) * T.cast(gradient[i, d], FLOAT)
        T.reduce_sum(product, delta, dim=1)

    @T.macro
    def body(buffers: Any) -> None:
        count = padded_length(sizes.q, pad) // length
        with T.Kernel(count, problem.heads, sizes.batch, threads=threads) as (block, head, batch):
            if tile is not None and tile.hopper:
                T.pdl_trigger()  # the next kernel's blocks come as these go, and wait for all of them
            delta = T.alloc_fragment([length], FLOAT)
            row0 = block * length
            pair, row = batch * problem.kv_heads + head // problem.group, batch * problem.heads + head
            place = Place(batch, head, {}, reader(buffers, sizes.inside(problem, batch, head)))
            if first_only:
                _read_rows(problem, backward, without_delta, finals, place, buffers, None, row0, length, sizes)
                if pair < blocks.pairs_before:
                    multiply(buffers, batch, head, row0, delta)
                    _read_rows(problem, backward, of_delta, finals, place, buffers, delta, row0, length, sizes)
            elif delta_given:
                T.copy(buffers["given"][batch, head, row0 : row0 + length], delta)
            elif reads_delta(backward):
                multiply(buffers, batch, head, row0, delta)
            else:
                T.fill(delta, 0)
            if not first_only:
                T.copy(delta, buffers["delta"][batch, head, row0 : row0 + length])
                _read_rows(problem, backward, backward.rows, finals, place, buffers, delta, row0, length, sizes)
            if tile is not None:
                size = length * padded(problem.dim)
                take_sums_for_granted(buffers, row, block * size, size)
                if not tile.hopper or pair < blocks.pairs_before:
                    for x in T.Parallel(length * padded(problem.dim)):
                        buffers["workspace"][row, block * (length * padded(problem.dim)) + x] = 0.0
                if tile.hopper and row < blocks.pairs and block == 0:
                    _, pairs = blocks.pairs_of(row)
                    buffers["counters"][1 + row, PREPARED] = -len(SPARE) * blocks.of_a_unit
                    buffers["counters"][1 + row, FINISHED] = -pairs * blocks.blocks
                    buffers["counters"][0, 0] = 0

    return build("backward_preprocess", parameters, body)


def _read_rows(
    problem: Problem, backward: Backward, rows: Sequence[tuple[str, Expr]], finals: tuple[str, ...], place: Place,
    buffers: Any, delta: Any, row0: Any, length: int, sizes: Sizes,
) -> None:  # fmt: skip
    """Writes some of the row values that the backward's pairs read; delta: None where they need none."""

    def value(name: str, i: Any) -> Any:
        inside = row0 + i < sizes.q
        return T.if_then_else(inside, buffers[name][place.batch, place.head, T.min(row0 + i, sizes.q - 1)], 0.0)

    def entry(i: Any) -> None:
        values: dict[Expr, Any] = {DELTA: delta[i]} if delta is not None else {}
        values.update({final_variable(n): value(f"saved_{n}", i) for n in backward.given_rows})
        for node in topological(*(e for _, e in rows)):
            if node.kind is VarKind.ARRIVING:
                final = node.bare_name
                values[node] = value(f"d_{final}", i) if final in finals else T.float32(0)
        splice = place.splice(row0 + i, None, values)
        results = splice(*(e for _, e in rows))
        for (name, _), result in zip(rows, results, strict=True):
            kept = T.if_then_else(row0 + i < sizes.q, result, 0.0)
            store(buffers[name], kept, place.batch, place.head, row0 + i)

    if rows:
        over_rows(length, entry)


def postprocess(
    problem: Problem, tile: Tile, scale: float, vectors: bool, longest_first: bool = False, threads: int = 256
) -> Any:
    """The PrimFunc: (dq, workspace, [counters, [pairs_of_a_unit], [units_ahead]]): dQ = scale * the sums, in the
    tensors' dtype and layout. After a kernel over keys for Hopper, whose blocks start as KeyBlocks says
    (longest_first), a block waits for the unit that adds to its sums alone: the first heads' dQ leaves while the last
    heads' blocks end, where they leave room. Persistent ones leave none, and only the last units' dQ to this kernel.
    """
    sizes = Sizes(problem)
    dim = padded(problem.dim)
    parameters = sizes.declare(attention_buffers.postprocess(problem, tile, longest_first))
    blocks = KeyBlocks.of(problem, tile, sizes, longest_first)

    @T.macro
    def store_tile(buffers: Any, block: Any, head: Any, batch: Any, last: Any) -> None:
        if tile.hopper:
            unit = T.truncdiv(batch * problem.kv_heads + head // problem.group, blocks.together)
            if T.get_thread_binding() == 0:
                wait_until_finished(buffers, unit)
            T.sync_threads()
        sums = T.alloc_fragment([tile.q * dim], FLOAT)
        gradient = T.alloc_shared([tile.q, dim], problem.dtype)
        row, first = batch * problem.heads + head, block * (tile.q * dim)
        take_sums_for_granted(buffers, row, first, tile.q * dim)
        T.copy(buffers["workspace"][row, first : first + tile.q * dim], sums)
        bring_to_rows(sums, 0, gradient, problem, tile, scale, vectors)
        T.copy(gradient, window(buffers["dq"], batch, head, block * tile.q, tile.q, dim))
        if tile.hopper:  # noqa: SIM102 - Python's condition, then the kernel's
            if last:
                T.pdl_sync()  # whoever waits for this kernel waits for the one before too

    @T.macro
    def body(buffers: Any) -> None:
        tiles = T.ceildiv(sizes.q, tile.q)
        if tile.persistent:
            left = (blocks.pairs - blocks.pairs_stored) * problem.group
            with T.Kernel(tiles, left, threads=threads) as (block, number):
                row = name_value(sizes.batch * problem.heads - left + number)
                batch = name_value(T.truncdiv(row, problem.heads))
                head = name_value(row - batch * problem.heads)
                store_tile(buffers, block, head, batch, T.And(block == 0, number == left - 1))
        else:
            with T.Kernel(tiles, problem.heads, sizes.batch, threads=threads) as (block, head, batch):
                last = T.And(T.And(block == 0, head == problem.heads - 1), batch == sizes.batch - 1)
                store_tile(buffers, block, head, batch, last)

    return build("backward_postprocess", parameters, body)
