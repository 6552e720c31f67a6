"""flex_attention beside torch's FlexAttention: five masks and scores, their numbers first, then forward and backward.

python -m benchmarks.flex                ours, torch's Triton kernels and its FlashAttention-4, and cuDNN's, on a GPU
python -m benchmarks.flex --who torch    one of them; --out RESULTS writes RESULTS.csv and RESULTS.json, too
python -m benchmarks.flex --host         the host time alone, with functions made anew; on a CPU without launches
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine
from attention_engine.flex import create_block_mask, flex_attention
from attention_engine.flex.engines import FINDER
from benchmarks.flex_cudnn import Planned, cudnn
from benchmarks.gallery import Mods, gallery
from benchmarks.host import CALLS, ROUNDS, host_us, without_launches
from benchmarks.run import DIRECTIONS, Row, write
from benchmarks.timing import environment

B, H, S, D = 2, 16, 8192, 128
GROUPED = "grouped "  # stands before a case of one batch, whose 32 query heads share 8 key heads
CASES = {
    "causal": "softmax.causal", "softcap": "softcap.causal", "alibi": "alibi.causal", "window 1024": "softmax.window",
    "documents": "softmax.documents",
}  # fmt: skip # each with its name in the table of results
PEERS = {"ours": "attention_engine", "torch": "flex_attention", "flash": "flex_flash", "cudnn": "cudnn_frontend"}
ALLOWED = 2.0  # errors of a peer, over eager's


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keys up to the query."""
    return q_idx >= kv_idx


def shape_of(name: str) -> tuple[int, int, int]:
    """The batch, query heads and key heads of a case."""
    return (1, 32, 8) if name.startswith(GROUPED) else (B, H, H)


def cases(device: str, heads: int = H) -> dict[str, Mods]:
    """The functions of each case, as people write them for either."""
    slopes = torch.exp2(-torch.arange(1, heads + 1, device=device) * 8.0 / heads)
    ends = torch.tensor([700, 2100, 2500, 5200, 7000], device=device)
    documents = torch.searchsorted(ends, torch.arange(S, device=device), right=True).int()
    return {
        "causal": (None, causal),
        "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), causal),
        "alibi": (lambda s, b, h, q, k: s - slopes[h] * (q - k), causal),
        "window 1024": (None, lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        "documents": (None, lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])),
    }


def ours(mods: Mods, device: str) -> Callable[..., Tensor]:
    """The call by this package."""
    score, mask = mods
    blocks = None if mask is None else create_block_mask(mask, None, None, S, S)
    return lambda q, k, v: flex_attention(q, k, v, score, blocks, enable_gqa=q.shape[1] != k.shape[1])


def torchs(mods: Mods, device: str, options: dict[str, Any] | None = None) -> Callable[..., Tensor]:
    """The call by torch.compile(flex_attention), its Triton kernels."""
    from torch.nn.attention import flex_attention as flex

    score, mask = mods
    wide = options is not None and torch.cuda.get_device_capability()[0] >= 10
    size = (256, 128) if wide else 128  # of what FlashAttention-4 takes: its own tile
    blocks: Any = flex.create_block_mask(mask, None, None, S, S, device=device, BLOCK_SIZE=size)
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        found: Tensor = compiled(q, k, v, score, blocks, enable_gqa=grouped, kernel_options=options)
        return found

    return call


def flash(mods: Mods, device: str) -> Callable[..., Tensor]:
    """The same by FlashAttention-4, where it is installed."""
    return torchs(mods, device, {"BACKEND": "FLASH"})


def plan_ms(call: Callable[..., Tensor], qkv: Sequence[Tensor]) -> str:
    """What making a plan takes, without and with what a backward pass reads; nothing where a call makes none."""
    if not isinstance(call, Planned):
        return ""
    of_forward, of_both = (ms(partial(call.plan, *qkv, trained=trained)) for trained in (False, True))
    return f", a plan {of_forward:.3f} ms, with its backward part {of_both:.3f} ms"


