"""The hand-placed kernels for Hopper beside their straight-line twins, in the warp simulator."""

from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, compiler
from attention_engine.library import (
    OnlineSigmoid,
    OnlineSoftmax,
    alibi,
    and_masks,
    causal,
    causal_from,
    document,
    padding,
    relative_bias,
    scale,
    sliding_window,
)
from attention_engine.passes.row_terms import reads_places_alone, terms_beside_product
from attention_engine.plan import units
from attention_engine.plan.forms import HopperForward, HopperKeys, Straight, Tile
from attention_engine.runtime import op, program_kernels
from tests import plain
from tests.cases import CASES, Case, Shape, engine_for, errors


def forward_tile(queries, keys=128, threads=256, **form):
    return Tile(queries, keys, threads, 2, HopperForward(**form))


def key_tile(queries, **form):
    return Tile(queries, 128, 256, 2, HopperKeys(**form))


SHARED_KEYS = Tile(64, 64, 256, 2, HopperKeys(shared_weights=True))


def skew(tile):
    return tile.in_form(skewed_sums=True)


# Head dims, the tile of the forward kernel (None: the twin runs), queries of a tile over keys.
KERNELS = {
    "forward-64": ((64, 64), forward_tile(192, threads=384), None),
    "forward-128": ((128, 128), forward_tile(128), None),
    "forward-192-128": ((192, 128), forward_tile(128), None),
    "forward-128-256": ((128, 256), forward_tile(128, 96), None),
    "backward-64-light": ((64, 64), None, key_tile(128)),
    "backward-64-heavy": ((64, 64), None, key_tile(64)),
    "backward-128-light": ((128, 128), None, key_tile(80)),
    "backward-128-heavy": ((128, 128), None, key_tile(64)),
    "backward-128-64": ((128, 64), None, key_tile(80)),
    "backward-64-128": ((64, 128), None, key_tile(64)),
    "backward-192-128-light": ((192, 128), None, key_tile(64)),
    "backward-192-128-heavy": ((192, 128), None, SHARED_KEYS),
    "backward-128-256-light": ((128, 256), None, key_tile(32)),
    "backward-128-256-heavy": ((128, 256), None, SHARED_KEYS),
    "backward-256": ((256, 256), None, SHARED_KEYS),
    "forward-32": ((32, 32), forward_tile(192, threads=384), None),
    "forward-80": ((80, 80), forward_tile(128), None),  # in tiles of 96 columns, as 72 and 88 are
    "forward-160": ((160, 160), forward_tile(128), None),
    "backward-32": ((32, 32), None, key_tile(128)),
    "backward-80": ((80, 80), None, key_tile(64)),
    "backward-96": ((96, 96), None, key_tile(64)),
    "backward-112": ((112, 112), None, key_tile(80)),
    "backward-160-light": ((160, 160), None, key_tile(64)),
    "backward-160-heavy": ((160, 160), None, SHARED_KEYS),
}
PROGRAMS = ("softmax", "softcap", "relu", "retention")  # rows, gradients of products, no rows, gradients of indices
LENGTHS = ((200, 131), (77, 260))  # of more than one tile, none whole


@pytest.fixture
def kernels(monkeypatch):
    """Chooses tiles for the interpreter, and says which kernels ran."""
    op.ATTENTIONS.clear()
    monkeypatch.setattr(compiler, "suits_a_head_each", lambda *_: False)
    chosen = {}

    def choose(problem, maths, target, hints):
        return replace(default(problem, maths, target, hints), **chosen)

    default = program_kernels.default_tiles
    monkeypatch.setattr(program_kernels, "default_tiles", choose)
    yield chosen
    op.ATTENTIONS.clear()


