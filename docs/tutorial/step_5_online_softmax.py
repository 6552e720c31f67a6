"""Step 5, the online softmax: a row is met tile by tile, and what was summed is rescaled when the maximum grows."""

import tilelang.language as T
import torch
from machine import DEVICE, compare, compiled, random

LOG2_E = 1.4426950408889634


def kernel(rows, columns, tile=16, width=64):
    """The log of the sum of exponentials of each row, of any length, in one pass."""

    @T.prim_func
    def log_sum_exp(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows,), "float32")):
        with T.Kernel(T.ceildiv(rows, tile), threads=128) as block:
            x = T.alloc_fragment([tile, width], "float32")
            largest = T.alloc_fragment([tile], "float32")
            before = T.alloc_fragment([tile], "float32")
            total = T.alloc_fragment([tile], "float32")
            part = T.alloc_fragment([tile], "float32")
            T.fill(largest, -1e30)  # below every score, and yet finite: -inf - -inf is NaN
            T.fill(total, 0)
            for n in T.serial(T.ceildiv(columns, width)):
                T.copy(X[block * tile, n * width], x)
                for i, j in T.Parallel(tile, width):  # past the row's end a copy gives 0, which must not count
                    x[i, j] = T.if_then_else(n * width + j < columns, x[i, j] * LOG2_E, -1e30)
                T.copy(largest, before)
                T.reduce_max(x, largest, dim=1, clear=False)
                for i, j in T.Parallel(tile, width):
                    x[i, j] = T.exp2(x[i, j] - largest[i])
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(tile):
                    total[i] = total[i] * T.exp2(before[i] - largest[i]) + part[i]
            for i in T.Parallel(tile):
                total[i] = (T.log2(total[i]) + largest[i]) / LOG2_E
            T.copy(total, Y[block * tile])

    return log_sum_exp


def log_sum_exp(x):
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    compiled(kernel, *x.shape)(x, y)
    return y


def main():
    rows, columns = (4096, 5000) if DEVICE == "cuda" else (32, 200)
    inputs = [10 * random(rows, columns, dtype=torch.float32)]
    return compare("online softmax", log_sum_exp, lambda x: x.logsumexp(-1), inputs)


if __name__ == "__main__":
    main()
