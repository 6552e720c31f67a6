"""A tile of pairs (keys, queries) of the backward pass on Hopper, and how it becomes operands of dV, dK and dQ.

A step makes products q . k, weights of them, gradients of the weights dO . v, and of these the gradients of products.
In 16 bits the weights are then an operand of dV, the gradients one of dK and of dQ. Three forms differ in where those
operands are, and in what a thread has in registers at once. dQ needs all keys of a block: gradients go to it through
shared memory in each form. What lies there has two tiles, which steps take in turns: one step's products may still read
theirs while the next step writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial as bind
from typing import Any

import tilelang.language as T

from attention_engine.kernels.bounds import either
from attention_engine.kernels.common import FLOAT, Packed, Stage, named, where_partial
from attention_engine.kernels.hopper.barriers import Ring, finish_before
from attention_engine.kernels.hopper.keys.form import KeyForm
from attention_engine.kernels.methods import macro_method
from attention_engine.kernels.pair_maths import PairMaths
from attention_engine.kernels.tiles import Visit
from attention_engine.kernels.warps import COMPUTE
from attention_engine.passes.schedule import keeps_products
from attention_engine.plan.hopper import pairs_in_turn


@dataclass(frozen=True)
class Step:
    """Where a block over keys is: the number of its step, the stage of its tiles and the parity of their barriers; the
    tile of queries that it visits, and the maths of its pairs; is a pair of the tile outside the tensors?"""

    number: Any
    stage: Any
    turn: Any
    visit: Visit
    q0: Any
    maths: PairMaths
    outside: Any


@dataclass(frozen=True)
class PairOperands:
    """The fp32 tiles of pairs, in registers, and the 16-bit operands, in registers or in shared memory.

    weights are where the products were, unless later formulas read products. weights_reaching: of the packed ones,
    those that values are multiplied with, where some are dropped and the others are needed after. rows: the rows of
    numbers, by name. rows_held: registers to which some of them come while the products that they meet are made.
    """

    form: KeyForm
    products: Any
    weights: Any
    gradients: Any
    weights_packed: Any
    weights_reaching: Any
    gradients_packed: Any
    weights_shared: Any
    gradients_shared: Any
    rows: Mapping[str, Any]
    rows_held: Mapping[str, Any]

    def row(self, name: str, stage: Any) -> Any:
        """A row of numbers of a step's queries."""
        return self.rows_held[name] if name in self.rows_held else Stage(self.rows[name], stage)

    @macro_method
    def hold_rows(self, names: list[str], stage: Any) -> None:
        """Rows that registers are kept for come to them."""
        for name in names:
            T.copy(self.rows[name][stage, : self.form.tile.q], self.rows_held[name])

    @macro_method
    def hold_early_rows(self, queries: Ring, stage: Any, turn: Any) -> None:
        """The row that a step's weights read comes to registers, when the step's queries are there."""
        T.barrier_wait(queries.full[stage], turn)
        self.hold_rows(self.form.early_rows, stage)

    @macro_method
    def make(self, at: Step, queries: Ring, output_gradients: Ring, v: Any) -> None:
        """From a step's products, which are on their way, to weights and gradients of products.

        The gradients of the weights are issued before the weights are made, and run while they are.
        """
        T.barrier_wait(output_gradients.full[at.stage], at.turn)
        issue_gradients(self, at, output_gradients, v)
        T.wait_wgmma(1)  # the products are there, the gradients of the weights on their way
        at.maths.weigh(self.products, self.weights)
        finish_before(self.weights, self._registers, queries.full, at.stage, at.turn)
        if self.form.holds_late_rows:
            self.hold_rows(self.form.late_rows, at.stage)
        T.wait_wgmma(0)
        at.maths.differentiate(self.products, self.weights, self.gradients, then_meet_values=True)
        clear_pairs(self.form, at, (self.weights, self.gradients))
        self.hand_weights_on(at)

    @macro_method
    def hand_weights_on(self, at: Step) -> None:
        """The weights become an operand of dV."""
        T.copy(self.weights, self.weights_packed)

    @macro_method
    def hand_gradients_on(self, at: Step) -> None:
        """The gradients of products become an operand of dK, and of dQ if all threads read them. Where dV is issued
        early, `issue_results` lets threads meet."""
        T.copy(self.gradients, self.gradients_packed)
        if self.form.shares_gradients and not self.form.shares_behind_dv:
            self.share_gradients(at)
            if not self.form.issues_dv_early:
                meet(self.form.tile.threads)

    @macro_method
    def share_gradients(self, at: Step) -> None:
        """All threads will read them, for dQ."""
        T.copy(self.gradients_packed, self.gradients_shared[at.number % 2, :, :])

    def weights_for_dv(self, at: Step) -> Any:
        """The operand of dV."""
        return self.weights_packed

    def gradients_for_dk(self, at: Step) -> Any:
        """The operand of dK."""
        return self.gradients_packed

    def gradients_for_dq(self, at: Step) -> Any:
        """The operand of dQ."""
        return self.gradients_shared[at.number % 2, :, :]

    def gradients_for_sums(self, at: Step) -> Stage:
        """What sums along diagonals read."""
        return Stage(self.gradients_shared, at.number % 2)

    @property
    def masks_gradients(self) -> bool:
        """Are gradients of products set to 0 where a pair is masked? Else what they come to there is 0 by itself."""
        return True

    @property
    def _registers(self) -> int:
        """How many registers a thread has of an fp32 tile."""
        return self.form.tile.kv * self.form.tile.q // self.form.tile.threads


class InRegisters(PairOperands):
    """Each warpgroup has 64 keys, and the operands of dV and dK stay in its registers."""


