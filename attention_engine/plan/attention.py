"""What calls of one softmax-like attention launch: the pipeline's last step before kernels, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attention_engine.arch import Arch
from attention_engine.ir.expr import Expr
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import WEIGHT, WEIGHT_GRADIENT, Backward
from attention_engine.ir.verify import checked
from attention_engine.passes.maths import Maths
from attention_engine.passes.read_places import plan_custom_sums
from attention_engine.passes.row_sums import plan_row_sums
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule
from attention_engine.passes.simplify import mul
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.passes.verify_schedule import verify_row_sums
from attention_engine.plan import attention_buffers as buffers
from attention_engine.plan.attention_buffers import (
    DEALT,
    deals_by_counter,
)
from attention_engine.plan.buffers import buffers_of
from attention_engine.plan.forms import Tile
from attention_engine.plan.hopper import (
    LISTED,
    adds_in_order,
    makes_delta,
    may_add_in_order,
    pairs_issue_much,
    rules_of_backward,
    starts_longest_first,
    walks_over_listed_keys,
)
from attention_engine.plan.launches import Launch, Step, Trim
from attention_engine.plan.room import of_any_sequence
from attention_engine.plan.rules import DISABLE_WARP_SPECIALIZATION, NO_CONTRACTION, rules_of_forward
from attention_engine.plan.targets import Target, places_of
from attention_engine.plan.units import BlockOrder, CallSize
from attention_engine.plan.verify import verify_steps

EXACT_DELTA, TRIMMED_DELTA = "exact delta", "trimmed delta"  # where a delta lies that the rows are made of once more


@dataclass(frozen=True)
class Tiles:
    """The tiles of the kernels of one problem."""

    forward: Tile
    backward: Tile
    queries: Tile

    @property
    def pairs(self) -> Tile:
        """Of the kernel of pairs, which copies queries and keys alike in each step."""
        return replace(self.queries, stages=min(self.queries.stages, 1))


def _valid(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return checked(verify_steps, steps)


class AttentionPlan:
    """The launches of one program for one problem, tile choice and target.

    over_queries: a kernel over queries makes dQ, and no atomics do: custom inputs want sums of rows, or gradients are
    to be the same in every run, and blocks can't add in order. by_queries: one over queries alone makes all gradients.
    vectors: may kernels add four numbers in one atomic? by_heads: blocks over keys walk over one head after another
    (plan/long_sequences.py).
    """

    def __init__(
        self, maths: Maths, problem: Problem, tiles: Tiles, target: Target, deterministic: bool, by_heads: bool = False
    ) -> None:
        self.maths, self.problem, self.tiles, self.target = maths, problem, tiles, target
        self.deterministic, self.by_heads = deterministic, by_heads
        schedule, backward = maths.backward_schedule, maths.backward
        self.row_sums = None
        if schedule is not None and backward is not None:
            found = plan_row_sums(schedule, backward, problem.splits)
            self.row_sums = checked(verify_row_sums, found, backward, schedule, maths.program)
        axes = {name: axes for name, _, axes in problem.custom}
        self.custom_sums = plan_custom_sums(schedule.pair_gradients if schedule else (), axes, deterministic)
        of_rows = bool(self.row_sums and self.row_sums.gradients)
        may = deterministic and not (of_rows or (backward is not None and backward.extremes))
        if may and may_add_in_order(problem, tiles.backward, self.tile_plan, self.custom_sums):
            self.tiles = tiles = replace(tiles, backward=adds_in_order(tiles.backward, self.tile_plan))
        self.over_queries = of_rows or (deterministic and not tiles.backward.in_order)
        if self.over_queries and tiles.backward.within_sequences:  # whose blocks also make dQ
            self.tiles = tiles = replace(tiles, backward=of_any_sequence(problem, self._schedule, tiles.backward))
        may_list = schedule is not None and tiles.backward.hopper and not (self.over_queries or maths.in_blocks)
        self.by_queries = may_list and walks_over_listed_keys(problem, self._schedule, self.tile_plan, self.custom_sums)
        if self.by_queries:
            self.tiles = tiles = replace(tiles, backward=LISTED)
        self.vectors = not isinstance(target, Arch) or target.has_wgmma
        self.row_pad = tiles.backward.row_pad  # of the rows that all backward kernels read

    @property
    def refused(self) -> bool:
        """Is there no backward pass?"""
        return self.maths.backward is None

    @property
    def _backward(self) -> Backward:
        if self.maths.backward is None:
            assert self.maths.refusal is not None
            raise self.maths.refusal
        return self.maths.backward

    @property
    def _over_keys_schedule(self) -> BackwardSchedule:
        """As the kernel over keys runs it."""
        within = self.maths.backward_within if self.tiles.backward.within_sequences else None
        return self._schedule if within is None else within

    @property
    def _schedule(self) -> BackwardSchedule:
        assert self._backward is not None and self.maths.backward_schedule is not None
        return self.maths.backward_schedule

    # ---- what is launched, in order

    @cached_property
    def forward_steps(self) -> tuple[Step, ...]:
        """What a forward pass launches."""
        tile = self.tiles.forward
        lists = [self.sequence_tiles] if tile.within_sequences else self._map("forward", tile, True)
        return _valid((*lists, self.forward))

    def backward_steps(self, finals: Sequence[str] = ()) -> tuple[Step, ...]:
        """What a backward pass launches where gradients arrive at these returned rows, but for the kernels of pairs."""
        tiles, backward = self.tiles, self._backward
        steps: list[Step] = []
        within = tiles.backward.within_sequences
        steps += [self.key_tiles] if within else []
        if backward.extremes:
            steps += [*self._map("extremes", self._tile_of_extremes(True), True), self.extremes(True)]
        steps.append(self.preprocess(finals))
        if backward.exact_delta:
            steps += [*self._map("queries", tiles.queries, True), self.exact_delta]
            steps.append(self.preprocess(finals, EXACT_DELTA))
        steps += [*([] if within else self._map("backward", tiles.backward, self.by_queries)), self.over_keys]
        if self.finds_twice:
            steps += [*self._map("queries", tiles.queries, True), self.extremes(False)]
            steps.append(Trim("delta", buffers.row("given", self.problem).at(TRIMMED_DELTA)))
            steps.append(self.preprocess(finals, TRIMMED_DELTA))
        if self.by_queries:
            steps.append(self.finish_keys)
        elif self.over_queries:
            steps += [*self._map("queries", tiles.queries, True), self.queries]
        else:
            steps += [self.postprocess, *([self.add_parts] if self.problem.copies > 1 else [])]
        return _valid(tuple(dict.fromkeys(steps)))  # a map serves every kernel that asks for it

    @property
    def pair_launches(self) -> list[Launch]:
        """The kernels of pairs, which come last; for gradients in fp32."""
        return [self.pairs(*found, "float32") for found in (*self.custom_sums.pairs, *self.custom_sums.by_rows)]

    def numbers(self, batch: int, queries: int, keys: int, finals: Sequence[str] = ()) -> dict[str, int]:
        """The numbers of a backward pass: how blocks over keys are ordered, and for which units delta is given."""
        size = CallSize(batch, queries, keys, places_of(self.target))
        known = self.longest_first, self.makes_delta, self.deterministic
        order = BlockOrder(self.problem, self.tiles.backward, self.tile_plan, *known)
        return order.numbers(size, bool(finals))

    # ---- what the mask and the maths ask for

    @cached_property
    def tile_plan(self) -> TilePlan:
        """What the mask asks of the kernels' loops."""
        return plan_tiles(self.maths.program.mask)

    @property
    def lists_no_keys(self) -> bool:
        """Does the forward pass walk without lists of tiles of keys?"""
        return self.tiles.forward.within_sequences or not self.tile_plan.mapped

    @cached_property
    def longest_first(self) -> bool:
        """Do blocks over keys start longest first, over so many heads as their launch says?"""
        return starts_longest_first(self.problem, self.tiles.backward, self.tile_plan)

    @cached_property
    def makes_delta(self) -> bool:
        """Do blocks over keys make delta, where no gradient arrives at returned rows, but for the first units'?"""
        schedule, tile = self._over_keys_schedule, self.tiles.backward
        hopper = tile.hopper and not self.over_queries
        return hopper and makes_delta(self.problem, self._backward, schedule, self.custom_sums, tile)

    @cached_property
    def stores_dq(self) -> bool:
        """Are blocks over keys persistent, and store dQ but for the last units'?"""
        return self.tiles.backward.persistent and not self.over_queries

    @cached_property
    def finds_twice(self) -> bool:
        """Do kernels over queries or pairs meet extremes too, whose rows are found once more?"""
        pairs = self.custom_sums.pairs or self.custom_sums.by_rows
        return bool(self._backward.extremes) and (self.over_queries or bool(pairs))

    @property
    def _exact(self) -> tuple[str, ...]:
        """The rules of kernels whose values must meet a row's extreme to the last bit."""
        return (NO_CONTRACTION,) if self._backward.extremes else ()

    @property
    def _one_role(self) -> tuple[str, ...]:
        """The rules of kernels that bring tiles by registers (unseen.py): TileLang would give one warp the loads and
        another the stores."""
        seen = key_condition(self.maths.program.mask)
        return () if seen is None or self.problem.dtype == "float32" else (DISABLE_WARP_SPECIALIZATION,)

    @property
    def _sums(self) -> tuple[Expr, ...]:
        return self.row_sums.sums if self.row_sums else ()

    @property
    def _in_blocks(self) -> tuple[bool, ...]:
        """What tells kernels to store gradients of keys in fp32; nothing where they don't."""
        return (True,) if self.maths.in_blocks or self.problem.copies > 1 else ()

    @property
    def _in_parts(self) -> tuple[bool, ...]:
        """The same of gradients of queries."""
        return (True,) if self.maths.in_blocks and not self.maths.whole_rows else ()

    # ---- each launch

    def _map(self, of: str, tile: Tile, over_keys: bool) -> list[Launch]:
        """The lists of tiles that blocks with this tile walk over, where the mask's bounds don't say it all."""
        plan = self.tile_plan
        if not plan.mapped:
            return []
        name = f"tile map of {of}"
        arguments = buffers.tile_map(self.problem, plan, tile, over_keys, name)
        builder = "block_map.block_map" if plan.follows_blocks(tile.q, tile.kv) else "tile_map.tile_map"
        writes = frozenset([name, *([DEALT] if deals_by_counter(plan, tile, over_keys) else [])])
        return [Launch(name, builder, (plan.mask, tile, over_keys), arguments, writes, lasting=not plan.reads)]

    @cached_property
    def forward_schedule(self) -> ForwardSchedule:
        """The forward pass as its kernel runs it."""
        tile, dtype = self.tiles.forward, self.problem.dtype
        if tile.within_sequences:
            return self.maths.forward_within_of(dtype)
        return self.maths.forward_parted_of(dtype) if tile.hopper else self.maths.forward_of(dtype)

    @cached_property
    def sequence_tiles(self) -> Launch:
        """Which tiles of queries packed sequences have."""
        tile = self.tiles.forward
        arguments = buffers.list_sequence_tiles(self.problem, tile)
        given = (self.forward_schedule.mask, tile)
        build, writes = "sequence_tiles.sequence_tiles", frozenset([buffers.SEQUENCE_TILES])
        return Launch("tiles of sequences", build, given, arguments, writes, of_sequences=True)

    @cached_property
    def forward(self) -> Launch:
        """q, k, v -> o and rows."""
        tile, lists = self.tiles.forward, "tile map of forward"
        schedule = self.forward_schedule
        arguments = buffers.forward(self.problem, schedule, tile, lists, self.maths.unfinished)
        writes = frozenset(["o", *(f"row_{name}" for name, _ in schedule.rows)])
        if not tile.hopper:
            builder = "straight.forward.forward_of_part" if self.maths.unfinished else "straight.forward.forward"
            return Launch("forward", builder, (schedule, tile), arguments, writes, self._one_role)
        places = (places_of(self.target),) if tile.persistent else ()
        rules = rules_of_forward(pairs_issue_much(schedule), tile.woven)
        builder = "hopper.forward.forward_of_part" if self.maths.unfinished else "hopper.forward.forward"
        return Launch("forward", builder, (schedule, tile, *places), arguments, writes, rules)

    @cached_property
    def key_tiles(self) -> Launch:
        """Which tiles of keys packed sequences have."""
        tile = self.tiles.backward
        arguments, writes = buffers.list_key_tiles(self.problem, tile), frozenset([buffers.KEY_TILES])
        return Launch("tiles of keys", "sequence_tiles.key_tiles", (tile,), arguments, writes, of_sequences=True)

    def extremes(self, over_keys: bool) -> Launch:
        """Rows of extremes for the kernel over keys, or for those over queries and pairs."""
        tile, name = self._tile_of_extremes(over_keys), "extremes" if over_keys else "extremes of queries"
        lists = f"tile map of {'extremes' if over_keys else 'queries'}"
        arguments = buffers.extremes(self.problem, self._schedule, self._backward, tile, lists)
        given = (self._schedule, self._backward, tile, over_keys)
        writes = frozenset(f"saved_{name}" for extreme in self._backward.extremes for name in extreme.names)
        return Launch(name, "straight.extremes.backward_extremes", given, arguments, writes, self._exact)

    def _tile_of_extremes(self, over_keys: bool) -> Tile:
        """Their tile: that of the products which meet them."""
        tile = self.tiles.backward if over_keys else self.tiles.queries
        return replace(tile, stages=min(tile.stages, 1))

    def preprocess(self, finals: Sequence[str], delta: str = "") -> Launch:
        """Row values for the backward pass, where gradients arrive at these returned rows; zeroes the sums of dQ.

        delta: the place of a delta that they are made of once more; the sums are zero by then.
        """
        tile = None if self.over_queries or self.by_queries or delta else self.tiles.backward
        arguments = buffers.preprocess(
            self.problem, self._backward, finals, tile, self.row_pad, self.longest_first, delta
        )
        first_only = self.makes_delta and not finals
        given = (self._backward, tuple(finals), tile, self.row_pad, self.longest_first, bool(delta), first_only)
        made = {"workspace", "counters", "tickets", "delta", *(name for name, _ in self._backward.rows)}
        writes = frozenset(b.place for b in buffers_of(arguments) if b.place in made)
        return Launch("preprocess_again" if delta else "preprocess", "rows.preprocess", given, arguments, writes)

    @cached_property
    def exact_delta(self) -> Launch:
        """delta as the row sums of weight * dweight, for programs that would magnify the rounding of o."""
        sums, tile, lists = (mul(WEIGHT, WEIGHT_GRADIENT),), self.tiles.queries, "tile map of queries"
        arguments = buffers.over_queries(
            self.problem, self._schedule, self._backward, sums, tile, self.row_pad, False, lists, EXACT_DELTA
        )
        given = (self._schedule, self._backward, sums, tile, self.row_pad, False)
        writes = frozenset([EXACT_DELTA])
        return Launch("exact_delta", "straight.queries.backward_queries", given, arguments, writes)

    @cached_property
    def _over_listed_keys(self) -> Launch:
        """dQ, and the sums of dK and dV."""
        tile, schedule, rows = self.tiles.backward, self._schedule, self._backward
        arguments = buffers.by_queries(self.problem, schedule, rows, tile, "tile map of backward")
        writes, rules = frozenset(["dq", buffers.DK_SUMS, buffers.DV_SUMS]), rules_of_backward(self.problem)
        return Launch("backward", "hopper.queries.backward", (schedule, rows, tile), arguments, writes, rules)

    @cached_property
    def finish_keys(self) -> Launch:
        """dK and dV from their sums."""
        tile = self.tiles.backward
        arguments, given = buffers.finish_keys(self.problem, tile), (tile, self._schedule.scale)
        return Launch("finish_keys", "rows.finish_keys", given, arguments, frozenset(["dk", "dv"]))

    @cached_property
    def add_parts(self) -> Launch:
        """dK and dV of what the parts of a group made."""
        arguments, wide = buffers.add_parts(self.problem, self.maths.in_blocks), self.maths.in_blocks
        return Launch("add_parts", "rows.add_parts", (wide,), arguments, frozenset(["dk", "dv"]))

    @cached_property
    def over_keys(self) -> Launch:
        """dK, dV, and the sums of dQ (or not, where `queries` makes dQ). Over queries where a call lists keys."""
        if self.by_queries:
            return self._over_listed_keys
        tile, with_dq = self.tiles.backward, not self.over_queries
        schedule = self._over_keys_schedule
        arguments = buffers.over_keys(
            self.problem, schedule, self._backward, tile, with_dq, self.custom_sums, self.stores_dq,
            "tile map of backward", self.maths.in_blocks,
        )  # fmt: skip
        walk = tile.in_form(by_heads=True) if self.by_heads else tile
        given: tuple[object, ...] = (schedule, self._backward, walk, self.vectors, with_dq, self.custom_sums)
        sums = (b.place for b in buffers.custom_sums(self.problem, tile, self.custom_sums))
        made = {"dk", "dv", "workspace", "counters", "tickets", *(["dq"] if self.stores_dq else []), *sums}
        made |= {buffers.DK_PARTS, buffers.DV_PARTS}
        writes = frozenset(b.place for b in buffers_of(arguments) if b.place in made)
        if not tile.hopper:
            given = (*given, *self._in_blocks)
            return Launch("backward", "straight.backward.backward", given, arguments, writes, self._exact)
        places = (places_of(self.target),) if self.stores_dq else (0,) * len(self._in_blocks)
        given, rules = (*given, *places, *self._in_blocks), rules_of_backward(self.problem)
        return Launch("backward", "hopper.backward.backward", given, arguments, writes, rules)

    @cached_property
    def queries(self) -> Launch:
        """dQ, and what rows add to gradients of custom inputs."""
        tile, sums = self.tiles.queries, self._sums
        arguments = buffers.over_queries(
            self.problem, self._schedule, self._backward, sums, tile, self.row_pad, lists="tile map of queries",
            wide=bool(self._in_parts),
        )  # fmt: skip
        given = (self._schedule, self._backward, sums, tile, self.row_pad, *((True, True) if self._in_parts else ()))
        writes = frozenset(["dq", *(f"sum{n}" for n in range(len(sums)))])
        rules = (*self._exact, *self._one_role)
        return Launch("queries", "straight.queries.backward_queries", given, arguments, writes, rules)

    @cached_property
    def postprocess(self) -> Launch:
        """dQ from its sums."""
        tile = self.tiles.backward
        arguments = buffers.postprocess(self.problem, tile, self.longest_first, bool(self._in_parts))
        given = (tile, self._schedule.scale, self.vectors, self.longest_first, *self._in_parts)
        return Launch("postprocess", "rows.postprocess", given, arguments, frozenset(["dq"]))

    def pairs(self, read: Expr, expr: Expr, dtype: str) -> Launch:
        """The gradient of a read that differs from pair to pair, as tiles of pairs."""
        arguments = buffers.pairs(self.problem, self._backward, read, self.row_pad, dtype)
        given = (self._schedule, self._backward, read, expr, self.tiles.pairs, self.row_pad, dtype)
        name, writes = f"pairs of {read}", frozenset(["d_pairs"])
        return Launch(name, "straight.pairs.backward_pairs", given, arguments, writes, self._exact)
