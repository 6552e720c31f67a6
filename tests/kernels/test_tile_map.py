"""Tile maps on the interpreter, beside all pairs asked one by one: what is listed, what is whole, what is left out."""

from inspect import signature

import pytest
import torch

from attention_engine import library as lib
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Type
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.passes.analyse_mask import Bound
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan.forms import Tile
from attention_engine.reference.evaluate import Evaluator

pytest.importorskip("tilelang")
from attention_engine.codegen.interpreter import Interpreter
from attention_engine.kernels.tile_map import tile_map
from attention_engine.kernels.tiles import EMPTY, PIECE

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 4, 2, 150, 181
TILES = {"small": Tile(32, 16, 128, 0), "asked in four strips": Tile(128, 64, 128, 0)}
IDS = torch.stack([torch.arange(KEYS) // 40, (torch.arange(KEYS) * 7 % 23 > 11).long() * 3 + torch.arange(KEYS) // 90])
INPUTS = {
    "documents": (("batch", "seq_len_kv"), "int32", IDS.int()),
    "lengths": (("batch",), "int64", torch.tensor([77, 0])),
    "keep": (("batch", "seq_len_kv"), "uint8", (torch.arange(2 * KEYS).view(2, KEYS) // 20 % 2).to(torch.uint8)),
    "reach": (("heads",), "int32", torch.tensor([3, 40, 200, -1]).int()),
    "blocks": ((1, "heads", 5, 6), "int8", (torch.arange(120).view(1, 4, 5, 6) % 3 == 0).to(torch.int8)),
    "gate": (("seq_len", "seq_len_kv"), "float32", torch.linspace(-1, 1, QUERIES * KEYS).view(QUERIES, KEYS)),
}


def per_head(b, h, q, k, custom):
    return (q - k).abs() <= custom["reach"][h]


MASKS = {
    "prefix": lib.prefix_lm(50), "dilated": lib.dilated(5), "rarely": lambda b, h, q, k: (q * 3 + k) % 97 == 0,
    "block diagonal": lib.block_diagonal(48), "block causal": lib.block_causal(30),
    "neighbourhood": lib.neighbourhood(12, 2, 3), "global": lib.with_global(4, lib.sliding_window(9, 9)),
    "not": lib.not_mask(lib.prefix_lm(70)), "documents": lib.document(), "padding": lib.padding(),
    "causal documents": lib.and_masks(lib.causal, lib.document()), "keep": lambda b, h, q, k, custom: custom["keep"],
    "per head": per_head, "causal per head": lib.and_masks(lib.causal, per_head),
    "blocks": lambda b, h, q, k, custom: custom["blocks"][0, h, q // 32, k // 32] != 0,
    "small blocks": lambda b, h, q, k, custom: custom["blocks"][0, h, q // 8 % 5, k // 8 % 6] != 0,
    "gate": lambda b, h, q, k, custom: custom["gate"] > 0.5, "nothing": lambda b, h, q, k: (q + k) % 2 == 3,
    "a choice": lambda b, h, q, k: lib_where(q < 40, k // 16 == 2, (k - q).abs() % 9 < 4),
    "extremes": lambda b, h, q, k: (q // 20 * 20).maximum(30) >= (k // 10 * 10).minimum(100),
}  # fmt: skip


def lib_where(condition, a, b):
    from attention_engine import where

    return where(condition, a, b)


def kept_pairs(mask, tensors, queries, keys):
    sizes = {B: BATCH, H: HEADS, Q_IDX: queries, KV_IDX: keys}
    places = {
        v: torch.arange(n).view([-1 if axis == place else 1 for axis in range(4)])
        for place, (v, n) in enumerate(sizes.items())
    }
    found = Evaluator(places, tensors, torch.float32, torch.device("cpu"))(mask)
    return found.expand(BATCH, HEADS, queries, keys)


def expected_lists(kept, plan, over_keys, size):
    """For each (batch, head, row): the entries, from every pair. Tiles begin at the first piece that is kept, or, where
    queries see no later keys, so much before it that they end with the last one, if there is room."""
    if not over_keys:
        kept = kept.transpose(2, 3)
    own, moving = (size.q, size.kv) if over_keys else (size.kv, size.q)
    lists = {}
    for b in range(BATCH if plan.by_batch else 1):
        for h in range((HEADS if over_keys else KV_HEADS) if plan.by_head else 1):
            group = HEADS // KV_HEADS if plan.by_head and not over_keys else 1
            for row in range(-(-kept.shape[2] // own)):
                for g in range(group):
                    pairs = kept[b, h * group + g, row * own : (row + 1) * own]
                    found = pairs.any(0).nonzero()
                    first = found[0].item() // PIECE * PIECE if len(found) else kept.shape[3]
                    if over_keys and plan.later_is_longer and len(found):
                        spare = (first - (found[-1].item() // PIECE + 1) * PIECE) % moving
                        first -= spare if first >= spare else 0
                    for start in range(first, kept.shape[3], moving):
                        of_tile = pairs[:, start : start + moving]
                        if of_tile.any():
                            entry = 2 * (start // PIECE * group + g) + (not of_tile.all())
                            lists.setdefault((b, h, row), []).append(entry)
    return lists


@pytest.mark.parametrize("over_keys", [True, False], ids=["over keys", "over queries"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("name", MASKS)
def test_lists_hold_the_tiles_that_hold_a_kept_pair(name, tile, over_keys):
    types = {n: Type.BOOL if n == "keep" else Type.FLOAT if n == "gate" else Type.INT for n in INPUTS}
    mask = trace(None, MASKS[name], None, CustomIO({n: axes for n, (axes, _, _) in INPUTS.items()}), types).mask
    problem = Problem(HEADS, KV_HEADS, 32, 32, "float16", custom=tuple((n, d, a) for n, (a, d, _) in INPUTS.items()))
    plan = plan_tiles(mask)
    assert plan.mapped
    rows, tiles = -(-QUERIES // tile.q), -(-KEYS // tile.kv)
    if not over_keys:
        rows, tiles = tiles, rows * plan.candidates(problem)
    size = (BATCH if plan.by_batch else 1, plan.heads(problem, over_keys), rows, tiles + 1)
    lists = torch.full(size, -7, dtype=torch.int32)
    read = [tensor for n, (_, _, tensor) in INPUTS.items() if n in plan.reads]
    Interpreter(tile_map(problem, mask, tile, over_keys))(BATCH, QUERIES, KEYS, *read, lists)
    tensors = {name: tensor for name, (_, _, tensor) in INPUTS.items()}
    expected = expected_lists(kept_pairs(mask, tensors, QUERIES, KEYS), plan, over_keys, tile)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, size[:3])).tolist():
        count, *entries = lists[b, h, row].tolist()
        assert entries[:count] == expected.get((b, h, row), []), (b, h, row)
        unused = entries[count:]
        assert unused == ([-7] * len(unused) if count else [EMPTY, *[-7] * (len(unused) - 1)])


LONG, SHORT = 16380, 40  # twice as many pieces as are bounded at once, and a row or two of tiles
LONG_MASKS = {
    "documents": lambda b, h, long, short, custom: custom["ids"] == short // 32,
    "some of many": lambda b, h, long, short: ((long // 100) * 7 + h) % 31 == short // 20,
    "late": lambda b, h, long, short: (long >= 8300) & (long % 4000 != short),
    "asked, far apart": lambda b, h, long, short: (long * 3 + short) % 9973 == h,
    "a gate": lambda b, h, long, short, custom: custom["gate"] > 2.5 + h / 8,
    "all": lambda b, h, long, short, custom: custom["ids"] >= 0,
    "a bound within": lambda b, h, long, short, custom: (long < 8000) & (custom["ids"] >= 0),
    "a bound at the end of what is bounded at once": lambda b, h, long, short, custom: (
        (long < 8192) & (custom["ids"] >= 0)
    ),
    "early": lambda b, h, long, short: (long < 50 + 8200 * h) & (long % 2 < 2),
}


@pytest.mark.parametrize("over_keys", [True, False], ids=["over keys", "over queries"])
@pytest.mark.parametrize("name", LONG_MASKS)
def test_tiles_of_long_rows_cover_each_kept_pair_once(name, over_keys):
    queries, keys = (SHORT, LONG) if over_keys else (LONG, SHORT)
    long_axis = "seq_len_kv" if over_keys else "seq_len"
    of_mask = LONG_MASKS[name]

    def mask_mod(b, h, q, k, *custom):
        return of_mask(b, h, *((k, q) if over_keys else (q, k)), *custom)

    mask_mod.__signature__ = signature(of_mask)
    torch.manual_seed(0)
    inputs = {
        "ids": (("batch", long_axis), "int32", (torch.rand(BATCH, LONG) < 1e-3).cumsum(1).int()),
        "gate": (("seq_len", "seq_len_kv"), "float32", torch.randn(queries, keys)),
    }
    types = {"ids": Type.INT, "gate": Type.FLOAT}
    mask = trace(None, mask_mod, None, CustomIO({n: axes for n, (axes, _, _) in inputs.items()}), types).mask
    problem = Problem(HEADS, KV_HEADS, 32, 32, "float16", custom=tuple((n, d, a) for n, (a, d, _) in inputs.items()))
    plan, tile = plan_tiles(mask), Tile(32, 48, 128, 0) if over_keys else Tile(80, 32, 128, 0)
    assert plan.mapped
    own, moving = (tile.q, tile.kv) if over_keys else (tile.kv, tile.q)
    group = 1 if over_keys else plan.candidates(problem)
    rows, tiles = -(-SHORT // own), -(-LONG // moving)
    size = (BATCH if plan.by_batch else 1, plan.heads(problem, over_keys), rows, tiles * group + 1)
    lists = torch.full(size, -7, dtype=torch.int32)
    read = [tensor for n, (_, _, tensor) in inputs.items() if n in plan.reads]
    Interpreter(tile_map(problem, mask, tile, over_keys))(BATCH, queries, keys, *read, lists)
    kept = kept_pairs(mask, {n: tensor for n, (_, _, tensor) in inputs.items()}, queries, keys)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, size[:3])).tolist():
        count, *entries = lists[b, h, row].tolist()
        assert count <= tiles * group and -7 not in entries[:count]
        last = {}  # of each head of the group: where its last tile ended
        for g in range(group):
            pairs = kept[b, h * group + g]
            pairs = pairs[row * own :][:own] if over_keys else pairs[:, row * own :][:, :own].T
            covered = 0
            for entry in entries[:count]:
                piece, of_head = divmod(entry // 2, group)
                if of_head == g:
                    assert piece * PIECE >= last.get(g, 0)
                    last[g] = piece * PIECE + moving
                    of_tile = pairs[:, piece * PIECE : last[g]]
                    assert of_tile.any() and entry % 2 == (not of_tile.all())
                    covered += of_tile.sum()
            assert covered == pairs.sum()


def test_a_mask_that_bounds_describe_needs_no_map():
    for mask_mod in (lib.causal, lib.sliding_window(5, 6), lib.causal_from(3)):
        assert not plan_tiles(trace(None, mask_mod, None, CustomIO()).mask).mapped
    assert not plan_tiles(None).mapped


def test_bounds_of_an_and_stay():
    plan = plan_tiles(trace(None, lib.and_masks(lib.causal, lib.block_diagonal(3)), None, CustomIO()).mask)
    assert plan.mapped and plan.bounds.bounds == (Bound(q=1, kv=-1, offset=0),)
