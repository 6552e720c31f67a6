"""Where the tuner's tiles run: in processes of their own on a GPU, in this one on the interpreter."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from attention_engine import folders
from attention_engine.codegen.compile import Resources
from attention_engine.compiler import Kernel, Kernels
from attention_engine.errors import AttentionEngineError
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import Program
from attention_engine.passes.maths import analyse
from attention_engine.plan.attention import Tiles
from attention_engine.plan.forms import KernelName, Tile
from attention_engine.plan.targets import Target, as_arch
from attention_engine.reference.dense import attend, attend_backward
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.tuner.entries import AnyTile
from attention_engine.tuner.measure import TF32_TOLERANCE, TOLERANCES, median_time_us, worst_difference
from attention_engine.tuner.search import Outcome, Trial
from attention_engine.tuner.space import judge
from attention_engine.tuner.worker import RemoteError, Worker, WorkerDied, WorkerTimeout, call_all, worker_count

Call = Callable[[], list[Tensor]]
CHECKED = 2 * 128 + 33  # longest length held against the dense reference: several tiles and a rest
COMPILE_SECONDS = 120.0
MEASURE_SECONDS = 25.0  # of one tile, with what the process does first: a kernel that takes longer hangs


@dataclass(frozen=True)
class Job:
    """One kernel of one problem to tune, without tensors: what a process needs to make them. tiles: the others'."""

    program: Program
    specs: tuple[CustomSpec, ...]
    kernel: KernelName
    problem: Problem
    lengths: tuple[int, int, int]  # batch, queries, keys
    target: Target
    device: str
    deterministic: bool
    tiles: Tiles
    wanted: tuple[str, ...] = ()  # the custom inputs whose gradients are asked for
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def with_tile(self, tile: Tile) -> Tiles:
        """The tiles with this one in place."""
        return dataclasses.replace(self.tiles, **{self.kernel: tile})

    def kernels(self, tile: Tile) -> list[Kernel]:
        """The kernels that a timed call runs, the tuned one first."""
        maths = analyse(self.program).wanting(self.wanted)
        return needed(Kernels(maths, self.problem, self.with_tile(tile), self.target, self.deterministic), self.kernel)

    def prepared(self, custom: Sequence[Tensor]) -> Prepared:
        """The job's tensors, in the process that measures."""
        return Prepared(self, list(custom))


class AnyJob(Protocol):
    """A job of the tuner, whatever its kernels."""

    @property
    def token(self) -> str:
        """A name that no other job has."""

    @property
    def target(self) -> Target:
        """What its kernels are compiled for."""

    @property
    def device(self) -> str:
        """Where they run."""

    def kernels(self, tile: Any) -> list[Kernel]:
        """The kernels that a timed call runs, the tuned one first."""

    def prepared(self, custom: Sequence[Tensor]) -> AnyPrepared:
        """The job's tensors, in the process that measures."""


class AnyPrepared(Protocol):
    """The tensors of a job."""

    def measure(self, tile: Any) -> tuple[float, float]:
        """See measure_tile."""


def needed(kernels: Kernels, kernel: KernelName) -> list[Kernel]:
    """The kernels that a timed call runs, the tuned one first."""
    launched = dict(kernels.of_forward) if kernel == "forward" else {**kernels.of_forward, **kernels.of_backward}
    return [launched.pop(kernel), *launched.values()]


def compile_tile(job: AnyJob, tile: AnyTile) -> Resources | None:
    """Puts the kernels of a tile on disk; what the tuned one takes, where they are for a GPU."""
    kernels = job.kernels(tile)
    for kernel in kernels:
        kernel.compiled  # noqa: B018 - made when first asked for
    return None if isinstance(job.target, str) else kernels[0].resources


# ---- in the process that measures

PREPARED: dict[str, AnyPrepared] = {}


def prepare(job: AnyJob, custom: Sequence[Tensor]) -> None:
    """Makes the tensors of a job in this process; `custom` are the caller's, copied."""
    PREPARED.clear()
    PREPARED[job.token] = job.prepared([c.detach().to(job.device, copy=True) for c in custom])


def measure_tile(token: str, tile: AnyTile) -> tuple[float, float]:
    """(difference from what is right over what is allowed, microseconds); no time where the first is above 1."""
    return PREPARED[token].measure(tile)


