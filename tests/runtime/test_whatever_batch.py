"""A row's bits don't depend on which batch it is computed in: outputs always, gradients with deterministic=True."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO
from attention_engine.library import OnlineSoftmax, alibi, causal, scale
from attention_engine.plan.forms import HopperForward, HopperKeys, Tile
from attention_engine.runtime import op, program_kernels
from tests.cases import Shape

HOPPER = {
    "forward": Tile(128, 64, 256, 2, HopperForward(persistent=True)), "backward": Tile(64, 128, 256, 2, HopperKeys()),
}  # fmt: skip


@pytest.fixture(params=["straight", "for Hopper"])
def kernels(request, monkeypatch):
    """Kernels of both kinds, in the interpreter: its GPU runs three persistent blocks at once."""
    default = program_kernels.default_tiles
    op.ATTENTIONS.clear()
    if request.param == "for Hopper":
        monkeypatch.setattr(program_kernels, "default_tiles", lambda *given: replace(default(*given), **HOPPER))
    yield
    op.ATTENTIONS.clear()


def results(engine, tensors):
    leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
    o = engine(*leaves)
    return {"o": o, **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, tensors["do"]), strict=True))}


@pytest.mark.parametrize(("heads", "dim", "mask"), [
    ((2, 2), 64, None), ((2, 2), 64, causal), ((4, 2), 64, None), ((4, 2), 64, causal), ((4, 2), 128, causal),
    ((4, 2), 80, causal), ((2, 1), 128, causal),
], ids=["full", "causal", "full, grouped", "causal, grouped", "causal, grouped, heads alternate",
        "causal, grouped, another head dim", "causal, one key head"])  # fmt: skip
def test_a_sequence_has_the_same_bits_alone_and_among_others(kernels, heads, dim, mask):
    shape = Shape(3, 200, 150, *heads, dim, dim)
    tensors = shape.tensors(torch.bfloat16, "cpu", 0)
    metas = shape.meta(torch.bfloat16)
    engine = AttentionEngine(
        metas, None, scale(0.125), mask, OnlineSoftmax(), backend="interpret", deterministic=True
    )  # fmt: skip
    together = results(engine, tensors)
    for batch in range(3):
        alone = results(engine, {name: x[batch : batch + 1] for name, x in tensors.items()})
        for name in together:
            assert torch.equal(alone[name][0], together[name][batch]), (name, batch)


def test_walks_over_queries_are_the_same_in_every_batch_where_another_kernel_makes_dq(kernels):
    """Slopes have gradients, which are sums of rows. By default blocks of every other unit walk back."""
    tensors = Shape(2, 200, 280, 4, 1, 64, 64).tensors(torch.bfloat16, "cpu", 0)
    slopes = torch.linspace(0.1, 0.5, 4, requires_grad=True)
    engine = AttentionEngine(
        None, CustomIO({"slopes": ("heads",)}), alibi(0.125), causal, OnlineSoftmax(), backend="interpret",
        deterministic=True,
    )  # fmt: skip

    def gradients(first):
        leaves = [tensors[name][first:].detach().requires_grad_() for name in "qkv"]
        return torch.autograd.grad(engine(*leaves, slopes), [*leaves, slopes], tensors["do"][first:])[:3]

    for together, alone in zip(gradients(0), gradients(1), strict=True):
        assert torch.equal(together[-1:], alone)
