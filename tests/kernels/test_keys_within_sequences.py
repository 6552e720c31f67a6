"""The backward kernel for Hopper whose blocks of keys lie in one of the packed sequences, in the warp simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_engine.compiler import Kernel
from attention_engine.ir.packing import PLACES, TABLES, Packing
from attention_engine.ir.problem import Problem
from attention_engine.kernels.sequence_tiles import CLASSES, FEW_BLOCKS, LATE
from attention_engine.plan.forms import HopperKeys, Tile
from attention_engine.runtime.packed import make_tables
from tests import packed_cases, plain
from tests.kernels.test_hopper_interpret import kernels, ran  # noqa: F401 - a fixture
from tests.kernels.test_within_sequences import ALIKE, OF_UNLIKE, TILES, UNLIKE, by_name, call, engine_of
from tests.packed_cases import sequence_by_sequence, tensors, with_gradients

DIM = 128
NAMES = ("causal", "ALiBi", "sigmoid in a window", "a number of each sequence")


TILE = Tile(64, 128, 256, 2, HopperKeys(persistent=True, within_sequences=True))


@pytest.fixture
def within(kernels, monkeypatch):  # noqa: F811
    kernels["forward"] = TILES[DIM]
    kernels["backward"] = TILE
    monkeypatch.setattr(packed_cases, "DIM", DIM)
    monkeypatch.setattr(packed_cases, "DIM_V", DIM)


def check(case, more=0):
    qkv, custom = tensors(case, torch.float16, more=more)
    custom = {n: t.detach() for n, t in custom.items()}
    found = with_gradients(call(case, engine_of(case, DIM), qkv, custom), qkv, custom)
    exact, eager = (
        with_gradients(sequence_by_sequence(case, qkv, custom, of), qkv, custom)
        for of in (torch.float64, torch.float16)
    )
    plain.compare(found, exact, eager, torch.float16, floor=1e-8)
    assert ran("backward")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_keys_of_one_sequence_keep_the_rule(name, within):
    found = check(replace(by_name[name], lengths=ALIKE), more=7)
    assert not found["dk"][-7:].any() and not found["dv"][-7:].any() and not found["dq"][-7:].any()


@pytest.mark.parametrize("name", OF_UNLIKE)
def test_lengths_of_keys_of_their_own_keep_the_rule(name, within):
    check(replace(by_name[name], lengths=UNLIKE[0], key_lengths=UNLIKE[1]))


@pytest.mark.parametrize("name", ["causal", "full, unlike lengths"])
def test_what_a_neighbour_holds_reaches_no_gradient(name, within):
    lengths = (70, 60, 130)
    case = replace(by_name[name], lengths=lengths, key_lengths=None if name == "causal" else lengths)
    qkv, custom = tensors(case, torch.float16)
    engine = engine_of(case, DIM)
    wanted = with_gradients(call(case, engine, qkv, custom), qkv, custom)
    with torch.no_grad():
        for t in qkv:
            t[70:130] = torch.nan
    found = with_gradients(call(case, engine, qkv, custom), qkv, custom)
    for n in ("dq", "dk", "dv"):
        assert found[n][70:130].isnan().all()
        for of in (slice(0, 70), slice(130, None)):
            assert torch.allclose(found[n][of], wanted[n][of], atol=1e-4), n


@pytest.mark.parametrize("lengths", [(40, 1, 90, 3, 60), (300, 0), (0, 0, 17)])
def test_short_and_empty_sequences_keep_the_rule(lengths, within):
    check(replace(by_name["causal"], lengths=lengths))


LONG = tuple(7 + 90 * (n * n % 23) for n in range(60))  # of more slots than are looked at together


@pytest.mark.parametrize("kv_heads", [2, 64])
@pytest.mark.parametrize(
    "lengths, more", [((5, 300, 0, 128, 1000, 1000, 129), 40), ((700,), 0), (LONG, 3), ((90, 2600, 2100, 2300), 5)]
)
def test_tiles_of_keys_are_listed_whole_sequences_together_and_long_ones_first(lengths, more, kv_heads):
    """Where they are few, those of a sequence's last keys come behind all others."""
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    rows, tile = int(starts[-1]) + more, TILE
    places = make_tables(Packing.ALIKE, starts, starts, rows, rows)[-1]
    custom = ((PLACES, "int32", TABLES[Packing.ALIKE][PLACES]),)
    problem = Problem(2 * kv_heads, kv_heads, DIM, DIM, "float16", custom=custom)
    listed = torch.full((rows // tile.kv + len(lengths) + 2, 3), -7, dtype=torch.int32)
    Kernel("sequence_tiles.key_tiles", (problem, tile), "interpret", problem, {}).run(rows, places, listed)
    count, found = int(listed[0, 0]), listed[1:].tolist()
    ends = [*zip(starts.tolist(), starts.tolist()[1:]), (int(starts[-1]), rows)]
    wanted = [[n, at, end] for n, (begin, end) in enumerate(ends) for at in range(begin, end, tile.kv)]
    few = -(-rows // tile.kv) * kv_heads <= FEW_BLOCKS

    def place(listed):
        n, at, end = listed
        return few and end - at <= LATE, -((end - ends[n][0]) * (CLASSES // 2 - 1) // rows)

    assert found[:count] == sorted(wanted, key=place)
