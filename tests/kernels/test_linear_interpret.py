"""Linear attention through the kernels, tile by tile on a CPU: results as near to float64 as plain PyTorch's.

tests/gpu/test_linear.py is its twin at larger lengths.
"""

import dataclasses

import pytest
import torch

from attention_engine import LinearAttentionEngine, meta_tensor
from attention_engine.ir.linear import LinearTile
from attention_engine.runtime.attentions import ATTENTIONS
from tests.linear_cases import CASES, Shape, engine_for, engine_results, errors, plain_results
from tests.plain import compare, worst_ratio
from tests.plain_linear import parallel, recurrence

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
GROUPS = {"own_heads": (2, 2, 2), "one_group": (1, 1, 4), "groups_differ": (1, 2, 4), "few": (1, 2, 2)}
RUNS = [  # every case, kind of groups, pair of dims and dtype; chunks of 64 (fp32: 32), so that tails and several occur
    ("plain", "own_heads", (64, 64), FP16), ("no_decay", "groups_differ", (64, 64), BF16),
    ("mamba2", "one_group", (128, 64), BF16), ("shifted", "groups_differ", (40, 96), FP16),
    ("shifted", "few", (40, 96), FP32), ("scaled_keys", "few", (40, 96), FP32),
    ("gla", "own_heads", (64, 64), BF16), ("gla_mods", "groups_differ", (40, 96), FP16), ("gla", "few", (40, 96), FP32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "groups", "dims", "dtype"), RUNS, ids=lambda x: str(x).removeprefix("torch."))
def test_kernels_keep_the_rule(name, groups, dims, dtype, record_property):
    found = []
    for length in (1, 17, 63, 64, 65, 200):
        shape = Shape(1, length, *GROUPS[groups], *dims)
        few = CASES[name].axes and length < 200  # numbers in a gradient, one for each token: eager's may all be lucky
        draws = 4 if few else 1 if dtype is FP32 else 2
        found += errors(CASES[name], shape, dtype, backend="interpret", draws=draws)
    record_property(*worst_ratio(found, f"linear {name} {str(dtype)[6:]}"))


def test_wide_heads_keep_the_rule(record_property):
    found = errors(CASES["plain"], Shape(1, 65, 1, 1, 1, 256, 512), BF16, backend="interpret")
    record_property(*worst_ratio(found, "linear plain bfloat16"))


def with_tiles(case, shape, change, **inputs_changed):
    """fp32 results of one problem, its kernels' tiles changed by a function of them."""
    engine = engine_for(case, shape, FP32, backend="interpret")
    inputs = {**shape.inputs(case, FP32), **inputs_changed}
    tensors, custom = [inputs[n] for n in ("q", "k", "v", "decay")], [inputs[n] for n in case.axes]
    program_kernels = ATTENTIONS[engine._check(*tensors, inputs["initial_state"], custom)].program_kernels
    program_kernels.tiles = change(program_kernels.kernels(*tensors, custom).tiles)
    program_kernels._kernels.clear()
    try:
        return engine_results(engine, inputs)
    finally:
        program_kernels.tiles = None
        program_kernels._kernels.clear()


def by_chunk(chunk):
    """Results with chunks of this length. Decays are weak: sums of a chunk stay small, and their rounding with them."""
    tile = LinearTile(chunk, 32, 32, 128, 0, heads=2)
    return with_tiles(
        CASES["mamba2"], Shape(1, 300, 1, 1, 2, 32, 32),
        lambda tiles: dataclasses.replace(tiles, forward=tile, states=tile, rows=dict.fromkeys(tiles.rows, tile)),
        decay=torch.linspace(-0.1, 0, 600).view(1, 300, 2),
    )  # fmt: skip


def test_chunk_lengths_agree():
    expected = by_chunk(32)
    for chunk in (64, 128, 256):
        for name, value in by_chunk(chunk).items():
            assert (value - expected[name]).abs().mean() <= 5e-5 * expected[name].abs().mean(), (chunk, name)


def test_heads_summed_in_parts_agree():
    def up_to(heads):
        return lambda tiles: dataclasses.replace(
            tiles, rows={n: dataclasses.replace(t, heads=heads) for n, t in tiles.rows.items()}
        )

    shape = Shape(1, 40, 1, 1, 4, 32, 32)
    apart, together = (with_tiles(CASES["plain"], shape, up_to(heads)) for heads in (1, 4))
    for name, value in apart.items():
        torch.testing.assert_close(value, together[name], rtol=1e-5, atol=1e-5)


