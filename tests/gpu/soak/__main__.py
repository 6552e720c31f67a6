"""A soak on a GPU: random programs, lengths, batches and documents, forward and backward; none may hang or be wrong.

    python -m tests.gpu.soak --seconds 600 --seed 1
    ATTENTION_ENGINE_CACHE_DIR=kernels python -m tests.gpu.soak --compile --arch H100 -n 2

Each draw runs in a process that is ended when the draw takes longer than the limit. The second form compiles, on a
machine that needs no GPU, all that draws may need. Exit status: 0 where every draw is right (or found no room in
memory), 1 where one is not, 2 where the GPU no longer answers.
"""

from __future__ import annotations

import argparse
import collections
import math
import sys
import time
from typing import Any

from tests.gpu.soak.draws import Draw, draw
from tests.gpu.soak.workers import Pool, Setting

FINE = ("right", "no room")
SCRIPT = """\
# draw {number} of seed {seed}: {outcome}; run it under `timeout 120`
from tests.gpu.soak.check import run
from tests.gpu.soak.draws import Draw
print(run({draw!r}, {backend!r}, {device!r}))
"""


class Report:
    """Tells what came of each draw, and counts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.worst, self.started = (0.0, "nothing"), time.monotonic()

    def tell(self, number: int, drawn: Draw, found: dict[str, Any]) -> None:
        """A line; for a draw that isn't fine what is known of it, and a script that runs it alone."""
        outcome, ratio = found["outcome"], float(found.get("worst", math.inf))
        self.outcomes[outcome] += 1
        if outcome == "right":
            self.worst = max(self.worst, (ratio, f"{found['of']} of {drawn}"))
        numbers = f"{ratio:.2f} {found['of']} | {found['milliseconds']:.0f} ms" if "milliseconds" in found else "-"
        print(f"#{number} seed {self.args.seed} | {drawn} | {outcome} | {numbers}", flush=True)
        if outcome not in FINE:
            said = {"number": number, "seed": self.args.seed, "draw": drawn, "outcome": outcome}
            script = SCRIPT.format(**said, backend=self.args.backend, device=self.args.device)
            print(f"{found['detail'].rstrip()}\n----\n{script}----", flush=True)

    def end(self, lost: bool) -> int:
        """The table; the exit status."""
        total, seconds = sum(self.outcomes.values()), time.monotonic() - self.started
        print(f"\n{total} draws in {seconds:.0f} s")
        for outcome, count in self.outcomes.most_common():
            print(f"  {outcome:10} {count}")
        print(f"worst of the right ones: {self.worst[0]:.2f} of what is allowed, {self.worst[1]}")
        if lost:
            print("THE GPU NO LONGER ANSWERS")
            return 2
        return 0 if total and all(outcome in FINE for outcome in self.outcomes) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no draw starts after so many")
    parser.add_argument("--draws", type=int, default=None, help="so many at most (without --seconds: 300)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6, help="processes side by side")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a draw may take")
    parser.add_argument("--fresh", action="store_true", help="a process for each draw")
    parser.add_argument("--backend", default="tilelang")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few heads and tokens, for a CPU")
    parser.add_argument(
        "--plant",
        nargs="*",
        default=[],
        metavar="NUMBER=FAULT",
        help="faults to be found, in these draws: wrong, hang, crash",
    )
    parser.add_argument("--compile", action="store_true", help="compile what draws need, and run none")
    parser.add_argument("--arch", default="H100", help="for --compile: of attention_engine.arch")
    parser.add_argument("-n", type=int, default=1, help="for --compile: processes side by side")
    parser.add_argument("--only", default="", help="for --compile: programs whose name has this")
    args = parser.parse_args(argv)
    if args.compile:
        from tests.gpu.soak.compile import compile_all

        return compile_all(args.arch, args.n, args.only)
    return soak(args)


def soak(args: argparse.Namespace) -> int:
    """Draws until time or number is up."""
    most = args.draws if args.draws is not None else 300 if args.seconds == math.inf else 1 << 40
    planted = dict(pair.split("=") for pair in args.plant)
    end, numbers = time.monotonic() + args.seconds, iter(range(args.first, args.first + most))
    report, pool = Report(args), Pool(Setting(args.backend, args.device, args.limit, args.fresh), args.workers)

    def take() -> tuple[int, Draw, str] | None:
        number = next(numbers, None) if time.monotonic() < end else None
        if number is None:
            return None
        return number, draw(args.seed, number, args.tiny), planted.get(str(number), "")

    pool.run(take, report.tell)
    return report.end(pool.lost)


if __name__ == "__main__":
    sys.exit(main())
