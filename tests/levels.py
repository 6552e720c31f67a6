"""What is known of every kernel of the library's programs on each GPU, though none of those need be here.

    python -m tests.levels -n 2                       makes what docs/levels.csv lacks, or has of another text
    python -m tests.levels --gpu B200 RTX5090 -n 2    the same for these GPUs alone; a new one's name adds it
    python -m tests.levels --stale                    lists what that would make, in a minute and without nvcc
    python -m tests.levels --mark                     marks it in docs/levels.csv, and writes the page's table
    python -m tests.levels --write                    the table of docs/limits.md, made of docs/levels.csv

A job is a program, a direction and a head dim: `--only "backward 128 softmax"` takes those whose name holds the text.
A row of docs/levels.csv is a kernel: its job, its GPU, and its level there: "compiles" (nvcc or hipcc made it, with so
many registers a thread, bytes spilled, and bytes of shared memory a block), "lowers" (TileLang made the text, HIP for
AMD's GPUs where no hipcc is, Python of the CuTe DSL for "A100 by CuTe"), "refused", and why, or "unmade", which nobody
looked at. A row ends with a digest of the kernel's text, and with "changed" where that has another one now.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from attention_engine import AttentionEngine, CustomIO, arch, library, meta_tensor
from attention_engine.arch import Arch
from attention_engine.codegen.compile import LoweredKernel, lower_kernel
from attention_engine.codegen.dialects import Text, find_hipcc, lower_as
from attention_engine.compiler import Kernel
from attention_engine.errors import AttentionEngineError, NotLowered
from tests import levels_table, linear_cases
from tests.kernels.hip import compile_hip_text
from tests.kernels.together import compile_together
from tests.levels_rows import Level, Place, Row, digest, read, write

DTYPE_OF_DIM = {64: torch.float16, 128: torch.bfloat16}
HEADS, LENGTH = (4, 2, 2), 256
TOGETHER = 2  # kernels that one call of nvcc makes
BY_CUTE = " by CuTe"
GPUS = ("A100", "RTX4090", "B200", "RTX5090", "MI300X", "MI250", f"A100{BY_CUTE}")
SHARED = tempfile.TemporaryDirectory()
Found: TypeAlias = tuple[Level, int, int, int, str]  # what is made of a kernel


@dataclass(frozen=True)
class Program:
    """What of the library makes it. score: made of the factor head dim ** -0.5. caches: does it say what calls with a
    cache do, whose queries are a request's last ones? integers: do its custom inputs hold them?"""

    rows: Callable[[], Any] = library.OnlineSoftmax
    mask: Any = library.causal
    score: Callable[[float], Any] = library.scale
    axes: Mapping[str, Any] = field(default_factory=dict)
    caches: bool = True
    integers: bool = False

    def custom(self) -> list[torch.Tensor]:
        """Custom inputs as a call gives them."""
        sizes = {"batch": 1, "heads": HEADS[0], "seq_len": LENGTH}
        dtype = torch.int32 if self.integers else torch.float32
        shapes = ([sizes.get(a, a) for a in axes] for axes in self.axes.values())
        return [torch.zeros(shape, dtype=dtype, requires_grad=not self.integers) for shape in shapes]


def _capped(factor: float) -> Any:
    return library.softcap(50.0, factor)


def _biased(factor: float) -> Any:
    return library.relative_bias("table", 16, factor)


