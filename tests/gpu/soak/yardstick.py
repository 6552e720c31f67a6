"""Plain torch at chosen rows, in float64 and as eager PyTorch in the dtype of q: results and gradients.

A whole row of queries goes by blocks, so that no tensor is larger than BLOCK numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests import plain
from tests.gpu.soak.programs import Program

BLOCK = 1 << 24
ROUNDING = {"dq": "dq by rounding", "dk": "dk by rounding"}
Named = dict[str, Tensor]


@dataclass
class Inputs:
    """q, k, v, custom inputs, and the gradients that arrive at o and at the row's logs."""

    q: Tensor
    k: Tensor
    v: Tensor
    custom: Named
    d_o: Tensor
    d_rows: Named = field(default_factory=dict)


def rows_of(
    program: Program, given: Inputs, batch: int, kv_heads: slice, rows: Tensor, keys: slice, learned: Named,
    leaves: Named, double: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """o (heads, rows, dim_v), the row's log or None, scores and weights, of the query heads of these key heads.

    leaves: q (heads, rows, dim), k, v (key heads, keys, dim) that gradients are asked of.
    """
    group, (heads, count, _) = program.group, leaves["q"].shape
    k, v = leaves["k"], leaves["v"]
    grouped = leaves["q"].reshape(k.shape[0], group * count, -1)
    products = (grouped @ k.transpose(1, 2)).view(heads, count, -1)
    first = (kv_heads.start or 0) * group
    h = torch.arange(first, first + heads, device=rows.device).view(-1, 1, 1)
    i, j = rows.view(1, -1, 1), torch.arange(keys.start, keys.stop, device=rows.device).view(1, 1, -1)
    custom = given.custom | learned
    x = program.scores(products, batch, h, i, j, custom)
    keep = program.keeps(batch, h, i, j, custom).expand(x.shape)
    weights, lse = plain.WEIGHTS[program.kind](x.to(torch.float64 if double else torch.float32), keep)
    o = (weights.to(v.dtype).view(k.shape[0], group * count, -1) @ v).view(heads, count, -1)
    return o, lse, x, weights


def _by_rounding(
    program: Program, d_o: Tensor, o: Tensor, scores: Tensor, weights: Tensor, leaves: Sequence[Tensor]
) -> list[Tensor]:  # fmt: skip
    """How far gradients of leaves are off where the row sum of o * dO is taken of an o rounded to q's dtype, as every
    fused kernel does.

    Such a row sum is subtracted from each pair's gradient. Eager PyTorch sums over weights instead, which is luckier in
    rows of one large weight. A key that many queries see has the mean of their luck; one that a query sees has its own.
    """
    if program.kind != "softmax":
        return [torch.zeros_like(x) for x in leaves]
    off = ((o.to(program.dtype).to(o.dtype) - o) * d_o).sum(-1, keepdim=True)
    return list(torch.autograd.grad(scores, leaves, (-off * weights).detach().to(scores.dtype), retain_graph=True))


def sampled_rows(program: Program, given: Inputs, rows: Tensor, double: bool) -> Named:
    """o, lse and dq of these rows in every batch and head, (batch, heads, rows, ...)."""
    found: list[Named] = []
    kv_heads, keys = slice(0, program.kv_heads), slice(0, given.k.shape[1])
    for b in range(given.q.shape[0]):
        leaves = _leaves(given, b, kv_heads, rows, keys, program.group, double)
        heads = slice(0, program.heads)
        o, lse, x, weights = rows_of(program, given, b, kv_heads, rows, keys, {}, leaves, double)
        (off,) = _by_rounding(program, _arriving(given, b, heads, rows, o), o, x, weights, [leaves["q"]])
        (dq,) = _gradients(program, given, b, heads, rows, o, lse, [leaves["q"]])
        found.append({"o": o.detach(), "dq": dq, ROUNDING["dq"]: off} | ({} if lse is None else {"lse": lse.detach()}))
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def whole_head(program: Program, given: Inputs, batches: list[int], kv_head: int, double: bool) -> Named:
    """All of a key head and of its query heads in these batches, and what those add to learned custom inputs."""
    kv_heads, found = slice(kv_head, kv_head + 1), []
    heads = slice(kv_head * program.group, (kv_head + 1) * program.group)
    wide = torch.float64 if double else torch.float32
    learned = {n: given.custom[n].to(wide if double else given.custom[n].dtype) for n in program.learned}
    learned = {n: x.detach().clone().requires_grad_() for n, x in learned.items()}
    totals = {n: torch.zeros_like(x, dtype=wide) for n, x in learned.items()}
    for b in batches:
        dk, dv = (torch.zeros_like(x[b, :, kv_head], dtype=wide) for x in (given.k, given.v))
        dk_off = torch.zeros_like(dk)
        parts = []
        for rows, keys in _blocks(program, given, b, heads):
            leaves = _leaves(given, b, kv_heads, rows, keys, program.group, double)
            o, lse, x, weights = rows_of(program, given, b, kv_heads, rows, keys, learned, leaves, double)
            both = [leaves["q"], leaves["k"]]
            off, of_keys = _by_rounding(program, _arriving(given, b, heads, rows, o), o, x, weights, both)
            wanted = [*leaves.values(), *learned.values()]
            dq, dk_part, dv_part, *rest = _gradients(program, given, b, heads, rows, o, lse, wanted)
            dk[keys] += dk_part[0]
            dk_off[keys] += of_keys[0]
            dv[keys] += dv_part[0]
            for name, gradient in zip(learned, rest, strict=True):
                totals[name] += gradient
            parts.append(
                {"o": o.detach(), "dq": dq, ROUNDING["dq"]: off} | ({} if lse is None else {"lse": lse.detach()})
            )
        joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        found.append(joined | {"dk": dk, "dv": dv, ROUNDING["dk"]: dk_off})
    return {n: torch.stack([one[n] for one in found]) for n in found[0]} | {f"d{n}": x for n, x in totals.items()}


def _leaves(given: Inputs, b: int, kv_heads: slice, rows: Tensor, keys: slice, group: int, double: bool) -> Named:
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    found = {"q": given.q[b, rows, heads], "k": given.k[b, keys, kv_heads], "v": given.v[b, keys, kv_heads]}
    found = {n: x.transpose(0, 1).contiguous() for n, x in found.items()}
    return {n: (x.double() if double else x.clone()).detach().requires_grad_() for n, x in found.items()}


def _arriving(given: Inputs, b: int, heads: slice, rows: Tensor, o: Tensor) -> Tensor:
    return given.d_o[b, rows, heads].transpose(0, 1).to(o.dtype)


def _gradients(
    program: Program, given: Inputs, b: int, heads: slice, rows: Tensor, o: Tensor, lse: Tensor | None,
    wanted: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    outputs, arriving = [o], [_arriving(given, b, heads, rows, o)]
    if program.rows:
        assert lse is not None
        outputs.append(torch.where(lse.isfinite(), lse, 0.0))
        arriving.append(given.d_rows["lse"][b, heads][:, rows].to(lse.dtype))
    found = torch.autograd.grad(outputs, wanted, arriving, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _blocks(program: Program, given: Inputs, b: int, heads: slice) -> Iterator[tuple[Tensor, slice]]:
    """Rows that follow each other, with a slice that holds every key they keep."""
    device, (total, length) = given.q.device, (given.q.shape[1], given.k.shape[1])
    j = torch.arange(length, device=device).view(1, 1, -1)
    h = torch.arange(heads.start, heads.stop, device=device).view(-1, 1, 1)
    step = max(1, min(1024, 4 * BLOCK // length))
    for first in range(0, total, step):
        rows = torch.arange(first, min(first + step, total), device=device)
        kept = program.keeps(b, h, rows.view(1, -1, 1), j, given.custom)
        seen = kept.expand(kept.shape[0], len(rows), length).any(0).any(0).nonzero()
        keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
        fit = max(1, BLOCK // (program.group * (keys.stop - keys.start)))
        for part in rows.split(fit):
            yield part, keys
