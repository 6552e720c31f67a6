"""The pairs of a cell, compared all at once: those that the reference keeps, whatever the bound."""

import pytest
import tilelang.language as T
import torch

from attention_engine.codegen.interpreter import Interpreter
from attention_engine.ir.chance import RANGE, SHARED, chance
from attention_engine.kernels.chance import kept_in_cells
from attention_engine.kernels.splice import name_value

SEED, BATCH, HEAD, CELLS, FIRST_KEY = 2**40 + 7, 3, 2, 64, 32
MOST = 1 << SHARED  # of what a cell's pairs share


def kernel_of(bound):
    """Stores the bits of 64 cells, of sixteen queries each, at sixteen keys; beside each those of the next keys'."""

    @T.prim_func
    def kernel(seed: T.Tensor((1,), "int64"), out: T.Tensor((CELLS, 2), "int64")):
        with T.Kernel(1, threads=128) as _:
            for m in T.Parallel(CELLS):
                query, key = m // 16 * 16 + m // 4 % 4 * 2, FIRST_KEY + m % 4 * 2
                two = kept_in_cells(name_value, bound, seed[0], BATCH, HEAD, [(query, key), (query, key + 16)])
                one = kept_in_cells(name_value, bound, seed[0], BATCH, HEAD, [(query, key)])
                out[m, 0] = T.cast(two, "int64")
                out[m, 1] = T.cast(one, "int64")

    return kernel


@pytest.mark.parametrize(
    "bound", [0, 1, MOST - 1, MOST, 25 * MOST + 19661, 127 * MOST + 5, 128 * MOST, 200 * MOST + 9999, RANGE - 1]
)
def test_a_bit_says_whether_a_pair_is_kept(bound):
    found = torch.zeros(CELLS, 2, dtype=torch.int64)
    Interpreter(kernel_of(bound))(torch.tensor([SEED]), found)
    for m in range(CELLS):
        query, first_key = m // 16 * 16 + m // 4 % 4 * 2, FIRST_KEY + m % 4 * 2
        for down in (0, 1, 8, 9):
            for right in (0, 1, 8, 9):
                place = (right & 1) * 8 + (down & 1) * 4 + (down >> 3) * 2 + (right >> 3)
                for cell, key in enumerate((first_key, first_key + 16)):
                    kept = chance(SEED, BATCH, HEAD, query + down, key + right) >= bound
                    assert int(found[m, 0]) >> (16 * cell + place) & 1 == kept
                    if cell == 0:
                        assert int(found[m, 1]) >> place & 1 == kept
