"""Row functions of every kind where the first tile of a row keeps no pair of it."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO
from attention_engine.library import sliding_window
from tests.merges import RIGHT

WINDOW, LENGTH = 20, 200


@pytest.mark.parametrize("name", [n for n, f in RIGHT.items() if not f.custom])
def test_a_row_begins_with_its_first_kept_pair(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, 2, 16) for _ in range(3))
    function = RIGHT[name]
    engine = AttentionEngine(
        None, CustomIO({}), lambda s, c, b, h, i, j: s * 0.25, sliding_window(WINDOW, 0), function.func,
        backend="interpret",
    )  # fmt: skip
    o = engine(q, k, v)
    scores = 0.25 * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    for row in range(LENGTH):
        first = max(row - WINDOW, 0)
        weights, _ = function.plain(scores[:, :, row : row + 1, first : row + 1])
        expected = torch.einsum("bhij,bjhd->bihd", weights, v[:, first : row + 1].double())
        assert o[:, row : row + 1].double().sub(expected).norm() <= 1e-4 * expected.norm() + 1e-5, row
