"""Dropout in a program: the output and every gradient beside plain torch and autograd, in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attention_engine.ir.chance import chance, threshold
from attention_engine.ir.program import Program
from attention_engine.library import OnlineSigmoid, OnlineSoftmax
from attention_engine.passes.derive_backward import derive_backward
from attention_engine.passes.drop_weights import SEED, drop_weights
from attention_engine.passes.maths import analyse
from attention_engine.reference.dense import attend, attend_backward, saved_rows
from tests import plain
from tests.cases import CASES, scaled
from tests.passes.test_derive_backward import OverMaximum, WithMaximum
from tests.programs import BATCH, EXAMPLES, HEADS, MASKS, Example

P = 0.3
QUERIES, KEYS = 7, 9
SEEDS = {SEED: torch.tensor([2**40 + 3])}
OTHERS = {"over its maximum": Example(OverMaximum), "with its maximum": Example(WithMaximum)}


def dropping(program: Program, probability: float = P) -> Program:
    return drop_weights(dataclasses.replace(program, custom=(*program.custom, SEED)), probability)


def tensors(length: int = QUERIES, keys: int = KEYS):
    generator = torch.Generator().manual_seed(1)
    sizes = (HEADS, length, 5), (HEADS, keys, 5), (HEADS, keys, 3), (HEADS, length, 3)
    return [torch.randn(BATCH, *s, generator=generator, dtype=torch.float64) for s in sizes]


def factors(batch, heads, queries, keys, probability=P):
    """1 / (1 - p) for a pair that stays, else 0."""
    axes = [torch.arange(n).view([-1 if a == place else 1 for a in range(4)])
            for place, n in enumerate((batch, heads, queries, keys))]  # fmt: skip
    return (chance(SEEDS[SEED], *axes) >= threshold(probability)).double() / (1 - probability)


KINDS = {**{case.kind: case.online_func for case in CASES.values() if case.kind != "relu2"}, "sigmoid": OnlineSigmoid}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_stay_are_divided_and_rows_know_all(kind, monkeypatch):
    """Of any row function: plain torch, whose weights are multiplied with the factors before they meet values."""
    q, k, v, do = tensors(40, 50)
    plainly = Example(KINDS[kind], scaled(5**-0.5)).trace(MASKS["causal"])
    program = dropping(plainly)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o, rows = attend(program, *leaves, SEEDS)
    found = torch.autograd.grad(o, leaves, do)
    weigh, m = plain.WEIGHTS[kind], factors(BATCH, HEADS, 40, 50)
    monkeypatch.setitem(plain.WEIGHTS, kind, lambda x, keep: ((w := weigh(x, keep))[0] * m, w[1]))
    twins = [t.transpose(1, 2).clone().requires_grad_() for t in (q, k, v)]
    wanted = plain.attention(*twins, kind, causal=True)
    torch.testing.assert_close(o.transpose(1, 2), wanted, atol=1e-12, rtol=1e-9)
    for ours, exact in zip(found, torch.autograd.grad(wanted, twins, do.transpose(1, 2)), strict=True):
        torch.testing.assert_close(ours.transpose(1, 2), exact, atol=1e-12, rtol=1e-9)
    if kind.startswith("softmax"):
        whole, without = attend(plainly, q, k, v)
        assert torch.equal(rows[0], without[0])
        assert not torch.allclose(o, whole)


@pytest.mark.parametrize("returned_rows", [False, True])
@pytest.mark.parametrize("mask", ["full", "late"])
@pytest.mark.parametrize("name", [*EXAMPLES, *OTHERS])
def test_the_derived_backward_agrees_with_autograd(name, mask, returned_rows):
    """Sums, extremes (and their ties), states that the weights read, `backward` by hand, gradients of custom inputs."""
    example = {**EXAMPLES, **OTHERS}[name]
    program = dropping(example.trace(MASKS[mask]))
    backward = derive_backward(program)
    q, k, v, do = tensors()
    q[:, :, 1] = 0.0  # a row whose scores are all equal
    lacking = dict(backward.undifferentiated)
    generator = torch.Generator().manual_seed(5)
    d_rows = {n: torch.randn(BATCH, HEADS, QUERIES, generator=generator, dtype=torch.float64)
              for n, _ in program.finals if returned_rows and n not in lacking}  # fmt: skip
    if returned_rows and not d_rows:
        return
    leaves = {"q": q, "k": k, "v": v, **example.custom()}
    leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    custom = {n: t for n, t in leaves.items() if n not in "qkv"} | SEEDS
    o, rows = attend(program, *(leaves[n] for n in "qkv"), custom)
    roots, arriving = [o], [do]
    for (n, _), row in zip(program.finals, rows, strict=True):
        if n in d_rows and row.requires_grad:
            roots.append(torch.where(row.isfinite(), row, 0.0))
            arriving.append(torch.where(row.isfinite(), d_rows[n], 0.0))
    exact = torch.autograd.grad(roots, list(leaves.values()), arriving, allow_unused=True)
    custom = {n: t.detach() for n, t in custom.items()}
    saved = saved_rows(program, backward, q, k, custom)
    delta = (o.detach() * do).sum(-1)
    found = attend_backward(program, backward, q, k, v, custom, saved, delta, do, d_rows)
    ours = {"q": found.q, "k": found.k, "v": found.v, **found.custom}
    for n, gradient in zip(leaves, exact, strict=True):
        gradient = torch.zeros_like(leaves[n]) if gradient is None else gradient
        assert gradient.isfinite().all()
        scale = max(1.0, gradient.abs().max().item())
        error = (ours.get(n, torch.zeros_like(gradient)) - gradient).abs().max().item()
        assert error <= 1e-11 * scale, f"d{n} is off by {error}\n{program}\n{backward}"


def test_a_probability_of_nearly_0_changes_nothing():
    q, k, v, _ = tensors()
    plainly = EXAMPLES["softmax"].trace()
    o, _ = attend(dropping(plainly, 2.0**-40), q, k, v, SEEDS)
    torch.testing.assert_close(o, attend(plainly, q, k, v)[0], atol=1e-11, rtol=1e-9)


def test_the_factor_joins_the_rows_number():
    """So that a pair of the backward pass multiplies no more than without dropout."""
    backward = analyse(dropping(Example(OnlineSoftmax).trace())).backward
    assert str(backward.weights) == "exp2(0.577078016 * qk + row0)"
    assert [name for name, _ in backward.saved] == ["lse"]


def test_programs_without_dropout_are_as_they_were():
    program = Example(OnlineSoftmax).trace()
    assert program.dropped is None
    maths = analyse(program)
    assert maths.forward_schedule.dropped is None
    assert maths.backward_schedule.dropped is None