def ran(part):
    """Was the hand-placed kernel of this direction run, or that which a function finds among kernels?"""
    find = part if callable(part) else attrgetter(part)
    made = [find(k) for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    scripts = [kernel.prim_func.script() for kernel in made if "compiled" in vars(kernel)]
    return [script.count("set_max_nreg") for script in scripts] == [2] * len(scripts) != []


WIDE = {name: dims for name, (dims, _, backward) in KERNELS.items() if backward and max(dims) > 128}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_keeps_the_rule(name, kernels):
    dims, forward, backward = KERNELS[name]
    kernels.update({k: t for k, t in (("forward", forward), ("backward", backward)) if t})
    number = list(KERNELS).index(name)
    for turn, lengths in enumerate(LENGTHS):
        case = CASES[PROGRAMS[(number + turn) % len(PROGRAMS)]]
        shape = Shape(1, *lengths, *((2, 1) if turn % 2 else (1, 1)), *dims)
        dtype = (torch.float16, torch.bfloat16)[turn % 2]
        assert errors(case, shape, dtype, causal=turn == 0, backend="interpret", floor=2e-3)
    assert ran(name.split("-")[0])


@pytest.mark.parametrize("program", ["softcap", "retention"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_heads_run_any_maths(name, program, kernels):
    """Products that are kept, masked gradients of pairs whose weight may be 0, and deterministic gradients."""
    kernels.update(backward=KERNELS[name][2])
    shape = Shape(1, 140, 150, 2, 1, *WIDE[name])
    options = {"deterministic": program == "softcap", "backend": "interpret", "floor": 2e-3}
    assert errors(CASES[program], shape, torch.bfloat16, program == "softcap", **options)
    assert ran("backward")


@pytest.mark.slow  # above, each is held to float64
def test_twins_agree_to_a_rounding(kernels):
    shape = Shape(1, 150, 200, 2, 1, 128, 128)
    inputs = shape.tensors(torch.float16, "cpu", 0)
    leaves = [inputs[n].requires_grad_() for n in "qkv"]
    found = []
    for tiles in ({}, {"forward": forward_tile(128), "backward": key_tile(80)}):
        kernels.clear()
        kernels.update(tiles)
        op.ATTENTIONS.clear()
        o = engine_for(CASES["softmax"], shape, torch.float16, True, backend="interpret")(*leaves)
        found.append([o, *torch.autograd.grad(o, leaves, inputs["do"])])
        assert ran("forward") is ran("backward") is bool(tiles)
    for mine, twin in zip(*found):
        torch.testing.assert_close(mine, twin, rtol=2e-3, atol=2e-3)


def by_head(b, h, q_idx, kv_idx):
    """A mask that no bounds describe, and that differs between heads."""
    return q_idx + 30 * h >= 2 * kv_idx - q_idx % 7


@pytest.mark.parametrize(
    ("mask", "lengths"), [(sliding_window(70, 5), (300, 290)), (by_head, (200, 131)), (by_head, (1, 1))]
)
def test_masks_by_bounds_and_by_lists(mask, lengths, kernels):
    kernels.update(forward=forward_tile(128), backward=key_tile(80))
    shape = Shape(1, *lengths, 2, 1, 128, 128)
    engine = AttentionEngine(
        shape.meta(torch.float16), None, scale(0.1), mask, OnlineSoftmax(), backend="interpret"
    )  # fmt: skip
    tensors = shape.tensors(torch.float16, "cpu", 0)

    def results(run, dtype):
        leaves = [tensors[n].to(dtype).requires_grad_() for n in "qkv"]
        o = run(*leaves)
        return dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, tensors["do"].to(o.dtype)))))

    given = {"score": plain.scaled(0.1), "mask": lambda *indices: mask(*indices)}
    found = plain.compare(
        results(engine, torch.float16),
        results(lambda q, k, v: plain.attention(q, k, v, "softmax", **given), torch.float64),
        results(lambda q, k, v: plain.eager(q, k, v, "softmax", **given), torch.float16), torch.float16, 2e-3,
    )  # fmt: skip
    assert found and ran("forward") and ran("backward")


