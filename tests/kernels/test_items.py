"""Work items of persistent kernels: each is dealt once, and causal work evenly."""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")
import tilelang.language as T

from attention_engine.codegen.interpreter import Interpreter
from attention_engine.ir.problem import Problem
from attention_engine.kernels.common import Sizes, build
from attention_engine.kernels.hopper.forward_copies import take_number
from attention_engine.kernels.items import Deal, Items, KeyBlocks, Shares
from attention_engine.plan.forms import Tile
from attention_engine.plan.units import (
    CallSize,
    pairs_of_a_listed_unit,
    pairs_of_a_unit,
    pairs_that_alternate,
    rows_that_meet,
)

TILE = Tile(128, 128, 256, 2)


def dealt(batch, heads, length, longest_last, places=132, dim=128, group=1, tile=TILE):
    """Who gets each item (batch, head, block), counted from 1, and in which of its turns."""
    problem = Problem(heads, heads // group, dim, dim, "float16")
    sizes = Sizes(problem)
    found = [torch.zeros(batch, heads, -(-length // tile.q), dtype=torch.int32) for _ in range(2)]
    shape = [sizes.batch, heads, T.ceildiv(sizes.q, tile.q)]
    parameters = {"batch": sizes.batch, "q_length": sizes.q, "kv_length": sizes.kv}
    parameters |= {"owner": T.Tensor(shape, "int32"), "turn": T.Tensor(shape, "int32")}

    @T.macro
    def body(buffers):
        items = Items(problem, tile, sizes, longest_last, places)
        with T.Kernel(items.grid, threads=128) as place:
            deal = Deal(items, place)
            for turn in T.serial(deal.turns):
                number = deal.number_in(turn)
                if number < deal.count:
                    block, head, sequence = deal.item_of(number)
                    buffers["owner"][sequence, head, block] = buffers["owner"][sequence, head, block] * 1000 + place + 1
                    buffers["turn"][sequence, head, block] = turn

    Interpreter(build("deal", parameters, body))(batch, length, length, *found)
    return found


def counted(batch, heads, length, longest_last, places):
    """How often each item (batch, head, block) comes where a counter deals them, and the counter after the launch."""
    problem = Problem(heads, heads, 128, 128, "float16")
    sizes, found = Sizes(problem), torch.zeros(batch, heads, -(-length // TILE.q), dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    parameters = {"batch": sizes.batch, "q_length": sizes.q, "kv_length": sizes.kv}
    parameters |= {"times": T.Tensor([sizes.batch, heads, T.ceildiv(sizes.q, TILE.q)], "int32")}
    parameters |= {"counter": T.Tensor([1], "int32")}

    @T.macro
    def body(buffers):
        items = Items(problem, TILE, sizes, longest_last, places).counted()
        with T.Kernel(items.grid, threads=32) as place:
            deal, count = Deal(items, place), items.blocks * items.pairs
            number = T.alloc_var("int32")
            number = deal.number
            taken = T.alloc_local([1], "int32")
            while number < count:
                block, head, sequence = deal.item_of(number + 0)
                if T.get_thread_binding() == 0:
                    buffers["times"][sequence, head, block] = buffers["times"][sequence, head, block] + 1
                take_number(buffers["counter"], taken, count - 1)
                number = deal.grid + taken[0]

    Interpreter(build("counted", parameters, body))(batch, length, length, found, counter)
    return found, counter


SIZES = [(1, 1, 128), (2, 3, 1000), (1, 5, 300), (3, 4, 5000), (2, 16, 2048), (1, 3, 12288), (1, 24, 40), (7, 2, 1)]


@pytest.mark.parametrize("longest_last", [False, True])
@pytest.mark.parametrize(("batch", "heads", "length"), SIZES)
def test_each_item_is_dealt_once(batch, heads, length, longest_last):
    for places in (3, 132):
        owner, _ = dealt(batch, heads, length, longest_last, places)
        assert int(owner.min()) >= 1 and int(owner.max()) <= places


@pytest.mark.parametrize("longest_last", [False, True])
@pytest.mark.parametrize(("batch", "heads", "length"), SIZES)
def test_a_counter_deals_each_item_once_and_is_set_back(batch, heads, length, longest_last):
    for places in (3, 132):
        times, counter = counted(batch, heads, length, longest_last, places)
        assert times.eq(1).all() and counter.item() == 0


@pytest.mark.parametrize(("batch", "heads", "length"), [
    (8, 16, 2048), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 16, 4096), (2, 16, 8192))),
    (1, 16, 16384),
])  # fmt: skip
def test_causal_work_is_dealt_evenly(batch, heads, length):
    owner, _ = dealt(batch, heads, length, longest_last=True)
    steps = torch.arange(1, length // 128 + 1, dtype=torch.float64).expand_as(owner)
    work = torch.zeros(132, dtype=torch.float64).index_add_(0, owner.flatten() - 1, steps.flatten())
    assert work.max() < 1.04 * work.mean()


def test_work_of_many_sections_is_dealt_as_one_row():
    tile = replace(TILE, q=192)
    owner, turn = dealt(1, 8, 16384, longest_last=True, places=33, dim=64, tile=tile)  # 21 turns, not 24
    steps = (torch.arange(1, 87) * 192).clamp(max=16384).div(128).ceil().expand_as(owner)
    work = torch.zeros(33).index_add_(0, owner.flatten() - 1, steps.flatten())
    assert work.max() < 1.01 * work.mean() and turn.max() == 20


def test_sections_of_heads_that_the_cache_holds_go_up_and_down_in_turns():
    _, turn = dealt(2, 16, 8192, longest_last=True)
    sections = turn.flatten(0, 1).unflatten(0, (4, 8))  # 4 MB of keys and values a head
    assert (sections[0, :, 1:] >= sections[0, :, :-1]).all() and (sections[2, :, 1:] >= sections[2, :, :-1]).all()
    assert (sections[1, :, 1:] <= sections[1, :, :-1]).all() and (sections[3, :, 1:] <= sections[3, :, :-1]).all()
    assert all((before.max() <= after.min()) for before, after in itertools.pairwise(sections))


def test_equal_work_goes_head_after_head():
    owner, turn = dealt(1, 4, 8192, longest_last=False)
    order = (turn * 132 + torch.where(turn % 2 == 0, owner - 1, 132 - owner)).flatten()
    assert (order[1:] == order[:-1] + 1).all()


def started(batch, heads, length, group=1, places=132, alternating=False):
    """When the GPU starts the block of each (batch, key head, block of keys), counted from 1, longest first, or where
    heads alternate."""
    problem = Problem(heads * group, heads, 128, 128, "float16")
    sizes = Sizes(problem)
    found = torch.zeros(batch, heads, -(-length // TILE.kv), dtype=torch.int32)
    parameters = {"batch": sizes.batch, "q_length": sizes.q, "kv_length": sizes.kv}
    blocks = KeyBlocks.of(problem, TILE, sizes, longest_first=True, alternates=alternating)
    parameters |= {"pairs_of_a_unit": blocks.together}
    parameters |= {"order": T.Tensor([sizes.batch, heads, T.ceildiv(sizes.kv, TILE.kv)], "int32")}

    @T.macro
    def body(buffers):
        with T.Kernel(*blocks.grid, threads=128) as index:
            block, head, sequence = blocks.keys_of(index)
            buffers["order"][sequence, head, block] = buffers["order"][sequence, head, block] * 10000 + index + 1

    together = pairs_of_a_unit(problem, TILE, batch, length, length, places)
    if alternating:
        size = CallSize(batch, length, length, places)
        together = pairs_that_alternate(problem, TILE, batch * heads, size, quarters=4)
    Interpreter(build("order", parameters, body))(batch, length, length, together, found)
    return found


@pytest.mark.parametrize(("batch", "heads", "length"), SIZES)
def test_each_block_of_keys_is_started_once(batch, heads, length):
    order = started(batch, heads, length)
    assert order.flatten().sort().values.tolist() == list(range(1, order.numel() + 1))


@pytest.mark.parametrize(("batch", "heads", "length", "places"), [
    (1, 8, 2048, 132), (4, 8, 2048, 132), (3, 2, 300, 132), (1, 6, 8192, 132), (2, 4, 5000, 7), (1, 2, 100, 132),
])  # fmt: skip
def test_even_heads_start_with_the_last_keys_and_odd_ones_with_the_first(batch, heads, length, places):
    order = started(batch, heads, length, 4, places, alternating=True)
    assert order.flatten().sort().values.tolist() == list(range(1, order.numel() + 1))
    even, odd = order[:, ::2], order[:, 1::2]
    assert (even[..., :-1] > even[..., 1:]).all()
    assert (odd[..., :-1] < odd[..., 1:]).all()


def test_odd_heads_of_a_unit_start_as_even_ones_end():
    order = started(1, 8, 8192, 4, alternating=True)[0]  # four pairs a unit, which two of run together
    assert order[[0, 2]].max() < order[[1, 3]].min() and order[[1, 3]].max() < order[[4, 6]].min()


def shares(pairs, blocks, alternating, latest_first, tiles=5):
    """Which tiles of queries the block at each position of a unit prepares: None where it has no share."""
    order = {"alternates": alternating, "latest_first": latest_first}
    unit = KeyBlocks(blocks, 8, 1, 8 * pairs, True, 0, pairs, 1, 1, **order)
    sharing = (pairs * blocks + 1) // 2
    found = torch.zeros(pairs * blocks, dtype=torch.int32)

    @T.prim_func
    def firsts(found: T.Tensor((pairs * blocks,), "int32")):
        with T.Kernel(pairs * blocks, threads=128) as position:
            first = Shares(unit, tiles, sharing).first(position)
            found[position] = first.head * tiles + first.tile

    Interpreter(firsts)(found)
    return [list(range(n, pairs * 4 * tiles, sharing)) or None for n in found.tolist()]


@pytest.mark.parametrize(("pairs", "blocks"), [(2, 1), (2, 7), (8, 16), (16, 5)])
@pytest.mark.parametrize(("alternating", "latest_first"), [(False, False), (True, False), (False, True)])
def test_the_longest_half_of_a_units_blocks_prepares_each_tile_once(pairs, blocks, alternating, latest_first):
    found = shares(pairs, blocks, alternating, latest_first)
    assert sorted(tile for share in found if share for tile in share) == list(range(pairs * 4 * 5))
    rows = [n // (pairs // 2 if alternating else pairs) for n in range(len(found))]
    lengths = [min(row + 1, 2 * blocks - row) if alternating else blocks - row for row in rows]
    lengths = [row + 1 for row in rows] if latest_first else lengths
    with_share = [length for length, share in zip(lengths, found, strict=True) if share]
    without = [length for length, share in zip(lengths, found, strict=True) if not share]
    assert min(with_share) >= max(without) - 1


@pytest.mark.parametrize(
    ("group", "length", "quarters", "pairs"),
    [(4, 2048, 4, 16), (4, 8192, 6, 4), (4, 16384, 6, 2), (2, 2048, 4, 16), (2, 4096, 6, 4), (8, 8192, 4, 4)],
)
def test_blocks_that_may_wait_for_one_another_take_half_of_a_gpu_at_most(group, length, quarters, pairs):
    problem, size = Problem(8 * group, 8, 128, 128, "float16"), CallSize(4, length, length, 132)
    assert pairs_that_alternate(problem, TILE, 32, size, quarters) == pairs
    rows = rows_that_meet(problem, TILE, -(-length // 128), quarters)
    assert pairs // 2 * rows <= 66


@pytest.mark.parametrize(("group", "places", "together"), [(1, 132, 2), (1, 1000, 4), (2, 1000, 2), (8, 132, 1)])
def test_blocks_of_keys_with_most_queries_start_first_in_units_of_a_gpu_or_its_cache(group, places, together):
    order = started(2, 5, 8192, group, places)  # 64 blocks a head, 8 MB of queries and gradients
    by_section = order.flatten(0, 1).sort(0).values
    sections = -(-10 // together)
    size = -(-10 // sections)
    for first in range(0, 10, size):
        section = by_section[first : first + size]
        assert (section[:, :-1].amax(0) < section[:, 1:].amin(0)).all()  # all heads' first blocks, then their second
        assert section.max() < by_section[first + size :].min() if first + size < 10 else True


@pytest.mark.parametrize(("pairs", "keys", "together"), [
    (32, 8192, 8), (8, 8192, 8), (32, 16384, 4), (6, 16384, 3), (32, 4096, 16), (32, 65536, 1), (1, 128, 1),
])  # fmt: skip
def test_units_of_blocks_with_lists_are_of_four_times_as_many_pairs_as_run_together(pairs, keys, together):
    assert pairs_of_a_listed_unit(TILE, pairs, keys, 132) == together


def test_blocks_of_keys_with_as_many_queries_are_numbered_by_the_gpu():
    problem = Problem(8, 4, 64, 64, "float16")
    blocks = KeyBlocks.of(problem, TILE, Sizes(problem), longest_first=False)
    assert len(blocks.grid) == 3 and blocks.keys_of((5, 3, 1)) == (5, 3, 1)


def listed(pairs, length, ahead):
    """The unit, and the number there, of each block of packed sequences, in the order in which a counter deals them."""
    problem = Problem(pairs, pairs, 128, 128, "float16")
    sizes, of_a_unit = Sizes(problem), length // TILE.kv
    blocks = KeyBlocks.of(problem, TILE, sizes, longest_first=False, at_once=132)
    blocks = replace(blocks, blocks=of_a_unit, most=of_a_unit + 1)
    found = torch.zeros(pairs * of_a_unit, 2, dtype=torch.int32)
    parameters = {"batch": sizes.batch, "units_ahead": blocks.ahead, "order": T.Tensor(found.shape, "int32")}

    @T.macro
    def body(buffers):
        with T.Kernel(1, threads=128):
            for index in T.serial(pairs * of_a_unit):
                unit, number = blocks.position(index)
                buffers["order"][index, 0] = unit
                buffers["order"][index, 1] = number

    Interpreter(build("order", parameters, body))(1, ahead, found)
    return [tuple(row) for row in found.tolist()]


@pytest.mark.parametrize(("pairs", "ahead"), [(8, 2), (8, 1), (5, 3), (2, 2), (2, 9), (1, 1)])
def test_the_last_units_of_packed_sequences_are_dealt_in_turns_when_what_they_wait_for_was_dealt(pairs, ahead):
    order = listed(pairs, 1024, ahead)
    assert sorted(order) == [(unit, number) for unit in range(pairs) for number in range(8)]
    first = max(pairs - ahead, 0)
    assert order[: first * 8] == sorted(order)[: first * 8]
    assert order[first * 8 :] == [(unit, number) for number in range(8) for unit in range(first, pairs)]
    dealt_at = {block: at for at, block in enumerate(order)}
    for unit, number in order:
        waited_for = [dealt_at[unit - ahead, other] for other in range(8)] if unit >= ahead else []
        assert all(at < dealt_at[unit, number] for at in waited_for)