class Tensors:
    """A job's custom inputs and device, in the process that measures; what a difference may be there."""

    def __init__(self, specs: Sequence[CustomSpec], custom: list[Tensor], device: str, dtype: str, tf32: bool) -> None:
        self.specs, self.custom, self.device = specs, custom, torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.allowed = TF32_TOLERANCE if tf32 else TOLERANCES[self.dtype]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = tf32

    def cut(self, batch: int, q_len: int, kv_len: int) -> list[Tensor]:
        """The custom inputs of shorter lengths."""
        most, found = {"batch": batch, "seq_len": q_len, "seq_len_kv": kv_len}, []
        for spec, tensor in zip(self.specs, self.custom, strict=True):
            for axis, name in enumerate(spec.axes):
                if isinstance(name, str) and name in most:
                    tensor = tensor.narrow(axis, 0, min(most[name], tensor.shape[axis]))
            found.append(tensor.contiguous())
        return found

    def exactly(self, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        """Custom inputs by name, as the reference takes them."""
        given = zip(self.specs, custom, strict=True)
        return {s.name: c.double() if c.is_floating_point() else c for s, c in given}

    def check_and_time(self, runs: Iterable[tuple[Call, list[Tensor]]]) -> tuple[float, float]:
        """(worst difference over what is allowed, microseconds of the last): each run is made when the ones before are
        right, and none is timed behind a wrong one.
        """
        for call, expected in runs:
            off = worst_difference(call(), expected) / self.allowed
            if not off <= 1:
                return off, 0.0
        return off, median_time_us(call, self.device)


class Prepared(Tensors):
    """The tensors of a job, and what is right on them. q, k, v are random: a caller's may all be alike."""

    def __init__(self, job: Job, custom: list[Tensor]) -> None:
        super().__init__(job.specs, custom, job.device, job.problem.dtype, job.problem.tf32)
        self.job, self.maths = job, analyse(job.program)

    def _program_kernels(self, tiles: Tiles) -> ProgramKernels:
        arch = None if isinstance(self.job.target, str) else self.job.target
        return ProgramKernels(self.maths, self.job.specs, arch is None, arch, self.job.deterministic, tiles)

    def _tensors(self, batch: int, q_len: int, kv_len: int) -> tuple[list[Tensor], list[Tensor]]:
        """q, k, v, do as (batch, length, heads, dim), and the custom inputs cut to the lengths."""
        problem, generator = self.job.problem, torch.Generator(self.device).manual_seed(0)
        sizes = [(q_len, problem.heads, problem.dim), (kv_len, problem.kv_heads, problem.dim),
                 (kv_len, problem.kv_heads, problem.dim_v), (q_len, problem.heads, problem.dim_v)]  # fmt: skip
        made = [torch.randn(batch, *s, generator=generator, device=self.device).to(self.dtype) for s in sizes]
        return made, self.cut(batch, q_len, kv_len)

    def _run(
        self, tiles: Tiles, given: list[Tensor], custom: list[Tensor], ahead: tuple[Tensor, list[Tensor]] | None
    ) -> Callable[[], list[Tensor]]:
        """What the tuned direction makes: the output, or the gradients of q, k, v."""
        program_kernels = self._program_kernels(tiles)
        q, k, v, do = given
        if self.job.kernel == "forward":
            return lambda: [program_kernels.forward(q, k, v, custom)[0]]
        assert ahead is not None
        return lambda: list(program_kernels.backward(q, k, v, custom, *ahead, do, {}, self.job.wanted)[:3])

    def _ahead(self, given: list[Tensor], custom: list[Tensor]) -> tuple[Tensor, list[Tensor]] | None:
        """The forward pass that a backward pass needs before it."""
        q, k, v, _ = given
        return None if self.job.kernel == "forward" else self._program_kernels(self.job.tiles).forward(q, k, v, custom)

    @functools.cached_property
    def _small(self) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, list[Tensor]] | None, list[Tensor]]:
        """A small problem with what is right by the dense maths in float64."""
        _, q_len, kv_len = self.job.lengths
        given, custom = self._tensors(1, min(q_len, CHECKED), min(kv_len, CHECKED))
        q, k, v, do = (t.double().transpose(1, 2) for t in given)
        named = self.exactly(custom)
        if self.job.kernel == "forward":
            exact = [attend(self.job.program, q, k, v, named)[0]]
        else:
            backward = self.maths.backward
            assert backward is not None
            output, saved = attend(self.job.program.returning(backward.saved), q, k, v, named)
            delta = (output * do).sum(-1)
            found = attend_backward(self.job.program, backward, q, k, v, named, saved, delta, do, {})
            exact = [found.q, found.k, found.v]
        return given, custom, self._ahead(given, custom), [e.transpose(1, 2) for e in exact]

    @functools.cached_property
    def _large(self) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, list[Tensor]] | None, list[Tensor]]:
        """The caller's size, with what the default tile makes of it."""
        given, custom = self._tensors(*self.job.lengths)
        ahead = self._ahead(given, custom)
        return given, custom, ahead, self._run(self.job.tiles, given, custom, ahead)()

    def measure(self, tile: Tile) -> tuple[float, float]:
        """See measure_tile."""
        tiles = self.job.with_tile(tile)
        prepared = (getattr(self, name) for name in ("_small", "_large"))
        return self.check_and_time(
            (self._run(tiles, given, custom, ahead), expected) for given, custom, ahead, expected in prepared
        )


