"""Calls with DTensors, sharded over heads or batches: what plain tensors give, to a rounding."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import everything, sharded_everywhere

EXACT = 1e-13


@pytest.fixture(scope="module")
def found():
    """Of both processes, which start once."""
    return run_ranks(2, everything)


def test_any_attention_over_heads_or_batches(found):
    for errors, *_ in found:
        assert len(errors) == 15 and max(errors.values()) <= EXACT, errors


@pytest.mark.slow
def test_any_attention_over_heads_and_over_batches():
    for errors in run_ranks(2, sharded_everywhere):
        assert len(errors) == 25 and max(errors.values()) <= EXACT, errors


def test_meshes_of_two_dimensions(found):
    for _, errors, *_ in found:
        assert len(errors) == 8 and max(errors.values()) <= EXACT, errors


def test_captured_tensors_dropped_weights_and_metas(found):
    for _, _, errors, *_ in found:
        assert len(errors) == 6 and max(errors.values()) <= EXACT, errors


def test_a_broken_law_is_seen(found):
    for *_, errors in found:
        assert len(errors) == 2 and min(errors.values()) > 1e-3, errors


def test_placements_that_no_rank_could_attend_with_are_refused(found):
    for *_, said, _ in found:
        assert said["tokens"] == (
            "WrongPlacement: q is sharded over tokens (dimension 1) by the mesh's dimension 'cp', and no rank could "
            "attend alone.\n  A sequence that ranks share needs "
            "attention_engine.distributed.ContextParallel(engine, mesh), which takes each rank's own tokens."
        )
        assert "k is sharded over tokens" in said["tokens of keys"]
        assert "q is sharded over tokens (dimension 2)" in said["tokens, bhsd"]
        assert "over a head's entries (dimension 3)" in said["entries"]
        assert "shards q over heads, k over batch, v over batch" in said["both"]
        assert "q is a DTensor, and k is none" in said["plain"]
        assert said["three heads"].startswith("HeadsDoNotDivide: 3 query heads can't be shared evenly among 2 ranks")
        assert "a batch of 3 can't be shared evenly among 2 ranks" in said["three batches"]
        assert said["packed"].startswith("OptionsClash: q is a DTensor, and a call with cu_seqlens_q takes none")
        for name in ("attention()", "part", "check", "rows of blocks", "cache"):
            assert said[name] == (
                "WrongPlacement: q is a DTensor, and only engine(q, k, v) takes one. Give each rank its own: "
                "q.to_local()."
            )
        assert said["partial"].startswith("WrongPlacement: q is ")
        assert said["linear"].startswith("WrongPlacement: q is a DTensor, and a linear engine takes none")
