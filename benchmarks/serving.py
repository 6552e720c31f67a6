"""What serving asks beside even requests of 128 columns: latent attention, and requests of uneven lengths.

python -m benchmarks.serving                 numbers against float64, then times beside a copy
python -m benchmarks.serving --only latent   or uneven
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from attention_engine import AttentionEngine, library, meta_tensor
from benchmarks.caches import error, exact, in_pages
from benchmarks.serving_peers import latent_peers
from benchmarks.timing import Clock

DTYPE, ROUNDS = torch.bfloat16, 15
DIM, DIM_V = 576, 512  # of latent attention: values are the first columns of keys
LATENT = ((16, 4096, 64), (64, 4096, 64), (64, 4096, 0), (128, 8192, 64), (128, 8192, 0))  # heads, keys, keys of a page
REQUESTS, HEADS, KV_HEADS, OF_HEAD, PAGE, SHORTEST, LONGEST = 128, 32, 8, 128, 64, 16, 65536
CHECKED = (512, 77, 1, 0, 64, 65, 448, 333)


def latent_engine(heads: int) -> AttentionEngine:
    """Of so many heads, which share one key head."""
    metas = [meta_tensor(None, h, None, d, dtype=DTYPE) for h, d in ((heads, DIM), (1, DIM), (1, DIM_V))]
    return AttentionEngine(tuple(metas), mask_mod=library.causal)


def check_latent(heads: int, page: int) -> None:
    """Uneven lengths with NaN behind them."""
    torch.manual_seed(1)
    k = torch.randn(len(CHECKED), 512, 1, DIM, device="cuda", dtype=DTYPE)
    lengths = torch.tensor(CHECKED, device="cuda", dtype=torch.int32)
    dirty = torch.arange(512, device="cuda")[:, None, None] >= lengths[:, None, None, None]
    of_k, table = k.masked_fill(dirty, torch.nan), None
    if page:
        of_k, table = in_pages(of_k, page)
    for queries in (1, 3):
        q = torch.randn(len(CHECKED), queries, heads, DIM, device="cuda", dtype=DTYPE)
        wanted = exact("softmax", q, k, k[..., :DIM_V], lengths)
        for parts in (1, 3):
            o = latent_engine(heads).with_cache(q, of_k, None, kv_lengths=lengths, page_table=table, num_splits=parts)
            print(f"  {heads} heads, page {page}, {queries} queries, {parts} parts: {error(o, wanted)}", flush=True)


def time_latent(clock: Clock, heads: int, keys: int, page: int) -> None:
    """128 requests, beside a copy of as many bytes."""
    k = torch.randn(REQUESTS, keys, 1, DIM, device="cuda", dtype=DTYPE)
    q = torch.randn(REQUESTS, 1, heads, DIM, device="cuda", dtype=DTYPE)
    lengths = torch.full((REQUESTS,), keys, device="cuda", dtype=torch.int32)
    source = k.flatten()[: k.numel() // 2]
    target = torch.empty_like(source)
    of_k, table = in_pages(k, page) if page else (k, None)
    engine = latent_engine(heads)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "latent": lambda: engine.with_cache(q, of_k, None, kv_lengths=lengths, page_table=table),
        **latent_peers(
            engine.with_cache(q, of_k, None, kv_lengths=lengths, page_table=table), q, of_k, table, lengths, DIM_V
        ),
    }
    size, flops = k.numel() * DTYPE.itemsize, 2 * REQUESTS * heads * keys * (DIM + DIM_V)
    print(f"{heads} heads, B{REQUESTS} KV {keys}, page {page}: {size / 1e6:.0f} MB", flush=True)
    for name, timing in clock.times(calls, ROUNDS).items():
        us = timing.device_us
        speed = f"{flops / us / 1e6:5.0f} TFLOP/s" if name != "copy" else ""
        print(f"  {name:14} {us:8.1f} us  {size / us / 1e6:5.2f} TB/s  {speed}", flush=True)


def drawn_lengths() -> Tensor:
    """Log-uniform ones; one is the longest that there may be."""
    torch.manual_seed(0)
    found = (SHORTEST * (LONGEST / SHORTEST) ** torch.rand(REQUESTS)).int().clamp(SHORTEST, LONGEST)
    found[REQUESTS * 3 // 5] = LONGEST
    return found


def time_uneven(clock: Clock) -> None:
    """128 requests in tables as wide as the longest may be: uneven ones, even ones of as many keys, and short ones."""
    uneven = drawn_lengths()
    drawn = {
        "uneven": uneven, "even": torch.full_like(uneven, int(uneven.float().mean())),
        "1000 each": torch.full_like(uneven, 1000),
    }  # fmt: skip
    count = max(int((n + PAGE - 1).div(PAGE, rounding_mode="floor").sum()) for n in drawn.values())
    k, v = torch.randn(2, count, PAGE, KV_HEADS, OF_HEAD, device="cuda", dtype=DTYPE)
    q = torch.randn(REQUESTS, 1, HEADS, OF_HEAD, device="cuda", dtype=DTYPE)
    engine = AttentionEngine(mask_mod=library.causal)
    for parts in (None, 1, 8):
        calls = {}
        for name, lengths in drawn.items():
            order, table, at = torch.randperm(count), torch.full((REQUESTS, LONGEST // PAGE), -1), 0
            for b, pages in enumerate((-(-lengths // PAGE)).tolist()):
                table[b, :pages], at = order[at : at + pages], at + pages
            given = {"kv_lengths": lengths.cuda(), "page_table": table.int().cuda(), "num_splits": parts}
            calls[name] = lambda given=given: engine.with_cache(q, k, v, **given)
        print(f"{REQUESTS} requests, {'parts dealt' if parts is None else f'{parts} parts'}:", flush=True)
        for name, timing in clock.times(calls, ROUNDS).items():
            size = int(drawn[name].sum()) * KV_HEADS * OF_HEAD * 2 * DTYPE.itemsize
            us = timing.device_us
            print(f"  {name:10} {size / 1e6:6.0f} MB {us:8.1f} us  {size / us / 1e6:5.2f} TB/s", flush=True)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["latent", "uneven"])
    parser.add_argument("--times", action="store_true", help="times alone")
    parser.add_argument("--clean", action="store_true", help="before a call, the cache holds what was read alone")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    clock = Clock(args.clean)
    if args.only != "uneven":
        for heads, page in () if args.times else dict.fromkeys((heads, page) for heads, _, page in LATENT):
            check_latent(heads, page)
        for case in LATENT:
            time_latent(clock, *case)
    if args.only != "latent":
        time_uneven(clock)


if __name__ == "__main__":
    main()
