"""The backward pass over queries on Hopper, for lists of key blocks: a block keeps its queries and walks over keys.

Where a call lists key blocks, what a block over keys reads, queries of several heads, is spread over more memory than
the L2 cache holds. Over queries the heads that share a list of keys run side by side and meet the same keys at the same
time: memory brings them once. A block keeps its queries, gradients of the output (dO) and its dQ, in registers, and
streams keys and values through two stages of shared memory. Weights and gradients of products go through shared memory
to dV and dK, which leave each step: they are added to sums in memory by atomics, 16 bytes at a time. `finish_keys` in
kernels/rows.py makes rows of them. So dQ has the same bits in every run, and dK and dV have not.

Order of a step: scores and gradients of weights are issued; weights are made while the latter run; both operands are
stored, all computing threads meet, dV, dK and dQ are issued in this order, and dV is added while the others run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.problem import Problem
from attention_engine.ir.program import Backward, row_variable
from attention_engine.kernels.bounds import either
from attention_engine.kernels.common import FLOAT, Buffers, Sizes, build, named, place_at, where_partial, window
from attention_engine.kernels.hopper.barriers import Ring, finish_before
from attention_engine.kernels.items import stage_of
from attention_engine.kernels.pair_maths import PairMaths, PairTile
from attention_engine.kernels.splice import name_value, take_for_granted
from attention_engine.kernels.tiles import KeyWalk, Visit, Walks
from attention_engine.kernels.warps import COLUMNS_SHARED, COMPUTE, GROUP, ROWS_WHOLE, WARP, Form, registers
from attention_engine.kernels.workspace import VECTOR, workspace_offset
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.plan import attention_buffers
from attention_engine.plan.attention_buffers import DK_SUMS, DV_SUMS
from attention_engine.plan.forms import Tile


def backward(problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile) -> Any:
    """The PrimFunc: (q, k, v, custom..., tile_lists, do, rows..., dq, dk_sums, dv_sums)."""
    sizes = Sizes(problem)
    parameters = sizes.declare(attention_buffers.by_queries(problem, schedule, rows, tile))
    form = QueryForm(problem, schedule, rows, tile, sizes, plan_tiles(schedule.mask))
    return build("backward", parameters, bind(run, form))


@dataclass(frozen=True)
class QueryForm(Form):
    """What the kernel is built for."""

    problem: Problem
    schedule: BackwardSchedule
    rows: Backward
    tile: Tile
    sizes: Sizes
    plan: TilePlan

    @cached_property
    def grid(self) -> tuple[Any, Any, Any]:
        """Heads that share keys start together, then those of the next queries."""
        problem = self.problem
        return problem.group, T.ceildiv(self.sizes.q, self.tile.q), self.sizes.batch * problem.kv_heads

    def walk(self, buffers: Buffers, batch: Any, head: Any, block: Any) -> KeyWalk:
        """The walk of a block of queries over tiles of keys."""
        return KeyWalk(Walks(self.plan, self.problem, self.sizes, self.tile), buffers, batch, head, block)


@dataclass(frozen=True)
class QueryBlock:
    """Where a block is: its batch, query head and key head, its first query, its walk."""

    batch: Any
    head: Any
    kv_head: Any
    q0: Any
    walk: KeyWalk


@dataclass(frozen=True)
class QueryMemory:
    """Tiles and barriers of a block. weights and gradients of products in shared memory have two tiles, which steps
    take in turns: one step's products may still read theirs while the next step writes."""

    q: Any
    do: Any
    arrived: Any  # q and dO have come
    keys: Ring
    values: Ring
    weights_shared: Any
    gradients_shared: Any
    products: Any
    gradients: Any
    gradients_packed: Any
    dq: Any
    dk: Any
    dv: Any
    rows: dict[Any, Any]

    @staticmethod
    def allocate(form: QueryForm) -> QueryMemory:
        """Made in the kernel."""
        tile, dtype, pairs = form.tile, form.problem.dtype, [form.tile.q, form.tile.kv]

        def ring(name: str, dim: int) -> Ring:
            full = named(f"{name}_full", T.alloc_barrier(arrive_count=[WARP] * tile.stages))
            empty = named(f"{name}_empty", T.alloc_barrier(arrive_count=[form.warps] * tile.stages))
            return Ring(named(f"{name}_tile", T.alloc_shared([tile.stages, tile.kv, dim], dtype)), full, empty)

        return QueryMemory(
            q=named("q_tile", T.alloc_shared([tile.q, form.dim], dtype)),
            do=named("do_tile", T.alloc_shared([tile.q, form.dim_v], dtype)),
            arrived=named("q_full", T.alloc_barrier(arrive_count=WARP)),
            keys=ring("k", form.dim), values=ring("v", form.dim_v),
            weights_shared=named("weights_out", T.alloc_shared([2, *pairs], dtype)),
            gradients_shared=named("gradients_out", T.alloc_shared([2, *pairs], dtype)),
            products=named("products", T.alloc_fragment(pairs, FLOAT)),
            gradients=named("gradients", T.alloc_fragment(pairs, FLOAT)),
            gradients_packed=named("gradients_in", T.alloc_fragment(pairs, dtype)),
            dq=named("dq", T.alloc_fragment([tile.q, form.dim], FLOAT)),
            dk=named("dk", T.alloc_fragment([tile.kv, form.dim], FLOAT)),
            dv=named("dv", T.alloc_fragment([tile.kv, form.dim_v], FLOAT)),
            rows={row_variable(n): named(f"{n}_row", T.alloc_fragment([tile.q], FLOAT)) for n, _ in form.rows.rows},
        )  # fmt: skip