def inputs(device: str, shape: tuple[int, int, int] = (B, H, H)) -> list[Tensor]:
    """q, k, v and the gradient of the output, of so many batches, query heads and key heads."""
    (batch, heads, kv_heads), make = shape, torch.Generator(device=device).manual_seed(0)
    each = [(batch, n, S, D) for n in (heads, kv_heads, kv_heads, heads)]
    given = [torch.randn(one, generator=make, device=device, dtype=torch.bfloat16) for one in each]
    return [t.requires_grad_(n < 3) for n, t in enumerate(given)]


def off(
    call: Callable[..., Tensor], mods: Mods, device: str, shape: tuple[int, int, int] = (B, H, H),
    direction: str = "backward", head: int = 4,
) -> float:  # fmt: skip
    """The mean error of the output, or the largest of the gradients, over eager bfloat16's, by float64: of a query
    head, and of the key head that it reads where no other query head reads it too."""
    score, mask = mods
    *qkv, arriving = inputs(device, shape)
    group, forward = shape[1] // shape[2], direction == "forward"
    index = torch.arange(S, device=device)
    places = head, head // group, head // group
    at = torch.zeros_like(index[:1]), torch.full_like(index[:1], head), index[:, None], index

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = (q @ k.mT) * D**-0.5
        x = x if score is None else score(x, *at)
        x = x if mask is None else x.masked_fill(~mask(*at), -math.inf)
        return x.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(v.dtype) @ v

    def of_head(dtype: torch.dtype) -> list[Tensor]:
        given = [t[0, n].detach().to(dtype).requires_grad_() for t, n in zip(qkv, places, strict=False)]
        o = plain(*given)
        return [o.detach()] if forward else list(torch.autograd.grad(o, given, arriving[0, head].to(o.dtype)))

    o = call(*qkv)
    made = [o.detach()] if forward else torch.autograd.grad(o, qkv, arriving)
    found = [t[0, n] for t, n in zip(made, places, strict=False)]
    alone = slice(None) if group == 1 else slice(1)  # o, or dq
    each = zip(found[alone], of_head(torch.bfloat16)[alone], of_head(torch.float64)[alone], strict=True)
    return max(float((f - x).abs().mean() / (e - x).abs().mean()) for f, e, x in each)


