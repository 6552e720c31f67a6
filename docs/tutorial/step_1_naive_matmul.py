"""Step 1, a naive product: every thread makes one entry of C and reads its whole row and column from memory."""

import tilelang.language as T
import torch
from machine import DEVICE, compare, compiled, random

TILE = 16


def kernel(rows, columns, inner):
    @T.prim_func
    def naive_matmul(
        A: T.Tensor((rows, inner), "float16"),
        B: T.Tensor((inner, columns), "float16"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(rows // TILE, columns // TILE, threads=TILE * TILE) as (row_block, column_block):
            total = T.alloc_fragment([TILE, TILE], "float32")  # one register of each thread
            T.fill(total, 0)
            for n in T.serial(inner):
                for i, j in T.Parallel(TILE, TILE):  # i, j: the thread
                    a = A[row_block * TILE + i, n]
                    b = B[n, column_block * TILE + j]
                    total[i, j] += T.cast(a, "float32") * T.cast(b, "float32")
            T.copy(total, C[row_block * TILE, column_block * TILE])

    return naive_matmul


def matmul(a, b):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    compiled(kernel, *c.shape, a.shape[1])(a, b, c)
    return c


def main():
    n = 1024 if DEVICE == "cuda" else 32
    return compare("naive matmul", matmul, torch.matmul, [random(n, n), random(n, n, seed=1)])


if __name__ == "__main__":
    main()
