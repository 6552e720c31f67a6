"""The bytes of a cell, compared four at once: the pairs that the reference keeps, whatever the bound."""

import pytest
import tilelang.language as T
import torch

from attention_engine.codegen.interpreter import Interpreter
from attention_engine.ir.chance import chance
from attention_engine.kernels.chance import kept_bytes
from attention_engine.kernels.splice import name_value

SEED, BATCH, HEAD, CELLS, FIRST_KEY = 2**40 + 7, 3, 2, 64, 32


def kernel_of(bound):
    """Stores the four words of 64 cells: sixteen of each sixteen queries, at sixteen keys."""

    @T.prim_func
    def kernel(seed: T.Tensor((1,), "int64"), out: T.Tensor((CELLS, 4), "int64")):
        with T.Kernel(1, threads=128) as _:
            for m in T.Parallel(CELLS):
                kept = kept_bytes(
                    name_value, bound, seed[0], BATCH, HEAD, m // 16 * 16 + m // 4 % 4 * 2, FIRST_KEY + m % 4 * 2
                )
                out[m, 0] = T.cast(kept[0], "int64")
                out[m, 1] = T.cast(kept[1], "int64")
                out[m, 2] = T.cast(kept[2], "int64")
                out[m, 3] = T.cast(kept[3], "int64")

    return kernel


@pytest.mark.parametrize(
    "bound", [0, 1, 5 << 20, 429496730, 127 << 24 | 5, 128 << 24, 128 << 24 | 77, 200 << 24 | 99999, 2**32 - 1]
)
def test_a_bit_says_whether_a_pair_is_kept(bound):
    found = torch.zeros(CELLS, 4, dtype=torch.int64)
    Interpreter(kernel_of(bound))(torch.tensor([SEED]), found)
    assert not (found & ~0x80808080).any()
    for m in range(CELLS):
        query, key = m // 16 * 16 + m // 4 % 4 * 2, FIRST_KEY + m % 4 * 2
        for down in (0, 1, 8, 9):
            for right in (0, 1, 8, 9):
                word, byte = (down & 1) * 2 + (right & 1), 3 - (down >> 3) * 2 - (right >> 3)
                kept = int(found[m, word]) >> (8 * byte + 7) & 1
                assert kept == (chance(SEED, BATCH, HEAD, query + down, key + right) >= bound)
