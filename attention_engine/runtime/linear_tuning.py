"""Tuning of linear attention: what is asked of the tuner, and the tensors on which its tiles are tried."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine.compiler import Kernel, LinearKernels
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTile, LinearTiles
from attention_engine.plan.targets import Target
from attention_engine.reference.linear import recur
from attention_engine.runtime.linear_program_kernels import LinearProgramKernels
from attention_engine.runtime.trials import CHECKED, Tensors
from attention_engine.runtime.tuning import Tuning, look_up
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles
from attention_engine.tuner.linear_space import (
    is_walk,
    linear_key,
    linear_space,
    refusal,
    role_of,
    tile_of,
    with_tile,
)
from attention_engine.tuner.space import Space

STEADY = ("sums", "decay", "states")  # kernels that are not tuned: they take little, or their tile is another's


@dataclass(frozen=True)
class LinearAsked:
    """A problem whose tiles are asked for. lengths: batch and tokens; wanted: gradients asked for beyond q, k, v."""

    program: LinearProgram
    specs: Sequence[CustomSpec]
    problem: LinearProblem
    target: Target
    lengths: tuple[int, int]
    device: str
    wanted: tuple[str, ...] = ()

    @property
    def default_tiles(self) -> LinearTiles:
        """The tiles of a problem that nothing is known of."""
        if self.problem.per_channel:
            return default_channel_tiles(self.problem, self.target)
        return default_linear_tiles(self.program, self.problem, self.target)

    def kernels_as_known(self, tuning: Tuning, direction: str) -> LinearKernels:
        """The kernels of "forward", "backward" or "step" with the tiles that are known without measuring."""
        tiles = self.default_tiles
        if direction != "step" and not self.problem.per_channel:
            known = look_up(tuning, self, tiles)
            for kernel in self.kernels(direction == "backward", tiles):
                tile = known[kernel].tile if kernel in known else None
                tiles = self.with_tile(tiles, kernel, tile) if isinstance(tile, LinearTile) else tiles
        return LinearKernels(self.program, self.problem, tiles, self.target)

    def kernels(self, backward: bool, tiles: LinearTiles) -> list[str]:
        """The tuned kernels of a direction, walks of states first, whose chunk is others' too."""
        kernels = LinearKernels(self.program, self.problem, tiles, self.target)
        found = kernels.of_backward(*self.lengths, self.wanted) if backward else kernels.of_forward(*self.lengths)
        names = [n for n in found if n.split()[0] not in STEADY]
        return sorted(names, key=lambda name: not name.endswith("states"))

    def key(self, kernel: str, tiles: LinearTiles) -> dict[str, Any]:
        """What the tune file calls it."""
        steady = is_walk(kernel) or role_of(kernel) == "states"
        chunk = None if steady else tiles.states.chunk  # else files that are joined would mix chunk lengths
        return linear_key(kernel, self.program, self.problem, self.target, self.lengths, self.wanted, chunk)

    def refusal(self, kernel: str, tiles: LinearTiles, tile: LinearTile) -> str | None:
        """Why a kernel can't run with a tile that a file holds; None: it can."""
        return refusal(kernel, self.problem, self.target, tile_of(tiles, kernel), tile)

    def space(self, kernel: str, tiles: LinearTiles) -> Space:
        """The tiles to try, likely ones first behind the default."""
        return linear_space(kernel, self.problem, self.target, tiles, self.lengths)

    def with_tile(self, tiles: LinearTiles, kernel: str, tile: LinearTile) -> LinearTiles:
        """The tiles with one kernel's replaced."""
        return with_tile(tiles, kernel, tile)

    def tile(self, tiles: LinearTiles, kernel: str) -> LinearTile:
        """A kernel's tile."""
        return tile_of(tiles, kernel)

    def as_planned(self, tiles: LinearTiles, kernel: str, tile: LinearTile) -> LinearTile:
        """That tile as a plan runs it, which changes none."""
        return tile

    def job(self, kernel: str, tiles: LinearTiles) -> LinearJob:
        """What a process needs to try tiles of a kernel."""
        return LinearJob(
            self.program, tuple(self.specs), kernel, self.problem, self.lengths, self.target, self.device, tiles,
            self.wanted,
        )  # fmt: skip


