"""Who holds what of a tile of products, against the layout of wgmma's accumulators that PTX states."""

import pytest

pytest.importorskip("tilelang")

from attention_engine.kernels.warps import thread_of_row


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_each_thread_holds_the_rows_that_ptx_gives_it(groups):
    """A warp has 16 rows; lanes 4 n to 4 n + 3 hold rows n and n + 8 of them, in this order."""
    for thread in range(128 * groups):
        warp, lane = divmod(thread, 32)
        for held, row in enumerate((warp * 16 + lane // 4, warp * 16 + lane // 4 + 8)):
            assert thread_of_row(row, lane % 4) == (thread, held)
