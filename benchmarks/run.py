"""Times cases on peers, in one run on one GPU; numbers are held to float64 before any time counts.

python -m benchmarks.run --case 'mha-128.softmax.*.8192' --peer attention_engine --peer cudnn --out results/h100
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_engine.errors import AttentionEngineError
from attention_engine.tuner.cases import Case, find
from benchmarks import history
from benchmarks.cases import Inputs, References, make_inputs, make_references, moved_bytes
from benchmarks.peers import PEERS, Attention, Peer, Unavailable
from benchmarks.profile import profile, proton
from benchmarks.timing import Call, Ceilings, Timing, clock, environment, measure_ceilings, peak_bytes

OURS = ("attention_engine", "deterministic")
ALLOWED = {True: 1.1, False: 2.0}  # mean error over that of the formula in the same dtype: for us, for peers
DIRECTIONS = ("forward", "backward")
# Our refusal or out of memory: said in the row, and the others go on. Peers may fail as they like.
REFUSALS = (Unavailable, AttentionEngineError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class Row:
    """One measurement, or why there is none. ratio: the worst error over eager's, of o, dq, dk and dv."""

    case: str
    dtype: str
    peer: str
    direction: str
    status: str  # ok, unavailable: ..., wrong: ..., broken: ...
    device_us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    host_us: float = 0.0
    tflops: float = 0.0
    of_matmul: float = 0.0
    gbs: float = 0.0
    of_copy: float = 0.0
    peak_mib: float = 0.0
    ratio: float = 0.0