# Head dims and tiles: with an output tile of its own, through the queries' tile or one of two, and from registers.
PERSISTENT = {
    "64": ((64, 64), forward_tile(192, threads=384)),
    "128": ((128, 128), forward_tile(128)),
    "32": ((32, 32), forward_tile(192, threads=384)),
    "72": ((72, 72), forward_tile(128)),
    "96": ((96, 96), forward_tile(128)),
    "112": ((112, 112), forward_tile(128)),
    "160": ((160, 160), forward_tile(128)),
    "128-through-queries": ((128, 128), forward_tile(128, 176)),
    "128-ahead": ((128, 128), forward_tile(128, persistent=True, queries_ahead=True)),
    "192-128": ((192, 128), forward_tile(128)),
    "192-128-narrow": ((192, 128), forward_tile(128, 96)),
    "128-256": ((128, 256), forward_tile(128, 112)),
    "256": ((256, 256), forward_tile(128, 80)),
}
MANY = (((400, 131), (3, 3), 1), ((77, 260), (4, 2), 2))  # lengths, heads, batch: more items than the three blocks


@pytest.mark.parametrize("name", PERSISTENT)
def test_persistent_forms_keep_the_rule(name, kernels):
    dims, tile = PERSISTENT[name]
    kernels.update(forward=tile.in_form(persistent=True))
    for turn, (lengths, heads, batch) in enumerate(MANY):
        case = CASES[PROGRAMS[(list(PERSISTENT).index(name) + turn) % len(PROGRAMS)]]
        dtype = (torch.float16, torch.bfloat16)[turn]
        shape = Shape(batch, *lengths, *heads, *dims)
        assert errors(case, shape, dtype, causal=turn == 0, backend="interpret", floor=2e-3)
    assert ran("forward")


def test_lazy_rescaling_keeps_the_rule(kernels):
    for name, lengths in (("softmax", (150, 600)), ("retention", (130, 300))):
        kernels.update(forward=forward_tile(128, lazy_rescale=True))
        shape = Shape(1, *lengths, 2, 1, 128, 128)
        assert errors(CASES[name], shape, torch.float16, causal=False, backend="interpret", floor=2e-3)
    assert ran("forward")


def later_half(b, h, q_idx, kv_idx):
    """A mask of bounds under which the first rows of tiles see no keys."""
    return q_idx - 260 >= kv_idx


WALKS = {
    "full": (None, (300, 290)), "causal": (causal, (300, 290)), "window": (sliding_window(70, 5), (300, 290)),
    "shifted": (causal_from(-40), (300, 200)), "lists": (by_head, (200, 131)), "one": (by_head, (1, 1)),
    "no keys for some": (later_half, (400, 150)),
}  # fmt: skip


@pytest.mark.parametrize("mask", WALKS)
@pytest.mark.parametrize("dim", [64, 128])
def test_persistent_lazy_and_woven_forms_are_the_others_bit_for_bit(mask, dim, kernels):
    keep, lengths = WALKS[mask]
    shape = Shape(2, *lengths, 4, 2, dim, dim)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    found = []
    others = ({"lazy_rescale": True}, {"queries_ahead": True}, {"woven": True})
    for forms in ({}, *({"persistent": True} | more for more in others)):
        op.ATTENTIONS.clear()
        tile = forward_tile(192, threads=384) if dim == 64 else forward_tile(128)
        kernels.update(forward=tile.in_form(**forms))
        engine = AttentionEngine(
            shape.meta(torch.float16), None, scale(0.1), keep, OnlineSoftmax(), backend="interpret"
        )
        o, rows = engine(*(tensors[n] for n in "qkv"), return_rowscales=True)
        found.append([o, *rows.values()])
    assert len(found[0]) > 1 and not any(one.isnan().any() for one in found[0])
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


def linear(factor):
    return lambda score, custom, b, h, q_idx, kv_idx: score * factor + custom["slopes"] * (2 * kv_idx - q_idx - 3)


