"""The pipeline, from a program to the kernels of one problem, on one screen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attention_engine.arch import Arch
from attention_engine.codegen.compile import (
    DISABLE_WARP_SPECIALIZATION,
    HELD_BARRIERS,
    HELD_THREADS,
    NO_CONTRACTION,
    ONE_CHAIN,
    UNIFORM_GROUPS,
    Resources,
)
from attention_engine.codegen.patches import patched
from attention_engine.errors import TileDoesNotFit
from attention_engine.ir.expr import Expr
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.linear import LinearProblem
from attention_engine.ir.problem import Problem, Tile
from attention_engine.ir.program import WEIGHT, WEIGHT_GRADIENT, Backward
from attention_engine.passes.by_hand import makes_delta, pairs_issue_much, starts_longest_first
from attention_engine.passes.maths import Maths
from attention_engine.passes.read_places import plan_custom_sums
from attention_engine.passes.row_sums import plan_row_sums
from attention_engine.passes.schedule import BackwardSchedule
from attention_engine.passes.simplify import mul
from attention_engine.passes.tile_plan import TilePlan, plan_tiles

if TYPE_CHECKING:
    from attention_engine.codegen.cache import KernelKey

Target = Arch | str  # an architecture, or "interpret"
INTERPRETED_PLACES = 3  # blocks that the interpreter's GPU runs at once: few, so that each has several work items


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


class Kernel:
    """One kernel: traced when first needed, then compiled (or made ready for the interpreter) when first called.

    builder: its module and function in kernels/, "forward.forward", "linear.states.states"; given: the function's
    arguments, which with the target are all that the kernel is made of, and so its key on disk.
    """

    def __init__(
        self, builder: str, given: tuple[object, ...], target: Target, problem: Problem | LinearProblem,
        configs: dict[str, bool],
    ) -> None:  # fmt: skip
        self.builder, self.given, self.target, self.problem, self.configs = builder, given, target, problem, configs

    @cached_property
    def prim_func(self) -> Any:
        """The TileLang function."""
        module, function = self.builder.rsplit(".", 1)
        build = getattr(importlib.import_module(f"attention_engine.kernels.{module}"), function)
        with patched():
            return build(*self.given)

    @cached_property
    def compiled(self) -> Any:
        """The callable: (tensors and numbers, in the order of the parameters) -> None."""
        if isinstance(self.target, str):
            from attention_engine.codegen.interpreter import Interpreter

            return Interpreter(self.prim_func)
        from attention_engine.codegen.cache import find_or_compile
        from attention_engine.codegen.compile import compile_kernel

        arch, configs = self.target, self.configs
        kernel = find_or_compile(self._key, lambda: compile_kernel(self.prim_func, arch, pass_configs=configs))
        needed, limit = kernel.lowered.launch_shared_bytes, self.target.shared_memory_per_block
        if needed > limit:
            problem = self.problem
            raise TileDoesNotFit(
                problem.dim, problem.dim_v, problem.dtype,
                f"need {needed} bytes of shared memory a block with their default tile, and "
                f"{self.target.name} has {limit}",
            )  # fmt: skip
        return kernel

    @property
    def _key(self) -> KernelKey:
        from attention_engine.codegen.cache import KernelKey

        assert isinstance(self.target, Arch), "the interpreter keeps nothing"
        return KernelKey(self.builder, self.given, self.target, tuple(self.configs.items()))

    @property
    def resources(self) -> Resources:
        """What the compiled kernel takes of a GPU."""
        from attention_engine.codegen.cache import resources_of

        return resources_of(self._key, self.compiled.lowered)

    @cached_property
    def run(self) -> Callable[..., None]:
        """`compiled` without a method call around it."""
        return getattr(self.compiled, "run", self.compiled)

    def source(self, form: str) -> str:
        """The kernel as "tilelang" or, compiled, as "cuda"."""
        if form == "tilelang":
            return str(self.prim_func.script())
        return str(self.compiled.source("cuda"))


def pass_configs(problem: Problem | LinearProblem, by_hand: bool = False) -> dict[str, bool]:
    """What TileLang is told: 16-bit problems may approximate (exp2, tanh ...), fp32 ones may not.

    tf32 products on wgmma want operands that fp32 tiles don't have in both orders; mma takes them all.
    Kernels placed by hand have their own barriers. A bulk copy wants rows that begin at whole 16 bytes: where strides
    may be anything there is none, and no warps of its own for it (TileLang would give those bulk copies all the same).
    """
    narrow = {"tl.disable_tma_lower": True, DISABLE_WARP_SPECIALIZATION: True} if problem.stride_unit == 1 else {}
    if problem.dtype == "float32":
        return {"tl.disable_wgmma": True, DISABLE_WARP_SPECIALIZATION: True, **narrow}
    fast = {"tl.enable_fast_math": True, **narrow}
    return {**fast, "tl.disable_thread_storage_sync": True} if by_hand else fast


def places_of(target: Target) -> int:
    """How many blocks of a kernel that fills an SM run at once."""
    return target.sm_count if isinstance(target, Arch) else INTERPRETED_PLACES


class Kernels:
    """The kernels of a program for one problem, tile choice and target."""

    def __init__(self, maths: Maths, problem: Problem, tiles: Tiles, target: Target, deterministic: bool) -> None:
        self.maths, self.problem, self.tiles, self.target = maths, problem, tiles, target
        schedule = maths.backward_schedule
        self.row_sums = (
            plan_row_sums(schedule, maths.backward, problem.splits) if schedule and maths.backward else None
        )
        axes = {name: axes for name, _, axes in problem.custom}
        self.custom_sums = plan_custom_sums(schedule.pair_gradients if schedule else (), axes, deterministic)
        self.over_queries = deterministic or bool(
            self.row_sums and self.row_sums.gradients
        )  # then dQ needs no atomics either
        self.vectors = not isinstance(target, Arch) or target.has_wgmma
        self.row_pad = tiles.backward.row_pad  # of the rows that all backward kernels read
        self._preprocess: dict[tuple[tuple[str, ...], bool], Kernel] = {}
        self._tile_maps: dict[tuple[int, int, bool], Kernel] = {}
        self._pairs: dict[tuple[Expr, str], Kernel] = {}
        self._extremes: dict[bool, Kernel] = {}

    def _kernel(self, builder: str, *given: object, rules: Sequence[str] = ()) -> Kernel:
        """rules: what to do to the text that TileLang prints, beside what all kernels ask for."""
        configs = pass_configs(self.problem, by_hand=builder.endswith("_hopper")) | dict.fromkeys(rules, True)
        return Kernel(builder, (self.problem, *given), self.target, self.problem, configs)

    @cached_property
    def tile_plan(self) -> TilePlan:
        """What the mask asks of the kernels' loops."""
        return plan_tiles(self.maths.program.mask)

    def tile_map(self, tile: Tile, over_keys: bool) -> Kernel:
        """The lists of tiles that blocks with this tile walk over, where the mask's bounds don't say it all."""
        mask, key = self.maths.program.mask, (tile.q, tile.kv, over_keys)
        assert mask is not None
        if key not in self._tile_maps:
            self._tile_maps[key] = self._kernel("tile_map.tile_map", mask, tile, over_keys)
        return self._tile_maps[key]

    @cached_property
    def forward(self) -> Kernel:
        """q, k, v -> o and rows."""
        tile = self.tiles.forward
        if not tile.specialised:
            given = (self.maths.forward_of(self.problem.dtype), tile)
            return self._kernel("forward.forward", *given, rules=self._one_role)
        places = (places_of(self.target),) if tile.persistent else ()
        schedule = self.maths.forward_parted_of(self.problem.dtype)
        rules = [UNIFORM_GROUPS, HELD_BARRIERS, *([ONE_CHAIN] if pairs_issue_much(schedule) else [])]
        return self._kernel("forward_hopper.forward_hopper", schedule, tile, *places, rules=rules)

    def preprocess(self, finals: tuple[str, ...], delta_given: bool = False) -> Kernel:
        """Row values for the backward pass, where gradients arrive at these returned rows; zeroes the sums of dQ.

        delta_given: from a delta that `exact_delta` made; the sums are zero by then.
        """
        key = finals, delta_given
        if key not in self._preprocess:
            tile = None if self.over_queries or delta_given else self.tiles.backward
            self._preprocess[key] = self._kernel(
                "rows.preprocess", self._backward, finals, tile, self.row_pad, self.longest_first, delta_given,
                self.makes_delta and not finals,
            )
        return self._preprocess[key]

    @cached_property
    def longest_first(self) -> bool:
        """Do blocks over keys start longest first, over so many heads as their launch says?"""
        return starts_longest_first(self.problem, self.tiles.backward, self.tile_plan)

    @cached_property
    def makes_delta(self) -> bool:
        """Do blocks over keys make delta, where no gradient arrives at returned rows, but for the first units'?"""
        by_hand = self.tiles.backward.specialised and not self.over_queries
        return by_hand and makes_delta(self.problem, self._backward, self._schedule, self.custom_sums)

    @cached_property
    def stores_dq(self) -> bool:
        """Are blocks over keys persistent, and store dQ but for the last units'?"""
        return self.tiles.backward.persistent and not self.over_queries

    def extremes(self, over_keys: bool) -> Kernel:
        """Rows of extremes for the kernel over keys, or for those over queries and pairs."""
        if over_keys not in self._extremes:
            given = (self._schedule, self._backward, self.tile_of_extremes(over_keys), over_keys)
            self._extremes[over_keys] = self._kernel("backward_extremes.backward_extremes", *given, rules=self._exact)
        return self._extremes[over_keys]

    def tile_of_extremes(self, over_keys: bool) -> Tile:
        """Their tile: that of the products which meet them."""
        tile = self.tiles.backward if over_keys else self.tiles.queries
        return replace(tile, stages=min(tile.stages, 1))

    @property
    def _one_role(self) -> list[str]:
        """The rules of kernels that bring tiles by registers (unseen.py): TileLang would give one warp the loads and
        another the stores."""
        seen = key_condition(self.maths.program.mask)
        return [] if seen is None or self.problem.dtype == "float32" else [DISABLE_WARP_SPECIALIZATION]

    @property
    def _exact(self) -> list[str]:
        """The rules of kernels whose values must meet a row's extreme to the last bit."""
        return [NO_CONTRACTION] if self._backward.extremes else []

    @cached_property
    def finds_twice(self) -> bool:
        """Do kernels over queries or pairs meet extremes too, whose rows are found once more?"""
        pairs = self.custom_sums.pairs or self.custom_sums.by_rows
        return bool(self._backward.extremes) and (self.over_queries or bool(pairs))

    @cached_property
    def exact_delta(self) -> Kernel:
        """delta as the row sums of weight * dweight, for programs that would magnify the rounding of o."""
        sums, with_dq = (mul(WEIGHT, WEIGHT_GRADIENT),), False
        return self._kernel(
            "backward_queries.backward_queries", self._schedule, self._backward, sums, self.tiles.queries,
            self.row_pad, with_dq,
        )

    @property
    def _backward(self) -> Backward:
        if self.maths.backward is None:
            assert self.maths.refusal is not None
            raise self.maths.refusal
        return self.maths.backward

    @property
    def _schedule(self) -> BackwardSchedule:
        assert self._backward is not None and self.maths.backward_schedule is not None
        return self.maths.backward_schedule

    @property
    def _sums(self) -> tuple[Expr, ...]:
        return self.row_sums.sums if self.row_sums else ()

    @cached_property
    def backward(self) -> Kernel:
        """dK, dV, and the sums of dQ (or not, where backward_queries makes dQ)."""
        tile = self.tiles.backward
        given = (self._schedule, self._backward, tile, self.vectors, not self.over_queries, self.custom_sums)
        if not tile.specialised:
            return self._kernel("backward.backward", *given, rules=self._exact)
        places = (places_of(self.target),) if self.stores_dq else ()
        return self._kernel("backward_hopper.backward_hopper", *given, *places, rules=[UNIFORM_GROUPS, HELD_THREADS])

    def backward_pairs(self, read: Expr, expr: Expr, dtype: str) -> Kernel:
        """The gradient of a read that differs from pair to pair, as tiles of pairs."""
        if (read, dtype) not in self._pairs:
            given = (self._schedule, self._backward, read, expr, self.tiles.pairs, self.row_pad, dtype)
            self._pairs[read, dtype] = self._kernel("backward_pairs.backward_pairs", *given, rules=self._exact)
        return self._pairs[read, dtype]

    @cached_property
    def backward_queries(self) -> Kernel:
        """dQ, and what rows add to gradients of custom inputs."""
        return self._kernel(
            "backward_queries.backward_queries", self._schedule, self._backward, self._sums, self.tiles.queries,
            self.row_pad, rules=[*self._exact, *self._one_role],
        )

    @cached_property
    def postprocess(self) -> Kernel:
        """dQ from its sums."""
        given = (self.tiles.backward, self._schedule.scale, self.vectors, self.longest_first)
        return self._kernel("rows.postprocess", *given)

    def of_forward(self) -> dict[str, Kernel]:
        """What a forward pass launches."""
        return {"forward": self.forward, **self._map_for("forward", self.tiles.forward, True)}

    def of_backward(self) -> dict[str, Kernel]:
        """What a backward pass launches, where no gradient arrives at returned rows; of custom inputs in fp32."""
        exact, queries, found = self._backward.exact_delta, self.over_queries, bool(self._backward.extremes)
        twice = self.finds_twice
        again = {"preprocess_again": self.preprocess((), True)} if exact or twice else {}
        return {
            **({"extremes": self.extremes(True)} if found else {}),
            "preprocess": self.preprocess(()),
            **({"exact_delta": self.exact_delta} if exact else {}),
            **again,
            "backward": self.backward,
            **({"queries": self.backward_queries} if queries else {"postprocess": self.postprocess}),
            **self._map_for("backward", self.tiles.backward, False),
            **({"extremes of queries": self.extremes(False)} if twice else {}),
            **(self._map_for("queries", self.tiles.queries, True) if exact or queries or twice else {}),
            **(self._map_for("extremes", self.tiles.backward, True) if found else {}),
            **{f"pairs of {read}": self.backward_pairs(read, e, "float32") for read, e in self.custom_sums.pairs},
        }

    def _map_for(self, name: str, tile: Tile, over_keys: bool) -> dict[str, Kernel]:
        return {f"tile map of {name}": self.tile_map(tile, over_keys)} if self.tile_plan.mapped else {}