# ---- in the process that asks


def judged(tile: AnyTile, answer: object) -> Trial:
    """What became of a tile that was measured: an answer of measure_tile, or what it raised."""
    match answer:
        case (float() as off, float() as time_us):
            if off <= 1:
                return Trial(tile, Outcome.OK, time_us)
            return Trial(tile, Outcome.WRONG, message=f"differs by {off:.3g} times what rounding explains")
        case WorkerTimeout():
            return Trial(tile, Outcome.TIMEOUT, message=str(answer))
        case RemoteError(kind="OutOfMemoryError") | torch.OutOfMemoryError() | MemoryError():
            return Trial(tile, Outcome.OUT_OF_MEMORY, message=str(answer).splitlines()[0])
        case _:
            return Trial(tile, Outcome.LAUNCH_ERROR, message=str(answer)[:300])


def compiled(job: AnyJob, tile: AnyTile, answer: object) -> Trial:
    """What became of a tile that was compiled: an answer of compile_tile, or what it raised."""
    match answer:
        case None:
            return Trial(tile, Outcome.OK)
        case Resources():
            reason = judge(answer, as_arch(job.target))
            return Trial(tile, Outcome.OK if reason is None else Outcome.REJECTED, message=reason or "")
        case WorkerTimeout():
            return Trial(tile, Outcome.TIMEOUT, message=f"compiling: {answer}")
        case RemoteError(kind="TileDoesNotFit"):
            return Trial(tile, Outcome.REJECTED, message=str(answer).splitlines()[0])
        case RemoteError(kind="MemoryError"):
            return Trial(tile, Outcome.OUT_OF_MEMORY, message=f"compiling: {answer}")
        case _:
            return Trial(tile, Outcome.COMPILE_ERROR, message=str(answer)[:300])


class WorkerBench:
    """Tiles on a GPU: compiled by several processes, run by one that may crash."""

    def __init__(self, job: AnyJob, custom: Sequence[Tensor]) -> None:
        self.job, self.custom, self.worker = job, [c.detach().cpu() for c in custom], Worker()
        self.ready = False

    def compile(self, tiles: Sequence[AnyTile], seconds: float) -> Iterator[Trial]:
        """One trial for each tile as it is compiled."""
        calls = [(self.job, tile) for tile in tiles]
        limit = min(COMPILE_SECONDS, max(seconds, 1.0))
        for number, answer in call_all(compile_tile, calls, worker_count(len(calls)), limit):
            yield compiled(self.job, tiles[number], answer)

    def measure(self, tile: AnyTile, seconds: float) -> Trial:
        """Numbers, then time; a process that failed is replaced."""
        limit = MEASURE_SECONDS + min(max(seconds, 0.0), MEASURE_SECONDS)
        with folders.locked(f"measuring-{self.job.device.replace(':', '')}"):  # two at once slow each other
            try:
                if not self.ready:
                    self.worker.call(prepare, self.job, self.custom, timeout=limit)
                    self.ready = True
                return judged(tile, self.worker.call(measure_tile, self.job.token, tile, timeout=limit))
            except (WorkerDied, WorkerTimeout, RemoteError) as error:
                self.close()  # a context that failed once fails ever after
                return judged(tile, error)

    def close(self) -> None:
        """Ends the measuring process; the next tile starts another."""
        self.worker.close()
        self.ready = False


class LocalBench:
    """Tiles on the interpreter, which neither crashes nor hangs."""

    def __init__(self, job: AnyJob, custom: Sequence[Tensor]) -> None:
        self.job, self.prepared = job, job.prepared([c.detach().clone() for c in custom])

    def compile(self, tiles: Sequence[AnyTile], seconds: float) -> Iterator[Trial]:
        """Nothing to do."""
        for tile in tiles:
            yield Trial(tile, Outcome.OK)

    def measure(self, tile: AnyTile, seconds: float) -> Trial:
        """Numbers, then time."""
        try:
            return judged(tile, self.prepared.measure(tile))
        except (RuntimeError, MemoryError, AttentionEngineError) as error:
            return judged(tile, error)

    def close(self) -> None:
        """Nothing to do."""


def bench_for(job: AnyJob, custom: Sequence[Tensor]) -> WorkerBench | LocalBench:
    """Where the tiles of a job run."""
    return LocalBench(job, custom) if isinstance(job.target, str) else WorkerBench(job, custom)
