"""What the computing warpgroups of a Hopper backward block over keys do: the steps of an item, and how dK and dV leave.

Order of a step (hopper/backward.py says why): products q . k; gradients of weights, on their way while the weights are
made; gradients of products; dV, which at head dims 64 and 128 waits for no other thread; dQ and dK, and dQ is added to
its sums while dK is made. Of packed sequences dK is made and additions leave while the next step begins, of listed
blocks of 64 keys dK is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.ir.expr import Expr
from attention_engine.ir.program import row_variable
from attention_engine.kernels import workspace
from attention_engine.kernels.common import Buffers, Corners, Place, block_values, reader, window
from attention_engine.kernels.diagonals import (
    Diagonal,
    Diagonals,
    add_held,
    finish_sums,
    hold,
    start_sums,
    sum_diagonals,
)
from attention_engine.kernels.hopper.barriers import arrive_when_read, give_back
from attention_engine.kernels.hopper.chances import Bits
from attention_engine.kernels.hopper.keys.adders import FirstTiles
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.hopper.keys.items import NOTES, KeyItem, leave_by_groups
from attention_engine.kernels.hopper.keys.memory import KeyMemory
from attention_engine.kernels.hopper.keys.neighbours import at_ends, clear_neighbours, keep_own_dq, leave_within
from attention_engine.kernels.hopper.keys.pair_operands import Step
from attention_engine.kernels.key_sums import sum_keys
from attention_engine.kernels.pair_maths import PairMaths, PairTile, factor_of
from attention_engine.kernels.splice import hold_value
from attention_engine.kernels.tiles import QueryWalk
from attention_engine.kernels.unseen import clear_keys
from attention_engine.kernels.warps import COMPUTE, GROUP, ROWS_WHOLE, WARP
from attention_engine.passes.within_sequences import KEYS


@dataclass(frozen=True)
class Work:
    """The item that the computing threads of a block are at.

    first_row: the row of the block's first query head among all heads and batches. of_heads: the block's values, those
    that its query heads share. stored: the tiles of dQ that the block stores, as it is the first to add to them.
    """

    form: KeyForm
    buffers: Buffers
    memory: KeyMemory
    item: KeyItem
    walk: QueryWalk
    kv0: Any
    first_row: Any
    of_heads: Mapping[Expr, Any]
    thread: Any
    stored: FirstTiles | None = None


@T.macro
def compute_item(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem, walk: QueryWalk) -> None:
    """An item's dK and dV, in registers, and what it adds to dQ and to gradients of custom inputs."""
    batch, kv_head, thread, kv0 = item.batch, item.kv_head, T.get_thread_binding(), item.first_key(form.tile)
    item = replace(item, batch=batch, kv_head=kv_head)  # under names of their own, read once
    start_results(form, memory)
    own_read = reader(buffers, form.sizes.inside(form.problem, item.b, kv_head))
    of_heads = values_of_heads(form, item, kv_head, own_read)
    first_row = batch * form.problem.heads + kv_head * form.problem.group
    first_row = hold_value(first_row) if form.with_dq and form.holds_row else first_row
    T.barrier_wait(memory.keys.full, item.round.items % 2)
    T.barrier_wait(memory.values.full, item.round.items % 2)
    k, v = memory.keys.tile, memory.values.tile
    unseen = (k, v) if not memory.pairs.masks_gradients else (k,) if form.with_dq else ()
    clear_behind(form, item, Place(item.b, kv_head, of_heads if form.within else {}, own_read), kv0, unseen)
    stored = FirstTiles(form, item, walk) if form.tile.stores_first else None
    work = Work(form, buffers, memory, item, walk, kv0, first_row, of_heads, thread, stored)
    if form.hides_additions:
        await_queries(work, 0)
    if form.holds_early_rows:  # noqa: SIM102 - Python's condition, then the kernel's
        if item.steps > 0:
            memory.pairs.hold_early_rows(memory.queries, *item.round.stage(0, form.tile.stages))
    for step in T.serial(item.steps):
        take_step(work, step)
    if form.crosses:
        T.wait_wgmma(0)
        last, _ = item.round.stage(item.steps + (form.tile.stages - 1), form.tile.stages)
        give_back(thread, memory.queries.empty, last, item.steps > 0)
    finish_results(work)


def values_of_heads(form: KeyForm, item: KeyItem, kv_head: Any, read: Any) -> dict[Expr, Any]:
    """The values of an item's block that its heads share. Of packed sequences the notes know most of them."""
    known = item.ends.known() if form.within else {}
    others = [(v, e) for v, e in form.of_heads if v not in known]
    return {**known, **block_values(others, item.b, kv_head, read)}