class Crossing(InRegisters):
    """The same where dK is made while the next step begins. Its operand lies in shared memory: registers would be too
    few for it and the next step's products (ptxas C7512)."""

    def gradients_for_dk(self, at: Step) -> Any:
        """The operand of dK."""
        return self.gradients_shared[at.number % 2, :, :]


class InSharedMemory(PairOperands):
    """The warpgroups share 64 keys, the queries of pairs and the head dims of dK and dV halved between them. So both
    operands go through shared memory."""

    @macro_method
    def hand_weights_on(self, at: Step) -> None:
        """The weights become an operand of dV when the gradients do."""
        T.copy(self.weights, self.weights_shared[at.number % 2, :, :])

    @macro_method
    def hand_gradients_on(self, at: Step) -> None:
        """The gradients of products become an operand of dK and dQ."""
        T.copy(self.gradients, self.gradients_shared[at.number % 2, :, :])
        meet(self.form.tile.threads)

    def weights_for_dv(self, at: Step) -> Any:
        """The operand of dV."""
        return self.weights_shared[at.number % 2, :, :]

    def gradients_for_dk(self, at: Step) -> Any:
        """The operand of dK."""
        return self.gradients_shared[at.number % 2, :, :]


class OneAfterAnother(InSharedMemory):
    """Each warpgroup has 64 keys, and dK and dV leave registers for one fp32 tile of pairs: weights are packed to 16
    bits before the gradients of weights are made. Both operands go through shared memory."""

    @macro_method
    def make(self, at: Step, queries: Ring, output_gradients: Ring, v: Any) -> None:
        """From a step's products, which are on their way, to weights, and after those to gradients of products."""
        T.wait_wgmma(0)
        at.maths.weigh(self.products, self.weights)
        partial = either(at.visit.is_partial(at.q0), at.outside)
        where_partial(partial, bind(at.maths.mask, self.weights))
        T.copy(self.weights, self.weights_packed)
        T.barrier_wait(output_gradients.full[at.stage], at.turn)
        issue_gradients(self, at, output_gradients, v)
        if self.weights_reaching is not None:
            at.maths.meet_values(Packed(self.weights_packed), self.weights_reaching)
            T.copy(self.weights_reaching, self.weights_shared[at.number % 2, :, :])
        else:
            T.copy(self.weights_packed, self.weights_shared[at.number % 2, :, :])
        T.wait_wgmma(0)
        at.maths.differentiate(self.products, Packed(self.weights_packed), self.gradients)
        if self.masks_gradients:
            clear_pairs(self.form, at, (self.gradients,))

    @property
    def masks_gradients(self) -> bool:
        """Not where they vanish with their weights, which are masked."""
        return not self.form.gradients_vanish


@T.macro
def issue_gradients(pairs: PairOperands, at: Step, output_gradients: Ring, v: Any) -> None:
    """The gradients of a step's weights are on their way."""
    T.wgmma_gemm(
        v, output_gradients.tile[at.stage, :, :], pairs.gradients, transpose_B=True, policy=pairs.form.policy,
        clear_accum=True,
    )  # fmt: skip


@T.macro
def clear_pairs(form: KeyForm, at: Step, tiles: tuple[Any, ...]) -> None:
    """Tiles hold 0 for pairs that the mask drops, and for those outside the tensors."""
    if form.schedule.mask is not None:
        where_partial(at.visit.is_partial(at.q0), bind(at.maths.drop, *tiles))
    where_partial(at.outside, bind(at.maths.cut, *tiles))


@T.macro
def meet(threads: int) -> None:
    """Asynchronous products see what all computing threads have stored in shared memory."""
    T.fence_proxy_async()
    T.sync_threads(COMPUTE, threads)


def operands_of(form: KeyForm, rows: Mapping[str, Any]) -> PairOperands:
    """The operands of a form; made in the kernel. rows: the rows of numbers, in shared memory."""
    kind: type[PairOperands] = InRegisters
    if form.tile.shared_weights:
        kind = InSharedMemory
    elif pairs_in_turn(form.problem, form.tile):
        kind = OneAfterAnother
    elif form.crosses:
        kind = Crossing
    pairs, dtype, in_memory = [form.tile.kv, form.tile.q], form.problem.dtype, not issubclass(kind, InRegisters)
    shares = form.shares_gradients or in_memory
    gradients_shared = named("gradients_out", T.alloc_shared([2, *pairs], dtype)) if shares else None
    weights_shared = named("weights_out", T.alloc_shared([2, *pairs], dtype)) if in_memory else None
    products = named("products", T.alloc_fragment(pairs, FLOAT))
    weights = named("weights", T.alloc_fragment(pairs, FLOAT) if keeps_products(form.schedule) else products)
    gradients = named("gradients", T.alloc_fragment(pairs, FLOAT))
    packs = kind is not InSharedMemory
    weights_packed = named("weights_in", T.alloc_fragment(pairs, dtype)) if packs else None
    apart = kind is OneAfterAnother and form.schedule.dropped is not None
    weights_reaching = named("weights_reaching", T.alloc_fragment(pairs, dtype)) if apart else None
    gradients_packed = named("gradients_in", T.alloc_fragment(pairs, dtype)) if not in_memory else None
    held = [*(form.early_rows * form.holds_early_rows), *(form.late_rows * form.holds_late_rows)]
    rows_held = {name: named(f"{name}_held", T.alloc_fragment([form.tile.q], FLOAT)) for name in held}
    return kind(
        form=form, products=products, weights=weights, gradients=gradients, weights_packed=weights_packed,
        weights_reaching=weights_reaching, gradients_packed=gradients_packed, weights_shared=weights_shared,
        gradients_shared=gradients_shared, rows=rows, rows_held=rows_held,
    )  # fmt: skip
