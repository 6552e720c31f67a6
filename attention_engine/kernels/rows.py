"""Row kernels around the backward pass: delta and what pairs read of a row before it; dQ in its dtype after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
from attention_engine.kernels.delta import FEW, HALVES, sum_halves
from attention_engine.kernels.items import KeyBlocks
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.splice import name_value
from attention_engine.kernels.warps import preparing
from attention_engine.kernels.workspace import (
    FINISHED,
    PREPARED,
    bring_to_rows,
    take_sums_for_granted,
    wait_until_finished,
    workspace_entry,
)
from attention_engine.plan import attention_buffers
from attention_engine.plan.attention_buffers import DK_PARTS, DK_SUMS, DV_PARTS, DV_SUMS
from attention_engine.plan.forms import ROW_PAD, Tile
from attention_engine.plan.hopper import rows_of_delta

ENTRIES = 4096  # of the output that a block multiplies with its gradient: many blocks at once keep memory busy
THREADS = 128


def reads_delta(backward: Backward) -> bool:
    """Does the backward pass need dO . o?"""
    exprs = [e for _, e in (*backward.rows, *backward.row_gradients)]
    return bool(exprs) and DELTA in topological(*exprs)


def preprocess(
    problem: Problem, backward: Backward, finals: tuple[str, ...], tile: Tile | None, pad: int,
    longest_first: bool = False, delta_given: bool = False, first_only: bool = False,
) -> Any:  # fmt: skip
    """The PrimFunc: (q, k, v, custom..., o, do, saved..., d_final..., delta, rows..., [workspace, [counters,
    [pairs_of_a_unit], units_ahead, [tickets]]]) -> delta and what follows it.

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
    sums = _SumsOfDq(tile, KeyBlocks.of(problem, tile, sizes, longest_first)) if tile is not None else None
    kernel = _Before(problem, backward, finals, sizes, pad, sums, delta_given, first_only)
    return build("backward_preprocess", parameters, kernel.run)


@dataclass(frozen=True)
class _SumsOfDq:
    """The sums of dQ that are zeroed: of a kernel over keys with this tile, and these blocks."""

    tile: Tile
    blocks: KeyBlocks


@dataclass(frozen=True)
class _RowsAt:
    """The rows that a block has: which block of its head's it is, its pair of key head and batch, and its query head
    among all; their first, and their delta."""

    place: Place
    block: Any
    pair: Any
    row: Any
    row0: Any
    delta: Any


