"""Packed sequences that are long in the mean: which kernel over keys a call launches, and which a plan has."""

import pytest
import torch

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.library import OnlineSoftmax, causal, scale, sliding_window
from attention_engine.plan.forms import HopperKeys, Tile
from attention_engine.plan.long_sequences import LONG

pytest.importorskip("tilelang")

ONE_BY_ONE = "backward of long sequences"


def engine_of(heads, kv_heads, dim=128, mask=causal, **options):
    metas = [meta_tensor(1, n, 256, dim, dtype=torch.float16) for n in (heads, kv_heads, kv_heads)]
    return AttentionEngine(metas, None, scale(0.1), mask, OnlineSoftmax(), device=arch.H100(), **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "packed", "more", "own"),
    [
        (8, 2, 128, "alike", {}, True), (8, 2, 128, "unlike", {"mask": sliding_window(100)}, True),
        (8, 1, 128, "alike", {}, True), (16, 1, 128, "alike", {}, False),  # of 16 heads a step has 15 comparisons
        (8, 8, 128, "alike", {}, False), (8, 2, 64, "alike", {}, False), (8, 2, 128, None, {}, False),
        (8, 2, 128, "alike", {"deterministic": True}, False),
    ],
)  # fmt: skip
def test_a_plan_has_a_kernel_for_them_where_heads_share_keys(heads, kv_heads, dim, packed, more, own):
    engine = engine_of(heads, kv_heads, dim, **more)
    kernels = engine._kernels("cuda", trained=True, packed=packed)
    assert (ONE_BY_ONE in engine._all_kernels(arch.H100(), packed=packed)) is own
    long = kernels.of_call(400, LONG, LONG)
    assert (long is not kernels) is own and kernels.of_call(400, LONG - 1, LONG) is kernels
    assert {name for name, kernel in long.of_backward.items() if kernel is not kernels.of_backward[name]} == (
        {"backward"} if own else set()
    )
    if "deterministic" not in more:
        assert (f"where these have {LONG} queries in the mean or more" in engine.explain(packed)) is own
    others, of_long = (next(each for each in made.backward.given if isinstance(each, Tile)) for made in (kernels, long))
    assert not others.by_heads and of_long.by_heads is own
    assert not own or of_long == others.in_form(by_heads=True)


def test_a_report_says_where_blocks_of_keys_hold_several_sequences():
    default, same_bits = (engine_of(8, 2, deterministic=of).explain("alike") for of in (False, True))
    of_keys = "each block of keys lies in one of the packed sequences"
    assert of_keys in default and of_keys not in same_bits
    assert "a block of keys may hold several of the packed sequences" in same_bits
    (line,) = [each for each in same_bits.splitlines() if each.startswith("backward over keys: ")]
    assert "within sequences" not in line


def test_a_report_says_that_blocks_add_to_dq_in_order():
    assert "for Hopper, in order, stores first" in engine_of(8, 8, deterministic=True).explain()


def test_one_head_after_another_asks_for_blocks_of_one_sequence():
    with pytest.raises(ValueError, match="within_sequences"):
        HopperKeys(by_heads=True)