PROGRAMS = {
    "softmax": Program(),
    "softmax, full": Program(mask=None),
    "softmax one": Program(library.OnlineSoftmaxOne),
    "softmax with sinks": Program(library.OnlineSoftmaxSink, axes={"sinks": ("heads",)}),
    "sigmoid": Program(library.OnlineSigmoid),
    "relu": Program(library.OnlineRelu),
    "retention": Program(library.OnlineRetention),
    "identity": Program(library.OnlineIdentity),
    "softcap": Program(score=_capped),
    "alibi": Program(score=library.alibi, axes={"slopes": ("heads",)}),
    "relative bias": Program(score=_biased, axes={"table": ("heads", 33)}),
    "causal from": Program(mask=library.causal_from(64)),
    "sliding window": Program(mask=library.sliding_window(100)),
    "with global": Program(mask=library.and_masks(library.causal, library.with_global(4, library.sliding_window(64)))),
    "prefix": Program(mask=library.prefix_lm(64)),
    "dilated": Program(mask=library.and_masks(library.causal, library.dilated(3))),
    "block diagonal": Program(mask=library.block_diagonal(48)),
    "block causal": Program(mask=library.block_causal(48)),
    "neighbourhood": Program(mask=library.neighbourhood(16, 2, 2), caches=False),
    "documents": Program(
        mask=library.document(), axes={"documents": ("batch", "seq_len")}, caches=False, integers=True
    ),
    "padding": Program(mask=library.padding(), axes={"lengths": ("batch",)}, integers=True),
    "tree": Program(mask=library.tree(), axes={"tree": ("batch", 8, 8), "context": ("batch",)}, integers=True),
    "or, not": Program(mask=library.or_masks(library.causal, library.not_mask(library.block_diagonal(48)))),
}


@dataclass(frozen=True)
class Job:
    """A program in a direction, at a head dim."""

    family: str
    dim: int
    program: str

    def __str__(self) -> str:
        return f"{self.family} {self.dim} {self.program}"

    def kernels(self, gpu: Arch) -> dict[str, Kernel]:
        """Its kernels on a GPU, by name: forward and backward have those of their own direction."""
        dtype = DTYPE_OF_DIM[self.dim]
        if self.family == "linear":
            case = linear_cases.CASES[self.program]
            shape = linear_cases.Shape(length=LENGTH, dim=self.dim, dim_v=self.dim)
            per = None if not case.decays else "channel" if case.channels else "token"
            return dict(linear_cases.engine_for(case, shape, dtype)._all_kernels(gpu, per))
        program = PROGRAMS[self.program]
        metas = [meta_tensor(1, heads, LENGTH, self.dim, dtype=dtype) for heads in HEADS]
        score, axes = program.score(self.dim**-0.5), CustomIO(program.axes)
        engine = AttentionEngine(metas, axes, score, program.mask, program.rows(), device=gpu)
        if self.family == "decoding":
            plain, paged = (engine._of_caches(gpu, page, False, None, program.custom()).every for page in (0, 64))
            return plain | {f"{name}, paged": kernel for name, kernel in paged.items()}
        found, forward = engine._all_kernels(gpu, program.custom()), engine._kernels("tilelang").of_forward
        return {n: k for n, k in found.items() if (n in forward) == (self.family == "forward")}


def jobs(*wanted: str) -> list[Job]:
    """Those whose names hold one of these texts, in their order; all without."""
    every = [Job(f, d, p) for f in ("backward", "forward") for d in (128, 64) for p in PROGRAMS]
    every += [Job("decoding", d, p) for d in (128, 64) for p, made in PROGRAMS.items() if made.caches]
    every += [Job("linear", d, p) for d in (64, 128) for p in linear_cases.CASES]
    return list(dict.fromkeys(job for text in wanted or [""] for job in every if text in str(job)))


def order(place: Place) -> tuple[int, int]:
    """Where the rows of a GPU and a job stand in a file: GPUs of this file first, jobs by families and head dims."""
    gpu, *_ = place
    every = _places()
    return (GPUS.index(gpu) if gpu in GPUS else len(GPUS)), every.get(Job(*place[1:]), len(every))


@functools.cache
def _places() -> dict[Job, int]:
    return {job: n for n, job in enumerate(jobs())}