@dataclass(frozen=True)
class LinearJob:
    """One kernel of one problem to tune, without tensors. tiles: the others'."""

    program: LinearProgram
    specs: tuple[CustomSpec, ...]
    kernel: str
    problem: LinearProblem
    lengths: tuple[int, int]
    target: Target
    device: str
    tiles: LinearTiles
    wanted: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def backward(self) -> bool:
        """Is it a kernel of the backward pass?"""
        return self.kernel.startswith("backward")

    def kernels(self, tile: LinearTile) -> list[Kernel]:
        """The kernels that a timed call runs, the tuned one first."""
        made = LinearKernels(self.program, self.problem, with_tile(self.tiles, self.kernel, tile), self.target)
        found = made.of_backward(*self.lengths, self.wanted) if self.backward else made.of_forward(*self.lengths)
        tuned = found.pop(self.kernel, None)  # absent where this tile makes walks too few to be worth it
        return [*([tuned] if tuned else []), *found.values()]

    def prepared(self, custom: Sequence[Tensor]) -> LinearPrepared:
        """The job's tensors, in the process that measures."""
        return LinearPrepared(self, list(custom))


class LinearPrepared(Tensors):
    """The tensors of a job, and what is right on them. q, k, v and decays are random."""

    def __init__(self, job: LinearJob, custom: list[Tensor]) -> None:
        super().__init__(job.specs, custom, job.device, job.problem.dtype, job.problem.tf32)
        self.job = job

    def _tensors(self, batch: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """q, k, v, decay (of 0, where mods read none), do; and the custom inputs cut to the lengths."""
        problem, make = self.job.problem, torch.Generator(self.device).manual_seed(0)
        sizes = [(problem.heads_of(n), problem.dim_of(n)) for n in ("q", "k", "v", "do")]
        q, k, v, do = (torch.randn(batch, length, *s, generator=make, device=self.device).to(self.dtype) for s in sizes)
        decay = -0.1 * torch.rand(batch, length, problem.heads, generator=make, device=self.device)
        decay = decay.to(getattr(torch, problem.decay_dtype or "float32"))
        return [q, k, v, decay, do], self.cut(batch, length, length)

    def _run(self, tiles: LinearTiles, given: list[Tensor], custom: list[Tensor]) -> Callable[[], list[Tensor]]:
        """What the tuned direction makes: the output, or the gradients of q, k, v."""
        arch = None if isinstance(self.job.target, str) else self.job.target
        program_kernels = LinearProgramKernels(self.job.program, self.job.specs, arch is None, arch, tiles)
        q, k, v, decay, do = given
        own = decay if self.job.problem.decay_dtype else None
        if not self.job.backward:
            return lambda: [program_kernels.forward(q, k, v, own, None, custom, False)[0]]

        def backward() -> list[Tensor]:
            found = program_kernels.backward(q, k, v, own, None, custom, do, None, frozenset(self.job.wanted))
            decays = [] if found.decay is None else [found.decay]
            return [found.q, found.k, found.v, *decays]

        return backward

    @functools.cached_property
    def _small(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """A small problem with what is right by the recurrence in float64."""
        given, custom = self._tensors(1, min(self.job.lengths[1], CHECKED))
        *leaves, do = [t.double() for t in given]
        named = self.exactly(custom)
        if not self.job.backward:
            q, k, v, decay = leaves
            return given, custom, [recur(self.job.program, q, k, v, decay, named, None)[0]]
        of_decay = LinearKernels(self.job.program, self.job.problem, self.job.tiles, self.job.target).plan.of_decay
        q, k, v, decay = (t.requires_grad_() for t in leaves)
        with torch.enable_grad():
            output, _ = recur(self.job.program, q, k, v, decay, named, None)
            asked = [q, k, v, *([decay] if of_decay(self.job.wanted) else [])]
            exact = torch.autograd.grad(output, asked, do, materialize_grads=True)
        return given, custom, list(exact)

    @functools.cached_property
    def _large(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The caller's size, with what the default tile makes of it."""
        given, custom = self._tensors(*self.job.lengths)
        return given, custom, self._run(self.job.tiles, given, custom)()

    def measure(self, tile: LinearTile) -> tuple[float, float]:
        """(difference from what is right over what is allowed, microseconds of the whole direction)."""
        tiles = with_tile(self.job.tiles, self.job.kernel, tile)
        prepared = (getattr(self, name) for name in ("_small", "_large"))
        return self.check_and_time((self._run(tiles, given, custom), expected) for given, custom, expected in prepared)
