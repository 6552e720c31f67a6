"""Which programs get a kernel placed by hand on Hopper, and with which tile."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import row_variable
from attention_engine.library import (
    OnlineRetention,
    OnlineSigmoid,
    OnlineSoftmax,
    causal,
    causal_from,
    dilated,
    relative_bias,
    scale,
    sliding_window,
    softcap,
)
from attention_engine.passes.derive_merge import derive_merge
from attention_engine.passes.maths import analyse, analyse_part
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.simplify import add
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan.attention_buffers import AHEAD, ENDS, MADE_BEFORE, TOGETHER
from attention_engine.plan.forms import HopperKeys, Tile
from attention_engine.plan.hopper import (
    pairs_in_turn,
    products_take_turns,
    rows_read,
    vanishes_with_weights,
    walks_turn,
    why_not_over_keys,
)
from attention_engine.plan.rules import ONE_CHAIN, WHOLE_DESCRIPTORS
from attention_engine.plan.units import (
    blocks_of_a_turn,
    pairs_in_order,
    pairs_of_a_unit,
    pairs_that_end,
    units_ahead,
)
from attention_engine.tuner.cases import find
from attention_engine.tuner.defaults import default_tiles

pytest.importorskip("tilelang")


def kernels(dims=(128, 128), online=OnlineSoftmax, score=None, mask=causal, dtype=torch.float16, gpu=arch.H100):
    metas = [meta_tensor(1, 2, 256, dim, dtype=dtype) for dim in (dims[0], *dims)]
    return AttentionEngine(metas, None, score or scale(0.1), mask, online(), device=gpu())._kernels("cuda")


def tiles(**problem):
    found = kernels(**problem).tiles
    return [(tile.q, tile.kv) if tile.hopper else None for tile in (found.forward, found.backward)]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ({}, [(128, 128), (80, 128)]),
        ({"mask": dilated(3)}, [(128, 128), (64, 128)]),
        ({"score": softcap(20.0, 0.1)}, [(128, 128), (64, 128)]),
        ({"dims": (64, 64)}, [(192, 128), (128, 128)]),
        ({"dims": (64, 64), "online": OnlineSigmoid}, [(128, 128), (128, 128)]),
        ({"dims": (64, 64), "score": softcap(20.0, 0.1)}, [(128, 128), (64, 128)]),
        ({"dims": (192, 128)}, [(128, 96), (64, 128)]),
        ({"dims": (192, 128), "score": softcap(20.0, 0.1)}, [(128, 96), (64, 64)]),
        ({"dims": (128, 256), "dtype": torch.bfloat16}, [(128, 112), (32, 128)]),
        ({"dims": (192, 128), "mask": sliding_window(99)}, [(128, 96), (64, 128)]),
        ({"dims": (192, 128), "mask": None}, [(128, 128), (64, 128)]),
        ({"dims": (256, 256)}, [(128, 80), (64, 64)]),
        ({"dims": (128, 64)}, [None, (80, 128)]),
        ({"dims": (96, 96)}, [(128, 128), (64, 128)]),
        ({"dims": (72, 72)}, [(128, 128), (64, 128)]),  # in tiles of 96 columns
        ({"dims": (112, 112)}, [(128, 128), (80, 128)]),
        ({"dims": (32, 32), "mask": None}, [(192, 128), (128, 128)]),
        ({"dims": (160, 160), "score": softcap(20.0, 0.1)}, [(128, 128), (64, 64)]),
        ({"dims": (100, 100)}, [None, None]),  # rows that are no whole 16 bytes
        ({"dims": (96, 64)}, [None, None]),
        ({"online": OnlineRetention}, [(128, 128), (80, 128)]),
        ({"dtype": torch.float32}, [None, None]),
        ({"gpu": arch.A100}, [None, None]),
    ],
    ids=lambda value: "-".join(map(str, value)) or "softmax" if isinstance(value, dict) else "",
)
def test_tiles_follow_the_registers_that_the_maths_needs(problem, expected):
    assert tiles(**problem) == expected


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("mha-128.alibi.full", (128, 128, ""), 64), ("mha-128.alibi.causal", (128, 128, "P"), 80),
        ("mha-64.alibi.full", (192, 128, ""), 128), ("mha-64.alibi.window", (192, 128, "P"), 128),
        ("mha-64.retention.causal", (192, 128, "PL"), 128), ("mha-128.retention.causal", (128, 128, "P"), 64),
        ("mha-128.relu.full", (192, 80, ""), 80), ("mha-128.relu.causal", (128, 128, "P"), 64),
        ("mha-128.sigmoid.full", (192, 80, ""), 80), ("mha-128.sigmoid.causal", (128, 128, "P"), 80),
        ("mha-64.softcap.full", (128, 128, ""), 64), ("mha-64.relu.full", (192, 128, ""), 64),
    ],
)  # fmt: skip
def test_maths_of_places_and_signs_get_the_larger_tiles_where_they_fit(name, forward, backward):
    (case,) = find(f"{name}.2048")
    made = AttentionEngine(case.metas(), **case.options(), device=arch.H100())._kernels("cuda")
    tiles = default_tiles(made.problem, made.maths.wanting(()), arch.H100())
    forms = "P" * tiles.forward.persistent + "L" * tiles.forward.lazy_rescale
    assert (tiles.forward.q, tiles.forward.kv, forms) == forward and tiles.backward.q == backward


@pytest.mark.parametrize(
    ("problem", "made"),
    [
        ({}, True), ({"dims": (64, 64)}, True), ({"score": softcap(20.0, 0.1)}, True), ({"mask": dilated(3)}, True),
        ({"online": OnlineSigmoid}, False),  # reads no delta
        ({"dims": (192, 128)}, False),  # no shared memory left
        ({"gpu": arch.A100}, False),
    ],
)  # fmt: skip
def test_which_blocks_make_delta_for_others(problem, made):
    assert kernels(**problem).plan.makes_delta is made


@pytest.mark.parametrize("keys", [128, 512, 2048, 4000, 8192, 30000])
@pytest.mark.parametrize("together", [1, 2, 8])
def test_units_that_start_together_dont_prepare_for_each_other(keys, together):
    blocks, places = together * -(-keys // 128), 132
    ahead = units_ahead(Tile(80, 128, 256, 2, HopperKeys()), keys, places, together)
    assert ahead * blocks >= places  # the first of the unit starts when the first that prepared for it is over
    assert ahead == 1 or (ahead - 2) * blocks < places


@pytest.mark.parametrize(("keys", "ahead"), [(1000, 17), (8192, 3), (16384, 3), (32768, 3), (131072, 3)])
def test_three_units_of_packed_sequences_at_least_end_in_turns(keys, ahead):
    tile = Tile(64, 128, 256, 2, HopperKeys(persistent=True, within_sequences=True))
    assert units_ahead(tile, keys, 132) == ahead
    if keys >= 16384:
        assert units_ahead(tile.in_form(within_sequences=False), keys, 132) < ahead


@pytest.mark.parametrize(
    ("batch", "keys", "together", "turn"),
    [
        (1, 8192, 2, 128), (1, 4096, 4, 128), (4, 2048, 8, 128),  # 128 of 132 blocks, whatever the cache holds
        (1, 5120, 4, 160), (1, 6144, 4, 192),  # an even number of units
        (1, 2048, 8, 128), (1, 100, 8, 8),  # all run at once
        (1, 16384, 1, 128), (1, 32768, 1, 132),  # more blocks of a pair than run at once
    ],
)  # fmt: skip
def test_units_of_walks_that_turn(batch, keys, together, turn):
    problem, tile = Problem(32, 8, 128, 128, "bfloat16"), Tile(80, 128, 256, 2, HopperKeys())
    assert pairs_of_a_unit(problem, tile, batch, keys, keys, 132, turns=True) == together
    assert blocks_of_a_turn(tile, keys, 132, together) == turn


@pytest.mark.parametrize(
    ("name", "batch", "keys", "ahead"),
    [
        ("llama-70b", 4, 2048, 4), ("llama-70b", 8, 2048, 8), ("llama-70b", 8, 1024, 4),  # all units
        ("llama-70b", 2, 4096, 2), ("llama-8b", 4, 2048, 2), ("llama-8b", 16, 1024, 8),  # longer, or fewer heads
        ("mha-128", 16, 1024, 2),  # of 16: a head has keys of its own
    ],
)  # fmt: skip
def test_short_blocks_of_many_heads_prepare_nothing(name, batch, keys, ahead):
    (case,) = find(f"{name}.softmax.causal.2048")
    made = AttentionEngine(case.metas(), **case.options(), device=arch.H100())._kernels("cuda")
    numbers = made.plan.numbers(batch, keys, keys)
    assert (numbers[AHEAD], numbers[MADE_BEFORE]) == (ahead, ahead)


@pytest.mark.parametrize(
    ("mask", "keys", "all_units"),
    [("causal", 2048, True), ("causal", 2176, False), ("full", 1024, True), ("full", 1152, False)],
)
def test_short_blocks_that_add_in_order_prepare_nothing(mask, keys, all_units):
    (case,) = find(f"mha-128.softmax.{mask}.2048")
    engine = AttentionEngine(case.metas(), **case.options(), device=arch.H100(), deterministic=True)
    numbers = engine._kernels("cuda").plan.numbers(8, keys, keys)
    units = -(-8 * 16 // numbers[TOGETHER])
    assert numbers[AHEAD] == units if all_units else numbers[AHEAD] < units


@pytest.mark.parametrize(
    ("dim", "batch", "keys", "together"),
    [
        (128, 8, 2048, 8), (128, 4, 4096, 4), (128, 2, 8192, 4), (128, 1, 16384, 2),  # as measured on an H100
        (64, 2, 2048, 16), (64, 8, 2048, 16), (64, 4, 4096, 8), (64, 2, 8192, 4), (64, 1, 16384, 2),
        (128, 1, 100, 16), (128, 1, 32768, 2),  # all; more blocks of a pair than run at once
    ],
)  # fmt: skip
def test_pairs_whose_blocks_add_in_order_together(dim, batch, keys, together):
    problem, tile = Problem(16, 16, dim, dim, "bfloat16"), Tile(80, 128, 256, 2, HopperKeys(in_order=True))
    assert pairs_in_order(problem, tile, 16 * batch, keys, 132) == together


@pytest.mark.parametrize(
    ("pairs", "keys", "together"),
    [
        (32, 2048, 4), (128, 2048, 4), (32, 4096, 2), (32, 8192, 1),  # half of 132 blocks
        (5, 2048, 3), (3, 100, 3),  # units alike; all
        (32, 8449, 0), (32, 20000, 0),  # a pair has more
    ],
)  # fmt: skip
def test_units_of_half_a_gpu_where_the_last_starts_longest_first(pairs, keys, together):
    assert pairs_that_end(Tile(80, 128, 256, 2, HopperKeys()), pairs, keys, 132) == together


def test_the_last_unit_starts_longest_first_at_head_dims_64_and_128():
    ends = {}
    for name in ("mha-128", "mha-64", "mha-32", "llama-8b"):
        (case,) = find(f"{name}.softmax.causal.2048")
        engine = AttentionEngine(case.metas(), **case.options(), device=arch.H100(), deterministic=True)
        plan = engine._kernels("cuda").plan
        assert plan.tiles.backward.in_order
        ends[name] = [plan.numbers(2, keys, keys)[ENDS] for keys in (2048, 16384)]  # the latter: more than half a GPU
    assert ends == {"mha-128": [1, 0], "mha-64": [1, 0], "mha-32": [0, 0], "llama-8b": [0, 0]}


@pytest.mark.parametrize(
    ("mask", "heads", "turns"),
    [
        (causal, (4, 2), True), (causal_from(3), (4, 2), True), (causal, (2, 2), False), (None, (4, 2), False),
        (sliding_window(99), (4, 2), False), (dilated(3), (4, 2), False),
    ],
)  # fmt: skip
def test_walks_of_grouped_heads_turn_where_all_see_the_last_queries(mask, heads, turns):
    problem = Problem(*heads, 128, 128, "bfloat16")
    plan = plan_tiles(AttentionEngine(mask_mod=mask)._program.mask)
    assert walks_turn(problem, Tile(80, 128, 256, 2, HopperKeys()), plan) is turns


@pytest.mark.parametrize(
    ("mask", "dim", "forms"),
    [
        (causal, 128, (True, False)), (sliding_window(99), 128, (True, False)), (None, 128, (True, False)),
        (dilated(3), 128, (True, False)), (causal, 64, (True, False)), (causal, 256, (True, False)),
        (None, 64, (True, False)), (dilated(3), 64, (True, False)), (dilated(3), 256, (False, False)),
    ],
)  # fmt: skip
def test_which_blocks_share_all_work_and_none_rescales_softmax_lazily(mask, dim, forms):
    metas = [meta_tensor(1, 2, 256, dim, dtype=torch.float16)] * 3
    tile = AttentionEngine(metas, None, scale(0.1), mask, OnlineSoftmax(), device=arch.H100())._kernels("cuda").tiles
    assert (tile.forward.persistent, tile.forward.lazy_rescale) == forms


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("softmax.full", True), ("softmax.causal", True), ("softmax.window", True), ("retention.causal", True),
        ("alibi.full", True), ("relu.causal", True), ("softcap.full", False), ("sigmoid.causal", False),
    ],
)  # fmt: skip
def test_products_take_turns_where_a_pair_takes_one_special_function(name, turns):
    (case,) = find(f"mha-128.{name}.2048")
    made = AttentionEngine(case.metas(), **case.options(), device=arch.H100())._kernels("cuda")
    assert products_take_turns(made.maths.forward_schedule) is turns


@pytest.mark.parametrize(
    ("batch", "heads", "length", "mask", "expected"),
    [
        (8, 6, 1024, None, (128, 176)), (2, 16, 1024, None, (128, 176)), (2, 16, 2048, None, (192, 128)),
        (2, 16, 8192, None, (192, 128)), (2, 16, 1024, causal, (192, 128)), (None, 16, 1024, None, (192, 128)),
        (2, 16, None, None, (192, 128)),
    ],
)  # fmt: skip
def test_blocks_are_lower_where_the_metas_say_that_a_last_wave_would_idle(batch, heads, length, mask, expected):
    metas = [meta_tensor(batch, heads, length, 64, dtype=torch.float16)] * 3
    engine = AttentionEngine(metas, None, scale(0.1), mask, OnlineSoftmax(), device=arch.H100())
    tile = engine._kernels("cuda").tiles.forward
    assert (tile.q, tile.kv, tile.persistent, tile.lazy_rescale) == (*expected, True, False)


@pytest.mark.parametrize(
    ("dim", "length", "mask", "ahead"),
    [
        (128, 2048, None, True), (128, 4096, None, False), (128, None, None, False), (128, 4096, causal, True),
        (128, 8192, causal, False), (128, 8192, dilated(3), True), (64, 1024, None, True),
        (64, 1024, causal, False), (64, 1024, dilated(3), False), (256, 1024, causal, False),
    ],
)  # fmt: skip
def test_queries_come_ahead_where_a_block_of_them_has_few_steps(dim, length, mask, ahead):
    metas = [meta_tensor(2, 4, length, dim, dtype=torch.float16)] * 3
    engine = AttentionEngine(metas, None, scale(0.1), mask, OnlineSoftmax(), device=arch.H100())
    assert engine._kernels("cuda").tiles.forward.queries_ahead is ahead


@pytest.mark.parametrize(
    ("name", "woven"),
    [
        ("mha-64.softmax.full.8192", True), ("vit.softmax.full.4096", True), ("mha-64.softmax.causal.8192", False),
        ("mha-64.softmax.window.8192", False), ("mha-64.alibi.full.8192", False), ("mha-64.softcap.full.8192", False),
        ("mha-64.retention.full.8192", False), ("mha-64.sigmoid.full.8192", False), ("mha-64.relu.full.8192", False),
        ("mha-64.softmax.full.1024", False), ("mha-128.softmax.full.8192", False),
    ],
)  # fmt: skip
def test_what_stands_among_exponentials_where_pairs_are_products_and_none_is_masked(name, woven):
    (case,) = find(name)
    made = AttentionEngine(case.metas(), **case.options(), device=arch.H100())._kernels("cuda")
    assert made.tiles.forward.woven is woven and (WHOLE_DESCRIPTORS in made.plan.forward.rules) is woven


def test_blocks_beside_sends_end_with_their_item():
    """A grid dealt over all SMs would wait for those that copies hold (benchmarks/notes.md, "Two GPUs")."""
    made = kernels()
    part = analyse_part(derive_merge(made.maths.program).part_program)
    for beside in (False, True):
        forward = default_tiles(made.problem, replace(part, beside_sends=beside), made.target).forward
        assert forward.hopper and forward.persistent is not beside
    ahead = kernels(mask=dilated(3))
    forward = default_tiles(ahead.problem, replace(ahead.maths, beside_sends=True), ahead.target).forward
    assert ahead.tiles.forward.queries_ahead and not (forward.persistent or forward.queries_ahead)


def test_what_never_rescales_has_no_lazy_form():
    metas = [meta_tensor(1, 2, 256, 64, dtype=torch.float16)] * 3
    engine = AttentionEngine(metas, None, scale(0.1), None, OnlineSigmoid(), device=arch.H100())
    assert not engine._kernels("cuda").tiles.forward.lazy_rescale


@pytest.mark.parametrize(
    ("score", "online", "one_chain"),
    [
        (scale(0.1), OnlineSoftmax, False),
        (softcap(20.0, 0.1), OnlineSoftmax, True),
        (scale(0.1), OnlineRetention, False),
    ],
)
def test_rows_go_in_one_chain_where_pairs_issue_much(score, online, one_chain):
    metas = [meta_tensor(1, 2, 256, 128, dtype=torch.float16)] * 3
    kernel = AttentionEngine(metas, None, score, None, online(), device=arch.H100())._kernels("cuda").forward
    assert kernel.configs.get(ONE_CHAIN, False) is one_chain


@pytest.mark.parametrize(
    ("online", "rows", "vanishes"), [(OnlineSoftmax, 2, True), (OnlineSigmoid, 0, True), (OnlineRetention, 1, False)]
)
def test_what_wide_heads_ask_of_a_backward_pass(online, rows, vanishes):
    metas = [meta_tensor(1, 2, 256, dim, dtype=torch.float16) for dim in (192, 192, 128)]
    kernels = AttentionEngine(metas, None, scale(0.1), causal, online(), device=arch.H100())._kernels("cuda")
    schedule = kernels.maths.backward_schedule
    assert (rows_read(schedule), vanishes_with_weights(schedule)) == (rows, vanishes)
    shared, own = Tile(64, 64, 256, 2, HopperKeys(shared_weights=True)), Tile(64, 128, 256, 2, HopperKeys())
    assert [pairs_in_turn(kernels.problem, tile) for tile in (shared, own)] == [False, True]
    crowded = replace(schedule, weights=add(schedule.weights, *(row_variable(f"row{n}") for n in range(4))))
    reasons = [why_not_over_keys(kernels.problem, s, CustomSums()) for s in (schedule, crowded)]
    assert reasons == [None, "more than 3 rows of numbers find no room"]


@pytest.mark.parametrize(("dims", "walks"), [((64, 64), True), ((128, 256), True), ((256, 256), False)], ids=str)
def test_diagonals_are_summed_by_walks_where_the_held_tile_fits(dims, walks):
    metas = [meta_tensor(1, 2, 256, dim, dtype=torch.float16) for dim in (dims[0], *dims)]
    custom, score = CustomIO({"table": ("heads", 65)}), relative_bias("table", 32, 0.1)
    made = AttentionEngine(metas, custom, score, causal, OnlineSoftmax(), device=arch.H100())._kernels("cuda")
    tile = default_tiles(made.problem, made.maths.wanting(("table",)), arch.H100()).backward
    assert tile.hopper and tile.skewed_sums is walks


@pytest.mark.parametrize(
    ("mask", "dim", "wanted", "clamped", "queries"),
    [
        (None, 128, True, True, 80), (causal, 128, True, True, 64), (sliding_window(99), 128, True, True, 64),
        (None, 128, False, True, 64), (None, 128, True, False, 64), (None, 64, True, True, 64),
    ],
)  # fmt: skip
def test_a_table_of_distances_gets_the_larger_tile_where_its_gradient_is_made_and_nothing_is_masked(
    mask, dim, wanted, clamped, queries
):
    def unclamped(s, custom, b, h, q_idx, kv_idx):
        return s * 0.1 + custom["table"][h, q_idx - kv_idx + 32]

    metas = [meta_tensor(1, 2, 256, dim, dtype=torch.float16)] * 3
    custom, score = CustomIO({"table": ("heads", 65)}), relative_bias("table", 32, 0.1) if clamped else unclamped
    made = AttentionEngine(metas, custom, score, mask, OnlineSoftmax(), device=arch.H100())._kernels("cuda")
    maths = made.maths.wanting(("table",) if wanted else ())
    assert default_tiles(made.problem, maths, arch.H100()).backward.q == queries


def test_atomics_of_a_pair_are_left_to_the_straight_line_kernel():
    def score(s, custom, b, h, q_idx, kv_idx):
        return s * 0.1 + custom["table"][(q_idx * kv_idx) % 7]

    metas = [meta_tensor(1, 2, 256, 128, dtype=torch.float16)] * 3
    engine = AttentionEngine(metas, CustomIO({"table": (7,)}), score, causal, OnlineSoftmax(), device=arch.H100())
    kernels = engine._kernels("cuda")
    asked = analyse(kernels.maths.program)
    found = [default_tiles(kernels.problem, maths, arch.H100()) for maths in (asked, asked.wanting(()))]
    assert [tiles.forward.hopper for tiles in found] == [True, True]
    assert [tiles.backward.hopper for tiles in found] == [False, True]
