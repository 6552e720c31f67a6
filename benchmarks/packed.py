"""Packed sequences on a GPU: numbers against float64, then times beside FlashAttention-4's varlen and dense calls.

python -m benchmarks.packed                      all rows and mean lengths
python -m benchmarks.packed --rows 16384 --mean 1000   of these alone
python -m benchmarks.packed --numbers            no times

python -m benchmarks.packed --programs softmax   of these programs

TFLOP/s count kept pairs, 2.5 times as much for a backward pass. "dense" is causal batches of the mean length. A peer
that does not import, or refuses, says why and is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, library
from benchmarks.peers import Unavailable, need
from benchmarks.timing import Clock

HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, torch.bfloat16
ROUNDS = 15
Attend = Callable[..., Tensor]


def lengths_of(rows: int, mean: int) -> list[int]:
    """Uneven lengths of this mean, the same in each run: the longest has some two or three times as many rows."""
    shares = torch.rand(rows // mean, generator=torch.Generator().manual_seed(mean)) ** 2 + 0.05
    found = (shares / shares.sum() * rows).long().clamp(min=17)
    found[found.argmax()] += rows - found.sum()
    return [int(n) for n in found]


def starts_of(lengths: Sequence[int]) -> Tensor:
    """Where sequences begin."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def inputs(*shape: int) -> list[Tensor]:
    """q, k, v of so many rows, which want gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def made(heads: int) -> Tensor:
        return torch.randn(*shape, heads, DIM, generator=generator, device="cuda", dtype=DTYPE).requires_grad_()

    return [made(HEADS), made(KV_HEADS), made(KV_HEADS)]


def programs() -> dict[str, Attend]:
    """Ours: (q, k, v, starts or None) -> output."""
    scale = DIM**-0.5
    slopes = 2.0 ** (-8 * (torch.arange(HEADS, device="cuda") + 1) / HEADS)
    softmax = AttentionEngine(mask_mod=library.causal)
    sigmoid = AttentionEngine(mask_mod=library.causal, online_func=library.OnlineSigmoid(), scale=scale)
    io = CustomIO({"slopes": ("heads",)})
    alibi = AttentionEngine(custom_io=io, score_mod=library.alibi(scale), mask_mod=library.causal)
    return {
        "softmax": lambda q, k, v, cu: softmax(q, k, v, cu_seqlens_q=cu),
        "sigmoid": lambda q, k, v, cu: sigmoid(q, k, v, cu_seqlens_q=cu),
        "ALiBi": lambda q, k, v, cu: alibi(q, k, v, slopes, cu_seqlens_q=cu),
    }


def flash_attention_4(lengths: Sequence[int]) -> Attend:
    """FlashAttention-4's varlen, causal. Raises Unavailable."""
    need("flash_attn.cute")
    from flash_attn.cute import flash_attn_varlen_func

    most = max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        found = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=most, max_seqlen_k=most, causal=True
        )
        return found[0] if isinstance(found, tuple) else found

    return attend


PEERS: dict[str, Callable[[Sequence[int]], Attend]] = {"FlashAttention-4": flash_attention_4}


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Causal softmax of the query heads of one key head, its gradients too: q (rows, group, dim), k (rows, dim)."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    scores = torch.einsum("qhd,kd->hqk", leaves[0], leaves[1]) * DIM**-0.5
    keep = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1, dtype=torch.promote_types(dtype, torch.float32))
    o = torch.einsum("hqk,kd->qhd", weights.to(dtype), leaves[2])
    return [o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))]


def ratios(attend: Attend, lengths: Sequence[int], kv_head: int = 1) -> list[float]:
    """The summed errors of o, dq, dk and dv over those of eager, of one key head, sequence by sequence."""
    qkv, cu, group = inputs(sum(lengths)), starts_of(lengths), HEADS // KV_HEADS
    o = attend(*qkv, cu)
    do = torch.randn_like(o)
    found = [o.detach(), *torch.autograd.grad(o, qkv, do)]
    heads = slice(kv_head * group, (kv_head + 1) * group)
    errors = torch.zeros(2, 4, dtype=torch.float64, device="cuda")
    for at in map(slice, cu.tolist(), cu.tolist()[1:]):
        of_head = [qkv[0][at, heads], *(t[at, kv_head] for t in qkv[1:]), do[at, heads]]
        right, eager = exact(*of_head, torch.float64), exact(*of_head, DTYPE)  # type: ignore[misc]
        ours = [*(t[at, heads] for t in found[:2]), *(t[at, kv_head] for t in found[2:])]
        for row, results in enumerate((ours, eager)):
            errors[row] += torch.stack([(a.double() - b).abs().sum() for a, b in zip(results, right, strict=True)])
    return [round(float(x), 3) for x in errors[0] / errors[1]]


def calls_of(rows: int, mean: int, wanted: Sequence[str]) -> dict[str, tuple[Callable[[], object], float]]:
    """What is timed of these programs, with its floating-point operations."""
    lengths = lengths_of(rows, mean)
    cu, qkv = starts_of(lengths), inputs(rows)
    batch = rows // mean
    dense = inputs(batch, mean)
    of_pair = 4 * DIM * HEADS
    packed, plain = of_pair * sum(n * (n + 1) // 2 for n in lengths), of_pair * batch * mean * (mean + 1) // 2
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor], float]] = {}
    for name, attend in programs().items():
        if name in wanted:
            calls[name] = (partial(attend, *qkv, cu), qkv, packed)
            calls[f"{name}, dense"] = (partial(attend, *dense, None), dense, plain)
    for name, make in PEERS.items():
        try:
            attend = make(lengths)
            attend(*qkv, cu)
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running is told
            print(f"  {name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        else:
            calls[name] = (partial(attend, *qkv, cu), qkv, packed)
    found: dict[str, tuple[Callable[[], object], float]] = {}
    for name, (call, leaves, operations) in calls.items():
        o = call()
        do = torch.randn_like(o)

        def backward(o: Tensor = o, do: Tensor = do, leaves: list[Tensor] = leaves) -> object:
            return torch.autograd.grad(o, leaves, do, retain_graph=True)

        found[f"{name} forward"], found[f"{name} backward"] = (call, operations), (backward, 2.5 * operations)
    return found


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[16384, 32768])
    parser.add_argument("--mean", nargs="+", type=int, default=[1000, 4000])
    parser.add_argument("--programs", nargs="+", default=["softmax", "sigmoid", "ALiBi"])
    parser.add_argument("--numbers", action="store_true", help="no times")
    args = parser.parse_args()
    print("errors of o, dq, dk, dv over eager's:", flush=True)
    lengths = [1, 0, 17, 128, 700, 1300, 255, 64]
    for name, attend in {"softmax": programs()["softmax"], **{n: None for n in PEERS}}.items():
        try:
            found = ratios(attend or PEERS[name](lengths), lengths)
        except Unavailable as error:
            print(f"  {name}: {error}", flush=True)
        else:
            print(f"  {name}: {found}", flush=True)
    clock = Clock()
    for rows in args.rows if not args.numbers else []:
        for mean in args.mean:
            print(f"{rows} rows, {rows // mean} sequences of {mean} in the mean", flush=True)
            calls = calls_of(rows, mean, args.programs)
            for name, timing in clock.times({n: call for n, (call, _) in calls.items()}, ROUNDS).items():
                speed = calls[name][1] / timing.device_us * 1e-6
                print(f"  {name:26} {timing.device_us:8.1f} us  {speed:6.1f} TFLOP/s   host {timing.host_us:6.1f} us",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
