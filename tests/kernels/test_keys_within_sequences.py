"""The backward kernel for Hopper whose blocks of keys lie in one of the packed sequences, in the warp simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_engine.plan.forms import HopperKeys, Tile
from tests import packed_cases, plain
from tests.kernels.test_hopper_interpret import kernels, ran  # noqa: F401 - a fixture
from tests.kernels.test_within_sequences import ALIKE, OF_UNLIKE, TILES, UNLIKE, by_name, call, engine_of
from tests.packed_cases import sequence_by_sequence, tensors, with_gradients

DIM = 128
NAMES = ("causal", "ALiBi", "sigmoid in a window", "a number of each sequence")


@pytest.fixture
def within(kernels, monkeypatch):  # noqa: F811
    kernels["forward"] = TILES[DIM]
    kernels["backward"] = Tile(64, 128, 256, 2, HopperKeys(persistent=True, within_sequences=True))
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
