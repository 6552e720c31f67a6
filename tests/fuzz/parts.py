"""The script of a draw in parts of its keys, cut at random and merged, beside the whole call and plain torch."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from attention_engine.errors import WrongIndex
from tests.fuzz.check import names_of

WORSE, NOISE = 1.5, 2e-6  # how much worse than the whole call's the merged error may be; and of fp32 sums


def worse_in_parts(text: str, backend: str, seed: int) -> list[str] | None:
    """Which results are further from float64 where keys are cut into parts, in words; None where the program can't be
    cut, as it reads custom inputs of the part's own rows elsewhere."""
    names = names_of(text)
    q, k, v, custom, turned = names["q"], names["k"], names["v"], names["custom"], names["LAYOUT"] == "bhsd"
    engine, rng = names["engine"](backend), random.Random(seed)
    cuts = sorted(rng.choices(range(k.shape[1] + 1), k=rng.randrange(4)))

    def lie(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if turned else tensor

    try:
        parts = [
            engine.partial(
                lie(q), lie(k[:, a:b]), lie(v[:, a:b]), kv_starts=a, **_own_rows(custom, names["AXES"], a, b)
            )
            for a, b in zip((0, *cuts), (*cuts, k.shape[1]), strict=True)
        ]
    except WrongIndex:
        return None
    rng.shuffle(parts)
    merged = engine.merge(parts, return_rowscales=True)
    whole = engine(lie(q), lie(k), lie(v), **custom, return_rowscales=True)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in custom.items()}
    exact, exact_rows, kept, _, _ = names["plain"](q.double(), k.double(), v.double(), wide, torch.float64)
    found = [("o", lie(merged[0]), lie(whole[0]), exact)]
    found += [(n, merged[1][n][kept], whole[1][n][kept], exact_rows[n][kept]) for n in names["ROWS"]]
    return [
        f"{name}: {_error(ours, wanted):.2e} in parts, {_error(other, wanted):.2e} whole"
        for name, ours, other, wanted in found
        if not _error(ours, wanted) <= WORSE * _error(other, wanted) + NOISE
    ]


def _own_rows(custom: dict[str, Tensor], axes: dict[str, Any], a: int, b: int) -> dict[str, Tensor]:
    """Custom inputs with the keys from a to b alone, where they have an axis of keys."""
    found = {}
    for name, tensor in custom.items():
        for n, axis in enumerate(axes[name]):
            tensor = tensor.narrow(n, a, b - a) if axis == "seq_len_kv" else tensor
        found[name] = tensor
    return found


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact).norm() / (exact.norm() + 1e-6))
