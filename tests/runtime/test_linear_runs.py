"""A run of a linear attention in two parts, and in pieces: the engine's own results, from states that others know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_engine.arch import H100
from attention_engine.ir.linear import LinearProblem, LinearTile
from attention_engine.plan import linear as plan
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.linear_runs import run_of
from tests.linear_cases import CASES, Shape, engine_for, engine_results

SHAPE = Shape(2, 150, 1, 1, 2, 32, 32)
WALK = LinearTile(32, 32, 32, 128, 0)
FORMS = {  # of tiles; is the gradient of decays asked for?
    "by chunks": (lambda tiles: replace(tiles, plan="chunks"), True),
    "by walks": (lambda tiles: replace(tiles, plan="walk", walks=dict.fromkeys(("dq", "dk", "dv"), WALK)), False),
}


def met(kept, left, first, reverse=False):
    """What each piece meets, and what the last leaves, by the law alone."""
    found, state = [], first
    order = range(left.shape[1])
    for n in reversed(order) if reverse else order:
        found.append(state)
        state = kept[:, n, ..., None] * state + left[:, n]
    return torch.stack(found[::-1] if reverse else found, 1), state


@pytest.mark.parametrize(
    ("name", "form"),
    [("mamba2", "by chunks"), ("plain", "by walks"), ("no_decay", "by walks"), ("gla_mods", None)],
)
def test_runs_in_pieces(monkeypatch, name, form):
    monkeypatch.setattr(plan, "PIECE", 32)
    case = CASES[name]
    engine, inputs = engine_for(case, SHAPE, torch.float32, backend="interpret"), SHAPE.inputs(case, torch.float32)
    tensors, custom = [inputs.get(n) for n in ("q", "k", "v", "decay")], [inputs[n] for n in case.axes]
    attention = ATTENTIONS[engine._check(*tensors, inputs["initial_state"], custom)]
    kernels, with_decay = attention.program_kernels, True
    if form is not None:
        change, with_decay = FORMS[form]
        monkeypatch.setattr(kernels, "tiles", change(kernels.kernels(*tensors, custom).tiles))
        kernels._kernels.clear()
    expected = engine_results(engine, inputs)
    ahead = run_of(attention, *tensors, custom)
    left, kept = ahead.states(), ahead.kept()
    assert left.shape[1] == 3  # of 64, 64 and 22 tokens
    starts, last = met(kept, left, inputs["initial_state"])
    back = run_of(attention, *tensors, custom, inputs["d_o"], [with_decay] * (1 + len(custom)))
    ends, d_initial = met(kept, back.states(), inputs["d_last"], reverse=True)
    dq, dk, dv, d_decay, _, d_custom = back.gradients(starts, ends)
    found = {
        "o": ahead.output(starts), "last": last, "d_q": dq, "d_k": dk, "d_v": dv, "d_initial_state": d_initial,
        **({"d_decay": d_decay} if with_decay and case.decays else {}),
        **({f"d_{n}": d for n, d in zip(case.axes, d_custom, strict=True)}),
    }  # fmt: skip
    assert {*found} <= {*expected}, (sorted(found), sorted(expected))
    for what, tensor in found.items():
        assert (tensor - expected[what]).abs().max() <= 2e-5 * expected[what].abs().max(), what


@pytest.mark.parametrize(("batch", "length", "pieces"), [(1, 65536, 10), (8, 65536, 2), (1, 300, 1), (64, 65536, 1)])
def test_pieces_fill_a_gpu_and_are_whole_chunks(batch, length, pieces):
    each = plan.piece_length(LinearProblem(80, 1, 1, 128, 64, "bfloat16"), H100(), batch, length)
    assert each % plan.PIECE == 0 and -(-length // each) == pieces
