"""One of the fifty cases held against plain torch in float64, by the project's rule; and all of them, as a command.

python -m tests.flex.check [--device cuda] [--dtype bfloat16] [--torch] [names...]

--torch asks torch's own FlexAttention in place of this package: how many it runs there, forward and with gradients.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_engine.flex import AuxRequest, create_block_mask, flex_attention
from tests.flex.cases import CASES, Case, Sizes, plain, qkv_of, tensors_of
from tests.plain import Error, compare, table

Results = dict[str, Tensor]


def gradients(outputs: tuple[Tensor, Tensor], inputs: dict[str, Tensor]) -> Results:
    """Those of a loss that weighs every output differently, and the lse of rows that keep a pair."""
    o, lse = outputs
    make = torch.Generator().manual_seed(3)
    weights = torch.randn(o.shape, generator=make, dtype=torch.float64).to(o.device, o.dtype)
    kept = torch.where(lse.isfinite(), lse, 0.0).float().sin()
    loss = (o * weights).sum() + kept.sum().to(o.dtype)
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return {f"d {n}": torch.zeros_like(t) if d is None else d for d, (n, t) in zip(found, inputs.items(), strict=True)}


FEW = 16  # numbers of a tensor whose errors no mean steadies
DRAWS = 8


def results(run: Callable[..., tuple[Tensor, Tensor]], one: Case, sizes: Sizes, dtype: torch.dtype, device: str,
            of: torch.dtype, seed: int = 0) -> Results:  # fmt: skip
    """Output, lse and gradients of run(mods, q, k, v) in dtype; the inputs are numbers of the dtype `of`."""
    held = {n: t.detach() for n, t in tensors_of(one, sizes, of, device).items()}
    tensors = {n: t.to(dtype).requires_grad_() if t.is_floating_point() else t for n, t in held.items()}
    qkv = [t.detach().to(dtype).requires_grad_() for t in qkv_of(sizes, of, device, seed)]
    o, lse = run(one.make(tensors, sizes), *qkv)
    inputs = dict(zip("qkv", qkv)) | {n: t for n, t in tensors.items() if t.requires_grad}
    lse = torch.where(lse.isfinite(), lse, 0.0)
    return {"o": o.detach(), "lse": lse.detach(), **gradients((o, lse), inputs)}


def ours(sizes: Sizes, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The case by this package."""

    def run(mods: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        score_mod, mask_mod = mods
        mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, sizes.queries, sizes.keys)
        more: dict[str, Any] = {"kernel_options": {"backend": backend}, "enable_gqa": sizes.heads != sizes.kv_heads}
        o, rows = flex_attention(q, k, v, score_mod, mask, return_aux=AuxRequest(lse=True), **more)
        return o, rows.lse

    return run


def errors_of(one: Case, sizes: Sizes, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Error]:
    """By the rule, beside plain torch in the same dtype.

    The gradient of a few numbers is a sum over all pairs, in which eager's errors may cancel by chance. So its error is
    held against what eager's come to over several draws: three times their root mean square.
    """
    return judged(results(ours(sizes, backend), one, sizes, dtype, device, dtype), one, sizes, dtype, device)


def judged(found: Results, one: Case, sizes: Sizes, dtype: torch.dtype, device: str) -> list[Error]:
    """Results by the rule; AssertionError where they break it."""
    exact = results(plain, one, sizes, torch.float64, device, dtype)
    eager = results(plain, one, sizes, dtype, device, dtype)
    few = {n for n, t in exact.items() if t.numel() <= FEW}
    floors = dict.fromkeys(exact, 1e-6 if dtype is torch.float32 else 2e-5)
    if few:
        squares = [_squared_errors(one, sizes, dtype, device, seed) for seed in range(1, DRAWS + 1)]
        floors |= {n: 3 * (sum(of[n] for of in squares) / DRAWS) ** 0.5 for n in few}
    return [e for n in exact for e in compare({n: found[n]}, {n: exact[n]}, {n: eager[n]}, dtype, floor=floors[n])]


