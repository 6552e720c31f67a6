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
    tiles = default_linear_tiles(problem, H100)
    return replace(tiles, walks=dict.fromkeys(("dq", "dk", "dv"), tiles.forward))


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


@pytest.mark.parametrize("problem", [WIDE, SHARED], ids=["wide", "shared"])
def test_one_kernel_for_dq_and_dk_is_tried(problem):
    tiles = walking(problem)
    joined = [t for t in linear_space("backward dq", problem, H100, tiles, (8, 2048)).tiles if t.with_dk]
    assert len(joined) > 3
    assert not any(t.with_dk for t in linear_space("backward dk", problem, H100, tiles, (8, 2048)).tiles)


def test_warps_of_their_own_copy_where_heads_are_walked_in_one_loop():
    tiles = default_linear_tiles(SHARED, H100)
    for tile in linear_space("backward dq", SHARED, H100, tiles, (8, 2048)).tiles[1:]:
        assert not tile.specialize or (tile.stages > 0 and tile.heads > 1 and tile.inner >= SHARED.dim_v)
    assert any(t.specialize and t.with_dk for t in linear_space("backward dq", SHARED, H100, tiles, (8, 2048)).tiles)
