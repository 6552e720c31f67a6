"""What a call does that may be meant and may be a mistake: reads outside of custom inputs, decays that grow.

Tensors are (batch, heads, length, dim) here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from attention_engine.ir.expr import Expr, Op, topological
from attention_engine.ir.linear import LinearProgram
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H, Program
from attention_engine.reference.evaluate import Evaluator
from attention_engine.reference.linear import apply_mods, token_indices

Custom = Mapping[str, Tensor]
PLACE = (B, H, Q_IDX, KV_IDX)


def doubts_of(program: Program, q: Tensor, k: Tensor, custom: Custom) -> Iterator[str]:
    """Reads outside of custom inputs, at pairs that the mask keeps; a mask's own at any pair."""
    sizes = (*q.shape[:3], k.shape[2])
    indices = {
        v: torch.arange(n, device=q.device).view([-1 if a == axis else 1 for a in range(4)])
        for axis, (v, n) in enumerate(zip(PLACE, sizes, strict=True))
    }
    evaluate = Evaluator(indices, custom, torch.float64, q.device)
    everywhere = torch.ones((), dtype=torch.bool, device=q.device)
    keep = everywhere if program.mask is None else evaluate(program.mask)
    of_mask = [] if program.mask is None else [program.mask]
    others = [e for name, e in program.named() if name != "keep"]
    yield from _reads_outside(of_mask, evaluate, everywhere, custom)
    yield from _reads_outside(others, evaluate, keep, custom)


def linear_doubts_of(
    program: LinearProgram, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Custom
) -> Iterator[str]:
    """The same, and decays above 0; tensors are (batch, length, heads, dim) here."""
    indices = token_indices(v.shape[0], v.shape[2], v.shape[1], v.device)
    evaluate = Evaluator(indices, custom, torch.float64, v.device)
    everywhere = torch.ones((), dtype=torch.bool, device=v.device)
    yield from _reads_outside([e for _, e in program.named()], evaluate, everywhere, custom)
    if grown := growth_of(program, q, k, v, decay, custom):
        yield f"warning: {grown}"


def growth_of(
    program: LinearProgram, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Custom
) -> str | None:  # fmt: skip
    """Where decays are above 0, and what to do; None where none is. Tensors are (batch, length, heads, dim)."""
    double = {n: t.double() if t.is_floating_point() else t for n, t in custom.items()}
    with torch.no_grad():
        logs = apply_mods(program, q, k, v, decay, double, torch.float64)[3]
    if not logs.numel() or not logs.max() > 0:
        return None
    b, h, t, _ = _first(logs == logs.max())
    grown = int((logs > 0).any(-1).sum())
    return (
        f"{grown} decays are above 0, up to {logs.max():.3g} at batch {b}, head {h}, token {t}: the state grows "
        "there.\n  A log decay is 0 or less where a state fades; say -x.exp() or x.logsigmoid() in decay_mod, or "
        "x.log() of a factor."
    )


def _reads_outside(roots: list[Expr], evaluate: Evaluator, keep: Tensor, custom: Custom) -> Iterator[str]:
    for node in topological(*roots):
        if node.op is not Op.LOAD or not node.args:
            continue
        leaves = [n for n in topological(*node.args) if n.op in (Op.VAR, Op.REDUCE)]
        if any(n not in evaluate.done for n in leaves):
            continue  # an index that is made of scores or of an entry
        shape = tuple(custom[node.name].shape) or (1,)
        outside = torch.zeros((), dtype=torch.bool, device=keep.device)
        for index, length in zip(node.args, shape, strict=True):
            place = evaluate(index)
            outside = outside | (place < 0) | (place >= length)
        outside = outside & keep
        if outside.any():
            where = ", ".join(f"{a} {i}" for a, i in zip(("b", "h", "q_idx", "kv_idx"), _first(outside), strict=False))
            yield (
                f"warning: {node} is read outside its shape {shape}, first at {where}: there it is 0 and gets no "
                "gradient."
            )


def _first(found: Tensor) -> tuple[int, ...]:
    """The place of the first True."""
    return tuple(int(i) for i in found.nonzero()[0])