def test_both_plans_of_the_forward_pass_agree():
    shape = Shape(1, 100, 1, 2, 2, 40, 96)
    walk, chunks = (
        with_tiles(CASES["shifted"], shape, lambda tiles, plan=plan: dataclasses.replace(tiles, plan=plan),
                   decay=torch.full((1, 100, 2), -0.1))
        for plan in ("walk", "chunks")
    )  # fmt: skip
    for name in ("o", "last"):
        torch.testing.assert_close(walk[name], chunks[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(walk["o"], chunks["o"])  # or one plan ran twice


@pytest.mark.parametrize("name", ["plain", "gla"])
@pytest.mark.parametrize("strength", [-1e4, -200.0])
def test_strong_decay_is_safe(strength, name):
    """A token that forgets everything: what comes after it is as if it were the first, and nothing overflows."""
    case, shape = CASES[name], Shape(1, 100, 1, 1, 1, 32, 32)
    engine = engine_for(case, shape, FP32, backend="interpret")
    inputs = shape.inputs(case, FP32)
    inputs["decay"][:, 70] = strength
    whole = engine_results(engine, inputs)
    assert all(x.isfinite().all() for x in whole.values())
    later = {n: x[:, 70:] if n in ("q", "k", "v", "decay", "d_o") else x for n, x in inputs.items()}
    later["initial_state"] = torch.zeros_like(inputs["initial_state"])
    part = engine_results(engine, later)
    for name in ("o", "d_q", "d_k", "d_v"):
        torch.testing.assert_close(whole[name][:, 70:], part[name], rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(whole["last"], part["last"], rtol=1e-3, atol=2e-4)
    assert whole["d_decay"][:, 70].abs().max() == 0
    every = {**inputs, "decay": torch.full_like(inputs["decay"], strength)}
    assert all(x.isfinite().all() for x in engine_results(engine, every).values())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_channels_that_forget_leave_the_others_alone(dtype):
    """Some channels forget all at some tokens, at chunks' ends too; the others keep all. No difference overflows."""
    case, shape = CASES["gla"], Shape(1, 130, 1, 1, 1, 32, 32)
    engine = engine_for(case, shape, dtype, backend="interpret")
    inputs = shape.inputs(case, dtype)
    inputs["decay"] = torch.zeros_like(inputs["decay"])
    inputs["decay"][:, [0, 31, 32, 63, 64, 100], :, ::3] = -1e4
    inputs["decay"][:, 33:40, :, 1::3] = -300.0
    exact, eager = plain_results(case, recurrence, inputs, True), plain_results(case, parallel, inputs, False)
    found = [engine_results(engine, inputs), exact, eager]
    for results in found:
        results["d_decay"] = torch.where(inputs["decay"] < -80, 0.0, results["d_decay"])  # nothing is left to lose
    compare(*found, dtype, floor=1e-6)


def test_a_decay_alike_in_all_channels_is_one_for_the_token():
    shape, case = Shape(1, 70, 1, 2, 2, 40, 32), CASES["plain"]
    engine, inputs = engine_for(case, shape, FP32, backend="interpret"), shape.inputs(case, FP32)
    token = engine_results(engine, inputs)
    channels = engine_results(engine, {**inputs, "decay": inputs["decay"][..., None].expand(1, 70, 2, 40)})
    channels["d_decay"] = channels["d_decay"].sum(-1)
    for name, value in token.items():
        torch.testing.assert_close(channels[name], value, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("name", ["plain", "shifted", "scaled_keys"])
def test_gradients_by_walks_and_by_chunks_agree(name):
    """No gradient of decays is asked for, so that all of dq, dk, dv and of the initial state may come from walks."""
    case, shape = CASES[name], Shape(2, 150, 2, 2, 2, 40, 96)
    engine, inputs = engine_for(case, shape, FP32, backend="interpret"), shape.inputs(case, FP32)
    tensors, custom = [inputs[n] for n in ("q", "k", "v", "decay")], [inputs[n] for n in case.axes]
    program_kernels = ATTENTIONS[engine._check(*tensors, inputs["initial_state"], custom)].program_kernels
    tile, tiles = LinearTile(64, 0, 32, 128, 0), program_kernels.kernels(*tensors, custom).tiles
    found = []
    for plan in ("walk", "chunks"):
        walks = dict.fromkeys(("dq", "dk", "dv"), tile)
        program_kernels.tiles = dataclasses.replace(tiles, plan=plan, walks=walks)
        program_kernels._kernels.clear()
        given = (*tensors, inputs["initial_state"], custom, inputs["d_o"], inputs["d_last"])
        made = program_kernels.backward(*given, frozenset(case.axes))
        (kernels,) = program_kernels._kernels.values()
        builders = {builder for builder, _ in kernels._made}
        assert builders >= ({"linear.token.walk.walk"} if plan == "walk" else {"linear.token.chunk.chunk_rows"})
        assert ("linear.token.chunk.chunk_rows" in builders) is (plan == "chunks")
        found.append({"q": made.q, "k": made.k, "v": made.v, "initial": made.initial, **made.custom})
    program_kernels.tiles = None
    program_kernels._kernels.clear()
    for key, value in found[0].items():
        assert (value - found[1][key]).abs().mean() <= 1e-5 * value.abs().mean(), key


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_that_share_their_rows_agree_however_many_a_block_takes(heads):
    """A head's own mod of a shared key must not be taken for all heads of the block."""
    shape = Shape(1, 40, 1, 1, 4, 32, 32)
    for name in ("plain", "scaled_keys", "shifted"):
        apart, together = (
            with_tiles(CASES[name], shape, lambda tiles, n=n: dataclasses.replace(
                tiles, plan="chunks", rows={r: dataclasses.replace(t, heads=n) for r, t in tiles.rows.items()}))
            for n in (1, heads)
        )  # fmt: skip
        for key, value in apart.items():
            torch.testing.assert_close(value, together[key], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("channels", [False, True], ids=["token", "channels"])
@pytest.mark.parametrize("plan", ["walk", "chunks"])
def test_fp16_states_beyond_its_range_are_right(plan, channels):
    """Sums of k v reach 1e6, their products with q 1e3: only states leave fp16's range, and their gradients too."""
    if channels and plan == "walk":
        pytest.skip("there is no walk of channels")
    length, dim = 200, 32
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.rand(1, length, 1, dim, generator=generator) for _ in range(4))
    inputs = {"q": q / 500, "k": 8 + 8 * k, "v": 30 + 10 * v, "do": do / 2000}
    inputs = {n: x.half() for n, x in inputs.items()}
    decay = -0.001 * torch.rand(1, length, 1, *([dim] if channels else []), generator=generator)
    engine = LinearAttentionEngine([meta_tensor(1, 1, length, dim, dtype=FP16)] * 3, backend="interpret")
    first = torch.full((1, 1, dim, dim), 3e5)

    def results(dtype, run):
        leaves = {n: inputs[n].detach().to(dtype or FP16, copy=True).requires_grad_() for n in "qkv"}
        a = decay.detach().to(dtype or torch.float32, copy=True).requires_grad_()
        o, _ = run(*leaves.values(), a, first.to(dtype or torch.float32))
        (o * inputs["do"].to(o.dtype)).sum().backward()
        return {"o": o, **{n: x.grad for n, x in leaves.items()}, "decay": a.grad}

    program_kernels = program_kernels_of(engine, inputs["q"], inputs["k"], inputs["v"], decay, first)
    tiles = program_kernels.kernels(*(inputs[n] for n in "qkv"), decay, ()).tiles
    program_kernels.tiles = dataclasses.replace(tiles, plan=plan)
    program_kernels._kernels.clear()
    try:
        ours = results(None, lambda *x: engine(*x[:4], initial_state=x[4], output_final_state=True))
    finally:
        program_kernels.tiles = None
        program_kernels._kernels.clear()
    expected = results(torch.float64, recurrence)
    for name, value in expected.items():
        error = (ours[name].double() - value).abs().mean()
        assert error <= 2e-3 * value.abs().mean(), name


def program_kernels_of(engine, q, k, v, decay, first):
    return ATTENTIONS[engine._check(q, k, v, decay, first, [])].program_kernels