def looked_at(name: str, job: Job, known: Sequence[Row] = ()) -> list[Row]:
    """The rows of a job's kernels on a GPU of that name: those known before, marked if their kernel has another text
    now, and "unmade" ones of kernels that have none."""
    common = _common(name, job)
    try:
        kernels = job.kernels(_gpu(name))
    except AttentionEngineError as error:
        return [Row(*common, "all", "refused", why=_line(str(error)))]
    before = {row.kernel: row for row in known}
    return [before.get(each, Row(*common, each, "unmade")).beside(digest(kernels[each])) for each in sorted(kernels)]


def made(name: str, job: Job, wanted: Collection[str] = ()) -> list[Row]:
    """Rows of these kernels of a job, or of all, made for a GPU of that name."""
    gpu, common = _gpu(name), _common(name, job)
    kernels = {each: kernel for each, kernel in job.kernels(gpu).items() if not wanted or each in wanted}
    found = _made_once(name, gpu, kernels)
    return [Row(*common, each, *found[each], digest(kernels[each])) for each in sorted(kernels)]


def _common(name: str, job: Job) -> tuple[str, str, int, str, str]:
    """What all rows of a job begin with."""
    return name, job.family, job.dim, job.program, str(DTYPE_OF_DIM[job.dim]).removeprefix("torch.")


def _made_once(name: str, gpu: Arch, kernels: Mapping[str, Kernel]) -> dict[str, Found]:
    """What is made of kernels: here, or for another job of this run, as many have the same."""
    suffix = BY_CUTE if name.endswith(BY_CUTE) else ""
    places = {kernel: Path(SHARED.name) / f"{each._key.digest}{suffix}" for kernel, each in kernels.items()}
    wanted = {place: kernels[kernel] for kernel, place in places.items() if not place.exists()}
    for place, found in _made(name, gpu, wanted):
        part = place.with_name(f"{os.getpid()} {place.name}")
        part.write_text(json.dumps(found))
        part.replace(place)
    return {kernel: tuple(json.loads(place.read_text())) for kernel, place in places.items()}


def _made(name: str, gpu: Arch, kernels: Mapping[Path, Kernel]) -> Iterable[tuple[Path, Found]]:
    """What is made of kernels, by the places where other jobs of this run find it: many have the same rows."""
    texts = {}
    for place, each in kernels.items():
        try:
            if name.endswith(BY_CUTE):
                text = lower_as("cutedsl", each.prim_func, gpu, each.configs)
                yield place, ("lowers", 0, 0, text.shared_bytes, "")
            elif gpu.language == "hip":
                yield place, _made_of_hip(lower_as("hip", each.prim_func, gpu, each.configs), gpu)
            else:
                texts[place] = lower_kernel(each.prim_func, gpu, pass_configs=each.configs)
        except (NotLowered, RuntimeError) as error:
            yield place, ("refused", 0, 0, 0, _line(getattr(error, "reason", str(error))))
    yield from _compiled(texts, gpu)


def _made_of_hip(made: Text, gpu: Arch) -> Found:
    """What AMD's compiler makes of a text, where it is here."""
    if find_hipcc() is None:
        return "lowers", 0, 0, made.shared_bytes, ""
    used = compile_hip_text(made.text, gpu)
    return "compiles", used.registers, used.scratch_bytes, made.shared_bytes, ""


def _gpu(name: str) -> Arch:
    gpu: Arch = getattr(arch, name.removesuffix(BY_CUTE))()
    return gpu.in_straight_lines() if name.endswith(BY_CUTE) else gpu


def _compiled(texts: Mapping[Any, LoweredKernel], gpu: Arch) -> Iterable[tuple[Any, Found]]:
    """What nvcc makes of texts, those with the same flags at once."""
    for flags in dict.fromkeys(k.flags for k in texts.values()):
        names = {f"n{n}": kernel for n, (kernel, k) in enumerate(texts.items()) if k.flags == flags}
        for n, one in compile_together({n: texts[kernel] for n, kernel in names.items()}, gpu).items():
            spilled, notes = one.used.spill_stores + one.used.spill_loads, "; ".join(one.used.notes)
            yield names[n], ("compiles", one.used.registers, spilled, one.used.shared_bytes, notes)


