"""Candidates: what may run stays, what can't falls for a reason, and the data of default tiles is whole."""

import pytest

from attention_engine import arch
from attention_engine.codegen.compile import Resources
from attention_engine.errors import TileDoesNotFit
from attention_engine.ir.problem import Problem
from attention_engine.plan.demand import demand
from attention_engine.plan.forms import KERNEL_NAMES, HopperForward, HopperKeys, Straight, Tile
from attention_engine.tuner import defaults
from attention_engine.tuner.cost import Work, blocks_per_sm, cycles
from attention_engine.tuner.problems import bucket
from attention_engine.tuner.space import MOST_SPILLED, judge, reason_against, register_limit, space

H100, A100, RTX4090, MI300X = arch.H100(), arch.A100(), arch.RTX4090(), arch.MI300X()
PROBLEM = Problem(16, 16, 128, 128, "float16")
WIDE = Problem(16, 16, 256, 256, "float16")
DEEP = Problem(16, 16, 192, 128, "float16")


@pytest.mark.parametrize(("kernel", "problem", "gpu", "tile", "reason"), [
    ("forward", PROBLEM, H100, Tile(128, 128, 256, 2), None),
    ("forward", PROBLEM, H100, Tile(128, 128, 64, 2), "wgmma wants whole warpgroups of 128 threads"),
    ("forward", PROBLEM, H100, Tile(96, 128, 256, 2), "96 rows don't cut into 128, what 256 threads take at a time"),
    ("forward", PROBLEM, H100, Tile(128, 128, 128, 2), "needs some 360 registers a thread, and there are 255"),
    ("forward", PROBLEM, H100, Tile(128, 192, 256, 3),
     "needs at least 327680 bytes of shared memory, and there are 232448"),
    ("forward", PROBLEM, RTX4090, Tile(128, 128, 256, 2),
     "needs at least 163840 bytes of shared memory, and there are 101376"),
    ("forward", PROBLEM, A100, Tile(64, 64, 256, 2), "64 rows don't cut into 128, what 256 threads take at a time"),
    ("forward", PROBLEM, MI300X, Tile(32, 32, 32, 1), "32 threads are no whole warps of 64"),
    ("backward", PROBLEM, H100, Tile(64, 128, 256, 2), None),
    ("backward", PROBLEM, H100, Tile(80, 128, 256, 2),
     "80 queries don't cut into the 64 rows that a warpgroup takes of a product"),
    ("backward", PROBLEM, H100, Tile(80, 128, 256, 2, HopperKeys()), None),
    ("backward", PROBLEM, H100, Tile(256, 128, 256, 2, HopperKeys()),
     "needs at least 393216 bytes of shared memory, and there are 232448"),
    ("forward", PROBLEM, H100, Tile(192, 80, 384, 2, HopperForward()), None),
    ("forward", PROBLEM, H100, Tile(192, 96, 384, 2, HopperForward()),
     "needs some 161 registers a thread, and there are 160"),
    ("backward", PROBLEM, H100, Tile(112, 128, 256, 2, HopperKeys()),
     "needs some 264 registers a thread, and there are 240"),
    ("backward", DEEP, H100, Tile(64, 128, 256, 2, HopperKeys()), None),
    ("backward", DEEP, H100, Tile(80, 128, 256, 2, HopperKeys()),
     "80 rows of dQ don't cut into 64, and dQ transposed wants head dims in units of 128"),
    ("backward", DEEP, H100, Tile(128, 128, 256, 2, HopperKeys()),
     "needs at least 376832 bytes of shared memory, and there are 232448"),
    ("backward", WIDE, H100, Tile(64, 64, 256, 2, HopperKeys(shared_weights=True)), None),
    ("backward", WIDE, H100, Tile(80, 64, 256, 2, HopperKeys(shared_weights=True)),
     "warpgroups share 64 keys, and queries in units of 16 each"),
    ("backward", PROBLEM, H100, Tile(64, 64, 256, 2), "64 rows don't cut into 128, what 256 threads take at a time"),
    ("backward", PROBLEM, H100, Tile(64, 64, 256, 2, Straight(True)), None),
    ("backward", PROBLEM, H100, Tile(16, 16, 256, 2, Straight(True)), "8 warps can't share so few pairs"),
    ("queries", WIDE, H100, Tile(128, 128, 256, 2),
     "needs at least 393216 bytes of shared memory, and there are 232448"),
])  # fmt: skip
def test_a_tile_that_cannot_run_has_its_reason(kernel, problem, gpu, tile, reason):
    assert reason_against(kernel, problem, gpu, tile) == reason


def test_registers_are_those_that_copying_threads_leave():
    assert register_limit(H100, Tile(128, 128, 256, 2)) == 240  # as setmaxnreg gives two warpgroups
    assert register_limit(H100, Tile(192, 128, 384, 2)) == 160
    assert register_limit(A100, Tile(128, 64, 256, 2)) == 255
    assert register_limit(A100, Tile(128, 64, 512, 2)) == 128


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("gpu", [H100, A100, RTX4090, MI300X, "interpret"], ids=str)
def test_a_space_holds_the_default_first_and_nothing_that_cannot_run(kernel, gpu):
    tiles = defaults.default_tiles(PROBLEM, None, gpu)
    found = space(kernel, PROBLEM, gpu, getattr(tiles, kernel))
    assert found.tiles[0] == getattr(tiles, kernel)
    assert len(set(found.tiles)) == len(found.tiles) > 10
    assert not {t for t, _ in found.rejected} & set(found.tiles)
    if gpu != "interpret":
        assert all(demand(kernel, PROBLEM, t).shared_bytes <= gpu.shared_memory_per_block for t in found.tiles[1:])


