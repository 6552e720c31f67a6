"""Into how many parts the rows of a call with a cache are cut."""

import pytest

from attention_engine.arch import H100
from attention_engine.plan.cached import choose_parts
from attention_engine.plan.forms import Tile

TILE = Tile(64, 64, 128, 2)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 10, 16, 24, 32, 40, 48, 64, 70, 96])
def test_no_more_parts_would_run_at_once(rows):
    """132 SMs: 8 rows in 15 parts would leave 12 of them idle, which 16 parts do not."""
    count = choose_parts(rows, 131072, TILE, H100())
    turns = -(-rows * count // 132)
    assert count == 128 or -(-rows * (count + 1) // 132) == turns + 1
    assert rows * count / (132 * turns) > 0.7


def test_a_part_has_a_tile_at_least():
    assert choose_parts(8, 512, TILE, H100()) == 8 and choose_parts(8, 256, TILE, H100()) == 1


def test_rows_that_fill_the_gpu_are_whole():
    assert choose_parts(106, 131072, TILE, H100()) == 1