class Running:
    """One peer on one case: its tensors, its calls, its error."""

    def __init__(self, case: Case, peer: Peer, inputs: Inputs, dtype: torch.dtype) -> None:
        self.layout = peer.layout
        self.attend: Attention = peer.make(case, dtype)
        self.leaves = [self._place(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        self.do, self.custom = self._place(inputs.do), inputs.custom
        self.output = self.attend(*self.leaves, self.custom)

    def _place(self, x: Tensor) -> Tensor:
        return x.clone() if self.layout == "bshd" else x.transpose(1, 2).contiguous()

    def results(self) -> list[Tensor]:
        """o, dq, dk and dv, (batch, length, heads, dim)."""
        gradients = torch.autograd.grad(self.output, self.leaves, self.do, retain_graph=True)
        found = [self.output.detach(), *gradients]
        return [x.transpose(1, 2) if self.layout == "bhsd" else x for x in found]

    def calls(self) -> dict[str, Call]:
        """The call of each direction: forward without a graph; backward with all that belongs to it."""
        detached = [x.detach() for x in self.leaves]
        return {
            "forward": lambda: self.attend(*detached, self.custom),
            "backward": lambda: torch.autograd.grad(self.output, self.leaves, self.do, retain_graph=True),
        }


def worst_ratio(references: References, found: list[Tensor]) -> tuple[float, str]:
    """The worst error over eager's, and whose it is; nan counts as worst."""
    ratios = references.ratios(found)
    name = max(ratios, key=lambda n: math.inf if math.isnan(ratios[n]) else ratios[n])
    return ratios[name], name


def measure(
    case: Case, peers: Sequence[str], dtype: torch.dtype, ceilings: Ceilings, rounds: int, device: str = "cuda"
) -> list[Row]:
    """All peers on one case."""
    inputs = make_inputs(case, dtype, device)
    references = make_references(case, inputs)
    rows, calls, ratios = [], {}, {}
    label = (case.name, str(dtype).removeprefix("torch."))
    for name in peers:
        try:
            running = Running(case, PEERS[name], inputs, dtype)
            ratio, worst = worst_ratio(references, running.results())
        except Exception as error:
            if name in OURS and not isinstance(error, REFUSALS):
                raise
            reason = str(error).strip().split("\n")[0][:160]
            kind = "unavailable" if isinstance(error, Unavailable) else f"failed: {type(error).__name__}"
            rows += [Row(*label, name, d, f"{kind}: {reason}") for d in DIRECTIONS]
            continue
        if not ratio <= ALLOWED[name in OURS]:
            status = f"wrong: {worst} is {ratio:.2f} x eager's error"
            rows += [Row(*label, name, d, status, ratio=ratio) for d in DIRECTIONS]
            continue
        ratios[name] = ratio
        calls.update({(name, d): call for d, call in running.calls().items()})
    timings = clock().times({f"{n} {d}": call for (n, d), call in calls.items()}, rounds)
    for (name, direction), call in calls.items():
        timing, peak = timings[f"{name} {direction}"], peak_bytes(call)
        rows.append(rate(label, case, name, direction, timing, peak, ceilings, ratios[name], dtype))
    return rows


def rate(label: tuple[str, str], case: Case, peer: str, direction: str, timing: Timing, peak: int, ceilings: Ceilings,
         ratio: float, dtype: torch.dtype) -> Row:  # fmt: skip
    """The row of a timing; refused where it would be faster than the device is."""
    tflops = case.flops(direction) / timing.device_us * 1e-6
    gbs = moved_bytes(case, direction, dtype.itemsize) / timing.device_us * 1e-3
    broken = tflops > 1.02 * ceilings.highest_tflops or gbs > 1.05 * ceilings.copy_gbs
    status = "broken: faster than this device's plain product or copy" if broken else "ok"
    return Row(*label, peer, direction, status, **asdict(timing), tflops=tflops, gbs=gbs, peak_mib=peak / 2**20,
               of_matmul=tflops / ceilings.matmul_tflops, of_copy=gbs / ceilings.copy_gbs, ratio=ratio)  # fmt: skip


def write(path: Path, rows: list[Row], where: dict[str, Any]) -> None:
    """PATH.csv, a row for each measurement, and PATH.json, the same with the environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows)
    whole = {"environment": where, "rows": [asdict(row) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")


def table(rows: list[Row]) -> str:
    """TFLOP/s forward / backward of each case and peer, with host microseconds."""
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        lines.append(case)
        for peer in dict.fromkeys(row.peer for row in rows if row.case == case):
            pair = [row for row in rows if row.case == case and row.peer == peer]
            shown = " / ".join(f"{row.tflops:5.0f}" for row in pair)
            host = " / ".join(f"{row.host_us:4.0f}" for row in pair)
            ok = all(row.status == "ok" for row in pair)
            lines.append(f"  {peer:18} {shown} TFLOP/s  host {host} us  error {pair[0].ratio:.2f} x" if ok
                         else f"  {peer:18} {pair[0].status}")  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", required=True, metavar="PATTERN", help="shape.program.mask.length, * for any"
    )
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="all, unless some are named")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each call")
    parser.add_argument("--out", type=Path, help="writes OUT.csv and OUT.json")
    parser.add_argument("--history", action="store_true", help="adds the ten figures that were measured to history.csv")
    parser.add_argument("--profile", action="store_true", help="what our kernels take, one by one, and ncu's counters")
    parser.add_argument("--proton", type=Path, metavar="FILE", help="writes FILE.hatchet, a Proton profile (triton)")
    args = parser.parse_args(argv)
    if args.history and not args.out:
        parser.error("--history names the file of the results: give --out, too")
    cases = find(*args.case)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    dtype = getattr(torch, args.dtype)
    ceilings = measure_ceilings(clock(), dtype)
    where, rows = {**environment("triton", "tilelang", "flash-attn-4"), **asdict(ceilings)}, []
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    for case in cases:
        with proton(args.proton):
            found = measure(case, args.peer or list(PEERS), dtype, ceilings, args.rounds)
        print(table(found), flush=True)
        if args.profile:
            print(profile(case, dtype), flush=True)
        rows += found
        if args.out:
            write(args.out, rows, where)
    if args.history:
        history.add(where, [asdict(row) for row in rows], args.out.with_suffix(".json").name)
        print("\n".join(history.losses(history.read()[1])))


if __name__ == "__main__":
    main()