def kept_share(mask: Callable[..., Any] | None) -> float:
    """The pairs of the first head that a mask keeps, of all."""
    if mask is None:
        return 1.0
    index, zero = torch.arange(S, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    return sum(float(mask(zero + b, zero, index[:, None], index).float().mean()) for b in range(B)) / B


def ms(run: Callable[[], object], rounds: int = 12) -> float:
    """The median, with the cache of the GPU cold."""
    cold = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times = []
    for n in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cold.zero_()
        torch.cuda._sleep(1_000_000)  # the host is ahead then
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end)] if n >= 3 else []
    return sorted(times)[rounds // 2]


MAKERS: dict[str, Callable[[Mods, str], Callable[..., Tensor]]] = {
    "ours": ours, "torch": torchs, "flash": flash, "cudnn": cudnn,
}  # fmt: skip


@contextmanager
def alone(lock: str) -> Iterator[IO[str]]:
    """While no other process holds this file."""
    with Path(lock).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield held


def wait_for_others(lock: str, who: str, name: str) -> None:
    """Says that this process has compiled, and waits until all have, or have no time left: what runs beside a kernel,
    were it to compile, takes its time."""
    with alone(lock) as rows:
        rows.write(json.dumps([who, name]) + "\n")
    while not gate_of(lock).exists():
        time.sleep(0.05)


def gate_of(lock: str | Path) -> Path:
    """The file that is there once kernels are timed."""
    return Path(lock).with_name("gate")


def one(who: str, name: str, lock: str) -> None:
    """Compiles a case, and times it when no other process does: a row, which stands in the file too."""
    began, shape = time.perf_counter(), shape_of(name)
    *qkv, arriving = inputs("cuda", shape)
    bare, named = name.removeprefix(GROUPED), cases("cuda", shape[1])
    mods = named[bare] if bare in named else gallery("cuda", S, H)[bare]
    found, said, made, errors, kept = [math.nan, math.nan], "", list[Tensor](), [math.nan, math.nan], math.nan

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*qkv)

    def backward() -> object:
        return torch.autograd.grad(made[0], qkv, arriving, retain_graph=True)

    runs = dict(zip(DIRECTIONS, (forward, backward), strict=True))
    compiled = []
    try:
        call = MAKERS[who](mods, "cuda")
        for direction, run in runs.items():
            made += [] if direction == "forward" else [call(*qkv)]
            run()
            compiled.append(direction)
    except Exception as refusal:  # noqa: BLE001 # what a peer refuses is a result
        said = f"{type(refusal).__name__}: {' '.join(str(refusal).split())[:160]}"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # others have tensors there
    wait_for_others(lock, who, name)
    with alone(lock):
        for n, direction in enumerate(compiled):
            errors[n], kept = off(call, mods, "cuda", shape, direction), kept_share(mods[1])
            torch.cuda.empty_cache()
            found[n] = ms(runs[direction])
        plans = plan_ms(call, qkv) if compiled else ""
    said = said or f"errors {errors[0]:.2f}, {errors[1]:.2f} of eager's, keeps {kept:.1%}{plans}"
    row = f"{who:6} {name:24} {found[0]:7.3f} ms, {found[1]:7.3f} ms, {said}"
    print(f"{row} ({time.perf_counter() - began:.0f} s)", flush=True)
    with alone(lock) as rows:
        rows.write(json.dumps([who, name, *found, *errors, kept, said]) + "\n")


def rows_of(who: str, name: str, found: Sequence[float], errors: Sequence[float], kept: float, said: str) -> list[Row]:
    """What was measured as rows of a table of results."""
    shape = "llama-8b" if name.startswith(GROUPED) else "mha-128"
    label = (f"{shape}.{CASES[name.removeprefix(GROUPED)]}.{S}", "bfloat16", PEERS[who])
    batch, heads, _ = shape_of(name)
    rows = []
    for direction, ms, error, products in zip(DIRECTIONS, found, errors, (2, 5), strict=True):
        if math.isnan(ms):
            rows.append(Row(*label, direction, f"unavailable: {said}"))
            continue
        status = "ok" if error <= ALLOWED else f"wrong: {error:.2f} x eager's error"
        flops = products * 2 * batch * heads * S * S * D * kept
        rows.append(Row(*label, direction, status, device_us=ms * 1e3, tflops=flops / ms * 1e-9, ratio=error))
    return rows


COMPILING = 0.7  # of the time that there is


