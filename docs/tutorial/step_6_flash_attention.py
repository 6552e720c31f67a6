"""Step 6, flash attention: steps 2 and 5 in one kernel; scores live in registers and are never written to memory."""

import tilelang.language as T
import torch
from machine import DEVICE, compare, compiled, random
from step_4_naive_attention import plain

LOG2_E = 1.4426950408889634


def kernel(length, dim, q_tile=64, kv_tile=64):
    scale = dim**-0.5 * LOG2_E  # exp2 is the GPU's own exponential
    rows = T.GemmWarpPolicy.FullRow  # a warp holds whole rows, so that it reduces them alone

    @T.prim_func
    def flash_attention(
        Q: T.Tensor((length, dim), "float16"),
        K: T.Tensor((length, dim), "float16"),
        V: T.Tensor((length, dim), "float16"),
        O: T.Tensor((length, dim), "float16"),
    ):
        with T.Kernel(T.ceildiv(length, q_tile), threads=128) as block:
            q = T.alloc_shared([q_tile, dim], "float16")
            k = T.alloc_shared([kv_tile, dim], "float16")
            v = T.alloc_shared([kv_tile, dim], "float16")
            scores = T.alloc_fragment([q_tile, kv_tile], "float32")
            weights = T.alloc_fragment([q_tile, kv_tile], "float16")
            out = T.alloc_fragment([q_tile, dim], "float32")
            largest = T.alloc_fragment([q_tile], "float32")
            rescale = T.alloc_fragment([q_tile], "float32")
            total = T.alloc_fragment([q_tile], "float32")
            part = T.alloc_fragment([q_tile], "float32")
            T.copy(Q[block * q_tile, 0], q)
            T.fill(out, 0)
            T.fill(total, 0)
            T.fill(largest, -1e30)
            for n in T.Pipelined(T.ceildiv(length, kv_tile), num_stages=2):
                T.copy(K[n * kv_tile, 0], k)
                T.gemm(q, k, scores, transpose_B=True, policy=rows, clear_accum=True)
                for i, j in T.Parallel(q_tile, kv_tile):
                    scores[i, j] = T.if_then_else(n * kv_tile + j < length, scores[i, j] * scale, -1e30)
                T.copy(largest, rescale)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i, j in T.Parallel(q_tile, kv_tile):
                    scores[i, j] = T.exp2(scores[i, j] - largest[i])
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(q_tile):
                    rescale[i] = T.exp2(rescale[i] - largest[i])
                    total[i] = total[i] * rescale[i] + part[i]
                for i, j in T.Parallel(q_tile, dim):
                    out[i, j] *= rescale[i]  # the output is a sum of the same exponentials
                T.copy(scores, weights)
                T.copy(V[n * kv_tile, 0], v)
                T.gemm(weights, v, out, policy=rows)
            for i, j in T.Parallel(q_tile, dim):
                out[i, j] /= total[i]
            T.copy(out, O[block * q_tile, 0])

    return flash_attention


def attention(q, k, v):
    out = torch.empty_like(q)
    compiled(kernel, *q.shape)(q, k, v, out)
    return out


def main():
    n = 4096 if DEVICE == "cuda" else 160
    inputs = [random(n, 64, seed=seed) for seed in range(3)]
    return compare("flash attention", attention, plain, inputs)


if __name__ == "__main__":
    main()