@T.macro
def run(form: QueryForm, buffers: Buffers) -> None:
    """A block for each tile of queries of a head."""
    with T.Kernel(*form.grid, threads=GROUP + form.tile.threads) as (in_group, tile_of_q, pair):
        memory = QueryMemory.allocate(form)
        batch = name_value(T.truncdiv(pair, form.problem.kv_heads))
        kv_head = name_value(pair - batch * form.problem.kv_heads)
        head = name_value(kv_head * form.problem.group + in_group)
        walk = form.walk(buffers, batch, head, tile_of_q)
        at = QueryBlock(batch, head, kv_head, tile_of_q * form.tile.q, walk)
        thread = T.get_thread_binding()
        copying, computing = registers(form.tile.threads)
        if thread < GROUP:
            T.dec_max_nreg(copying)
            if thread < WARP:
                copy(form, buffers, memory, at)
        else:
            T.inc_max_nreg(computing)
            compute(form, buffers, memory, at)


@T.macro
def copy(form: QueryForm, buffers: Buffers, memory: QueryMemory, at: QueryBlock) -> None:
    """A warp brings queries and dO, then keys and values of each step."""
    tile, batch, kv_head = form.tile, at.batch, at.kv_head
    T.tma_copy(window(buffers["q"], batch, at.head, at.q0, tile.q, form.dim), memory.q, barrier=memory.arrived)
    T.tma_copy(window(buffers["do"], batch, at.head, at.q0, tile.q, form.dim_v), memory.do, barrier=memory.arrived)
    T.barrier_arrive(memory.arrived)
    for step in T.unroll(at.walk.count, unroll_factor=1):
        kv0 = at.walk.at(step).start
        stage, turn = stage_of(step, tile.stages)
        copy_tile(window(buffers["k"], batch, kv_head, kv0, tile.kv, form.dim), memory.keys, stage, turn)
        copy_tile(window(buffers["v"], batch, kv_head, kv0, tile.kv, form.dim_v), memory.values, stage, turn)


@T.macro
def copy_tile(source: Any, ring: Ring, stage: Any, turn: Any) -> None:
    """Brings a tile to a stage, when nobody reads the tile before any more."""
    T.barrier_wait(ring.empty[stage], turn ^ 1)
    T.tma_copy(source, ring.tile[stage, :, :], barrier=ring.full[stage])
    T.barrier_arrive(ring.full[stage])


