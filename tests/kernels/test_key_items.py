"""Persistent blocks of the backward pass over keys, in the warp simulator, beside a grid's."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, document_ids, plan
from attention_engine.arch import H100
from attention_engine.codegen.simulator.roles import Turns
from attention_engine.ir.problem import Problem
from attention_engine.kernels.hopper import backward
from attention_engine.kernels.hopper.keys import spare_warps
from attention_engine.library import OnlineSoftmax, document, scale
from attention_engine.plan import attention_buffers, units
from attention_engine.plan.hopper import backward_persists
from attention_engine.runtime import op, run
from attention_engine.tuner.defaults import default_tiles
from tests.cases import CASES, Shape, errors
from tests.kernels.test_hopper_interpret import MANY, PROGRAMS, SHARED_KEYS, WALKS, by_head, kernels, key_tile, ran

__all__ = ["kernels"]  # a fixture


def no_queries_for_some(b, h, q_idx, kv_idx):
    """A mask of bounds under which the first blocks of keys see no queries, so that they have no steps."""
    return kv_idx - 260 >= q_idx


def few_of_some_heads(b, h, q_idx, kv_idx):
    """A mask by lists, of which some are empty."""
    return (q_idx % 5 != kv_idx % 3) & (kv_idx < 150 * h)


SEEN = {
    **WALKS, "no queries for some": (no_queries_for_some, (150, 500)),
    "lists of two heads": (by_head, (300, 500)), "empty lists": (few_of_some_heads, (170, 400)),
}  # fmt: skip


def attend(mask, kernels, queries, persistent):
    """The output under a mask that kernels of this form make, what it was made of, and the gradient that arrives."""
    op.ATTENTIONS.clear()
    kernels.update(backward=key_tile(queries, persistent=persistent))
    keep, lengths = SEEN[mask]
    shape = Shape(2, *lengths, 4, 2, 128, 128)
    engine = AttentionEngine(shape.meta(torch.float16), None, scale(0.1), keep, OnlineSoftmax(), backend="interpret")
    tensors = shape.tensors(torch.float16, "cpu", 0)
    leaves = [tensors[n].requires_grad_() for n in "qkv"]
    return engine(*leaves), leaves, tensors["do"]


@pytest.mark.slow  # below, blocks that store dQ give a grid's gradients too
@pytest.mark.parametrize("queries", [64, 80])
@pytest.mark.parametrize("mask", SEEN)
def test_persistent_blocks_give_what_a_grid_gives_bit_for_bit(mask, queries, kernels, monkeypatch):
    """Additions to dQ too: one block of the simulator's grid has all items, in a grid's order. Those to delta are in
    the order of how much a thread takes at once, which its registers decide."""
    monkeypatch.setattr(spare_warps, "FEW", spare_warps.MANY)
    # a grid's walks may turn, and so add up in another order
    for module in (plan.hopper, plan.units, attention_buffers, backward):
        monkeypatch.setattr(module, "walks_turn", lambda *_: False)
    found = []
    for persistent in (False, True):
        found.append(torch.autograd.grad(*attend(mask, kernels, queries, persistent)))
        assert ran("backward") and walks() is persistent
    assert not any(gradient.isnan().any() for gradient in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_block_waits_for_what_another_prepares_and_for_room_for_its_keys(kernels):
    """Which the simulator can't show missing: its one block has prepared all, and copies when its others wait."""
    kernels.update(backward=key_tile(64, persistent=True))
    shape = Shape(1, 100, 100, 1, 1, 128, 128)
    assert errors(CASES["softmax"], shape, torch.float16, causal=False, backend="interpret", floor=2e-3)
    lines = [line.strip() for line in script_over_keys().splitlines()]
    waits = [n for n, line in enumerate(lines) if line.startswith("while T.atomic_load_elem_op")]
    prepared, *finished = (n for n in waits if "counters" in lines[n])
    assert "noted" in next(x for x in lines[prepared:] if "arrive_barrier" in x)
    assert len(finished) == 3, "a spare warp each, before it stores dQ"
    for at in finished:
        copied = next(n for n in range(at, len(lines)) if lines[n].startswith("T.tma_copy"))
        assert "workspace" in lines[copied], "sums, which others' threads wrote and the TMA unit reads"
        assert any("fence_proxy_of_memory" in line for line in lines[at:copied])
    for name in "kv":
        waits = [n for n, line in enumerate(lines) if line.startswith(f"T.mbarrier_wait_parity({name}_empty")]
        copies = [n for n, line in enumerate(lines) if line.startswith(f"T.tma_copy(T.region({name}[")]
        assert len(waits) == 2 and [n - 2 for n in copies] == waits[1:], "before a copy, and where nothing is copied"


@pytest.mark.parametrize("mask", ["no queries for some", "empty lists"])
def test_a_warp_that_is_late_misses_nothing(mask, kernels, monkeypatch):
    """Of one that copies, those that compute and three others, each goes on when no other can. Items without steps end
    faster than others prepare beside them: one barrier for the end of all of them could be missed."""
    asked = attend(mask, kernels, 64, True)
    expected = torch.autograd.grad(*asked, retain_graph=True)
    assert walks()
    for late in range(5):
        monkeypatch.setattr(Turns, "late", late)
        found = torch.autograd.grad(*asked, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), late


