"""The launches of a plan become kernels: traced, compiled and kept, each when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attention_engine.arch import Arch
from attention_engine.codegen.patches import kept_macros, patched
from attention_engine.collector import seldom_collected
from attention_engine.errors import TileDoesNotFit
from attention_engine.frontend.signatures import Form
from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTiles
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import Program
from attention_engine.passes.maths import Maths
from attention_engine.plan.attention import AttentionPlan, Tiles
from attention_engine.plan.cached import CachedPlan
from attention_engine.plan.cached_buffers import Cache
from attention_engine.plan.channels import ChannelPlan
from attention_engine.plan.few_key_heads import (
    may_have_a_head_each,
    reads_copies,
    suits_a_head_each,
    with_a_head_each,
)
from attention_engine.plan.launches import Launch, Step, launches
from attention_engine.plan.linear import LinearPlan
from attention_engine.plan.long_sequences import are_long, walks_by_heads
from attention_engine.plan.rules import DISABLE_WARP_SPECIALIZATION, NO_STORAGE_SYNC
from attention_engine.plan.targets import Target

if TYPE_CHECKING:
    from attention_engine.codegen.ahead import Work
    from attention_engine.codegen.cache import KernelKey
    from attention_engine.codegen.compile import CompiledKernel, Resources


class Kernel:
    """One kernel: traced when first needed, then compiled (or made ready for the interpreter) when first called.

    builder: its module and function in kernels/, "straight.forward.forward", "linear.token.states.states"; given: the
    function's arguments, which with the target are all that the kernel is made of, and so its key on disk.
    """

    def __init__(
        self, builder: str, given: tuple[object, ...], target: Target, problem: Problem | LinearProblem,
        configs: dict[str, bool],
    ) -> None:  # fmt: skip
        self.builder, self.given, self.target, self.problem, self.configs = builder, given, target, problem, configs
        self._work: Work[CompiledKernel] | None = None

    @cached_property
    def prim_func(self) -> Any:
        """The TileLang function."""
        from attention_engine.codegen.ahead import tracing
        from attention_engine.codegen.compile import load_tilelang

        load_tilelang()
        module, function = self.builder.rsplit(".", 1)
        with tracing, patched(), seldom_collected():  # around the import too, which rewrites the module's macros
            build = getattr(importlib.import_module(f"attention_engine.kernels.{module}"), function)
            return build(*self.given)

    @cached_property
    def compiled(self) -> Any:
        """The callable: (tensors and numbers, in the order of the parameters) -> None."""
        if isinstance(self.target, str):
            from attention_engine.codegen.interpreter import Interpreter

            return Interpreter(self.prim_func)
        self.begin()
        kernel = self._find_or_compile() if self._work is None else self._work.result()
        needed, limit = kernel.lowered.launch_shared_bytes, self.target.shared_memory_per_block
        if needed > limit:
            problem = self.problem
            raise TileDoesNotFit(
                problem.dim, problem.dim_v, problem.dtype,
                f"need {needed} bytes of shared memory a block with their default tile, and "
                f"{self.target.name} has {limit}",
            )  # fmt: skip
        return kernel

    def begin(self) -> None:
        """Starts compiling in a thread, where it must be compiled; `compiled` waits for it."""
        if isinstance(self.target, str) or self._work is not None or "compiled" in vars(self):
            return
        if self.target.language == "hip":
            return  # compiled where it is first called: there is no cache of such kernels
        from attention_engine.codegen import ahead, cache

        if not cache.is_kept(self._key):
            self._work = ahead.begin(self._find_or_compile)
            self._work.future.add_done_callback(lambda _: kept_macros.keep())  # nobody waits for it

    @property
    def is_compiled(self) -> bool:
        """Is there nothing left to compile: in this process or on disk?"""
        from attention_engine.codegen.cache import is_kept

        return "compiled" in vars(self) or is_kept(self._key)

    @property
    def ready(self) -> bool:
        """May it be called without a wait for a compiler? It was begun."""
        return "compiled" in vars(self) or self._work is None or self._work.future.done()

    def _find_or_compile(self) -> CompiledKernel:
        from attention_engine.codegen.cache import find_or_compile
        from attention_engine.codegen.compile import compile_kernel

        arch, configs = self.target, self.configs
        assert isinstance(arch, Arch), "the interpreter compiles nothing"
        if arch.language == "hip":
            from attention_engine.codegen.dialects import compile_hip

            return compile_hip(self.prim_func, arch, configs)
        return find_or_compile(self._key, lambda: compile_kernel(self.prim_func, arch, pass_configs=configs))

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
        found: Callable[..., None] = getattr(self.compiled, "run", self.compiled)
        return found

    def source(self, form: Form) -> str:
        """The kernel as "tilelang", as "hip" or "cutedsl" (lowered alone) or, compiled, as "cuda"."""
        if form == "tilelang":
            return str(self.prim_func.script())
        if form == "hip" or form == "cutedsl":
            from attention_engine.codegen.dialects import lower_as

            assert isinstance(self.target, Arch), "the interpreter has no text"
            return lower_as(form, self.prim_func, self.target, self.configs).text
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
    return {**fast, NO_STORAGE_SYNC: True} if by_hand else fast


class _Launched:
    """The kernels of launches, each traced and compiled when it is first asked for."""

    def __init__(self, problem: Problem | LinearProblem, target: Target) -> None:
        self.problem, self.target = problem, target
        self._made: dict[tuple[str, tuple[object, ...]], Kernel] = {}

    def kernel(self, launch: Launch) -> Kernel:
        """The kernel of a launch; launches of equal builders and arguments share one."""
        key = launch.builder, launch.given
        if key not in self._made:
            configs = pass_configs(self.problem, by_hand=launch.builder.startswith("hopper."))
            configs |= dict.fromkeys(launch.rules, True)
            given = (self.problem, *launch.given)
            self._made[key] = Kernel(launch.builder, given, self.target, self.problem, configs)
        return self._made[key]

    def named(self, steps: Iterable[Step]) -> dict[str, Kernel]:
        """The kernels that steps launch, by name."""
        return {launch.name: self.kernel(launch) for launch in launches(steps)}


def begin_all(kernels: Iterable[Kernel]) -> None:
    """Starts compiling kernels side by side; each is waited for where it is first called."""
    for kernel in kernels:
        kernel.begin()


def compile_all(kernels: Collection[Kernel]) -> None:
    """Compiles kernels side by side. Raises what the first of them raises that can't be compiled."""
    begin_all(kernels)
    for kernel in kernels:
        _ = kernel.compiled


