"""Which calls have blocks over keys of one query head each, and which programs may."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.ir.problem import Problem
from attention_engine.library import OnlineSoftmax, alibi, and_masks, causal, document, scale, sliding_window
from attention_engine.plan.few_key_heads import reads_copies, suits_a_head_each, time
from attention_engine.plan.forms import HopperKeys, Tile
from attention_engine.plan.units import CallSize
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.tuner.cases import find

pytest.importorskip("tilelang")

PLACES = 132


def engine_of(heads, kv_heads, *, batch=1, length=8192, dim=128, mask=causal, io=None, score=None, **options):
    metas = [meta_tensor(batch, n, length, dim, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]
    score = score or scale(0.1)
    return AttentionEngine(metas, io, score, mask, OnlineSoftmax(), device=arch.H100(), **options)


def kernels_of(*heads, **how):
    return engine_of(*heads, **how)._kernels("cuda", trained=True)


@pytest.mark.parametrize(
    ("heads", "batch", "length", "mask", "one"),
    [
        ((8, 1), 1, 2048, causal, True), ((8, 1), 1, 8192, causal, True), ((8, 1), 1, 16384, causal, True),
        ((8, 1), 1, 8192, None, True), ((8, 1), 1, 16384, None, False),  # 128 blocks for 132 places
        ((8, 2), 1, 8192, causal, True), ((8, 2), 2, 8192, causal, False),
        ((32, 8), 1, 2048, causal, True), ((32, 8), 1, 4096, causal, False), ((32, 8), 1, 2048, None, False),
        ((64, 8), 1, 1024, causal, True), ((64, 8), 1, 4096, causal, False),
        ((8, 8), 1, 1024, causal, False),  # have keys of their own
        ((8, 1), 1, 8192, sliding_window(1024), True),
    ],
)  # fmt: skip
def test_heads_are_apart_where_blocks_of_all_would_leave_much_of_a_gpu_idle(heads, batch, length, mask, one):
    kernels = kernels_of(*heads, mask=mask)
    assert suits_a_head_each(kernels.plan, batch, length, length) is one
    other = kernels.of_call(batch, length, length)
    assert (other is not kernels) is one
    assert other.problem.copies == (heads[0] // heads[1] if one else 1)
    assert other.problem.heads_of_keys == heads[1]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["llama-8b", "llama-70b"])
def test_calls_with_enough_blocks_sum_a_group_in_registers(name, mask):
    cases = [case for case in find(f"{name}*.softmax.{mask}.*") if case.length * case.shape.batch >= 8192]
    assert len(cases) >= 5
    shape = cases[0].shape
    plan = kernels_of(shape.heads, shape.kv_heads, mask=causal if mask == "causal" else None).plan
    for case in cases:
        assert not suits_a_head_each(plan, case.shape.batch, case.length, case.length), case.name


def test_a_batch_of_one_decides_where_bits_are_the_same_in_every_batch():
    even = kernels_of(16, 2, deterministic=True).plan
    for batch in (1, 64):
        assert even.tiles.backward.in_order and suits_a_head_each(even, batch, 4096, 4096)
        assert not suits_a_head_each(kernels_of(32, 8, deterministic=True).plan, batch, 2048, 2048)  # gains a half


@pytest.mark.parametrize("how", [{"kv_heads": 1}, {"kv_heads": 2, "dim": 96}])
def test_blocks_of_one_head_add_in_order_where_those_of_a_group_cannot(how):
    of_groups = kernels_of(8, deterministic=True, **how)
    assert of_groups.plan.over_queries
    for batch, length in ((1, 4096), (64, 16384)):
        assert of_groups.of_call(batch, length, length).plan.tiles.backward.in_order


@pytest.mark.parametrize(
    ("how", "may"),
    [
        ({}, True), ({"mask": and_masks(causal, document("d")), "io": CustomIO({"d": ("batch", "seq_len")})}, True),
        ({"io": CustomIO({"slopes": ("heads",)}), "score": alibi(0.1)}, False),  # whose gradients are sums of rows
        ({"io": CustomIO({"bias": ("seq_len_kv",)}),
          "score": lambda score, custom, b, h, q_idx, kv_idx: score + custom["bias"][kv_idx]}, False),
        ({"io": CustomIO({"bias": ("heads", "seq_len_kv")}),
          "score": lambda score, custom, b, h, q_idx, kv_idx: score + custom["bias"][h, kv_idx]}, True),
    ],
)  # fmt: skip
def test_the_kernel_over_keys_alone_reads_copies(how, may):
    kernels = kernels_of(8, 1, dim=64, **how)
    assert suits_a_head_each(kernels.plan, 1, 4096, 4096)
    assert (kernels.of_call(1, 4096, 4096) is not kernels) is may


def test_straight_kernels_have_all_heads_of_a_group():
    assert not suits_a_head_each(kernels_of(8, 1, dim=72 + 1).plan, 1, 1024, 1024)


def test_packed_sequences_count_as_a_batch_of_their_mean_length():
    made = engine_of(8, 1)._asked(arch.H100(), False, packed="alike")
    program_kernels = ProgramKernels(made.maths, made.specs, False, arch.H100(), False)
    q, k = (torch.empty(1, 900, heads, 128) for heads in (8, 1))
    tables = [torch.zeros(5, dtype=torch.int32) for _ in made.specs]
    assert program_kernels._sizes(q, k, tables) == (4, 225, 225)
    assert ProgramKernels(made.maths, [], False, arch.H100(), False)._sizes(q, k, []) == (1, 900, 900)


@pytest.mark.parametrize(("sequences", "rows", "one"), [(1, 8192, True), (16, 512, True), (16, 2048, False)])
def test_packed_sequences_are_parted_where_they_have_few_blocks(sequences, rows, one):
    of_sequences = engine_of(8, 1)._kernels("cuda", trained=True, packed="alike")
    assert of_sequences.plan.tiles.backward.within_sequences
    other = of_sequences.of_call(sequences, rows, rows)
    tile = other.plan.tiles.backward
    assert (other.problem.copies > 1) is one and tile.within_sequences and tile.persistent
    same_bits = engine_of(8, 1, deterministic=True)._kernels("cuda", trained=True, packed="alike")
    assert same_bits.of_call(sequences, rows, rows) is same_bits


def test_a_call_takes_as_long_as_its_longest_block_or_its_share_of_all_steps():
    problem, tile = Problem(8, 1, 128, 128, "bfloat16"), Tile(64, 128, 256, 2, HopperKeys())
    size = CallSize(1, 8192, 8192, PLACES)
    assert time(problem, tile, True, size, 1) == 128 * 8 == time(problem, tile, False, size, 1)
    assert time(problem, tile, False, size, 8) == 4 * (128 + 3)  # 512 blocks in four waves
    assert time(problem, tile, True, size, 8) == pytest.approx((128 * 65 / 128 + 3) * 512 / PLACES)
    assert time(problem, tile, True, CallSize(1, 0, 0, PLACES), 1) == 0  # no keys, no blocks


def test_kernels_of_few_key_heads_are_compiled_ahead_for_any_length():
    for batch in (1, 16):
        names = engine_of(8, 1, batch=batch)._all_kernels(arch.H100())
        assert {"backward", "backward of few key heads", "add_parts of few key heads"} <= {*names}
    assert not [name for name in engine_of(8, 8)._all_kernels(arch.H100()) if "few key heads" in name]
    source = engine_of(8, 1).source("add_parts of few key heads", device=arch.H100())
    assert "dk_parts" in source


def test_a_report_says_which_blocks_the_metas_lengths_get():
    assert "each block has one query head" in engine_of(8, 1).explain()
    assert "each block has one query head" not in engine_of(8, 1, batch=16).explain()


def test_a_step_begins_to_compile_what_its_backward_pass_launches(monkeypatch):
    begun = []
    monkeypatch.setattr("attention_engine.runtime.program_kernels.begin_all", begun.extend)
    monkeypatch.setattr("attention_engine.runtime.run.begin_all", lambda kernels: None)
    made = engine_of(8, 1)._asked(arch.H100(), False)
    program_kernels = ProgramKernels(made.maths, [], False, arch.H100(), False)
    q, k = (torch.empty(1, 2048, heads, 128, dtype=torch.bfloat16) for heads in (8, 1))
    program_kernels.begin_backward(q, k, k, [], ())
    assert {kernel.problem.copies for kernel in begun} == {8}


def test_sums_that_a_plan_lacks_are_refused():
    assert not reads_copies(kernels_of(8, 1, io=CustomIO({"slopes": ("heads",)}), score=alibi(0.1)).plan)
