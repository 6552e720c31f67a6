"""Blocks over keys that add to dQ in order: each tile has one order, in which nobody waits for ever, or for long."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

import pytest
import tilelang.language as T
import torch

from attention_engine import AttentionEngine, arch
from attention_engine.codegen.interpreter import Interpreter
from attention_engine.compiler import Kernels
from attention_engine.kernels.common import build
from attention_engine.kernels.hopper.backward import key_form
from attention_engine.kernels.hopper.keys.adders import NOBODY, FirstTiles, Neighbours, Tiles
from attention_engine.kernels.hopper.keys.items import KeyItem
from attention_engine.kernels.hopper.notes import size_of
from attention_engine.library import OnlineSoftmax, causal_from, scale
from attention_engine.plan.attention_buffers import APART, ENDS, TOGETHER
from tests.cases import Shape

STEP, HANDED_ON = 1.0, 0.85  # how long a block takes for a step, and until the next one may add


class Added:
    """What blocks over keys of one call do. walks: of each block (head, block of keys), in the order in which a GPU
    starts them, its steps, each a tile (query head, number) and the block that adds to it before, or None."""

    def __init__(self, shape, offset=0, number=None):
        engine = AttentionEngine(
            shape.meta(torch.float16), None, scale(0.1), causal_from(offset), OnlineSoftmax(), deterministic=True
        )
        made = engine._asked(arch.H100(), False).trained.kernels_as_known(engine.tuning)
        plan = Kernels(made.maths, made.problem, made.tiles, arch.H100(), True).plan
        form = key_form(plan.problem, *plan.over_keys.given)
        assert (form.blocks.alternates or form.blocks.ends is not None) and form.tile.in_order
        numbers = plan.numbers(shape.batch, shape.q_len, shape.kv_len)
        name = APART if form.blocks.alternates else ENDS
        self.number = numbers[name] if number is None else number
        queries, keys = (-(-length // of) for length, of in ((shape.q_len, 80), (shape.kv_len, 128)))
        started = torch.zeros(shape.batch, shape.kv_heads, keys, dtype=torch.int32)
        steps = torch.zeros(shape.batch, shape.heads, queries, keys, 3, dtype=torch.int32)
        sizes, blocks = form.sizes, form.blocks
        parameters = {
            "batch": sizes.batch, "q_length": sizes.q, "kv_length": sizes.kv, TOGETHER: blocks.together,
            name: sizes.variable(name),
            "started": T.Tensor([sizes.batch, shape.kv_heads, T.ceildiv(sizes.kv, 128)], "int32"),
            "steps": T.Tensor([sizes.batch, shape.heads, T.ceildiv(sizes.q, 80), T.ceildiv(sizes.kv, 128), 3], "int32"),
        }  # fmt: skip

        @T.macro
        def body(buffers):
            with T.Kernel(*blocks.grid, threads=128) as index:
                block, kv_head, batch = blocks.keys_of(index)
                walk = form.walk(buffers, batch, kv_head, block, index=index)
                before = T.alloc_local([1], "int32")
                tiles = T.alloc_shared([size_of(Tiles)], "int32")
                neighbours = Neighbours(form, KeyItem(block, kv_head, batch, walk.count), walk, tiles)
                neighbours.note_tiles()
                stored = FirstTiles(form, neighbours.item, walk)
                buffers["started"][batch, kv_head, block] = index + 1
                for step in T.serial(walk.count):
                    visit = walk.at(step)
                    tile = T.truncdiv(visit.start, 80)
                    neighbours.find(before, tile, step)
                    buffers["steps"][batch, visit.head, tile, block, 0] += step + 1
                    buffers["steps"][batch, visit.head, tile, block, 1] = before[0]
                    if stored.hold(visit.start, step):
                        buffers["steps"][batch, visit.head, tile, block, 2] = 1

        Interpreter(build("adders", parameters, body))(
            shape.batch, shape.q_len, shape.kv_len, numbers[TOGETHER], self.number, started, steps
        )
        assert started.flatten().sort().values.tolist() == list(range(1, started.numel() + 1))
        group, self.walks = shape.heads // shape.kv_heads, [[] for _ in range(started.numel())]
        for b, head, tile, block in steps[..., 0].nonzero().tolist():
            number, name, stored = steps[b, head, tile, block].tolist()
            assert bool(stored) == (name == NOBODY)
            before = None if name == NOBODY else name - 1
            walk = self.walks[started[b, head // group, block] - 1]
            walk.append((number, block, (b, head, tile), before))
        for walk in self.walks:
            walk.sort()
            assert [number for number, *_ in walk] == list(range(1, len(walk) + 1))

    def time(self, places=132, waits=True):
        """How long a GPU takes that runs so many blocks at once; None where they wait for ever."""
        last, waiting, left = {}, {}, iter(self.walks)
        ready = [(0.0, number, iter(walk)) for number, walk in zip(range(places), left, strict=False)]
        end, started = 0.0, len(ready)
        while ready:
            now, number, walk = heapq.heappop(ready)
            end = max(end, now)
            step = next(walk, None)
            if step is None:
                if (other := next(left, None)) is not None:
                    heapq.heappush(ready, (now, started, iter(other)))
                    started += 1
                continue
            _, block, tile, before = step
            done = now + STEP
            if waits and before is not None:
                if (tile, before) not in last:
                    waiting[tile, before] = (done, number, walk, block)
                    continue
                done = max(done, last[tile, before] + HANDED_ON)
            while True:
                last[tile, block] = done
                heapq.heappush(ready, (done, number, walk))
                if (tile, block) not in waiting:
                    break
                late, number, walk, other = waiting.pop((tile, block))
                done, block = max(late, done + HANDED_ON), other
        return None if waiting else end


def shape_of(batch, queries, keys, heads=8, kv_heads=2):
    return Shape(batch, queries, keys, heads, kv_heads, 128, 128)


CALLS = {  # shapes, how far on queries stand, by how many quarters of a step blocks are apart
    "S 2048": (shape_of(1, 2048, 2048), 0, 4), "S 1111": (shape_of(1, 1111, 1111), 0, 4),
    "groups of two": (shape_of(1, 2048, 2048, 4, 2), 0, 4), "groups of eight": (shape_of(1, 2048, 2048, 16, 2), 0, 4),
    "more queries": (shape_of(1, 1500, 900), 0, 4), "more keys": (shape_of(1, 500, 1000), 0, 0),
    "keys that all see": (shape_of(1, 500, 900), 400, 0), "queries that see nothing": (shape_of(1, 900, 900), -140, 0),
    "a batch": (shape_of(2, 800, 800, 8, 4), 0, 4), "S 4096": (shape_of(1, 4096, 4096), 0, 6),
    "S 4096, groups of eight": (shape_of(1, 4096, 4096, 16, 2), 0, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_each_tile_has_one_order_of_blocks(name):
    shape, offset, quarters = CALLS[name]
    added = Added(shape, offset)
    assert added.number == quarters
    after, seen = defaultdict(dict), defaultdict(int)
    for walk in added.walks:
        for _, block, tile, before in walk:
            after[tile][before] = block
            seen[tile] += 1
    for (_, head, tile), names in after.items():
        order = [names[None]]
        while order[-1] in names:
            order.append(names[order[-1]])
        assert len(order) == len(names) == seen[_, head, tile]
        if head // (shape.heads // shape.kv_heads) % 2:
            order.reverse()
        near = sum(a < b for a, b in itertools.pairwise(order))  # these first, in the order of their keys
        assert order == sorted(order[: near + 1]) + sorted(order[near + 1 :], reverse=True) or near == 0
        assert near == 0 or quarters
    assert None not in (added.time(places) for places in (132, 40, 20))  # nobody waits for ever


@pytest.mark.parametrize(("places", "quarters"), [(3, 0), (4, 2), (7, 2), (16, 4)])
def test_so_few_blocks_may_wait_for_one_another_that_few_places_suffice(places, quarters, monkeypatch):
    monkeypatch.setattr("attention_engine.plan.attention.places_of", lambda _: places)
    added = Added(shape_of(1, 2048, 2048))  # sixteen blocks a head
    assert added.number == quarters and added.time(places) is not None


@pytest.mark.parametrize("name", ["S 2048", "groups of two", "groups of eight"])
def test_blocks_wait_little(name):
    apart, together = Added(CALLS[name][0]), Added(CALLS[name][0], number=0)
    alone = apart.time(waits=False)
    assert apart.time() < 1.03 * alone
    assert together.time() > 1.05 * together.time(waits=False)


ENDINGS = {  # where each key head has one query head: shapes, how far on queries stand
    "S 2048": (shape_of(2, 2048, 2048, 8, 8), 0), "S 1111": (shape_of(1, 1111, 1111, 5, 5), 0),
    "more queries": (shape_of(1, 1500, 900, 3, 3), 0), "more keys": (shape_of(1, 500, 1000, 3, 3), 0),
    "keys that all see": (shape_of(2, 500, 900, 3, 3), 400),
    "queries that see nothing": (shape_of(2, 900, 900, 4, 4), -140),
}  # fmt: skip


@pytest.mark.parametrize("places", [132, 20, 7])
@pytest.mark.parametrize("name", ENDINGS)
def test_blocks_of_later_keys_add_first(name, places, monkeypatch):
    monkeypatch.setattr("attention_engine.plan.attention.places_of", lambda _: places)
    added = Added(*ENDINGS[name])
    blocks = -(-ENDINGS[name][0].kv_len // 128)
    assert added.number == (2 * blocks <= places)  # all of the last unit have a place
    for walk in added.walks:
        assert all(before in (None, block + 1) for _, block, _, before in walk)
    assert added.time(places) is not None


def test_a_last_unit_of_more_blocks_than_places_would_wait_for_ever(monkeypatch):
    monkeypatch.setattr("attention_engine.plan.attention.places_of", lambda _: 7)
    (shape, _) = ENDINGS["S 2048"]
    assert Added(shape, number=1).time(7) is None


def test_units_end_sooner_longest_first():
    (shape, _) = ENDINGS["S 2048"]
    longest, shortest = Added(shape), Added(shape, number=0)
    starts = [walk[0][1] for walk in longest.walks]  # block of keys
    assert starts[:4] == [15] * 4 and starts[-64:-60] == [0] * 4 and starts[-1] == 15
    assert longest.time() < 0.9 * shortest.time()
    assert longest.time() < 1.03 * longest.time(waits=False)
