"""The derived backward pass against autograd of the reference, in float64; and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_engine.errors import BackwardNotDerived
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.tracing import trace
from attention_engine.ir.program import Program
from attention_engine.library import OnlineRetention, OnlineSoftmax
from attention_engine.passes.derive_backward import derive_backward
from attention_engine.reference.dense import attend, attend_backward, saved_rows
from tests.programs import BATCH, EXAMPLES, HEADS, MASKS, Example, scaled

LIMIT = 1e-12
QUERIES, KEYS = 7, 9


def tensors(kv_heads: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"q": (HEADS, QUERIES, 5), "k": (kv_heads, KEYS, 5), "v": (kv_heads, KEYS, 3), "do": (HEADS, QUERIES, 3)}
    return {n: torch.randn(BATCH, *s, generator=generator, dtype=torch.float64) for n, s in sizes.items()}


def exact_gradients(program: Program, given: dict[str, Tensor], custom: dict[str, Tensor], d_rows: dict[str, Tensor]):
    """Output, rows and all gradients by autograd of the reference."""
    leaves = {n: t.clone().requires_grad_() for n, t in {**given, **custom}.items() if n != "do"}
    o, rows = attend(program, leaves["q"], leaves["k"], leaves["v"], {n: leaves[n] for n in custom})
    roots, seeds = [o], [given["do"]]
    for (name, _), row in zip(program.finals, rows, strict=True):
        if name in d_rows and row.requires_grad:
            finite = row.isfinite()
            roots.append(torch.where(finite, row, 0.0))
            seeds.append(torch.where(finite, d_rows[name], 0.0))
    gradients = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves.values(), gradients, strict=True)]
    return o.detach(), rows, dict(zip(leaves, filled, strict=True))


def derived_gradients(program: Program, given: dict[str, Tensor], custom: dict[str, Tensor], d_rows: dict[str, Tensor], o: Tensor):
    backward = derive_backward(program)
    saved = saved_rows(program, backward, given["q"], given["k"], custom)
    delta = (o * given["do"]).sum(-1)
    found = attend_backward(program, backward, given["q"], given["k"], given["v"], custom, saved, delta, given["do"], d_rows)
    return {"q": found.q, "k": found.k, "v": found.v, **found.custom}


def compare(program: Program, custom: dict[str, Tensor], returned_rows: bool = False) -> None:
    given = tensors()
    d_rows = {}
    if returned_rows:
        d_rows = {n: torch.randn(BATCH, HEADS, QUERIES, dtype=torch.float64) for n, _ in program.finals}
        d_rows = {n: d for n, d in d_rows.items() if n not in dict(derive_backward(program).undifferentiated)}
        assert d_rows, "no returned row has a gradient"
    o, _, exact = exact_gradients(program, given, custom, d_rows)
    found = derived_gradients(program, given, custom, d_rows, o)
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        assert gradient.isfinite().all(), f"the yardstick of d{name} is not finite"
        assert found[name].shape == gradient.shape
        error = (found[name] - gradient).abs().max().item()
        assert error <= LIMIT, f"d{name} is off by {error}\n{program}\n{derive_backward(program)}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_derived_backward_agrees_with_autograd(name, mask):
    example = EXAMPLES[name]
    compare(example.trace(MASKS[mask]), example.custom())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["softmax", "softmax one", "relu2 row sum", "sink", "tempered", "live retention", "gated"])
def test_the_gradient_of_a_returned_row_agrees_with_autograd(name, mask):
    example = EXAMPLES[name]
    compare(example.trace(MASKS[mask]), example.custom(), returned_rows=True)