def measure(who: Sequence[str], names: Sequence[str], out: Path | None, seconds: float) -> None:
    """A process for each case and each of who, which print their rows; then how many times ours the others take. Who
    hasn't compiled in 0.7 of so many seconds, or isn't done in all of them, has no row."""
    names, began = names or [*CASES, *[GROUPED + name for name in CASES]], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        command = [sys.executable, "-m", "benchmarks.flex", "--lock", str(rows), "--who"]
        waiting = {(each, name): subprocess.Popen([*command, each, name]) for each in who for name in names}

        def compiled() -> set[tuple[str, str]]:
            with alone(str(rows)):
                return {(each, name) for each, name, *_ in map(json.loads, rows.read_text().splitlines())}

        while time.monotonic() < began + COMPILING * seconds and len(compiled()) < len(waiting):
            time.sleep(0.2)
        for case, process in waiting.items():
            if case not in compiled():
                process.kill()
        gate_of(rows).touch()
        for process in waiting.values():
            try:
                process.wait(max(0.0, began + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        found = [row for row in map(json.loads, rows.read_text().splitlines()) if len(row) > 2]
    times = {(each, name): of for each, name, *of in found}
    if out is not None:
        ordered = sorted(found, key=lambda row: (names.index(row[1]), list(PEERS).index(row[0])))
        listed = [
            row for peer, name, *of, kept, said in ordered for row in rows_of(peer, name, of[:2], of[2:], kept, said)
        ]
        write(out, listed, environment("triton", "tilelang", "flash-attn-4", "nvidia-cudnn-frontend"))
    print("without a row:", [" ".join(case) for case in waiting if case not in times] or "none")
    for each in who:
        for name in names:
            if each != "ours" and ("ours", name) in times and (each, name) in times:
                a, b = times["ours", name], times[each, name]
                print(f"{each:6} {name:24} {b[0] / a[0]:7.2f}   , {b[1] / a[1]:7.2f} times ours")


def host(device: str) -> None:
    """Microseconds of Python of calls whose functions are kept, or made anew, in inference."""
    if device == "cpu":
        torch.set_num_threads(1)
        without_launches()
    options = None if device == "cuda" else {"backend": "interpret"}
    q, k, v = (torch.randn(1, 8, 128, 64, device=device, dtype=torch.float16) for _ in range(3))
    slopes = torch.rand(8, device=device)
    documents = torch.zeros(128, dtype=torch.int32, device=device)
    engine = AttentionEngine(None, mask_mod=causal, layout="bhsd", backend="auto" if options is None else "interpret")

    def plain() -> None:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128)
        flex_attention(q, k, v, None, mask, kernel_options=options)

    def scored() -> None:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128)
        flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), mask, kernel_options=options)

    def packed() -> None:
        mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 128, 128)
        flex_attention(q, k, v, None, mask, kernel_options=options)

    kept, slope = create_block_mask(causal, None, None, 128, 128), lambda s, b, h, i, j: s - slopes[h] * (i - j)
    of_documents = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 128, 128)
    dilated = create_block_mask(lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0), None, None, 128, 128)
    before = FINDER._built.cache_info().misses
    print("host time of a call, us" + (" (launches left out)" if device == "cpu" else ""))
    calls = {
        "an engine": lambda: engine(q, k, v),
        "a mask, kept": lambda: flex_attention(q, k, v, None, kept, kernel_options=options),
        "a score and a mask, kept": lambda: flex_attention(q, k, v, slope, kept, kernel_options=options),
        "dilated, kept": lambda: flex_attention(q, k, v, None, dilated, kernel_options=options),
        "documents, kept": lambda: flex_attention(q, k, v, None, of_documents, kernel_options=options),
        "a mask made anew": plain, "a score and a mask made anew": scored, "documents, made anew": packed,
    }  # fmt: skip
    for name, call in calls.items():
        call()
        print(f"{name:32} {host_us(call):8.1f}")
    made = FINDER._built.cache_info().misses - before
    print(f"engines made for {7 * (ROUNDS + 1) * CALLS} calls of seven functions: {made}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--who", choices=list(MAKERS), action="append")
    parser.add_argument("names", nargs="*", help="cases; all where none is named")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--gallery", action="store_true", help="ours alone, of each mask and score of the gallery")
    parser.add_argument("--out", type=Path, help="where the table of results is written")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which nobody is waited for")
    parser.add_argument("--lock", help="one case, timed while this file is locked, where its times are added")
    asked = parser.parse_args()
    if asked.host:
        host("cuda" if torch.cuda.is_available() else "cpu")
    elif asked.lock:
        one(asked.who[0], asked.names[0], asked.lock)
    elif asked.gallery:
        measure(["ours"], list(gallery("cpu", S, H)), None, asked.seconds)
    else:
        measure(asked.who or list(MAKERS), asked.names, asked.out, asked.seconds)


if __name__ == "__main__":
    main()