@dataclass(frozen=True)
class _Before:
    """The kernel `preprocess` under construction."""

    problem: Problem
    backward: Backward
    finals: tuple[str, ...]
    sizes: Sizes
    pad: int
    sums: _SumsOfDq | None
    delta_given: bool
    first_only: bool

    @cached_property
    def dim_v(self) -> int:
        """Columns of a row: rows of a power of two share threads evenly."""
        return max(1 << (self.problem.dim_v - 1).bit_length(), 16)

    @cached_property
    def length(self) -> int:
        """Rows of a block."""
        return min(max(ENTRIES // self.dim_v, 16), ROW_PAD)

    @property
    def pairs_before(self) -> Any:
        """How many pairs of key head and batch no block over keys prepares for."""
        assert self.sums is not None, "who makes the first units' rows zeroes their sums too"
        return self.sums.blocks.pairs_before

    @macro_method
    def run(self, buffers: Buffers) -> None:
        """A block for some rows of a head."""
        problem, sizes, length = self.problem, self.sizes, self.length
        count = padded_length(sizes.q, self.pad) // length
        with T.Kernel(count, problem.heads, sizes.batch, threads=THREADS) as (block, head, batch):
            if self.sums is not None and self.sums.tile.hopper:
                T.pdl_trigger()  # the next kernel's blocks come as these go, and wait for all of them
            delta = T.alloc_fragment([length], FLOAT)
            row0 = block * length
            pair, row = batch * problem.kv_heads + head // problem.group, batch * problem.heads + head
            place = Place(batch, head, {}, reader(buffers, sizes.inside(problem, batch, head)))
            at = _RowsAt(place, block, pair, row, row0, delta)
            if self.first_only:
                self.make_first_rows(buffers, at)
            else:
                self.make_rows(buffers, at)
            if self.sums is not None:
                self.zero_sums(buffers, self.sums, at)

    @macro_method
    def make_first_rows(self, buffers: Buffers, at: _RowsAt) -> None:
        """What pairs read of all rows, but what is made of delta for the first units alone."""
        of_delta = rows_of_delta(self.backward)
        self.write_rows(buffers, at, [named for named in self.backward.rows if named not in of_delta], None)
        if at.pair < self.pairs_before:
            if self.sums is not None and self.sums.tile.in_order:
                self.multiply_in_order(buffers, at)
            else:
                self.multiply(buffers, at.place.batch, at.place.head, at.row0, at.delta)
            self.write_rows(buffers, at, of_delta, at.delta)

    @macro_method
    def make_rows(self, buffers: Buffers, at: _RowsAt) -> None:
        """Delta, and what pairs read of rows."""
        place = at.place
        if self.delta_given:
            T.copy(self.rows_of(buffers, "given", at), at.delta)
        elif reads_delta(self.backward):
            self.multiply(buffers, place.batch, place.head, at.row0, at.delta)
        else:
            T.fill(at.delta, 0)
        T.copy(at.delta, self.rows_of(buffers, "delta", at))
        self.write_rows(buffers, at, self.backward.rows, at.delta)

    def rows_of(self, buffers: Buffers, name: str, at: _RowsAt) -> Any:
        """A block's rows of a tensor."""
        return buffers[name][at.place.batch, at.place.head, at.row0 : at.row0 + self.length]

    @macro_method
    def multiply(self, buffers: Buffers, batch: Any, head: Any, row0: Any, delta: Any) -> None:
        """delta = the row sums of o * dO."""
        length, dim_v, dtype = self.length, self.dim_v, self.problem.dtype
        product = T.alloc_fragment([length, dim_v], FLOAT)
        output = T.alloc_fragment([length, dim_v], dtype)
        gradient = T.alloc_fragment([length, dim_v], dtype)
        T.copy(window(buffers["o"], batch, head, row0, length, dim_v), output)
        T.copy(window(buffers["do"], batch, head, row0, length, dim_v), gradient)
        for i, d in T.Parallel(length, dim_v):
            product[i, d] = T.cast(output[i, d], FLOAT) * T.cast(gradient[i, d], FLOAT)
        T.reduce_sum(product, delta, dim=1)

    @macro_method
    def multiply_in_order(self, buffers: Buffers, at: _RowsAt) -> None:
        """The same to the last bit as blocks over keys make it for later ones (hopper/keys/spare_warps.py)."""
        rows, dtype = [self.length, padded(self.problem.dim_v)], self.problem.dtype
        batch, head = at.place.batch, at.place.head
        output, gradient = T.alloc_shared(rows, dtype), T.alloc_shared(rows, dtype)
        sums = T.alloc_fragment([self.length, HALVES], FLOAT)
        T.copy(window(buffers["o"], batch, head, at.row0, *rows), output)
        T.copy(window(buffers["do"], batch, head, at.row0, *rows), gradient)
        sum_halves(sums, output, gradient, FEW)
        T.reduce_sum(sums, at.delta, dim=1)

    @macro_method
    def zero_sums(self, buffers: Buffers, sums: _SumsOfDq, at: _RowsAt) -> None:
        """The sums of these rows' dQ, unless the first block to add to them stores; a kernel placed by hand zeroes
        those of all but its first units. Its counters and tickets."""
        size, row, by_hand, blocks = self.length * padded(self.problem.dim), at.row, sums.tile.hopper, sums.blocks
        if not sums.tile.stores_first:
            take_sums_for_granted(buffers, row, at.block * size, size)
            if not by_hand or at.pair < blocks.pairs_before:
                for x in T.Parallel(size):
                    buffers["workspace"][row, at.block * size + x] = 0.0
        if by_hand and row < blocks.pairs and at.block == 0:
            listed = blocks.listed(buffers)
            _, pairs = listed.pairs_of(row)
            buffers["counters"][1 + row, PREPARED] = -len(preparing(sums.tile)) * listed.of_a_unit
            buffers["counters"][1 + row, FINISHED] = -pairs * listed.blocks
            buffers["counters"][0, 0] = 0
        if sums.tile.in_order:
            tickets, each = buffers["tickets"], list(range(-(-self.length // sums.tile.q)))
            for number in each:
                tile_of_head = at.block * len(each) + number
                if tile_of_head < tickets.shape[1]:
                    tickets[row, tile_of_head] = 0

    def write_rows(self, buffers: Buffers, at: _RowsAt, rows: Sequence[tuple[str, Expr]], delta: Any) -> None:
        """Writes some of the row values that the backward's pairs read; delta: None where they need none."""
        place, row0, queries = at.place, at.row0, self.sizes.q

        def value(name: str, i: Any) -> Any:
            inside = row0 + i < queries
            return T.if_then_else(inside, buffers[name][place.batch, place.head, T.min(row0 + i, queries - 1)], 0.0)

        def entry(i: Any) -> None:
            values: dict[Expr, Any] = {DELTA: delta[i]} if delta is not None else {}
            values.update({final_variable(n): value(f"saved_{n}", i) for n in self.backward.given_rows})
            for node in topological(*(e for _, e in rows)):
                if node.kind is VarKind.ARRIVING:
                    final = node.bare_name
                    values[node] = value(f"d_{final}", i) if final in self.finals else T.float32(0)
            results = place.splice(row0 + i, None, values)(*(e for _, e in rows))
            for (name, _), result in zip(rows, results, strict=True):
                kept = T.if_then_else(row0 + i < queries, result, 0.0)
                store(buffers[name], kept, place.batch, place.head, row0 + i)

        if rows:
            over_rows(self.length, entry)


def finish_keys(problem: Problem, tile: Tile, scale: float, threads: int = 256) -> Any:
    """The PrimFunc: (dk, dv, dk_sums, dv_sums): rows of dK = scale * its sums, and of dV, in the tensors' dtype."""
    sizes = Sizes(problem)
    parameters = sizes.declare(attention_buffers.finish_keys(problem, tile))
    each = ("dk", DK_SUMS, scale), ("dv", DV_SUMS, 1.0)

    @T.macro
    def body(buffers: Buffers) -> None:
        with T.Kernel(T.ceildiv(sizes.kv, tile.kv), problem.kv_heads, sizes.batch, threads=threads) as (block, head, b):
            row = b * problem.kv_heads + head
            for name, of, factor in each:
                dim = padded(problem.dim if name == "dk" else problem.dim_v)
                sums = T.alloc_fragment([tile.kv * dim], FLOAT)
                gradient = T.alloc_shared([tile.kv, dim], problem.dtype)
                first = block * (tile.kv * dim)
                T.copy(buffers[of][row, first : first + tile.kv * dim], sums)
                for x in T.Parallel(tile.kv * dim):
                    key, d = workspace_entry(x, tile, dim, vectors=True)
                    gradient[key, d] = T.cast(sums[x] * factor, problem.dtype)
                T.copy(gradient, window(buffers[name], b, head, block * tile.kv, tile.kv, dim))

    return build("backward_finish_keys", parameters, body)


def add_parts(problem: Problem, wide: bool, threads: int = 256) -> Any:
    """The PrimFunc: (dk, dv, dk_parts, dv_parts): the sums over the copies of each key head, in the tensors' dtype, or
    in fp32. In one launch: torch would add and round dK and dV in four."""
    sizes, keys = Sizes(problem), 16  # keys of a block: few, so that blocks are many
    parameters = sizes.declare(attention_buffers.add_parts(problem, wide))
    each = ("dk", DK_PARTS, problem.dim), ("dv", DV_PARTS, problem.dim_v)

    @T.macro
    def body(buffers: Buffers) -> None:
        grid = T.ceildiv(sizes.kv, keys), problem.heads_of_keys, sizes.batch
        with T.Kernel(*grid, threads=threads) as (block, head, batch):
            for name, of, dim in each:
                total = T.alloc_fragment([keys, padded(dim)], FLOAT)
                part = T.alloc_fragment([keys, padded(dim)], FLOAT)
                first = head * problem.copies
                T.copy(window(buffers[of], batch, first, block * keys, keys, padded(dim)), total)
                for n in T.serial(problem.copies - 1):
                    T.copy(window(buffers[of], batch, first + 1 + n, block * keys, keys, padded(dim)), part)
                    for j, d in T.Parallel(keys, padded(dim)):
                        total[j, d] += part[j, d]
                T.copy(total, window(buffers[name], batch, head, block * keys, keys, padded(dim)))

    return build("backward_add_parts", parameters, body)


def postprocess(
    problem: Problem, tile: Tile, scale: float, vectors: bool, longest_first: bool = False, wide: bool = False,
    threads: int = 256,
) -> Any:  # fmt: skip
    """The PrimFunc: (dq, workspace, [counters, [pairs_of_a_unit], [units_ahead]]): dQ = scale * the sums, in the
    tensors' dtype (wide: in fp32) and layout. After a kernel over keys for Hopper, whose blocks start as KeyBlocks says
    (longest_first), a block waits for the unit that adds to its sums alone: the first heads' dQ leaves while the last
    heads' blocks end, where they leave room. Persistent ones leave none, and only the last units' dQ to this kernel.
    """
    sizes = Sizes(problem)
    dim = padded(problem.dim)
    parameters = sizes.declare(attention_buffers.postprocess(problem, tile, longest_first, wide))
    blocks = KeyBlocks.of(problem, tile, sizes, longest_first)

    @T.macro
    def store_tile(buffers: Any, block: Any, head: Any, batch: Any, last: Any) -> None:
        if tile.hopper:
            unit = T.truncdiv(batch * problem.kv_heads + head // problem.group, blocks.together)
            if T.get_thread_binding() == 0:
                wait_until_finished(buffers, unit)
            T.sync_threads()
        sums = T.alloc_fragment([tile.q * dim], FLOAT)
        gradient = T.alloc_shared([tile.q, dim], FLOAT if wide else problem.dtype)
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
