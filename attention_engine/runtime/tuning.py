"""Which tiles an engine runs with: its tune files, what it may measure, and else the defaults."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_engine import folders
from attention_engine.compiler import Kernels
from attention_engine.errors import NotWhileCapturing
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.frontend.meta import Lengths
from attention_engine.ir.problem import Problem
from attention_engine.passes.analyse_mask import analyse_mask
from attention_engine.passes.maths import Maths
from attention_engine.plan.attention import Tiles
from attention_engine.plan.forms import KernelName, Tile
from attention_engine.plan.targets import Target, as_arch
from attention_engine.runtime.trials import Job, LocalBench, WorkerBench, bench_for
from attention_engine.tuner.cost import Work, cycles
from attention_engine.tuner.defaults import default_tiles
from attention_engine.tuner.entries import Entry, name_of
from attention_engine.tuner.problems import mask_class, problem_key
from attention_engine.tuner.search import Budget, Result, search
from attention_engine.tuner.space import Space, refusal, space
from attention_engine.tuner.store import TuneFile, now

FOUND: dict[str, Entry] = {}  # what this process measured, by the key's name, for engines without a file


@dataclass
class Tuning:
    """How an engine comes to its tiles. files and measure: for the forward pass, and for the backward pass."""

    measure: tuple[bool, bool] = (False, False)
    files: tuple[str | os.PathLike[str] | None, ...] = (None, None)
    budget: Budget = field(default_factory=Budget)
    bench: Callable[[Any, Sequence[Tensor]], WorkerBench | LocalBench] = bench_for
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._files = tuple(TuneFile(path) if path else None for path in self.files)
        for file in self._files:
            if file is not None:
                file.read()  # a file that can't be read is told of when the engine is built

    @property
    def matters(self) -> bool:
        """May tiles differ from the defaults?"""
        return any(self.measure) or any(self.files)

    def __str__(self) -> str:
        paths = [str(Path(f).expanduser().resolve()) if f else "" for f in self.files]
        return f"{self.measure} {paths}" if self.matters else ""

    def file(self, kernel: str) -> TuneFile | None:
        """The tune file of a kernel."""
        return self._files[not kernel.startswith("forward")]

    def find(self, kernel: str, key: dict[str, Any]) -> Entry | None:
        """What is known of a problem, without measuring."""
        file = self.file(kernel)
        if file is not None:
            return file.find(key)
        return FOUND.get(name_of(key)) if self.measure[not kernel.startswith("forward")] else None


@dataclass(frozen=True)
class Asked:
    """A problem whose tiles are asked for."""

    maths: Maths
    specs: Sequence[CustomSpec]
    problem: Problem
    target: Target
    deterministic: bool
    lengths: Lengths
    device: str
    wanted: tuple[str, ...] = ()  # the custom inputs whose gradients are asked for; maths holds no others
    hints: Lengths | None = None  # batch, queries and keys that the metas name, if all

    @property
    def trained(self) -> Asked:
        """The problem of what runs when gradients are wanted."""
        if self.maths.bent is None:
            return self
        return dataclasses.replace(self, maths=self.maths.trained.wanting(self.wanted))

    def over_queries(self, tiles: Tiles) -> bool:
        """Is dQ made by a kernel of its own?"""
        return Kernels(self.maths, self.problem, tiles, self.target, self.deterministic).plan.over_queries

    def kernels_as_known(self, tuning: Tuning) -> Kernels:
        """The kernels with the tiles that are known without measuring."""
        tiles = default_tiles(self.problem, self.maths, self.target, self.hints)
        for name, entry in look_up(tuning, self, tiles).items():
            assert isinstance(entry.tile, Tile)
            tiles = self.with_tile(tiles, name, entry.tile)
        return Kernels(self.maths, self.problem, tiles, self.target, self.deterministic)

    def key(self, kernel: KernelName, tiles: Tiles) -> dict[str, Any]:
        """What the tune file calls it."""
        over_queries = kernel != "forward" and self.over_queries(tiles)
        return problem_key(kernel, self.maths, self.problem, self.target, self.lengths[1:], over_queries, self.wanted)

    def kernels(self, backward: bool, tiles: Tiles) -> list[KernelName]:
        """The tuned kernels of a direction."""
        if not backward:
            return ["forward"]
        return ["backward", "queries"] if self.over_queries(tiles) else ["backward"]

    def space(self, kernel: KernelName, tiles: Tiles) -> Space:
        """The tiles to try, likely ones first behind the default."""
        found = space(kernel, self.problem, self.target, self.tile(tiles, kernel))
        batch, queries, keys = self.lengths
        kept = 0.5 if mask_class(analyse_mask(self.maths.program.mask)) == "causal" else 1.0
        arch, work = as_arch(self.target), Work(batch, queries, keys, kept)
        default, *others = (tile for tile in found.tiles if isinstance(tile, Tile))
        ranked = sorted(others, key=lambda tile: cycles(kernel, self.problem, arch, tile, work))
        return dataclasses.replace(found, tiles=(default, *ranked))

    def refusal(self, kernel: KernelName, tiles: Tiles, tile: Tile) -> str | None:
        """Why a kernel can't run with a tile that a file holds; None: it can."""
        return refusal(kernel, self.problem, self.target, self.tile(tiles, kernel), tile)

    def tile(self, tiles: Tiles, kernel: KernelName) -> Tile:
        """A kernel's tile."""
        found: Tile = getattr(tiles, kernel)
        return found

    def as_planned(self, tiles: Tiles, kernel: KernelName, tile: Tile) -> Tile:
        """That tile as a plan runs it, which changes the form of some: of deterministic gradients, of listed keys."""
        tiles = self.with_tile(tiles, kernel, tile)
        plan = Kernels(self.maths, self.problem, tiles, self.target, self.deterministic).plan
        return self.tile(plan.tiles, kernel)

    def with_tile(self, tiles: Tiles, kernel: KernelName, tile: Tile) -> Tiles:
        """The tiles with one kernel's replaced."""
        return dataclasses.replace(tiles, **{kernel: tile})

    def job(self, kernel: KernelName, tiles: Tiles) -> Job:
        """What a process needs to try tiles of a kernel."""
        return Job(
            self.maths.program, tuple(self.specs), kernel, self.problem, self.lengths, self.target, self.device,
            self.deterministic, tiles, self.wanted,
        )  # fmt: skip


