"""Lists of key blocks on a GPU: numbers against float64, then times, and how much of them goes to making lists.

python -m benchmarks.blocks                         all lengths and lists
python -m benchmarks.blocks --lengths 32768 --kept 16   of these alone
python -m benchmarks.blocks --numbers               no times
python -m benchmarks.blocks --peers                 FlexAttention beside, with a BlockMask of the same lists, and
    cudnn.block_sparse_attention where it can: as many key heads as query heads, square blocks
python -m benchmarks.blocks --key-heads 4 16 --size 128x64 128x128 --out RESULTS    RESULTS.csv and RESULTS.json, too

Each block of queries sees so many random blocks of keys; lists are one for each key head. TFLOP/s count pairs that
lists keep, 2.5 times as much for a backward pass.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from attention_engine import AttentionEngine, BlockList
from benchmarks.peers import Unavailable, need
from benchmarks.run import Row, write
from benchmarks.timing import Clock, Timing, environment

HEADS, DIM, DTYPE = 16, 128, torch.bfloat16
ROUNDS = 10
MAKERS = ("listed_blocks", "block_map", "tile_map")  # kernels that make lists
PEERS = {"ours": "attention_engine", "FlexAttention": "flex_attention", "cuDNN": "cudnn_frontend"}


def draw(length: int, kept: int, key_heads: int, size: tuple[int, int]) -> BlockList:
    """Random lists of so many blocks."""
    generator = torch.Generator("cuda").manual_seed(kept)
    shape = (1, key_heads, length // size[0], length // size[1])
    indices = torch.rand(shape, generator=generator, device="cuda").topk(kept, -1).indices.to(torch.int32)
    return BlockList(indices, torch.full(shape[:3], kept, dtype=torch.int32, device="cuda"), size)


def inputs(length: int, key_heads: int) -> list[Tensor]:
    """q, k, v, which want gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def made(heads: int) -> Tensor:
        found = torch.randn(1, length, heads, DIM, generator=generator, device="cuda", dtype=DTYPE)
        return found.requires_grad_()

    return [made(HEADS), made(key_heads), made(key_heads)]


def dense(qkv: list[Tensor], do: Tensor, lists: BlockList, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of all pairs, with a mask made of the lists."""
    q, k, v = (t.detach().to(dtype).transpose(1, 2).requires_grad_() for t in qkv)
    group = q.shape[1] // k.shape[1]
    found = lists.to_map(k.shape[2] // lists.block_size[1]).bool()
    keep = found.repeat_interleave(lists.block_size[0], 2).repeat_interleave(lists.block_size[1], 3)
    keep = keep.repeat_interleave(q.shape[1] // keep.shape[1], 1)
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * DIM**-0.5
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1, dtype=torch.promote_types(dtype, torch.float32))
    o = weights.to(dtype) @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(o, (q, k, v), do.to(dtype).transpose(1, 2))
    return [t.detach().transpose(1, 2) for t in (o, *gradients)]


def ratios(engine: AttentionEngine, length: int, kept: int, key_heads: int, size: tuple[int, int]) -> list[float]:
    """The summed errors of o, dq, dk and dv over those of eager."""
    qkv, lists = inputs(length, key_heads), draw(length, kept, key_heads, size)
    o = engine(*qkv, block_mask=lists)
    do = torch.randn_like(o)
    ours = [o.detach(), *torch.autograd.grad(o, qkv, do)]
    right, eager = dense(qkv, do, lists, torch.float64), dense(qkv, do, lists, DTYPE)
    return [round(float((a - c).abs().sum() / (b - c).abs().sum()), 3)
            for a, b, c in zip(ours, eager, right, strict=True)]  # fmt: skip


def flex(lists: BlockList, length: int) -> Callable[..., Tensor]:
    """FlexAttention with the same blocks, on (batch, length, heads, dim)."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    assert lists.counts is not None
    group = HEADS // lists.indices.shape[1]
    counts, indices = (t.repeat_interleave(group, 1).contiguous() for t in (lists.counts, lists.indices))
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(indices), counts, indices, BLOCK_SIZE=lists.block_size,
        seq_lengths=(length, length),
    )  # fmt: skip
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)  # type: ignore[no-any-return]

    return attend


def _cudnn_calls() -> Any:
    return importlib.import_module("cudnn.block_sparse_attention")


