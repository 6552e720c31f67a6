"""A small flash attention in TileLang: lengths known at run time, causal extent, two stages; and smaller kernels."""

import tilelang.language as T

LOG2_E = 1.4426950408889634


def forward(heads: int, dim: int, *, q_tile: int = 64, kv_tile: int = 64, threads: int = 128, dtype: str = "float16"):
    """O and the log-sum-exp of causal softmax attention, tensors (batch, length, heads, dim)."""
    batch, length = T.dynamic("batch"), T.dynamic("length")
    shape = (batch, length, heads, dim)
    full_rows = T.GemmWarpPolicy.FullRow
    scale = dim**-0.5 * LOG2_E

    @T.prim_func
    def main(
        Q: T.Tensor(shape, dtype),
        K: T.Tensor(shape, dtype),
        V: T.Tensor(shape, dtype),
        O: T.Tensor(shape, dtype),
        Lse: T.Tensor((batch, heads, length), "float32"),
    ):
        with T.Kernel(T.ceildiv(length, q_tile), heads, batch, threads=threads) as (bx, by, bz):
            q = T.alloc_shared([q_tile, dim], dtype)
            k = T.alloc_shared([kv_tile, dim], dtype)
            v = T.alloc_shared([kv_tile, dim], dtype)
            scores = T.alloc_fragment([q_tile, kv_tile], "float32")
            weights = T.alloc_fragment([q_tile, kv_tile], dtype)
            out = T.alloc_fragment([q_tile, dim], "float32")
            largest = T.alloc_fragment([q_tile], "float32")
            before = T.alloc_fragment([q_tile], "float32")
            total = T.alloc_fragment([q_tile], "float32")
            part = T.alloc_fragment([q_tile], "float32")
            T.copy(Q[bz, bx * q_tile : (bx + 1) * q_tile, by, :], q)
            T.fill(out, 0)
            T.fill(total, 0)
            T.fill(largest, -1e30)
            for step in T.Pipelined(
                T.min(T.ceildiv(length, kv_tile), T.ceildiv((bx + 1) * q_tile, kv_tile)), num_stages=2
            ):
                T.copy(K[bz, step * kv_tile : (step + 1) * kv_tile, by, :], k)
                T.gemm(q, k, scores, transpose_B=True, policy=full_rows, clear_accum=True)
                for i, j in T.Parallel(q_tile, kv_tile):
                    scores[i, j] = T.if_then_else(
                        T.And(bx * q_tile + i >= step * kv_tile + j, step * kv_tile + j < length),
                        scores[i, j] * scale,
                        -1e30,
                    )
                T.copy(largest, before)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i, j in T.Parallel(q_tile, kv_tile):
                    scores[i, j] = T.exp2(scores[i, j] - largest[i])
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(q_tile):
                    before[i] = T.exp2(before[i] - largest[i])
                    total[i] = total[i] * before[i] + part[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(q_tile, dim):
                    out[i, j] *= before[i]
                T.copy(V[bz, step * kv_tile : (step + 1) * kv_tile, by, :], v)
                T.gemm(weights, v, out, policy=full_rows)
            for i, j in T.Parallel(q_tile, dim):
                out[i, j] /= total[i]
            T.copy(out, O[bz, bx * q_tile : (bx + 1) * q_tile, by, :])
            for i in T.Parallel(q_tile):
                total[i] = (T.log2(total[i]) + largest[i]) / LOG2_E
            T.copy(total, Lse[bz, by, bx * q_tile : (bx + 1) * q_tile])

    return main


def largest_scores(rows: int = 128, keys: int = 64, dim: int = 64):
    """The largest score of each row, which two warpgroups share, of keys that come in two stages."""
    length, full_rows = T.dynamic("length"), T.GemmWarpPolicy.FullRow

    @T.prim_func
    def main(
        Q: T.Tensor((rows, dim), "float16"),
        K: T.Tensor((length, dim), "float16"),
        Largest: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(1, threads=256):
            q = T.alloc_shared([rows, dim], "float16")
            k = T.alloc_shared([keys, dim], "float16")
            scores = T.alloc_fragment([rows, keys], "float32")
            largest = T.alloc_fragment([rows], "float32")
            T.copy(Q, q)
            T.fill(largest, -1e30)
            for step in T.Pipelined(T.ceildiv(length, keys), num_stages=2):
                T.copy(K[step * keys : (step + 1) * keys, :], k)
                T.gemm(q, k, scores, transpose_B=True, policy=full_rows, clear_accum=True)
                T.reduce_max(scores, largest, dim=1, clear=False)
            T.copy(largest, Largest)

    return main


def weighted_sums(rows: int = 64, keys: int = 64, dim: int = 64):
    """Q @ (w * K)^T summed over steps: threads read each step's weights w, which are copied like its keys."""
    length, full_rows = T.dynamic("length"), T.GemmWarpPolicy.FullRow

    @T.prim_func
    def main(
        Q: T.Tensor((rows, dim), "float16"),
        K: T.Tensor((length, dim), "float16"),
        W: T.Tensor((length,), "float32"),
        Sums: T.Tensor((rows, keys), "float32"),
    ):
        with T.Kernel(1, threads=128):
            q = T.alloc_shared([rows, dim], "float16")
            k = T.alloc_shared([keys, dim], "float16")
            weights = T.alloc_shared([keys], "float32")
            scores = T.alloc_fragment([rows, keys], "float32")
            sums = T.alloc_fragment([rows, keys], "float32")
            T.copy(Q, q)
            T.fill(sums, 0)
            for step in T.Pipelined(T.ceildiv(length, keys), num_stages=2):
                T.copy(K[step * keys : (step + 1) * keys, :], k)
                T.copy(W[step * keys : (step + 1) * keys], weights)
                T.gemm(q, k, scores, transpose_B=True, policy=full_rows, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    sums[i, j] += scores[i, j] * weights[j]
            T.copy(sums, Sums)

    return main
