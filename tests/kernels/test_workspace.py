"""The workspace of dQ: what stands where."""

import pytest

from attention_engine.kernels.workspace import workspace_entry, workspace_offset
from attention_engine.plan.forms import HopperKeys, Straight, Tile


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize(
    ("q", "dim", "hopper"), [(80, 128, True), (128, 64, True), (64, 256, True), (64, 192, True), (64, 128, False)]
)
def test_each_place_holds_the_entry_that_is_put_there(q, dim, hopper, vectors):
    tile = Tile(q, 128, 256, 2, HopperKeys() if hopper else Straight())
    places = {(i, d): workspace_offset(i, d, tile, dim, vectors) for i in range(q) for d in range(dim)}
    assert sorted(places.values()) == list(range(q * dim))
    for entry, place in places.items():
        assert workspace_entry(place, tile, dim, vectors) == entry