@pytest.mark.parametrize(("kernel", "default"), [
    ("forward", Tile(128, 128, 256, 2, HopperForward())), ("backward", Tile(80, 128, 256, 2, HopperKeys())),
])  # fmt: skip
def test_kernels_placed_by_hand_are_tried_where_the_default_is_one(kernel, default):
    by_hand = [tile for tile in space(kernel, PROBLEM, H100, default).tiles if tile.hopper]
    assert by_hand[0] == default and len(by_hand) > 5
    straight = Tile(64, 128, 256, 2)
    assert not any(tile.hopper for tile in space(kernel, PROBLEM, H100, straight).tiles)


def test_backward_tiles_that_no_warpgroup_can_cut_fall_before_compiling():
    fallen = dict(space("backward", PROBLEM, H100, Tile(80, 128, 256, 2, HopperKeys())).rejected)
    straight, shared = Tile(96, 64, 128, 2), Tile(64, 96, 256, 1, Straight(shared_weights=True))
    assert "96 queries don't cut into the 64 rows" in fallen[straight] and "96 keys" in fallen[shared]
    assert "registers" in fallen[Tile(96, 128, 256, 2, HopperKeys())]


def test_walks_down_diagonals_are_tried_where_the_default_has_them():
    table = Problem(16, 16, 128, 128, "float16", custom=(("table", "float32", (257,)),))
    defaults_of_both = [Tile(64, 128, 256, 2, HopperKeys(skewed_sums=skews)) for skews in (False, True)]
    skewed = [[t for t in space("backward", table, H100, d).tiles if t.skewed_sums] for d in defaults_of_both]
    assert not skewed[0] and len(skewed[1]) > 1
    assert defaults_of_both[0] in space("backward", table, H100, defaults_of_both[1]).tiles


def test_compiled_kernels_are_judged_by_what_they_really_take():
    assert judge(Resources(168, 0, 0, 232448), H100) is None
    assert judge(Resources(168, 0, 0, 232449), H100) == "needs 232449 bytes of shared memory, and there are 232448"
    assert judge(Resources(255, MOST_SPILLED, 1, 1000), H100) == f"spills {MOST_SPILLED + 1} bytes a thread"


def test_cost_knows_waves_occupancy_and_masks():
    def cost(tile, **work):
        return cycles("forward", PROBLEM, H100, tile, Work(**{"batch": 2, "queries": 8192, "keys": 8192, **work}))

    tile = Tile(128, 128, 256, 2)
    assert cost(tile) > 1.8 * cost(tile, kept=0.5)
    assert cost(tile) == pytest.approx(4 * cost(tile, queries=4096, keys=4096), rel=0.1)
    assert cost(tile) < cost(Tile(64, 16, 128, 1))
    assert cost(tile, batch=1, queries=128) == cost(tile, batch=8, queries=128)  # both one wave of 132 SMs
    assert blocks_per_sm("forward", Problem(16, 16, 64, 64, "float16"), H100, Tile(64, 64, 128, 2)) >= 2
    assert blocks_per_sm("forward", PROBLEM, H100, tile) == 1


def test_lengths_of_one_power_of_two_share_a_bucket():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


FAMILIES = ("sm_90a", "sm_80", "sm_89", "cdna")


@pytest.mark.parametrize("family", FAMILIES)
def test_default_tiles_are_marked_with_how_they_were_found(family):
    found = defaults.entries(family)
    assert {e.key["kernel"] for e in found} == set(KERNEL_NAMES)
    assert {e.key["arch"] for e in found} == {family}
    assert all(set(e.key) == {"kernel", "arch", "dtype", "dim", "dim_v", "measured"} for e in found)
    measured = {e.key["measured"] for e in found if e.key["measured"] != "no"}
    assert all("H100" in name for name in measured) if family == "sm_90a" else not measured


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("gpu", arch.KNOWN_GPUS, ids=lambda gpu: gpu.__name__)
def test_every_usual_problem_has_default_tiles(gpu, dtype):
    for dim in (16, 64, 80, 128, 192, 256):
        tiles = defaults.default_tiles(Problem(4, 2, dim, dim, dtype), None, gpu())
        every = (tiles.forward, tiles.backward, tiles.queries)
        assert all((tile.stages == 0) is (dtype == "float32") for tile in every)


def test_head_dims_beyond_every_class_are_refused():
    with pytest.raises(TileDoesNotFit, match="head dims 2048 and 64 in float16 have no tile for sm_90a"):
        defaults.default_tiles(Problem(4, 2, 2048, 64, "float16"), None, H100)


@pytest.mark.parametrize(("dtype", "way_out"), [("float16", "smaller head dims;"), ("float32", "a 16-bit dtype;")])
def test_only_fp32_is_told_that_16_bits_take_less(dtype, way_out):
    with pytest.raises(TileDoesNotFit) as caught:
        defaults.default_tiles(Problem(4, 2, 2048, 64, dtype), None, H100)
    assert way_out in str(caught.value)
