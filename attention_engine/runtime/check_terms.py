"""What eager's errors come to in a gradient of few numbers, each a sum of many terms.

The gradient of a learned temperature sums a term of every pair. Eager's errors of the rows cancel, by chance nearly to
0, and a ratio to that says nothing of our sum. So the terms are made one by one, in float64 and in eager's dtype: a
zero of its own is added to each read, and its gradient is the term. Errors are summed over the keys of a row, in which
they do cancel (its weights sum to 1), and the root of the sum of the rows' squares is what they come to where they
don't cancel by chance. Over random draws it is the root mean square of eager's error, within a fifth.

It is at least one rounding, in fp32, of the sum of the terms' absolute values: softmax doesn't see a number that is
added to all scores of a row, so its gradient is 0, of terms that are not. Eager makes them so that their errors cancel
too; others that sum in fp32 can't know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention_engine.ir.expr import Expr, Op, Type, make, substitute, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H, Program

FEW = 16  # numbers of a tensor whose errors no mean steadies; rows of which a sum of squares is steady
ROUNDING = 2.0**-24  # of fp32, in which kernels and PyTorch sum, whatever the dtype of the tensors
PAIR, ROW = (B, H, Q_IDX, KV_IDX), (B, H, Q_IDX)
Zeros = dict[str, tuple[str, tuple[Expr, ...]]]  # by its name: the tensor whose reads it joins, and its indices


def summed(named: Mapping[str, Tensor]) -> list[str]:
    """The tensors whose gradients are judged by their terms."""
    return [n for n, t in named.items() if t.is_floating_point() and 0 < t.numel() <= FEW]


def with_zeros(exprs: Iterable[Expr], few: Sequence[str], indices: tuple[Expr, ...], zeros: Zeros) -> list[Expr]:
    """The expressions with a zero added to each read of these tensors; notes the zeros."""
    exprs = list(exprs)
    table = {}
    for node in topological(*exprs):
        if node.op is Op.LOAD and node.name in few and node.dtype is Type.FLOAT:
            name = f"{node.name}.zero{len(zeros)}"
            zeros[name] = (node.name, indices)
            table[node] = make(Op.ADD, node, make(Op.LOAD, *indices, arg=name, dtype=Type.FLOAT))
    return [substitute(e, table) for e in exprs]


def program_with_zeros(program: Program, few: Sequence[str]) -> tuple[Program, Zeros]:
    """The forward pass of a program with a zero at each read: one for every pair in its score, one a row elsewhere."""
    zeros: Zeros = {}
    (score,) = with_zeros([program.score], few, PAIR, zeros)
    states = program.states
    of_rows = [s.update for s in states], [program.weights, program.rescale, program.output], program.finals
    updates, three, finals = of_rows[0], of_rows[1], [row for _, row in of_rows[2]]
    made = with_zeros([*updates, *three, *finals], few, ROW, zeros)
    weights, rescale, output = made[len(states) : len(states) + 3]
    new = replace(
        program, score=score, states=tuple(replace(s, update=u) for s, u in zip(states, made, strict=False)),
        weights=weights, rescale=rescale, output=output, forward=None, backward=None,
        finals=tuple((n, e) for (n, _), e in zip(program.finals, made[len(states) + 3 :], strict=True)),
    )  # fmt: skip
    return new, zeros


def make_zeros(zeros: Zeros, sizes: Mapping[Expr, int], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The tensors of zeros, which ask for gradients."""
    return {
        name: torch.zeros([sizes[i] for i in indices], dtype=dtype, device=device, requires_grad=True)
        for name, (_, indices) in zeros.items()
    }


def errors_of_terms(
    few: Mapping[str, int], zeros: Zeros, run: Callable[[torch.dtype], Mapping[str, Sequence[Tensor | None]]],
    dtype: torch.dtype,
) -> dict[tuple[str, str], float]:  # fmt: skip
    """For each tensor and each result that gradients come from, what eager's errors come to in one of its numbers.

    few: how many numbers the tensors have. run: the gradients of the zeros in a dtype, in order, by result.
    """
    exact, eager = run(torch.float64), run(dtype)
    found: dict[tuple[str, str], float] = {}
    least: dict[tuple[str, str], float] = {}
    for result, gradients in exact.items():
        for (owner, _), want, got in zip(zeros.values(), gradients, eager[result], strict=True):
            if want is None or got is None:
                continue
            apart = (got.double() - want).nan_to_num(posinf=0, neginf=0)
            if apart.ndim == len(PAIR) and apart.shape[:-1].numel() >= FEW:
                apart = apart.sum(-1)
            key, numbers = (owner, result), few[owner]
            found[key] = found.get(key, 0.0) + float(apart.square().sum()) / numbers
            least[key] = least.get(key, 0.0) + ROUNDING * float(want.abs().sum()) / numbers
    return {key: max(value**0.5, least[key]) for key, value in found.items()}
