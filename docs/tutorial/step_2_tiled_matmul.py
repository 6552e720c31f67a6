"""Step 2, a tiled product: a block brings tiles of A and B on chip once, and tensor cores multiply them."""

import tilelang.language as T
import torch
from machine import DEVICE, compare, compiled, random


def kernel(rows, columns, inner, tile=64, step=32):
    @T.prim_func
    def tiled_matmul(
        A: T.Tensor((rows, inner), "float16"),
        B: T.Tensor((inner, columns), "float16"),
        C: T.Tensor((rows, columns), "float16"),
    ):
        with T.Kernel(T.ceildiv(rows, tile), T.ceildiv(columns, tile), threads=128) as (row_block, column_block):
            a = T.alloc_shared([tile, step], "float16")
            b = T.alloc_shared([step, tile], "float16")
            total = T.alloc_fragment([tile, tile], "float32")
            T.fill(total, 0)
            for n in T.Pipelined(T.ceildiv(inner, step), num_stages=2):  # the next tiles travel meanwhile
                T.copy(A[row_block * tile, n * step], a)
                T.copy(B[n * step, column_block * tile], b)
                T.gemm(a, b, total)
            T.copy(total, C[row_block * tile, column_block * tile])

    return tiled_matmul


def matmul(a, b):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    compiled(kernel, *c.shape, a.shape[1])(a, b, c)
    return c


def main():
    n = 1024 if DEVICE == "cuda" else 160  # not a multiple of the tile: copies stop at the edge
    return compare("tiled matmul", matmul, torch.matmul, [random(n, n), random(n, n, seed=1)])


if __name__ == "__main__":
    main()
