"""Sequences that four processes share, on one node and on two; heads and batches over both dimensions of a mesh."""

from __future__ import annotations

import pytest

from tests.distributed.compared import EXACT, compare_all, compare_needs, compare_nodes
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import sharded_in_two_dimensions


def some(mesh):
    """Each attention once; what two nodes do; DTensors on a mesh of two dimensions."""
    return (
        compare_all(mesh, every=False, once=True), compare_nodes(mesh, every=False), compare_needs(mesh),
        sharded_in_two_dimensions(mesh),
    )  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """Of all four."""
    return run_ranks(4, some)


def test_any_attention_over_four_ranks(found):
    for errors, *_ in found:
        assert len(errors) == 10 and max(errors.values()) <= EXACT, errors


def test_two_nodes_of_two_ranks(found):
    for _, errors, *_ in found:
        assert len(errors) == 4 and max(errors.values()) <= EXACT, errors


def test_four_ranks_send_the_keys_alone_that_others_need(found):
    for _, _, of_cases, _ in found:
        assert max(error for error, *_ in of_cases.values()) <= EXACT
        assert all(of_cases[name][1] < 0.8 * of_cases[name][2] for name in ("window", "documents"))


def test_batches_over_one_dimension_and_heads_over_the_other(found):
    for *_, errors in found:
        assert len(errors) == 4 and max(errors.values()) <= EXACT, errors


@pytest.mark.slow
def test_any_attention_over_four_ranks_in_every_layout_by_every_method():
    for errors in run_ranks(4, compare_all):
        assert len(errors) == 90 and max(errors.values()) <= EXACT, errors


@pytest.mark.slow
def test_two_nodes_by_every_method():
    for errors in run_ranks(4, compare_nodes):
        assert len(errors) == 24 and max(errors.values()) <= EXACT, errors
