"""The tiles of linear attention that are worth trying, and what a tune file calls its problems."""

from dataclasses import replace

import pytest

from attention_engine import arch
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import LinearProblem, LinearTile
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_space import (
    cycles,
    demand,
    linear_key,
    linear_space,
    reason_against,
    tile_of,
    with_tile,
)

H100 = arch.H100()
WIDE = LinearProblem(32, 32, 32, 256, 512, "bfloat16")
SHARED = LinearProblem(80, 1, 1, 128, 64, "bfloat16")
KERNELS = ("forward walk", "forward states", "forward output", "backward states", "backward dq", "backward dk",
           "backward dv", "backward walk dq", "backward walk dk", "backward walk dv")  # fmt: skip
PROGRAM = trace_mods({}, CustomIO({}))


def walking(problem):
    tiles = default_linear_tiles(PROGRAM, problem, H100)
    return replace(tiles, walks=dict.fromkeys(("dq", "dk", "dv"), tiles.forward))


AHEAD = {  # problem, mods: do warps copy heads of dq and dk ahead?
    "shared": (SHARED, {}, True),
    "shared fp16, 64/64": (replace(SHARED, dim=64, dtype="float16"), {}, True),
    "factors": (SHARED, {"q": lambda x, c: x * 0.5, "v": lambda x, c: x * 2.0}, True),
    "groups": (replace(SHARED, q_heads=8, k_heads=8), {}, True),
    "groups that differ": (replace(SHARED, k_heads=8), {}, False),
    "own heads": (replace(SHARED, q_heads=80, k_heads=80), {}, False),
    "a group of 41": (replace(SHARED, heads=41), {}, False),
    "v's dim in steps": (replace(SHARED, dim_v=128), {}, False),
    "padded": (replace(SHARED, dim_v=40), {}, False),
    "bent": (SHARED, {"k": lambda x, c: x.sigmoid()}, False),
    "fp32": (replace(SHARED, dtype="float32"), {}, False),
    "wide": (replace(WIDE, q_heads=1, k_heads=1), {}, False),
}


@pytest.mark.parametrize(("problem", "mods", "ahead"), AHEAD.values(), ids=AHEAD)
def test_heads_are_copied_ahead_where_one_loop_holds_all_products(problem, mods, ahead):
    rows = default_linear_tiles(trace_mods(mods, CustomIO({})), problem, H100).rows
    expected = replace(rows["dq"], stages=2, specialize=True, blocks=2, heads=40)
    assert (rows["dq"] == expected) is ahead and rows["dk"] == rows["dq"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("problem", [WIDE, SHARED], ids=["wide", "shared"])
def test_what_may_run_fits_and_comes_likely_first(kernel, problem):
    tiles = walking(problem)
    found = linear_space(kernel, problem, H100, tiles, (8, 2048))
    first, *others = found.tiles
    assert first == tile_of(tiles, kernel)
    assert len(found.tiles) == len(set(found.tiles)) > 3
    assert all(reason_against(kernel, problem, H100, t) is None for t in others)
    assert all(demand(kernel, problem, t).shared_bytes <= H100.shared_memory_per_block for t in others)
    times = [cycles(kernel, problem, H100, t, (8, 2048)) for t in others]
    assert times == sorted(times) and times[0] < times[-1]
    assert not {t for t, _ in found.rejected} & set(found.tiles)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tile_put_in_is_the_tile_found(kernel):
    tiles, tile = walking(WIDE), LinearTile(64, 32, 32, 128, 0, blocks=3)
    changed = with_tile(tiles, kernel, tile)
    assert tile_of(changed, kernel) == tile
    others = [k for k in KERNELS if k.split()[-1] != kernel.split()[-1] or "walk" in k.split()]
    if kernel.endswith("states"):  # whoever reads states has their chunks
        assert {t.chunk for t in changed.rows.values()} == {64}
    else:
        assert all(tile_of(changed, k) == tile_of(tiles, k) for k in others if k != kernel)


def test_every_rejected_tile_has_a_reason():
    reasons = {
        reason.rstrip("0123456789").split(",")[0]: tile
        for kernel in KERNELS
        for tile, reason in linear_space(kernel, WIDE, H100, walking(WIDE), (1, 512)).rejected
    }
    assert any("registers" in r for r in reasons) and any("shared memory" in r for r in reasons)
    assert any("don't cut" in r for r in reasons)


def test_few_heads_make_one_wave_of_blocks():
    tile = LinearTile(64, 256, 128, 256, 1, in_registers=False)
    few, more, many = (cycles("forward walk", WIDE, H100, tile, (batch, 4096)) for batch in (1, 2, 8))
    assert few < more < many
    assert cycles("forward walk", WIDE, H100, tile, (1, 8192)) == pytest.approx(2 * few)


KEYS = {
    "batch": {"lengths": (2, 100)},
    "length": {"lengths": (1, 300)},
    "kernel": {"kernel": "forward states"},
    "heads": {"problem": replace(WIDE, q_heads=8)},
    "dtype": {"problem": replace(WIDE, dtype="float16")},
    "gpu": {"target": arch.A100()},
}


@pytest.mark.parametrize("changed", KEYS)
def test_a_key_tells_problems_apart(changed):
    usual = {"kernel": "forward walk", "problem": WIDE, "target": H100, "lengths": (1, 100)}

    def key(kernel, problem, target, lengths):
        return linear_key(kernel, PROGRAM, problem, target, lengths, ("decay",))

    assert key(**usual) != key(**{**usual, **KEYS[changed]})
    assert key(**usual) == key(**{**usual, "lengths": (1, 128)})  # one bucket
    assert "gradients" not in key(**usual) and key(**{**usual, "kernel": "backward dq"})["gradients"] == ["decay"]


def test_warps_of_their_own_copy_where_heads_are_walked_in_one_loop():
    _, *tiles = linear_space("backward dq", SHARED, H100, default_linear_tiles(PROGRAM, SHARED, H100), (8, 2048)).tiles
    for tile in tiles:
        assert not tile.specialize or (tile.stages > 0 and tile.heads > 1 and tile.inner >= SHARED.dim_v)
    assert any(t.specialize for t in tiles) and not all(t.specialize for t in tiles)