class Noted:
    """The kernel after that over keys, and what it found of dQ."""

    def __init__(self, kernel):
        self.kernel, self.found = kernel, None

    def begin(self):
        pass

    def run(self, dq, *others):
        self.found = dq.clone()
        self.kernel.run(dq, *others)


@pytest.mark.parametrize(("mask", "together", "ahead", "stored"), [
    *[(mask, 1, *units) for mask in ("full", "causal", "lists of two heads") for units in ((1, 3), (3, 1))],
    ("causal", 2, 1, 2), ("causal", 3, 1, 0), ("lists of two heads", 1, 9, 0),
])  # fmt: skip
def test_blocks_store_dq_of_units_that_are_done(mask, together, ahead, stored, kernels, monkeypatch):
    """All but the last ones', and none where a unit is not whole: four pairs, of which so many are stored."""
    monkeypatch.setattr(spare_warps, "FEW", spare_warps.MANY)
    monkeypatch.setattr(units, "units_ahead", lambda *_: ahead)
    monkeypatch.setattr(units, "prepared_before", lambda *_: False)
    monkeypatch.setattr(units, "pairs_of_a_unit", lambda *_: together)
    monkeypatch.setattr(run.torch, "empty_like", lambda t: torch.full_like(t, float("nan")) if t.is_floating_point()
                        else torch.zeros_like(t))  # fmt: skip
    found = []
    for persistent in (False, True):
        asked = attend(mask, kernels, 64, persistent)
        (attention,) = op.ATTENTIONS.values()
        for made in attention.program_kernels._kernels.values():
            launched = made.plan.postprocess
            after = made._made[launched.builder, launched.given] = Noted(made.kernel(launched))
        found.append(torch.autograd.grad(*asked))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(found[0][1:], found[1][1:], strict=True):  # a causal grid's walks turn: sums in another order
        assert torch.allclose(a, b, rtol=2**-10, atol=2**-11) if mask == "causal" else torch.equal(a, b)
    dq = found[0][0].reshape(2, -1, 2, 2, 128).transpose(1, 2).flatten(0, 1)
    before = after.found.reshape(2, -1, 2, 2, 128).transpose(1, 2).flatten(0, 1)
    assert torch.equal(before[:stored], dq[:stored]) and before[stored:].isnan().all()


def script_over_keys():
    """The kernel over keys that ran."""
    (script,) = [
        kernel.backward.prim_func.script()
        for attention in op.ATTENTIONS.values() for kernel in attention.program_kernels._kernels.values()
        if "compiled" in vars(kernel.backward)
    ]  # fmt: skip
    return script


def walks():
    """Did the blocks of the kernel over keys that ran take notes of items?"""
    return "record" in script_over_keys()


@pytest.mark.slow  # above, they give what a grid gives
def test_persistent_blocks_keep_the_rule(kernels):
    """Of programs with rows, products that are kept, no rows and gradients of indices; groups of heads, two batches."""
    kernels.update(backward=key_tile(64, persistent=True))
    for number, name in enumerate(PROGRAMS):
        lengths, heads, batch = MANY[number % 2]
        shape, dtype = Shape(batch, *lengths, *heads, 128, 128), (torch.float16, torch.bfloat16)[number % 2]
        assert errors(CASES[name], shape, dtype, causal=number < 2, backend="interpret", floor=2e-3)
        assert ran("backward")


def test_deterministic_gradients_have_a_grid(kernels):
    shape = Shape(1, 300, 300, 2, 1, 128, 128)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    ids = document_ids([1, 129, 70, 100], 300).expand(1, -1).contiguous()
    for deterministic in (False, True):
        op.ATTENTIONS.clear()
        kernels.update(backward=key_tile(64, persistent=True))
        engine = AttentionEngine(
            shape.meta(torch.float16), CustomIO({"documents": ("batch", "seq_len")}), scale(0.1), document(),
            OnlineSoftmax(), backend="interpret", deterministic=deterministic,
        )  # fmt: skip
        leaves = [tensors[n].requires_grad_() for n in "qkv"]
        torch.autograd.grad(engine(*leaves, ids), leaves, tensors["do"])
        assert walks() is not deterministic


def default_of(mask, dim, **axes):
    metas = Shape(1, 300, 300, 2, 1, dim, dim).meta(torch.float16)
    made = AttentionEngine(metas, CustomIO(axes), scale(0.1), mask, OnlineSoftmax(), device=H100())._kernels("cuda")
    return default_tiles(made.problem, made.maths.wanting(()), H100()).backward


def test_only_lists_of_tiles_ask_for_persistent_blocks():
    """What a start and an end of a block take counts where blocks have few steps."""
    assert default_of(document(), 128, documents=("batch", "seq_len")).persistent
    assert default_of(by_head, 128).persistent and not default_of(by_head, 64).persistent
    for mask, _ in (WALKS["full"], WALKS["causal"], WALKS["window"]):
        assert not default_of(mask, 128).persistent


def test_persistent_blocks_want_keys_of_their_own_and_head_dims_128():
    problem = Problem(2, 1, 128, 128, "float16")
    assert backward_persists(problem, key_tile(64)) and backward_persists(problem, key_tile(80))
    assert not backward_persists(problem, SHARED_KEYS)
    assert not backward_persists(replace(problem, dim_v=64), key_tile(64))
