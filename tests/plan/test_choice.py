"""Which tile a problem gets: one that spills nothing, in straight lines and over keys of packed sequences."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.library import OnlineSoftmax, alibi, causal, document, scale, sliding_window
from attention_engine.plan.forms import Tile

pytest.importorskip("tilelang")


@pytest.mark.parametrize(
    ("gpu", "dim", "mask", "queries"),
    [
        (arch.A100, 128, None, 64), (arch.A100, 128, causal, 64),
        (arch.A100, 128, sliding_window(100), 32), (arch.A100, 128, document(), 32),
        (arch.A100, 64, sliding_window(100), 64), (arch.RTX4090, 128, causal, 32),
        (arch.B200, 128, sliding_window(100), 64),  # who computes has the registers of those who copy there
    ],
)  # fmt: skip
def test_masks_that_need_registers_have_fewer_queries_a_tile(gpu, dim, mask, queries):
    metas = [meta_tensor(1, 2, 256, dim)] * 3
    axes = CustomIO({"documents": ("batch", "seq_len")} if mask is not None and "doc" in mask.__qualname__ else {})
    engine = AttentionEngine(metas, axes, scale(0.1), mask, OnlineSoftmax(), device=gpu())
    tile = engine._kernels("cuda").tiles.backward
    assert (tile.q, tile.kv, tile.threads) == (queries, 64, 256)
    assert ("its mask needs registers" in engine.explain()) is (gpu is arch.A100 and mask not in (None, causal))


@pytest.mark.parametrize("gpu", [arch.A100, arch.B200])
@pytest.mark.parametrize(("mask", "queries"), [(None, 128), (causal, 128), (sliding_window(100), 64)])
def test_forward_they_do_at_head_dims_64(gpu, mask, queries):
    metas = [meta_tensor(1, 2, 256, 64)] * 3
    engine = AttentionEngine(metas, None, scale(0.1), mask, OnlineSoftmax(), device=gpu())
    assert engine._kernels("cuda").tiles.forward == Tile(queries, 64, 128, 2)


def test_what_is_explained_of_an_amd_gpu():
    """Its warps have 64 threads: blocks of 32 are none of the tiles to try."""
    engine = AttentionEngine(
        [meta_tensor(1, 2, 256, 64)] * 3, None, scale(0.1), causal, OnlineSoftmax(), device=arch.MI300X()
    )
    said = engine.explain()
    assert "on MI300X, 304 SMs" in said and "chosen by what fits shared memory, not measured" in said
    assert "32 threads are no whole warps of 64" in said


def bent(score, custom, b, h, q_idx, kv_idx):
    """A score whose gradient is made of the product once more."""
    return (score * 0.1 - custom["slopes"] * (q_idx - kv_idx).abs()).tanh()


def prefixed(b, h, q_idx, kv_idx, custom):
    return (q_idx >= kv_idx) | (kv_idx < custom["prefix"])


@pytest.mark.parametrize(
    ("score", "mask", "packed", "queries"),
    [
        (alibi(0.1), causal, "alike", 64), (alibi(0.1), causal, "unlike", 64), (alibi(0.1), prefixed, "unlike", 48),
        (bent, causal, "alike", 48), (bent, causal, "unlike", 32), (bent, prefixed, "unlike", 32),
    ],
)  # fmt: skip
def test_pairs_that_hold_many_numbers_have_fewer_queries_a_tile(score, mask, packed, queries):
    """Of packed sequences whose slopes have gradients: three fp32 tiles of pairs, and tables that these read."""
    axes = {"slopes": ("heads",), **({"prefix": ("batch",)} if mask is prefixed else {})}
    engine = AttentionEngine([meta_tensor(1, 2, 256, 128)] * 3, CustomIO(axes), score, mask, device=arch.H100())
    custom = [torch.zeros(2, requires_grad=True), torch.zeros(1, dtype=torch.int32)][: len(axes)]
    kernel = engine._all_kernels(arch.H100(), custom, packed=packed)["backward"]
    (tile,) = (given for given in kernel.given if isinstance(given, Tile))
    assert (tile.q, tile.kv, tile.hopper) == (queries, 128, True)


@pytest.mark.parametrize(("score", "queries"), [(alibi(0.1), 64), (bent, 32)])
def test_deterministic_gradients_of_packed_sequences_have_such_tiles_too(score, queries):
    """A window over sequences of unlike lengths: with 64 queries 688 bytes were spilled, with 32 none are."""
    engine = AttentionEngine(
        [meta_tensor(1, 2, 256, 128)] * 3, CustomIO({"slopes": ("heads",)}), score, sliding_window(100),
        device=arch.H100(), deterministic=True,
    )  # fmt: skip
    kernel = engine._all_kernels(arch.H100(), [torch.zeros(2)], packed="unlike")["backward"]
    (tile,) = (given for given in kernel.given if isinstance(given, Tile))
    assert (tile.q, tile.kv, tile.hopper) == (queries, 128, True)
