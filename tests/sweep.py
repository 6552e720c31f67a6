"""Compiles every program of the tests, at many head dims and dtypes, for a GPU that need not be here.

    python -m tests.sweep --arch H100 --part 3/8 -n 2

A program that the constructor accepts must compile for every architecture. One line for each problem that does not
(`--each`: for each problem, as it ends), then how many had each outcome, and the slowest. `--lower` stops before nvcc,
in seconds a problem instead of a minute; `--only TEXT` takes the problems whose name holds it; `--list` names them.
"""

from __future__ import annotations

import argparse
import collections
import resource
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.codegen import compile as codegen_compile
from attention_engine.tuner.worker import RemoteError, call_all, worker_count
from tests import cases, programs
from tests.kernels.together import compile_together

DIMS = (32, 64, 128, 256)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MASKS = ("full", "causal")  # in turns, so that each dim and each dtype meets both
LENGTH, GROUP = 256, 2
PATIENCE = 20  # seconds by the clock for each second of a core: for machines with more to do


@dataclass(frozen=True)
class Job:
    """One problem: a program of tests/programs.py or tests/cases.py, under a mask, at a head dim, in a dtype."""

    program: str
    mask: str
    dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.program}, {self.mask}, D {self.dim}, {self.dtype}"

    def engine(self, device: arch.Arch) -> AttentionEngine:
        metas = [
            meta_tensor(1, heads, LENGTH, self.dim, dtype=DTYPES[self.dtype])
            for heads in (programs.HEADS, programs.HEADS // GROUP, programs.HEADS // GROUP)
        ]
        where, name = self.program.split(": ")
        if where == "case":
            case = cases.CASES[name]
            axes, score, func = case.axes, case.score_mod(self.dim**-0.5), case.online_func()
        else:
            example = programs.EXAMPLES[name]
            axes, score, func = example.axes, example.score_mod, example.online_func()
        return AttentionEngine(metas, CustomIO(axes), score, programs.MASKS[self.mask], func, device=device)


def jobs() -> list[Job]:
    """Every problem, in an order in which neighbours differ in all they can."""
    names = [f"case: {name}" for name in cases.CASES] + [f"example: {name}" for name in programs.EXAMPLES]
    places = [(d, t) for d in DIMS for t in DTYPES]
    return [
        Job(name, MASKS[(number + turn) % len(MASKS)], *places[(number + turn * 5) % len(places)])
        for turn in range(len(places))
        for number, name in enumerate(names)
    ]


def run(job: Job, arch_name: str, lower: bool, limit: int | None, only: Collection[str] = ()) -> tuple[str, float]:
    """The outcome of a problem (or these kernels of it), and its seconds of a core.

    Kernels whose flags are the same go to nvcc together: headers are most of what a call takes.
    limit: seconds of a core for each kernel; where all take more, the process ends. None: as many as they take.
    """
    device = getattr(arch, arch_name)()
    started = cpu_seconds()
    chosen = {
        name: kernel
        for name, kernel in job.engine(device)._all_kernels(device).items()
        if not only or kernel.builder.rsplit(".", 1)[1] in only
    }
    if limit is not None:
        allow_cpu_seconds(limit * len(chosen))
    lowered = {
        f"n{number}": codegen_compile.lower_kernel(kernel.prim_func, device, pass_configs=kernel.configs)
        for number, kernel in enumerate(chosen.values())
    }
    names = dict(zip(lowered, chosen, strict=True))
    spills = []
    for flags in () if lower else dict.fromkeys(k.flags for k in lowered.values()):
        made = compile_together({n: k for n, k in lowered.items() if k.flags == flags}, device)
        spills += [names[n] for n, kernel in made.items() if kernel.used.spills]
    outcome = f"ok, spills in {', '.join(spills)}" if spills else "ok"
    return outcome, cpu_seconds() - started


def allow_cpu_seconds(count: int) -> None:
    """Ends this process when it has taken so many more seconds of a core; what it starts may take as many anew."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + count + 1, hard))


def cpu_seconds() -> float:
    """Seconds of a core that this process and those it waited for have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def sweep(chosen: list[Job], arch_name: str, workers: int, lower: bool, limit: int) -> Iterator[tuple[Job, str, float]]:
    """Each problem with its outcome and its seconds of a core, as they come."""
    given = [(job, arch_name, lower, limit) for job in chosen]
    for number, answer in call_all(run, given, workers, float(limit * PATIENCE)):
        if isinstance(answer, RemoteError):
            yield chosen[number], f"{answer.kind}: {(str(answer).strip() or 'no words').splitlines()[0]}", 0.0
        elif isinstance(answer, Exception):  # ended by the limit (-24), a crash or the clock
            yield chosen[number], f"{type(answer).__name__}: {answer}", 0.0
        else:
            yield chosen[number], *answer


def processes(text: str) -> int:
    """How many processes, as the command line says it."""
    if not text.strip().removeprefix("-").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is a number of processes, of 1 or more; it was {text!r}.")
    return int(text)


def part(text: str) -> slice:
    """The problems of the Kth of N parts, of a text K/N."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"it is K/N, the Kth of N parts, K from 1 to N; it was {text!r}.")
    return slice(int(number) - 1, None, int(of))


def read_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="H100", help="of attention_engine.arch")
    parser.add_argument("--part", type=part, default="1/1", metavar="K/N", help="the Kth of N parts, from 1")
    parser.add_argument(
        "-n", type=processes, default=worker_count(64), help="processes; default: as many as cores serve"
    )
    parser.add_argument("--lower", action="store_true", help="without nvcc")
    parser.add_argument("--limit", type=int, default=60, help="seconds of a core for each kernel (default 60)")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name holds this")
    parser.add_argument("--each", action="store_true", help="a line for each problem, as it ends")
    parser.add_argument("--list", action="store_true", help="name the problems, compile nothing")
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    chosen = [job for job in jobs() if args.only in str(job)][args.part]
    if args.list:
        print(*chosen, sep="\n")
        return 0
    outcomes: collections.Counter[str] = collections.Counter()
    times: list[tuple[float, Job]] = []
    started = time.perf_counter()
    for job, outcome, seconds in sweep(chosen, args.arch, args.n, args.lower, args.limit):
        kind = outcome.split(":")[0].split(" in ")[0]
        outcomes[kind] += 1
        times.append((seconds, job))
        if args.each or kind != "ok":
            print(f"{job}: {outcome}" + (f", {seconds:.0f} s of a core" if args.each else ""), flush=True)
    print(f"{args.arch}, {len(chosen)} problems in {time.perf_counter() - started:.0f} s:", dict(outcomes))
    for seconds, job in sorted(times, key=lambda timed: -timed[0])[:3]:
        print(f"  {seconds:.0f} s of a core: {job}")
    return 0 if all(kind.startswith("ok") for kind in outcomes) else 1


if __name__ == "__main__":
    from tests import sweep as here  # by the name under which processes find its functions

    sys.exit(here.main())