@T.macro
def compute(form: QueryForm, buffers: Buffers, memory: QueryMemory, at: QueryBlock) -> None:
    """A block's dQ, in registers, and what it adds to dK and dV."""
    tile, problem, sizes = form.tile, form.problem, form.sizes
    T.fill(memory.dq, 0)
    T.warpgroup_fence_operand(memory.dq, num_regs=tile.q * form.dim // tile.threads)
    for name, _ in form.rows.rows:
        T.copy(buffers[name][at.batch, at.head, at.q0 : at.q0 + tile.q], memory.rows[row_variable(name)])
    place = place_at(form.schedule.block, problem, sizes, buffers, at.batch, at.head)
    row = at.batch * problem.kv_heads + at.kv_head
    T.barrier_wait(memory.arrived, 0)
    for step in T.serial(at.walk.count):
        visit = at.walk.at(step)
        kv0 = visit.start
        pairs = PairTile((tile.q, tile.kv), False, at.q0, kv0, memory.rows)
        maths = PairMaths(form.schedule, sizes, place, pairs)
        make_pairs(form, memory, visit, maths, step)
        add_step(form, buffers, memory, row, kv0, step)
    store(form, buffers, memory, at)


@T.macro
def make_pairs(form: QueryForm, memory: QueryMemory, visit: Visit, maths: PairMaths, step: Any) -> None:
    """A step's weights and gradients of products, handed on through shared memory."""
    tile, keys, values, kv0 = form.tile, memory.keys, memory.values, maths.kv0
    stage, turn = stage_of(step, tile.stages)
    thread = T.get_thread_binding()
    T.barrier_wait(keys.full[stage], turn)
    T.wgmma_gemm(
        memory.q, keys.tile[stage, :, :], memory.products, transpose_B=True, policy=ROWS_WHOLE, clear_accum=True
    )  # fmt: skip
    T.barrier_wait(values.full[stage], turn)
    T.wgmma_gemm(
        memory.do, values.tile[stage, :, :], memory.gradients, transpose_B=True, policy=ROWS_WHOLE, clear_accum=True
    )  # fmt: skip
    T.wait_wgmma(1)
    maths.weigh(memory.products, memory.products)
    finish_before(memory.products, tile.q * tile.kv // tile.threads, keys.full, stage, turn)
    T.wait_wgmma(0)
    if thread % WARP == 0:
        T.barrier_arrive(values.empty[stage])
    maths.differentiate(memory.products, memory.products, memory.gradients)
    if form.schedule.mask is not None:
        where_partial(visit.is_partial(kv0), bind(maths.drop, memory.products, memory.gradients))
    outside = T.Or(kv0 + tile.kv > form.sizes.kv, maths.q0 + tile.q > form.sizes.q)
    where_partial(either(False, outside), bind(maths.cut, memory.products, memory.gradients))
    T.copy(memory.products, memory.weights_shared[step % 2, :, :])
    T.copy(memory.gradients, memory.gradients_packed)
    T.copy(memory.gradients_packed, memory.gradients_shared[step % 2, :, :])
    T.fence_proxy_async()
    T.sync_threads(COMPUTE, tile.threads)


@T.macro
def add_step(form: QueryForm, buffers: Buffers, memory: QueryMemory, row: Any, kv0: Any, step: Any) -> None:
    """What a step adds to dQ, in registers, and to dV and dK, in memory."""
    tile, keys = form.tile, memory.keys
    stage, _ = stage_of(step, tile.stages)
    T.wgmma_gemm(
        memory.weights_shared[step % 2, :, :], memory.do, memory.dv, transpose_A=True, policy=COLUMNS_SHARED,
        clear_accum=True,
    )  # fmt: skip
    T.wgmma_gemm(
        memory.gradients_shared[step % 2, :, :], memory.q, memory.dk, transpose_A=True, policy=COLUMNS_SHARED,
        clear_accum=True,
    )  # fmt: skip
    T.wgmma_gemm(memory.gradients_packed, keys.tile[stage, :, :], memory.dq, policy=ROWS_WHOLE)
    T.wait_wgmma(2)
    add_to_sums(form, buffers[DV_SUMS], memory.dv, row, kv0)
    T.wait_wgmma(1)
    add_to_sums(form, buffers[DK_SUMS], memory.dk, row, kv0)
    T.wait_wgmma(0)
    if T.get_thread_binding() % WARP == 0:
        T.barrier_arrive(keys.empty[stage])


@T.macro
def add_to_sums(form: QueryForm, sums: Any, tile: Any, row: Any, kv0: Any) -> None:
    """A step's part of dK or dV is added to the sums in memory, by atomics."""
    keys, dim = int(tile.shape[0]), int(tile.shape[1])
    take_for_granted(T.And(row >= 0, row < sums.shape[0]))
    take_for_granted(T.And(kv0 >= 0, kv0 * dim + keys * dim <= sums.shape[1]))
    take_for_granted(sums.shape[1] % VECTOR == 0)
    for j, d in T.Parallel(keys, dim):
        T.atomic_add(sums[row, kv0 * dim + workspace_offset(j, d, form.tile, dim, True)], tile[j, d])


@T.macro
def store(form: QueryForm, buffers: Buffers, memory: QueryMemory, at: QueryBlock) -> None:
    """dQ leaves by the tile of queries."""
    tile, dq = form.tile, memory.dq
    if form.schedule.scale != 1:
        for i, d in T.Parallel(tile.q, form.dim):
            dq[i, d] *= form.schedule.scale
    T.sync_threads(COMPUTE, tile.threads)  # nobody reads queries any more
    T.copy(dq, memory.q)
    T.fence_proxy_async()
    T.sync_threads(COMPUTE, tile.threads)
    T.copy(memory.q, window(buffers["dq"], at.batch, at.head, at.q0, tile.q, form.dim))
    if T.get_thread_binding() % GROUP == 0:
        T.tma_store_wait(0)  # has read: the memory may go