def choose(tuning: Tuning, asked: Any, tiles: Any, backward: bool, custom: Sequence[Tensor]) -> Any:
    """The tiles with those of one direction looked up or, where the engine tunes, measured."""
    for kernel in asked.kernels(backward, tiles):
        key = asked.key(kernel, tiles)
        entry = _known(tuning, asked, kernel, key, tiles)
        if entry is None and tuning.measure[backward]:
            entry = _tune_once(tuning, asked, kernel, key, tiles, custom)
        if entry is not None:
            tiles = asked.with_tile(tiles, kernel, entry.tile)
    return tiles


def look_up(tuning: Tuning, asked: Any, tiles: Any) -> dict[Any, Entry]:
    """What is known of a problem's kernels, both directions, without measuring."""
    found = {}
    for backward in (False, True):
        held = tiles
        for kernel in asked.kernels(backward, held):
            entry = _known(tuning, asked, kernel, asked.key(kernel, held), held)
            if entry is not None:
                found[kernel], held = entry, asked.with_tile(held, kernel, entry.tile)
    return found


def _known(tuning: Tuning, asked: Any, kernel: str, key: dict[str, Any], tiles: Any) -> Entry | None:
    """What is known of a kernel of a problem. Raises TuneFileUnreadable where a file holds what it can't run with."""
    entry, file = tuning.find(kernel, key), tuning.file(kernel)
    why = asked.refusal(kernel, tiles, entry.tile) if entry is not None and file is not None else None
    if entry is not None and file is not None and why is not None:
        raise file.refuse(entry, why)
    return entry


def _tune_once(
    tuning: Tuning, asked: Any, kernel: str, key: dict[str, Any], tiles: Any, custom: Sequence[Tensor]
) -> Entry:
    """Measures, while other processes that want the same entry of the same file wait for it."""
    if asked.device.startswith("cuda") and torch.cuda.is_current_stream_capturing():
        raise NotWhileCapturing(
            "tune=True met a new problem inside a CUDA graph's capture.\n  Call the engine once before the capture."
        )
    file = tuning.file(kernel)
    if file is None:
        return _tune(tuning, asked, kernel, key, tiles, custom)
    wanted = f"{file.path.resolve()} {name_of(key)}"
    with folders.locked(f"tuning-{hashlib.blake2b(wanted.encode(), digest_size=10).hexdigest()}"):
        return _known(tuning, asked, kernel, key, tiles) or _tune(tuning, asked, kernel, key, tiles, custom)


def _tune(tuning: Tuning, asked: Any, kernel: str, key: dict[str, Any], tiles: Any, custom: Sequence[Tensor]) -> Entry:
    if asked.device.startswith("cuda"):
        torch.cuda.synchronize(asked.device)  # else what still runs would be timed too
    bench = tuning.bench(asked.job(kernel, tiles), custom)
    try:
        result = search(bench, asked.space(kernel, tiles).tiles, tuning.budget, key["kernel"])
    finally:
        bench.close()
    entry = Entry(key, result.best.tile, round(result.best.time_us or 0.0, 2), len(result.trials), now())
    tuning.results[entry.name] = result
    FOUND[entry.name] = entry
    file = tuning.file(kernel)
    if file is not None:
        file.add([entry])
    return entry