def _squared_errors(one: Case, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    exact = results(plain, one, sizes, torch.float64, device, dtype, seed)
    eager = results(plain, one, sizes, dtype, device, dtype, seed)
    return {n: float((eager[n].double() - exact[n]).square().mean()) for n in exact}


def of_torch(sizes: Sizes, device: str, lse: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The case by torch's FlexAttention; on a GPU compiled, as its documents say."""
    from torch.nn.attention import flex_attention as torchs

    attend: Any = torch.compile(torchs.flex_attention) if device.startswith("cuda") else torchs.flex_attention

    def run(mods: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        (score_mod, mask_mod), z = mods, sizes
        mask = mask_mod and torchs.create_block_mask(mask_mod, z.batch, z.heads, z.queries, z.keys, device=device)
        if not lse:
            return attend(q, k, v, score_mod, mask), None
        o, rows = attend(q, k, v, score_mod, mask, return_aux=torchs.AuxRequest(lse=True))
        return o, rows.lse

    return run


def try_torch(one: Case, sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[str, str]:
    """What torch's FlexAttention says to the case, forward and with gradients: "ok", "wrong" or its error.

    "ok" with gradients where it is close; "ok, by the rule" where it keeps the rule that holds for this package.
    """
    exact, allowed = results(plain, one, sizes, torch.float64, device, dtype), 1e-4 if dtype is torch.float32 else 3e-2

    def verdict(run: Callable[[], Results]) -> tuple[str, Results]:
        torch._dynamo.reset()
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 # whatever torch says is what is asked
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}", {}
        off = max(float((found[n].double() - exact[n]).abs().max() / (1 + exact[n].abs().max())) for n in found)
        return "ok" if off <= allowed else f"wrong by {off:.1e}", found

    def forward() -> Results:
        with torch.no_grad():
            mods = one.make({n: t.detach() for n, t in tensors_of(one, sizes, dtype, device).items()}, sizes)
            o, _ = of_torch(sizes, device, lse=False)(mods, *[t.detach() for t in qkv_of(sizes, dtype, device)])
        return {"o": o}

    said, found = verdict(lambda: results(of_torch(sizes, device, lse=True), one, sizes, dtype, device, dtype))
    if said != "ok":
        return verdict(forward)[0], said
    try:
        judged(found, one, sizes, dtype, device)
    except AssertionError as error:
        return said, f"ok, and not by the rule: {' '.join(str(error).splitlines()[-1].split())}"
    return said, "ok, by the rule"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--torch", action="store_true")
    asked = parser.parse_args()
    dtype, names = getattr(torch, asked.dtype), asked.names or list(CASES)
    cuda = asked.device.startswith("cuda")
    sizes = Sizes(queries=256, keys=256, dim=64) if cuda else Sizes(queries=128, keys=128)
    warnings.simplefilter("ignore")
    counts = {"ours": 0, "torch forward": 0, "torch with gradients": 0, "torch by the rule": 0}
    for name in names:
        if asked.torch:
            forward, training = try_torch(CASES[name], sizes, dtype, asked.device)
            counts["torch forward"] += forward == "ok"
            counts["torch with gradients"] += training.startswith("ok")
            counts["torch by the rule"] += training == "ok, by the rule"
            line = f"torch forward: {forward}; with gradients: {training}"
        else:
            try:
                errors = errors_of(CASES[name], sizes, dtype, "auto", asked.device)
                worst = max(errors, key=lambda e: e.ratio)
                counts["ours"], line = counts["ours"] + 1, f"ok, worst {worst.ratio:.2f} of eager ({worst.name})"
            except Exception as error:  # noqa: BLE001 # each case is told of
                line = f"{type(error).__name__}: {error}"
        print(f"{name:32} {line}", flush=True)
    shown = [f"{n} {c}" for n, c in counts.items() if n.startswith("torch") == asked.torch]
    print(f"{asked.device}, {asked.dtype}, of {len(names)}: " + ", ".join(shown))


if __name__ == "__main__":
    main()

__all__ = ["errors_of", "ours", "results", "table", "try_torch"]