SLOPED = {  # scores that are linear in the indices, a slope a head: their terms of rows leave the tile
    "alibi": Case(
        "alibi", "softmax", OnlineSoftmax, alibi,
        lambda factor, custom: lambda s, b, h, i, j: s * factor - custom["slopes"][h] * (i - j),
        {"slopes": ("heads",)}, lambda heads, length: {"slopes": 2.0 ** -(torch.arange(heads) + 1.0)},
    ),
    "sigmoid": Case(
        "sigmoid", "sigmoid", OnlineSigmoid, linear,
        lambda factor, custom: lambda s, b, h, i, j: s * factor + custom["slopes"][h] * (2 * j - i - 3),
        {"slopes": ("heads",)}, lambda heads, length: {"slopes": 0.01 / (torch.arange(heads) + 1.0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("forms", [{}, {"persistent": True}, {"persistent": True, "queries_ahead": True}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 256)], ids=str)
@pytest.mark.parametrize("name", SLOPED)
def test_tiles_that_start_with_what_places_add_keep_the_rule(name, dims, forms, kernels):
    """Those of every item, and of lengths that end within a tile."""
    for turn, (lengths, heads, batch) in enumerate(MANY):
        kernels.update(forward=forward_tile(128, 96 if dims[1] == 256 else 128, **forms))
        shape, dtype = Shape(batch, *lengths, *heads, *dims), (torch.float16, torch.bfloat16)[turn]
        assert errors(SLOPED[name], shape, dtype, causal=turn == 0, backend="interpret", floor=2e-3)
    assert ran("forward")
    scores = [attention.maths.forward_parted.score for attention in op.ATTENTIONS.values()]
    assert all(reads_places_alone(terms_beside_product(score)) for score in scores)


ADDED = {  # scores that add to their product what differs from pair to pair, or from key to key
    "how far": CASES["alibi"],
    "table": Case(  # near the diagonal, and past its reach on either side
        "table", "softmax", OnlineSoftmax, lambda factor: relative_bias("table", 20, factor),
        lambda factor, custom: lambda s, b, h, i, j: s * factor + custom["table"][h, (i - j).clamp(-20, 20) + 20],
        {"table": ("heads", 41)}, lambda heads, length: {"table": torch.randn(heads, 41, generator=seeded())},
    ),
    "keys": Case(
        "keys", "softmax", OnlineSoftmax,
        lambda factor: lambda s, custom, b, h, i, j: s * factor + custom["keys"] - 0.01 * abs(i - j),
        lambda factor, custom: lambda s, b, h, i, j: s * factor + custom["keys"][h, j] - 0.01 * (i - j).abs(),
        {"keys": ("heads", "seq_len_kv")},
        lambda heads, length: {"keys": torch.randn(heads, length, generator=seeded())},
    ),
    "short": Case(  # keys past the input's end read 0
        "short", "softmax", OnlineSoftmax,
        lambda factor: lambda s, custom, b, h, i, j: s * factor + custom["short"][h, j],
        lambda factor, custom: lambda s, b, h, i, j: s * factor + (custom["short"][h, j.clamp(max=89)] * (j < 90)),
        {"short": ("heads", 90)}, lambda heads, length: {"short": torch.randn(heads, 90, generator=seeded())},
    ),
}  # fmt: skip


FAR = ("keys", "short")  # numbers of keys may be far from 0: such tiles hold the score itself (ir/reach.py)


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("forms", [{}, {"persistent": True}, {"persistent": True, "queries_ahead": True}], ids=str)
@pytest.mark.parametrize("name", ADDED)
def test_tiles_that_start_with_all_that_is_added_keep_the_rule(name, forms, kernels):
    """And those of scores that may be far from 0, which start with nothing."""
    for turn, (lengths, heads, batch) in enumerate(MANY):
        kernels.update(forward=forward_tile(128, **forms))
        shape, dtype = Shape(batch, *lengths, *heads, 128, 128), (torch.float16, torch.bfloat16)[turn]
        assert errors(ADDED[name], shape, dtype, causal=turn == 0, backend="interpret", floor=2e-3)
    assert ran("forward")
    scores = [attention.maths.forward_parted.score for attention in op.ATTENTIONS.values()]
    assert scores and all(bool(terms_beside_product(score)) is (name not in FAR) for score in scores)


def test_documents_in_a_persistent_form(kernels):
    shape, ids = Shape(1, 400, 400, 3, 3, 128, 128), torch.tensor([0] * 30 + [1] * 250 + [2] * 120).view(1, 400)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    found = []
    for forms in ({}, {"persistent": True}, {"persistent": True, "queries_ahead": True}):
        op.ATTENTIONS.clear()
        kernels.update(forward=forward_tile(128, **forms))
        mask = and_masks(causal, document("ids"))
        engine = AttentionEngine(
            shape.meta(torch.float16),
            CustomIO({"ids": ("batch", "seq_len")}),
            scale(0.1),
            mask,
            OnlineSoftmax(),
            backend="interpret",
        )
        found.append(engine(*(tensors[n] for n in "qkv"), ids))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    want = plain.attention(
        *(tensors[n] for n in "qkv"), "softmax", causal=True, score=plain.scaled(0.1),
        mask=lambda b, h, i, j: ids[0, i] == ids[0, j],
    )  # fmt: skip
    torch.testing.assert_close(found[0].double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("forms", [{}, {"persistent": True}, {"persistent": True, "queries_ahead": True}], ids=str)
@pytest.mark.parametrize("mask", ["bounds", "list"])
def test_values_of_nan_dont_reach_queries_that_keep_no_key(kernels, mask, forms):
    shape = Shape(2, 300, 200, 1, 1, 128, 128)
    kernels.update(forward=forward_tile(128, **forms))
    axes, mask_mod, custom, empty = {
        "bounds": ({}, causal_from(-140), [], (slice(None), slice(128))),
        "list": ({"keys": ("batch",)}, padding("keys"), [torch.tensor([0, 200])], 0),
    }[mask]
    meta = shape.meta(torch.float16)
    engine = AttentionEngine(meta, CustomIO(axes), scale(0.1), mask_mod, OnlineSoftmax(), backend="interpret")
    tensors = shape.tensors(torch.float16, "cpu", 0)
    tensors["v"][:] = torch.nan
    o = engine(*(tensors[n] for n in "qkv"), *custom)
    assert ran("forward") and not o[empty].any() and o[1, -1].isnan().all()


def test_a_key_and_a_query_alone(kernels):
    kernels.update(forward=forward_tile(192, threads=384), backward=key_tile(128))
    for lengths in ((1, 129), (130, 1)):
        shape = Shape(2, *lengths, 1, 1, 64, 64)
        assert errors(CASES["softmax"], shape, torch.float16, causal=True, backend="interpret", floor=2e-3)
    assert ran("forward") and ran("backward")


def test_custom_inputs_with_and_without_gradients(kernels):
    kernels.update(forward=forward_tile(128), backward=key_tile(80))
    case, shape = CASES["alibi"], Shape(1, 150, 140, 2, 2, 128, 128)
    engine = engine_for(case, shape, torch.float16, True, backend="interpret")
    tensors = shape.tensors(torch.float16, "cpu", 0)
    slopes = case.custom(2, 140)["slopes"]
    leaves = [tensors[n].requires_grad_() for n in "qkv"]
    frozen = torch.autograd.grad(engine(*leaves, slopes), leaves, tensors["do"])
    asked = torch.autograd.grad(engine(*leaves, slopes.requires_grad_()), [*leaves, slopes], tensors["do"])
    for one, other in zip(frozen, asked, strict=False):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    assert ran("backward")


SUMMED = {
    "of keys": ({"bias": ("batch", "heads", "seq_len_kv")}, lambda custom, h, q_idx, kv_idx: custom["bias"]),
    "of diagonals": ({"bias": ("heads", 300)}, lambda custom, h, q_idx, kv_idx: custom["bias"][h, q_idx - kv_idx + 99]),
}


SKEWED = {
    "of keys": [((64, 64), key_tile(64))],
    "of diagonals": [
        ((64, 64), key_tile(64)), ((64, 64), skew(key_tile(64))), ((128, 128), skew(key_tile(80))),
        ((128, 128), skew(key_tile(128))), ((192, 128), skew(SHARED_KEYS)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
@pytest.mark.parametrize(
    ("name", "dims", "tile"), [(name, *kernel) for name, some in SKEWED.items() for kernel in some]
)
def test_sums_for_custom_inputs_agree_with_the_twin(name, dims, tile, deterministic, kernels):
    axes, bias = SUMMED[name]
    shape = Shape(1, 150, 140, 2, 1, *dims)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    sizes = {"batch": 1, "heads": 2, "seq_len_kv": 140, 300: 300}
    leaves = [*(tensors[n].requires_grad_() for n in "qkv"), torch.randn([sizes[a] for a in axes["bias"]])]
    leaves[3].requires_grad_()
    found = []
    for tiles in ({"backward": Tile(64, 64, 256, 2, Straight(shared_weights=True))}, {"backward": tile}):
        op.ATTENTIONS.clear()
        kernels.update(tiles)
        engine = AttentionEngine(
            shape.meta(torch.float16), CustomIO(axes),
            lambda score, custom, b, h, q_idx, kv_idx: score * 0.1 + bias(custom, h, q_idx, kv_idx),
            online_func=OnlineSoftmax(), backend="interpret", deterministic=deterministic,
        )  # fmt: skip
        found.append(torch.autograd.grad(engine(*leaves), leaves, tensors["do"]))
        assert ran("backward") is tiles["backward"].hopper
    for mine, twin in zip(*found):
        torch.testing.assert_close(mine, twin, rtol=4e-3, atol=4e-3)


UNITS = {  # of blocks over keys: head dim, tile, batch, heads and key heads, causal, pairs of a unit by the launch
    "a head each": (64, key_tile(128), 1, (3, 3), False, None),
    "a key head each": (128, key_tile(80), 2, (2, 1), False, None),
    "two heads and one": (64, key_tile(128), 1, (3, 3), True, 2),
    "two key heads": (128, key_tile(80), 2, (4, 2), True, 2),
}


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", UNITS)
def test_blocks_prepare_for_units_after_theirs(name, ahead, kernels, monkeypatch):
    """And dQ is stored when its unit is done."""
    dim, tile, batch, heads, causal, pairs = UNITS[name]
    kernels.update(backward=tile)
    monkeypatch.setattr(units, "units_ahead", lambda *_: ahead)
    monkeypatch.setattr(units, "prepared_before", lambda *_: False)
    if pairs is not None:
        monkeypatch.setattr(units, "pairs_of_a_unit", lambda *_: pairs)
    shape = Shape(batch, 270, 280, *heads, dim, dim)
    assert errors(CASES["softmax"], shape, torch.float16, causal=causal, backend="interpret", floor=2e-3)
    assert ran("backward")


TURNS = {  # head dim, how far on queries stand, and after how many blocks walks turn
    "each block": (128, 0, 1), "a unit": (128, 0, 6), "never": (128, 0, 1 << 30), "head dim 64": (64, 0, 2),
    "queries that see nothing": (128, -140, 1), "keys that all see": (128, 100, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_blocks_of_grouped_heads_walk_from_either_end(name, kernels, monkeypatch):
    dim, offset, turn = TURNS[name]
    kernels.update(backward=key_tile(80 if dim == 128 else 128))
    monkeypatch.setattr(units, "blocks_of_a_turn", lambda *_: turn)
    shape = Shape(2, 270, 300, 4, 2, dim, dim)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    leaves = [tensors[n].requires_grad_() for n in "qkv"]
    meta = shape.meta(torch.float16)
    engine = AttentionEngine(meta, None, scale(0.1), causal_from(offset), OnlineSoftmax(), backend="interpret")
    found = torch.autograd.grad(engine(*leaves), leaves, tensors["do"])
    assert ran("backward")
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    o = plain.attention(*exact, "softmax", score=plain.scaled(0.1), mask=lambda b, h, i, j: i + offset >= j)
    for mine, true in zip(found, torch.autograd.grad(o, exact, tensors["do"].double()), strict=True):
        assert (mine.double() - true).norm() < 2e-3 * true.norm()


@pytest.mark.parametrize("name", UNITS)
def test_delta_of_units_ahead_knows_of_gradients_of_returned_rows(name, kernels, monkeypatch):
    dim, tile, batch, heads, causal, pairs = UNITS[name]
    kernels.update(backward=tile)
    monkeypatch.setattr(units, "units_ahead", lambda *_: 1)
    monkeypatch.setattr(units, "prepared_before", lambda *_: False)
    if pairs is not None:
        monkeypatch.setattr(units, "pairs_of_a_unit", lambda *_: pairs)
    case, shape = CASES["softmax"], Shape(batch, 270, 280, *heads, dim, dim)
    given = shape.tensors(torch.float16, "cpu", 0)
    arriving = given.pop("do"), torch.randn(batch, heads[0], 270)

    def gradients(inputs, backend):
        engine = engine_for(case, shape, torch.float16, causal=causal, backend=backend)
        output, rows = engine(*inputs, return_rowscales=True)
        results = output, *rows.values()
        return torch.autograd.grad([(x * dx).sum() for x, dx in zip(results, arriving, strict=True)], inputs)

    found = gradients([t.clone().requires_grad_() for t in given.values()], "interpret")
    assert ran("backward")
    right = gradients([t.double().requires_grad_() for t in given.values()], "reference")
    for mine, exact in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-2, atol=2e-2)


def test_deterministic_engines_use_it_for_keys_alone(kernels):
    """Where blocks can't add to dQ in order."""
    kernels.update(backward=key_tile(64))
    shape = Shape(1, 130, 140, 2, 2, 192, 128)
    assert errors(CASES["softmax"], shape, torch.float16, True, backend="interpret", deterministic=True)
    (made,) = [k for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    assert ran("backward") and "atomic" not in made.backward.prim_func.script()


ENDS = {
    "twins": {},
    "by hand": {"forward": forward_tile(128), "backward": key_tile(64)},
    "skewed": {"forward": forward_tile(128), "backward": skew(key_tile(64))},
    "skewed, larger": {"forward": forward_tile(128), "backward": skew(key_tile(80))},
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["by atomics", "deterministic"])
@pytest.mark.parametrize(("name", "kv_heads"), [*((name, 1) for name in ENDS), ("skewed", 2), ("skewed, larger", 2)])
def test_tiles_at_either_end_of_a_relative_bias(name, kv_heads, deterministic, kernels):
    """Of three by four tiles some are past the reach on one side, some on the other, some on neither."""
    shape = Shape(1, 300, 420, 2, kv_heads, 128, 128)
    tensors = shape.tensors(torch.float16, "cpu", 0)
    table = torch.randn(2, 61, generator=torch.Generator().manual_seed(1))
    tiles = ENDS[name]
    kernels.update(tiles)

    def results(backend, dtype):
        leaves = [*(tensors[n].to(dtype).requires_grad_() for n in "qkv"), table.clone().requires_grad_()]
        engine = AttentionEngine(
            shape.meta(torch.float16), CustomIO({"table": ("heads", 61)}), relative_bias("table", 30, 0.1),
            online_func=OnlineSoftmax(), backend=backend, deterministic=deterministic,
        )  # fmt: skip
        o = engine(*leaves)
        return [o, *torch.autograd.grad(o, leaves, tensors["do"].to(dtype))]

    exact = results("reference", torch.float64)
    op.ATTENTIONS.clear()
    for mine, true in zip(results("interpret", torch.float16), exact, strict=True):
        torch.testing.assert_close(mine.double(), true.double(), rtol=4e-3, atol=4e-3)
    assert ran("forward") is bool(tiles)