def resources_by_symbol(kernels: Mapping[str, Kernel]) -> dict[str, Resources]:
    """What kernels take of a GPU, by the names of their functions; a second one of a name has its own behind it."""
    found: dict[str, Resources] = {}
    for name, kernel in kernels.items():
        symbol = kernel.compiled.lowered.symbol
        found[f"{symbol}, {name}" if symbol in found else symbol] = kernel.resources
    return found


class Kernels(_Launched):
    """The kernels of a program for one problem, tile choice and target: what its plan launches."""

    problem: Problem

    def __init__(
        self, maths: Maths, problem: Problem, tiles: Tiles, target: Target, deterministic: bool, by_heads: bool = False
    ) -> None:  # fmt: skip
        super().__init__(problem, target)
        self.plan = AttentionPlan(maths, problem, tiles, target, deterministic, by_heads)
        self.maths, self.tiles = maths, tiles

    def of_call(self, batch: int, queries: int, keys: int) -> Kernels:
        """Those of the backward pass of a call of these lengths, of packed sequences in the mean: others where its key
        heads are few, or its packed sequences long."""
        other = self.of_few_key_heads if suits_a_head_each(self.plan, batch, queries, keys) else None
        if other is None and are_long(queries):
            other = self.of_long_sequences
        return self if other is None else other

    @cached_property
    def of_few_key_heads(self) -> Kernels | None:
        """Those whose blocks over keys have one query head each; None where there are none."""
        if not may_have_a_head_each(self.plan):
            return None
        given = with_a_head_each(self.problem, self.tiles)
        found = Kernels(self.maths, *given, self.target, self.plan.deterministic)
        return found if reads_copies(found.plan) else None

    @cached_property
    def of_long_sequences(self) -> Kernels | None:
        """Those of packed sequences that are long; None where there are none. Only the kernel over keys is another."""
        if not walks_by_heads(self.problem, self.plan.tiles.backward):
            return None
        found = Kernels(self.maths, self.problem, self.tiles, self.target, self.plan.deterministic, by_heads=True)
        found._made = self._made
        return found

    @property
    def forward(self) -> Kernel:
        """q, k, v -> o and rows."""
        return self.kernel(self.plan.forward)

    @property
    def backward(self) -> Kernel:
        """dK, dV, and the sums of dQ."""
        return self.kernel(self.plan.over_keys)

    @property
    def of_forward(self) -> dict[str, Kernel]:
        """What a forward pass launches, by name."""
        return self.named(self.plan.forward_steps)

    @property
    def of_backward(self) -> dict[str, Kernel]:
        """What a backward pass launches where no gradient arrives at returned rows; of custom inputs in fp32."""
        return self.named((*self.plan.backward_steps(), *self.plan.pair_launches))

    @property
    def every_of_backward(self) -> dict[str, Kernel]:
        """What any backward pass launches: also of long packed sequences, and of few key heads."""
        usual, found = self.of_backward, dict(self.of_backward)
        for what, other in (("long sequences", self.of_long_sequences), ("few key heads", self.of_few_key_heads)):
            of_other = {} if other is None else other.of_backward
            found |= {f"{name} of {what}": k for name, k in of_other.items() if k is not usual.get(name)}
        return found


class CachedKernels(_Launched):
    """The same of attention to a cache."""

    problem: Problem

    def __init__(
        self, program: Program, problem: Problem, cache: Cache, target: Target, scale: Expr | None = None
    ) -> None:  # fmt: skip
        super().__init__(problem, target)
        self.plan = CachedPlan(program, problem, cache, target, scale)

    @property
    def every(self) -> dict[str, Kernel]:
        """What calls may launch, by name."""
        return self.named(self.plan.every_step)


class LinearKernels(_Launched):
    """The same of a linear attention."""

    problem: LinearProblem

    def __init__(self, program: LinearProgram, problem: LinearProblem, tiles: LinearTiles, target: Target) -> None:
        super().__init__(problem, target)
        self.program, self.tiles = program, tiles
        self.plan = (ChannelPlan if problem.per_channel else LinearPlan)(program, problem, tiles, target)

    def of_forward(self, batch: int, length: int) -> dict[str, Kernel]:
        """What a forward pass launches that neither begins nor ends with a state."""
        return self.named(self.plan.forward_steps(batch, length, False, False))

    def of_backward(self, batch: int, length: int, wanted: Collection[str]) -> dict[str, Kernel]:
        """What a backward pass launches where no state was given."""
        return self.named(self.plan.backward_steps(batch, length, wanted, False, False))
