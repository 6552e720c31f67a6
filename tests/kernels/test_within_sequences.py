"""The forward kernel for Hopper whose blocks lie in one of the packed sequences, in the warp simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, library, meta_tensor
from attention_engine.arch import H100
from attention_engine.plan.forms import HopperForward, Tile
from tests import packed_cases, plain
from tests.kernels.test_hopper_interpret import kernels, ran  # noqa: F401 - a fixture
from tests.packed_cases import CASES, HEADS, KV_HEADS, SCALE, Case, io_of, sequence_by_sequence, starts, tensors

TILES = {
    128: Tile(128, 128, 256, 2, HopperForward(persistent=True, within_sequences=True)),
    64: Tile(192, 128, 384, 2, HopperForward(persistent=True, within_sequences=True)),
}
TABLE = Case(  # read without guards where tiles start with it
    "a table of distances",
    {"score_mod": lambda s, c, b, h, i, j: s * SCALE + c["at"][h, (i - j) % 50] * c["of"], "mask_mod": library.causal},
    lambda s, c, at: s * SCALE + c["at"][at.h, (at.q - at.kv) % 50] * c["of"][at.b], packed_cases.causal,
    axes={"at": ("heads", 50), "of": ("batch",)},
    make=lambda n, q, k: {"at": packed_cases.drawn(HEADS, 50), "of": packed_cases.drawn(n)},
)  # fmt: skip
by_name = {case.name: case for case in [*CASES, TABLE]}
ALIKE = (300, 0, 5, 128, 131)  # an empty one, one that fills a tile, and tiles that two sequences share
UNLIKE = ((150, 40, 0, 130, 9), (333, 12, 60, 0, 140))
NAMES = ("causal", "ALiBi", "sigmoid in a window", "a number of each sequence", "a table of distances")
OF_UNLIKE = ("full, unlike lengths", "causal, unlike lengths", "ALiBi, unlike lengths")


@pytest.fixture(params=[128, 64, 112])
def dim(request, kernels, monkeypatch):  # noqa: F811
    kernels["forward"] = TILES[-(-request.param // 64) * 64]  # 112: rows end before their tile does
    monkeypatch.setattr(packed_cases, "DIM", request.param)
    monkeypatch.setattr(packed_cases, "DIM_V", request.param)
    return request.param


def engine_of(case, dim, **options):
    metas = [meta_tensor(None, heads, None, dim, dtype=torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    if "score_mod" not in case.options:
        options["scale"] = SCALE
    return AttentionEngine(metas, io_of(case), backend="interpret", **{**case.options, **options})


def call(case, engine, qkv, custom, **more):
    of_keys = {} if case.key_lengths is None else {"cu_seqlens_k": starts(case.key_lengths)}
    return engine(*qkv, cu_seqlens_q=starts(case.lengths), **of_keys, **custom, **more)


@pytest.mark.parametrize("name", [*NAMES, *OF_UNLIKE])
def test_blocks_of_one_sequence_keep_the_rule(name, dim):
    unlike = name in OF_UNLIKE
    case = replace(
        by_name[name], lengths=UNLIKE[0] if unlike else ALIKE, key_lengths=UNLIKE[1] if unlike else None
    )  # fmt: skip
    qkv, custom = tensors(case, torch.float16, more=0 if unlike else 7)
    with torch.no_grad():
        found = {"o": call(case, engine_of(case, dim), qkv, custom)}
        exact, eager = ({"o": sequence_by_sequence(case, qkv, custom, of)} for of in (torch.float64, torch.float16))
    plain.compare(found, exact, eager, torch.float16, floor=1e-8)
    assert ran("forward")
    assert not found["o"][sum(case.lengths) :].any()


def test_what_a_neighbour_holds_reaches_nobody(dim):
    case = replace(by_name["causal"], lengths=(70, 60, 130))
    qkv, custom = tensors(case, torch.float16)
    with torch.no_grad():
        wanted = call(case, engine_of(case, dim), qkv, custom)
        for t in qkv:
            t[70:130] = torch.nan
        found = call(case, engine_of(case, dim), qkv, custom)
    assert found[70:130].isnan().all()
    assert torch.equal(found[:70], wanted[:70]) and torch.equal(found[130:], wanted[130:])


def test_rows_leave_with_their_sequence(dim):
    case = replace(by_name["causal"], lengths=ALIKE)
    qkv, custom = tensors(case, torch.float16)
    with torch.no_grad():
        _, rows = call(case, engine_of(case, dim), qkv, custom, return_rowscales=True)
        at = 0
        for n in case.lengths:
            if n:
                q, k, v = (t[None, at : at + n] * f for t, f in zip(qkv, (SCALE * dim**0.5, 1, 1), strict=True))
                _, lse = plain.attention(q, k, v, "softmax", mask=lambda b, h, i, j: i >= j, return_lse=True)
                assert torch.allclose(rows["lse"][:, at : at + n].double(), lse[0], atol=2e-2)
            at += n


def test_no_group_waits_for_one_that_gets_no_item():
    """The simulator knows no barrier of groups. A list may hold fewer tiles than there are blocks: those without one
    have no first group that lets a second start (on a GPU, two sequences of 64 and 100 rows waited for ever)."""
    metas = [meta_tensor(None, heads, None, 128, dtype=torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    engine = AttentionEngine(metas, mask_mod=library.causal, online_func=library.OnlineSigmoid(), scale=SCALE)
    lines = engine._source_kernel("forward", "tilelang", "alike", H100()).source("tilelang").splitlines()
    waits = [at for at, line in enumerate(lines) if 'tvm_storage_sync("shared", 2 + thread // 128 - 2, 256)' in line]
    assert waits
    for wait in waits:
        around, margin = [], indent_of(lines[wait])
        for line in reversed(lines[:wait]):
            if indent_of(line) < margin:
                around.append(line.strip())
                margin = indent_of(line)
        assert "if numbers[3] > 0:" in around, around[:4]


@pytest.mark.parametrize("packed", ["alike", None])
def test_weights_of_a_sigmoid_are_held_before_the_wait_for_the_output(packed):
    """By a fence and a branch of a wait that is over, or ptxas makes them while no product of the group runs."""
    metas = [meta_tensor(None, heads, None, 128, dtype=torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    engine = AttentionEngine(metas, mask_mod=library.causal, online_func=library.OnlineSigmoid(), scale=SCALE)
    lines = engine._source_kernel("forward", "tilelang", packed, H100()).source("tilelang").splitlines()
    weights = max(at for at, line in enumerate(lines) if "fast_rcp" in line)
    found = [line.strip() for line in lines[weights + 1 : weights + 4]]
    for line, wanted in zip(found, ("warpgroup_fence_operand", "mbarrier_wait_parity(v_full", "wait_wgmma(0)")):
        assert wanted in line, found


def indent_of(line):
    return len(line) - len(line.lstrip())