def _compiles_here(name: str) -> bool:
    """Is there more to learn of a GPU's kernels than that they lower?"""
    return not name.endswith(BY_CUTE) and (_gpu(name).language == "cuda" or find_hipcc() is not None)


def _line(words: str) -> str:
    """The last of some lines."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return (lines or ["no words"])[-1][:200]


def page(found: list[Row]) -> str:
    """docs/limits.md with the table of these rows."""
    asked = collections.Counter(job.family for job in jobs())
    return levels_table.with_table(levels_table.PAGE.read_text(), found, asked)


def read_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", default=GPUS, help=f'of attention_engine.arch; "A100{BY_CUTE}"')
    parser.add_argument("--only", nargs="+", default=[], help="jobs whose name holds one of these")
    parser.add_argument("-n", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="makes no other row after so many")
    parser.add_argument("--to", type=Path, default=levels_table.PATH, help="the file of the rows")
    parser.add_argument("--stale", action="store_true", help="list the rows that are not there or of another text")
    parser.add_argument("--mark", action="store_true", help="mark them in the file, and write the page's table")
    parser.add_argument("--write", action="store_true", help="write the table of docs/limits.md")
    return parser.parse_args()


def answers(ask: Callable[..., list[Row]], asked: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Row]:
    """What processes find, each answer as it comes."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for given, found in pool.imap_unordered(functools.partial(_tell, ask), asked):
            if isinstance(found, str):
                print(f"# {given[0]} {given[1]}: {found}", flush=True)
            else:
                yield from found


def _tell(ask: Callable[..., list[Row]], given: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Row] | str]:
    """What a process answers."""
    try:
        return given, ask(*given)
    except Exception as error:  # noqa: BLE001 - the others go on
        return given, f"{type(error).__name__}: {_line(str(error))}"


def tasks(stale: Iterable[Row]) -> list[tuple[str, Job, tuple[str, ...]]]:
    """Kernels to make, a few of a job at a time: nvcc takes ten seconds for each."""
    by_place: dict[Place, list[str]] = collections.defaultdict(list)
    for row in stale:
        by_place[row.place].append(row.kernel)
    return [
        (place[0], Job(*place[1:]), tuple(names[n : n + TOGETHER]))
        for place, names in by_place.items()
        for n in range(0, len(names), TOGETHER)
    ]


def main() -> int:
    args, started = read_arguments(), time.perf_counter()
    if args.write:
        levels_table.PAGE.write_text(page(read()))
        return 0
    known: dict[Place, list[Row]] = collections.defaultdict(list)
    for row in read(args.to):
        known[row.place].append(row)
    asked = [
        (name, job, known[name, job.family, job.dim, job.program]) for name in args.gpu for job in jobs(*args.only)
    ]
    found = list(answers(looked_at, asked, args.n))
    stale = [row for row in found if not row.current or (row.level == "lowers" and _compiles_here(row.gpu))]
    if args.stale:
        print(*(f"{row}\n" for row in stale), sep="", end="")
        return int(bool(stale))
    places = {row.place for row in found}
    rows = {(r.place, r.kernel): r for r in [*(r for r in read(args.to) if r.place not in places), *found]}
    write(rows.values(), args.to, order)
    for row in answers(made, [] if args.mark else tasks(stale), args.n):
        print(row, flush=True)
        rows[row.place, row.kernel] = row
        write(rows.values(), args.to, order)
        if time.perf_counter() - started > args.seconds:
            break
    if args.to == levels_table.PATH:
        levels_table.PAGE.write_text(page(read()))
    return 0


if __name__ == "__main__":
    from tests import levels as here  # by the name under which processes find its functions

    sys.exit(here.main())
