"""Dropout beside none: which share of 1e7 pairs is dropped and how pairs go together; on a GPU, what a pass takes.

python -m benchmarks.dropout
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attention_engine import AttentionEngine, library, meta_tensor
from attention_engine.ir.chance import chance, threshold

SIDE = 3200  # queries, and keys: 1e7 pairs
B, H, S = 2, 16, 8192
STEPS = (0, 1), (1, 0), (0, 8), (8, 0), (1, 8), (16, 0), (0, 16)  # of queries and keys, to other pairs


def statistics(probability: float, seed: int = 1) -> str:
    """The share that is dropped, how far rows and columns lie from it, and the largest correlation with pairs beside;
    each over what it is off by chance (one standard deviation)."""
    places, key = torch.arange(SIDE), torch.tensor([seed])
    rows = [chance(key, key * 0, key * 0, q[:, None], places) < threshold(probability) for q in places.split(64)]
    dropped = torch.cat(rows).double() - probability
    spread = math.sqrt(probability * (1 - probability))
    share = float(dropped.mean()) / spread * SIDE
    lines = [float(dropped.mean(d).square().mean()) * SIDE / spread**2 - 1 for d in (0, 1)]
    found = []
    for down, right in STEPS:
        here, there = dropped[: SIDE - down, : SIDE - right], dropped[down:, right:]
        found.append(float((here * there).mean()) / spread**2 * math.sqrt(here.numel()))
    of_lines = " and ".join(f"{line / math.sqrt(2 / SIDE):+.1f}" for line in lines)
    most = max(found, key=abs)
    return f"p {probability}: {share:+.1f} standard deviations; columns, rows {of_lines}; pairs beside {most:+.1f}"


def ms(run: Callable[[], object], rounds: int = 10) -> float:
    """Milliseconds of a run, of many."""
    for _ in range(2):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


def passes(dim: int, causal: bool, probability: float) -> list[Callable[[], object]]:
    """A forward pass and a backward pass, compiled."""
    meta = meta_tensor(None, H, None, dim, dtype=torch.float16)
    mask = library.causal if causal else None
    engine = AttentionEngine((meta,) * 3, mask_mod=mask, dropout_p=probability)
    q, k, v, arriving = (torch.randn(B, S, H, dim, device="cuda", dtype=torch.float16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    seed = torch.tensor([7], device="cuda")
    o = engine(*leaves, dropout_seed=seed)

    def forward() -> Tensor:
        with torch.no_grad():
            return engine(*leaves, dropout_seed=seed)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, arriving, retain_graph=True)

    return [forward, backward]


def speeds(dim: int, causal: bool) -> str:
    """Times without and with dropout, taken in turns, and the speed with it beside that without."""
    runs = [passes(dim, causal, probability) for probability in (0.0, 0.1)]
    best = [[math.inf] * 2 for _ in runs]
    for _ in range(3):
        best = [[min(t, ms(run)) for t, run in zip(times, both)] for times, both in zip(best, runs)]
    row = [f"{n} {a:.3f} / {b:.3f} ms, {a / b:.3f}" for n, a, b in zip(("forward", "backward"), *best)]
    return f"head dim {dim}, {'causal' if causal else 'full'}: {'; '.join(row)}"


def main() -> None:
    """Prints a line as soon as it is known."""
    for probability in (0.1, 0.5):
        print(statistics(probability), flush=True)
    if torch.cuda.is_available():
        for dim in (128, 64):
            for causal in (True, False):
                print(speeds(dim, causal), flush=True)


if __name__ == "__main__":
    main()