class _Cudnn(torch.autograd.Function):
    """cudnn.block_sparse_attention: explicit calls of both directions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, size: int) -> Tensor:
        found = _cudnn_calls().block_sparse_attention_forward(q, k, v, indices, sparse_block_size=size, layout="bshd")
        ctx.save_for_backward(q, k, v, found["o_tensor"], found["lse_tensor"], indices)
        ctx.size = size
        return cast(Tensor, found["o_tensor"])

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, indices = ctx.saved_tensors
        options = {"sparse_block_size": ctx.size, "layout": "bshd"}
        found = _cudnn_calls().block_sparse_attention_backward(do, q, k, v, o, lse, indices, **options)
        return *(found[f"d{n}_tensor"] for n in "qkv"), None, None


def cudnn(lists: BlockList) -> Callable[..., Tensor]:
    """cuDNN with the same blocks, on (batch, length, heads, dim)."""
    need("cudnn.block_sparse_attention", "cutlass")
    if lists.indices.shape[1] != HEADS or lists.block_size not in ((64, 64), (128, 128)):
        raise Unavailable("cuDNN's backward pass takes a list for each query head, with keys of its own, square blocks")
    indices, size = lists.indices.sort(-1).values.contiguous(), lists.block_size[0]
    return lambda q, k, v: _Cudnn.apply(q, k, v, indices, size)  # type: ignore[no-untyped-call]


def peers(lists: BlockList, length: int) -> dict[str, Callable[..., Tensor]]:
    """Those that can run such lists, by name."""
    found = {"FlexAttention": flex(lists, length)}
    try:
        found["cuDNN"] = cudnn(lists)
    except Unavailable as reason:
        print(f"  without cuDNN: {reason}", flush=True)
    return found


def share_of_lists(call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of the kernels that make lists, and of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    times = [(event.key, event.self_device_time_total / 3) for event in seen.key_averages()]
    return sum(t for name, t in times if any(maker in name for maker in MAKERS)), sum(t for _, t in times)


def size_of(text: str) -> tuple[int, int]:
    """Queries and keys of a block, of "128x64"."""
    queries, _, keys = text.partition("x")
    return int(queries), int(keys)


def timings(
    engine: AttentionEngine, length: int, kept: int, key_heads: int, size: tuple[int, int], with_peers: bool
) -> Iterator[tuple[str, str, Timing, float]]:  # fmt: skip
    """Who, the direction, the times, and TFLOP/s. Prints what part of ours goes to making lists."""
    qkv, lists = inputs(length, key_heads), draw(length, kept, key_heads, size)
    operations = 4 * DIM * HEADS * length * kept * size[1]
    attends: dict[str, Callable[..., Tensor]] = {"ours": lambda *t: engine(*t, block_mask=lists)}
    attends |= peers(lists, length) if with_peers else {}
    calls: dict[str, tuple[Callable[[], object], float]] = {}
    for name, attend in attends.items():
        o = attend(*qkv)
        do = torch.randn_like(o)
        calls[f"{name} forward"] = lambda a=attend: a(*qkv), operations
        calls[f"{name} backward"] = (
            lambda o=o, d=do: torch.autograd.grad(o, qkv, d, retain_graph=True), 2.5 * operations,
        )  # fmt: skip
    for name, timing in Clock().times({n: call for n, (call, _) in calls.items()}, ROUNDS).items():
        who, _, direction = name.partition(" ")
        yield who, direction, timing, calls[name][1] / timing.device_us * 1e-6
    for name in ("ours forward", "ours backward"):
        making, whole = share_of_lists(calls[name][0])
        print(f"  lists of {name}: {making:.1f} of {whole:.1f} us", flush=True)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 65536, 131072])
    parser.add_argument("--kept", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--size", nargs="+", type=size_of, default=[(128, 64)], help="queries x keys of a block")
    parser.add_argument("--key-heads", nargs="+", type=int, default=[4])
    parser.add_argument("--numbers", action="store_true", help="no times")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--out", type=Path, help="where the table of results is written")
    args = parser.parse_args()
    engine, rows = AttentionEngine(), list[Row]()
    for size, heads in product(args.size, args.key_heads):
        print(f"{HEADS} query heads, {heads} of keys, blocks of {size[0]} x {size[1]}", flush=True)
        errors = ratios(engine, 2048, 5, heads, size)
        print("errors of o, dq, dk, dv over eager's:", errors, flush=True)
        for length, kept in product(args.lengths, args.kept) if not args.numbers else ():
            print(f"{length} queries and keys, {kept} blocks of each block of queries", flush=True)
            case = f"{HEADS}/{heads} heads.blocks of {size[0]} x {size[1]}.{kept} for each.{length}"
            for who, direction, timing, speed in timings(engine, length, kept, heads, size, args.peers):
                print(f"  {who:14} {direction:9} {timing.device_us:8.1f} us  {speed:6.1f} TFLOP/s   "
                      f"host {timing.host_us:6.1f} us", flush=True)  # fmt: skip
                times = (timing.device_us, timing.low_us, timing.high_us, timing.host_us, speed)
                error = max(errors) if who == "ours" else 0.0  # of the same lists at a length of 2048
                row = Row(case, "bfloat16", PEERS[who], direction, "ok", *times, ratio=error)
                rows.append(row)
    if args.out is not None:
        write(args.out, rows, environment("triton", "tilelang", "nvidia-cudnn-frontend"))


if __name__ == "__main__":
    main()
