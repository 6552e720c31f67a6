"""Random programs: scores x masks x row functions x custom inputs x shapes x dtypes x layouts, against plain torch.

    python -m tests.fuzz --seed 1 --count 100 --backend interpret
    ATTENTION_ENGINE_CACHE_DIR=kernels python -m tests.fuzz --seed 1 --count 100 --compile H100

The second form compiles, without a GPU, what the same draws need with --backend tilelang. A draw that is neither right
nor refused is printed as a script. Exit status: 1 where there was one.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time

import pytest

from attention_engine import arch
from tests.fuzz.check import Outcome, attempt, names_of, run
from tests.fuzz.packed import run_packed
from tests.fuzz.scripts import draw
from tests.gpu.compile import silence

FINE = ("right", "refused", "compiled")


def compiled(text: str, device: str) -> Outcome:
    """What comes of compiling what the script needs."""
    names = names_of(text)
    build = names["engine"]
    names["engine"] = lambda _: build("auto")
    with pytest.MonkeyPatch.context() as monkeypatch:
        silence(monkeypatch, getattr(arch, device)())
        found = attempt(names, "auto", "cpu")
    return found if isinstance(found, Outcome) else Outcome("compiled", "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--backend", default="interpret", choices=("interpret", "reference", "tilelang"))
    parser.add_argument("--packed", action="store_true", help="batches as packed sequences, where a draw can be so")
    parser.add_argument("--compile", metavar="ARCH", help="compile for this GPU and run nothing")
    args = parser.parse_args(argv)
    long = args.backend == "tilelang" or bool(args.compile)
    device, backend = ("cuda" if args.backend == "tilelang" else "cpu"), args.backend
    counts: collections.Counter[str] = collections.Counter()
    worst = (0.0, "nothing")
    for number in range(args.first, args.first + args.count):
        drawn, started = draw(args.seed, number, long), time.perf_counter()
        found = compiled(drawn.text, args.compile) if args.compile else None
        found = run_packed(drawn.text, backend, number % 2 == 1, device) if args.packed and found is None else found
        found = found or run(drawn.text, backend, device)
        spent = time.perf_counter() - started
        counts[found.kind if found.kind in ("right", "wrong", "compiled") else f"{found.kind}: {found.of}"] += 1
        print(f"#{number} {found.kind} {found.ratio:.2f} {found.of} | {drawn.name} | {spent:.1f} s", flush=True)
        if found.kind == "right":
            worst = max(worst, (found.ratio, f"{found.of} of #{number}"))
        if found.kind not in FINE:
            print(f"{found.detail.rstrip()}\n----\n{drawn.paste(backend, device)}----", flush=True)
    print(f"\n{args.count} draws of seed {args.seed}, worst of the right ones {worst[0]:.2f}, {worst[1]}")
    for kind, count in counts.most_common():
        print(f"  {count:4} {kind}")
    return int(any(not kind.startswith(FINE) for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
