"""Step 4, naive attention: scores, softmax, output, one kernel after another, every pair written to memory and read."""

import tilelang.language as T
import torch
from machine import DEVICE, compare, compiled, random
from step_3_softmax import softmax


def scores_kernel(length, dim, tile=64):
    """S = Q K^T / sqrt(dim)."""

    @T.prim_func
    def scores(
        Q: T.Tensor((length, dim), "float16"),
        K: T.Tensor((length, dim), "float16"),
        S: T.Tensor((length, length), "float32"),
    ):
        with T.Kernel(T.ceildiv(length, tile), T.ceildiv(length, tile), threads=128) as (q_block, kv_block):
            q = T.alloc_shared([tile, dim], "float16")
            k = T.alloc_shared([tile, dim], "float16")
            products = T.alloc_fragment([tile, tile], "float32")
            T.copy(Q[q_block * tile, 0], q)
            T.copy(K[kv_block * tile, 0], k)
            T.gemm(q, k, products, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(tile, tile):
                products[i, j] *= dim**-0.5
            T.copy(products, S[q_block * tile, kv_block * tile])

    return scores


def output_kernel(length, dim, tile=64):
    """O = P V."""

    @T.prim_func
    def output(
        P: T.Tensor((length, length), "float16"),
        V: T.Tensor((length, dim), "float16"),
        O: T.Tensor((length, dim), "float16"),
    ):
        with T.Kernel(T.ceildiv(length, tile), threads=128) as q_block:
            p = T.alloc_shared([tile, tile], "float16")
            v = T.alloc_shared([tile, dim], "float16")
            out = T.alloc_fragment([tile, dim], "float32")
            T.fill(out, 0)
            for n in T.Pipelined(T.ceildiv(length, tile), num_stages=2):
                T.copy(P[q_block * tile, n * tile], p)
                T.copy(V[n * tile, 0], v)
                T.gemm(p, v, out)
            T.copy(out, O[q_block * tile, 0])

    return output


def attention(q, k, v):
    length, dim = q.shape
    scores = torch.empty(length, length, dtype=torch.float32, device=q.device)  # this is what step 6 does without
    compiled(scores_kernel, length, dim)(q, k, scores)
    out = torch.empty_like(q)
    compiled(output_kernel, length, dim)(softmax(scores).half(), v, out)
    return out


def plain(q, k, v):
    return (q @ k.T * q.shape[1] ** -0.5).softmax(-1) @ v


def main():
    n = 1024 if DEVICE == "cuda" else 160
    inputs = [random(n, 64, seed=seed) for seed in range(3)]
    return compare("naive attention", attention, plain, inputs)


if __name__ == "__main__":
    main()
