"""The hand-placed kernels for Hopper beside their straight-line twins, in the warp simulator."""

from dataclasses import replace

import pytest
import torch

from attention_engine.ir.problem import Tile
from attention_engine.runtime import launch, op
from tests.cases import CASES, Shape, engine_for, errors


def by_hand(queries, keys=128, threads=256):
    return Tile(queries, keys, threads, 2, specialised=True)


# Head dims, the tile of the forward kernel (None: the twin runs), queries of a tile over keys.
KERNELS = {
    "forward-64": ((64, 64), by_hand(192, threads=384), None),
    "forward-128": ((128, 128), by_hand(128), None),
    "forward-192-128": ((192, 128), by_hand(128), None),
    "forward-128-256": ((128, 256), by_hand(128, 96), None),
    "backward-64-light": ((64, 64), None, by_hand(128)),
    "backward-64-heavy": ((64, 64), None, by_hand(64)),
    "backward-128-light": ((128, 128), None, by_hand(80)),
    "backward-128-heavy": ((128, 128), None, by_hand(64)),
    "backward-128-64": ((128, 64), None, by_hand(80)),
    "backward-64-128": ((64, 128), None, by_hand(64)),
}
PROGRAMS = ("softmax", "softcap", "alibi", "relu", "retention")  # plain, gradients of products, custom input, no rows
LENGTHS = ((200, 131), (77, 300), (1, 129), (161, 1))


@pytest.fixture
def kernels(monkeypatch):
    """Chooses tiles for the interpreter, and says which kernels ran."""
    op.ATTENTIONS.clear()
    chosen = {}

    def choose(problem, maths, target):
        return replace(default(problem, maths, target), **chosen)

    default = launch.default_tiles
    monkeypatch.setattr(launch, "default_tiles", choose)
    yield chosen
    op.ATTENTIONS.clear()


def ran(part):
    """Was the hand-placed kernel of this direction run?"""
    made = [k for a in op.ATTENTIONS.values() for k in a.launcher._kernels.values()]
    return [getattr(k, part).prim_func.script().count("set_max_nreg") for k in made] == [2] * len(made) != []


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_keeps_the_rule(name, kernels):
    dims, forward, backward = KERNELS[name]
    kernels.update({k: t for k, t in (("forward", forward), ("backward", backward)) if t})
    number = list(KERNELS).index(name)
    for turn, lengths in enumerate(LENGTHS):
        case = CASES[PROGRAMS[(number + turn) % len(PROGRAMS)]]
        shape = Shape(1, *lengths, *((4, 2) if turn % 2 else (2, 2)), *dims)
        dtype = (torch.float16, torch.bfloat16)[turn % 2]
        assert errors(case, shape, dtype, causal=turn != 1, backend="interpret", floor=2e-3)
    assert ran(name.split("-")[0])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_twins_agree_to_a_rounding(causal, kernels):
    shape = Shape(1, 150, 200, 2, 1, 128, 128)
    inputs = shape.tensors(torch.float16, "cpu", 0)
    leaves = [inputs[n].requires_grad_() for n in "qkv"]
    found = []
    for tiles in ({}, {"forward": by_hand(128), "backward": by_hand(80)}):
        kernels.clear()
        kernels.update(tiles)
        op.ATTENTIONS.clear()
        o = engine_for(CASES["softmax"], shape, torch.float16, causal, backend="interpret")(*leaves)
        found.append([o, *torch.autograd.grad(o, leaves, inputs["do"])])
        assert ran("forward") is ran("backward") is bool(tiles)
    for mine, twin in zip(*found):
        torch.testing.assert_close(mine, twin, rtol=2e-3, atol=2e-3)


def test_deterministic_engines_use_it_for_keys_alone(kernels):
    kernels.update(backward=by_hand(80))
    shape = Shape(1, 130, 140, 2, 2, 128, 128)
    assert errors(CASES["softmax"], shape, torch.float16, True, backend="interpret", deterministic=True)
    (made,) = [k for a in op.ATTENTIONS.values() for k in a.launcher._kernels.values()]
    assert made.tiles.backward.q == 64  # 80 queries and the kernel over queries would want rows padded differently
    assert ran("backward") and "atomic" not in made.backward.prim_func.script()
