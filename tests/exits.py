"""Do processes that train a step end with 0? `python -m tests.exits --count 300` runs many and counts how they ended.

Each takes one step and ends at once: on the reference, on the interpreter, with the tuner's workers, with kernels
compiled for a GPU that need not be here and, where a GPU is, on it. A status other than 0 is printed with the process's
last words; the command ends with 1 then.

"refused": an error is raised in a backward pass on a GPU, caught, and the process ends. "plain" has nothing of this
package in it, is asked for by name, and shows why runtime/ends.py is there: with torch 2.11 and Python 3.12 some of
such processes abort, a third of those with an error and one in ten of the others where cores are busy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = """
import sys
import torch
from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.library import OnlineSoftmax, causal, scale

kind = sys.argv[1]
if kind == "plain":
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, d_o):
            x, weight = ctx.saved_tensors
            return d_o @ weight.T, x.T @ d_o

    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    o = Product.apply(x, x)
    for _ in range(16):
        torch.autograd.grad(o, x, torch.ones_like(o), retain_graph=True)
    sys.exit()
device, dtype = ("cuda", torch.float16) if kind in ("gpu", "refused") else ("cpu", torch.float32)
if kind == "tuner":
    from attention_engine.tuner.worker import call_all

    assert sorted(call_all(abs, [(-n,) for n in range(4)], 2, 60)) == [(n, n) for n in range(4)]
if kind == "compiled":
    device, dtype = "cpu", torch.float16
metas = (meta_tensor(1, 2, 64, 64, dtype=dtype),) * 3
backend = {"gpu": "auto", "refused": "auto", "compiled": "auto", "interpret": "interpret"}.get(kind, "reference")
engine = AttentionEngine(metas, None, scale(0.125), causal, OnlineSoftmax(), backend=backend)
if kind == "compiled":
    engine.compile_for(arch.H100())
    sys.exit()
weight = torch.nn.Parameter(torch.eye(64, device=device, dtype=dtype))
q, k, v = (torch.randn(1, 64, 2, 64, device=device, dtype=dtype) for _ in range(3))
loss = engine(q @ weight, k @ weight, v).float().square().mean()
if kind == "refused":  # an error on the thread of the GPU, which autograd has for itself
    def refuse(gradient):
        raise ValueError("no")

    weight.register_hook(refuse)
    try:
        loss.backward()
    except ValueError:
        sys.exit()
loss.backward()
torch.optim.SGD([weight], 0.1).step()
"""
KINDS = ("reference", "interpret", "tuner", "compiled", "gpu", "refused", "plain")
SECONDS = 300  # for one process


def end_of(kind: str, cold: bool = False) -> tuple[str, int, str]:
    """The kind, the exit status (a signal's number below 0) and the last words of a process that trains a step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STEP, kind]
    with tempfile.TemporaryDirectory() as folder:
        if cold:
            environment["ATTENTION_ENGINE_CACHE_DIR"] = folder
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    return kind, done.returncode, "; ".join(done.stderr.strip().splitlines()[-3:])


def ends(kinds: list[str], count: int, together: int, cold: bool = False) -> Iterator[tuple[str, int, str]]:
    """How `count` processes ended, the kinds in turn, some at a time."""
    with ThreadPoolExecutor(together) as pool:
        yield from pool.map(partial(end_of, cold=cold), (kinds[n % len(kinds)] for n in range(count)))


def kinds_here() -> list[str]:
    """The kinds that can run on this machine."""
    import torch

    from attention_engine.codegen.compile import find_nvcc

    lacking = {
        "plain",
        *([] if find_nvcc() else ["compiled"]),
        *([] if torch.cuda.is_available() else ["gpu", "refused"]),
    }
    return [k for k in KINDS if k not in lacking]


def main(argv: list[str] | None = None) -> int:
    """Runs the processes; 1 where one ended otherwise than it should."""
    parser = argparse.ArgumentParser("tests.exits", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--together", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="by default all that this machine can run")
    parser.add_argument("--cold", action="store_true", help="each compiles its kernels anew")
    args = parser.parse_args(argv)
    counts: Counter[tuple[str, int]] = Counter()
    for kind, status, words in ends(args.kinds or kinds_here(), args.count, args.together, args.cold):
        counts[kind, status] += 1
        if status:
            print(f"{kind}: ended with {status}: {words}", flush=True)
    for (kind, status), number in sorted(counts.items()):
        print(f"{number:5} {kind} ended with {status}")
    return 1 if any(status for _, status in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