@T.macro
def clear_behind(form: KeyForm, item: KeyItem, place: Place, kv0: Any, tiles: tuple[Any, ...]) -> None:
    """Keys that nobody sees become 0. Of packed sequences, where ends alone say which, only the last tile has some."""
    if form.within and form.seen is KEYS:
        if kv0 + form.tile.kv > item.ends.last_key:
            clear_keys(form.seen, place, kv0, tiles, form.tile.threads)
    else:
        clear_keys(form.seen, place, kv0, tiles, form.tile.threads)


@T.macro
def start_results(form: KeyForm, memory: KeyMemory) -> None:
    """All sums begin at 0."""
    tile, results = form.tile, memory.results
    T.fill(results.dk, 0)
    T.fill(results.dv, 0)
    for key_sum in results.key_sums:
        T.fill(key_sum.total, 0)
    if results.skewed is not None:
        start_sums(results.skewed)
    T.warpgroup_fence_operand(results.dk, num_regs=tile.kv * form.dim // tile.threads)
    T.warpgroup_fence_operand(results.dv, num_regs=tile.kv * form.dim_v // tile.threads)


@T.macro
def take_step(work: Work, step: Any) -> None:
    """One tile of queries of one head."""
    form, memory, item, walk, kv0 = work.form, work.memory, work.item, work.walk, work.kv0
    tile, sizes, queries, pairs = form.tile, form.sizes, memory.queries, memory.pairs
    stage, turn = item.round.stage(step, tile.stages)
    if memory.entries is None:
        visit = walk.at(step)
    if not (form.hides_additions or form.holds_early_rows):
        T.barrier_wait(queries.full[stage], turn)
    T.wgmma_gemm(
        memory.keys.tile, queries.tile[stage, :, :], pairs.products, transpose_B=True, policy=form.policy,
        clear_accum=True,
    )  # fmt: skip
    if form.crosses:
        T.wait_wgmma(1)  # all but these: dK of the step before is there
        give_back(work.thread, queries.empty, item.round.stage(step + (tile.stages - 1), tile.stages)[0], step > 0)
    if memory.entries is not None:
        visit = walk.at(step)
    head = visit.head
    q0 = visit.start
    sums = None
    if form.with_dq and memory.order is None:
        sums = sums_of_step(work, head, q0)
        take_step_for_granted(work, sums, q0)
    place = place_of(work, head)
    staged = {row_variable(n): pairs.row(n, stage) for n in form.row_names}
    chosen = None if memory.chances is None else bind(bits_of_step, work, step)
    maths = PairMaths(form.schedule, sizes, place, PairTile((tile.kv, tile.q), True, q0, kv0, staged, chosen=chosen))
    outside = False if form.within else T.Or(kv0 + tile.kv > sizes.kv, q0 + tile.q > sizes.q)
    at = Step(number=step, stage=stage, turn=turn, visit=visit, q0=q0, maths=maths, outside=outside)
    pairs.make(at, queries, memory.output_gradients, memory.values.tile)
    if memory.chances is not None:
        memory.chances.hand_back(work.thread, item.round.steps + step)
    sum_pairs_of_keys(work, at)
    if form.within:
        at_ends(form, item.ends, q0, bind(clear_neighbours, form, memory, item.ends, at))
    pairs.hand_gradients_on(at)
    issue_results(work, at)
    sum_pairs_of_diagonals(work, at)
    if memory.order is not None:
        sums = workspace.hold_place(work.buffers, row_of_sums(work, head), q0 * form.dim)
        workspace.take_place_for_granted(work.buffers, sums, tile.q * form.dim)
    T.wait_wgmma(1)  # all but dK
    if work.thread % WARP == 0:
        T.barrier_arrive(memory.output_gradients.empty[stage])
    if form.within:
        at_ends(form, item.ends, q0, bind(keep_own_dq, form, memory.results.dq, item.ends, q0))
    if form.with_dq:
        if memory.order is not None:
            add_in_order(work, sums, q0, step)
        elif form.within:
            workspace.add_at(work.buffers, sums, memory.results.dq, tile, form.dim, form.vectors)
        else:
            add_to_sums_of_dq(work, sums, q0)
    if not form.crosses:
        T.wait_wgmma(0)
        if work.thread % WARP == 0:
            T.barrier_arrive(queries.empty[stage])


@T.macro
def await_queries(work: Work, step: Any) -> None:
    """Queries of a step, if there is one, are there. Of packed sequences they are waited for before the additions of
    the step before: behind them, ptxas has the wait's branch wait until they have left, and so the first products."""
    queries, item = work.memory.queries, work.item
    if step < item.steps:
        stage, turn = item.round.stage(step, work.form.tile.stages)
        T.barrier_wait(queries.full[stage], turn)


def sums_of_step(work: Work, head: Any, q0: Any) -> Any:
    """Where the sums of a step's dQ stand: their row, or, of packed sequences, the first one's place among all."""
    form, row = work.form, row_of_sums(work, head)
    if form.within:
        return workspace.name_place(work.buffers, row, q0 * form.dim)
    return row if form.holds_row else hold_value(row)


def row_of_sums(work: Work, head: Any) -> Any:
    """The row of a query head among all heads and batches."""
    return work.first_row + (head - work.item.kv_head * work.form.problem.group)


def take_step_for_granted(work: Work, sums: Any, q0: Any) -> None:
    """Spares the guards of a step's sums."""
    form, size = work.form, work.form.tile.q * work.form.dim
    if form.within:
        workspace.take_place_for_granted(work.buffers, sums, size)
    else:
        workspace.take_sums_for_granted(work.buffers, sums, q0 * form.dim, size)


def bits_of_step(work: Work, step: Any) -> Callable[[Any, Any], Any]:
    """What says of a step's pairs whether their weights meet values; read when it is asked for."""
    assert work.memory.chances is not None, "nobody asks where nothing is chosen"
    bits = Bits.of_step(work.memory.chances, work.thread, work.item.round.steps + step)
    return bind(bits.keep, rows_are_keys=True)


def place_of(work: Work, head: Any) -> Place:
    """Where a step's pairs are: a query head, with its block values."""
    form, batch = work.form, work.item.b
    read = reader(work.buffers, form.sizes.inside(form.problem, batch, head))
    values = {**work.of_heads, **block_values(form.of_steps, batch, head, read)}
    return Place(batch, head, values, read, form.problem.approximate)


def corners_of(work: Work, at: Step) -> Corners:
    """The first query and key of a step's pairs, and the last."""
    tile, kv0 = work.form.tile, work.kv0
    return (at.q0, kv0), (at.q0 + tile.q - 1, kv0 + tile.kv - 1)


def diagonals_of(form: KeyForm, buffers: Buffers, place: Place) -> Diagonals:
    """The sums along diagonals that a place's pairs add to."""
    targets = [(buffers[f"diagonal{number}"], factor) for number, factor in enumerate(form.factors)]
    return Diagonals(targets, place, form.sizes)


@T.macro
def sum_pairs_of_keys(work: Work, at: Step) -> None:
    """Adds a step's gradients of products to the sums of its keys; sums along diagonals begin to be made, if skewed."""
    form, results, gradients = work.form, work.memory.results, work.memory.pairs.gradients
    for number, (_, expr) in enumerate(form.summed.of_keys):
        factor = factor_of(form.schedule, expr)
        sum_keys(results.key_sums[number], at.maths, work.buffers, gradients, factor)
    if results.skewed is not None:
        hold(results.skewed, gradients, at.maths.place, corners_of(work, at))


@T.macro
def sum_pairs_of_diagonals(work: Work, at: Step) -> None:
    """Adds a step's gradients of products to the sums along diagonals; all threads have met."""
    form, skewed = work.form, work.memory.results.skewed
    if skewed is not None:
        add_held(skewed, diagonals_of(form, work.buffers, at.maths.place), corners_of(work, at))
    else:
        for number, factor in enumerate(form.factors):
            source = work.memory.pairs.gradients_for_sums(at)
            sum_diagonals(Diagonal(form.summed, form.tile, number, factor), at.maths, work.buffers, source)


@T.macro
def issue_results(work: Work, at: Step) -> None:
    """What a step adds to dV, its dQ, and what it adds to dK are on their way. The next step's queries are there."""
    form, memory, pairs, results = work.form, work.memory, work.memory.pairs, work.memory.results
    k, queries, output_gradients = memory.keys.tile, memory.queries, memory.output_gradients
    if form.issues_dv_early and not form.shares_behind_dv:
        T.fence_proxy_async()
    T.wgmma_gemm(pairs.weights_for_dv(at), output_gradients.tile[at.stage, :, :], results.dv, policy=form.policy)
    if form.shares_behind_dv:
        pairs.share_gradients(at)
        T.fence_proxy_async()
    if form.issues_dv_early:
        T.sync_threads(COMPUTE, form.tile.threads)
    if form.with_dq:
        if form.transposes_dq:
            T.wgmma_gemm(
                k, pairs.gradients_for_dq(at), results.dq, transpose_A=True, policy=ROWS_WHOLE, clear_accum=True
            )  # fmt: skip
        else:
            T.wgmma_gemm(
                pairs.gradients_for_dq(at), k, results.dq, transpose_A=True, policy=form.dq_policy, clear_accum=True
            )  # fmt: skip
    T.wgmma_gemm(pairs.gradients_for_dk(at), queries.tile[at.stage, :, :], results.dk, policy=form.policy)
    if form.hides_additions:
        await_queries(work, at.number + 1)
    if form.holds_early_rows:
        after = T.min(at.number + 1, work.item.steps - 1)
        pairs.hold_early_rows(queries, *work.item.round.stage(after, form.tile.stages))


@T.macro
def add_in_order(work: Work, place: Any, q0: Any, step: Any) -> None:
    """When it is the block's turn, a step's dQ is added to the sums from a place on. Where first blocks store, and this
    is one, it becomes them."""
    form, dq, order, stored = work.form, work.memory.results.dq, work.memory.order, work.stored
    assert order is not None, "who adds in order has one"
    order.wait(step)
    if stored is None:
        workspace.add_at(work.buffers, place, dq, form.tile, form.dim, form.vectors)
    elif stored.hold(q0, step):
        workspace.store_at(work.buffers, place, dq, form.tile, form.dim, form.vectors)
    else:
        workspace.add_at(work.buffers, place, dq, form.tile, form.dim, form.vectors)
    order.hand_on(work.thread)


@T.macro
def add_to_sums_of_dq(work: Work, row: Any, q0: Any) -> None:
    """A step's dQ is added to the sums in memory, by atomics."""
    form, dq = work.form, work.memory.results.dq
    for i, j in T.Parallel(form.dq_shape[0], form.dq_shape[1]):
        query, d = (j, i) if form.transposes_dq else (i, j)
        T.atomic_add(
            work.buffers["workspace"][
                row, q0 * form.dim + workspace.workspace_offset(query, d, form.tile, form.dim, form.vectors),
            ],
            dq[i, j],
        )  # fmt: skip


@T.macro
def finish_results(work: Work) -> None:
    """After the last step: sums for custom inputs leave, and dK gets the factor of the scores."""
    form, buffers, item, kv0, results = work.form, work.buffers, work.item, work.kv0, work.memory.results
    dk = results.dk
    if results.skewed is not None:
        place = Place(item.batch, item.kv_head, {}, reader(buffers))  # of several heads a group, steps have added
        finish_sums(results.skewed, diagonals_of(form, buffers, place), kv0)
    for number, key_sum in enumerate(results.key_sums):
        if not key_sum.by_head:
            T.copy(
                key_sum.total,
                buffers[f"key_sum{number}"][item.batch, item.kv_head, kv0 : kv0 + form.tile.kv],
            )
    if form.schedule.scale != 1:
        for j, d in T.Parallel(form.tile.kv, form.dim):
            dk[j, d] *= form.schedule.scale


@T.macro
def store(form: KeyForm, buffers: Buffers, memory: KeyMemory, item: KeyItem) -> None:
    """dK and dV leave: by the tiles of keys and values, or in fp32 from registers."""
    k, v, tile, results = memory.keys.tile, memory.values.tile, form.tile, memory.results
    batch, kv_head, thread = item.batch, item.kv_head, T.get_thread_binding()
    kv0 = item.first_key(tile)
    T.sync_threads(COMPUTE, tile.threads)  # nobody reads k and v any more, nor adds to dQ
    if form.with_dq and thread == GROUP:
        T.barrier_arrive(memory.added[item.round.items % NOTES])
    if form.within:
        leave_within(form, buffers, memory, item, kv0)
    elif form.wide:
        T.copy(results.dv, window(buffers["dv"], batch, kv_head, kv0, tile.kv, form.dim_v))
        T.copy(results.dk, window(buffers["dk"], batch, kv_head, kv0, tile.kv, form.dim))
    else:
        T.copy(results.dv, v)
        T.copy(results.dk, k)
        T.fence_proxy_async()
        if form.persistent:
            leave_by_groups(v, buffers["dv"], item, tile)
            leave_by_groups(k, buffers["dk"], item, tile)
            arrive_when_read(thread, [(memory.values.empty, 0), (memory.keys.empty, 0)])
        else:
            T.sync_threads(COMPUTE, tile.threads)
            T.copy(v, window(buffers["dv"], batch, kv_head, kv0, tile.kv, form.dim_v))
            T.copy(k, window(buffers["dk"], batch, kv_head, kv0, tile.kv, form.dim))
            if thread % GROUP == 0:
                T.tma_store_wait(0)  # has read: the memory may go
