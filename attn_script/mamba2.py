"""Mamba-2's state space duality (Dao and Gu 2024), each head with its own B (k) and C (q); v is x, dt weighs it.

h_t = exp(dt_t A_h) h_{t-1} + B_t^T (dt_t x_t), o_t = C_t h_t. The skip D_h x_t stands outside.

    python attn_script/mamba2.py [--length N] [--backend interpret]
"""

import torch
from _run_linear import Sizes, run

from attention_engine import CustomIO, LinearAttentionEngine

SIZES = Sizes(heads=80, q_heads=80, k_heads=80, dim=128, dim_v=64)


def v_mod(x, custom):
    return x * custom["dt"]


def decay_mod(x, custom):
    return custom["dt"] * custom["A"]


def make_engine(qkv_meta, **options):
    io = CustomIO({"dt": ("batch", "heads", "seq_len"), "A": ("heads",)})
    return LinearAttentionEngine(qkv_meta, v_mod=v_mod, decay_mod=decay_mod, custom_io=io, **options)


def extra(sizes):
    make = torch.Generator().manual_seed(1)
    dt = torch.rand(sizes.batch, sizes.heads, sizes.length, generator=make) * 0.1 + 0.001
    return {"dt": dt, "A": -torch.rand(sizes.heads, generator=make) * 15 - 1}


def plain(q, k, v, dt, A):  # noqa: N803 - the paper's name
    dt = dt.transpose(1, 2)
    return q, k, (v * dt[..., None]).to(v.dtype), dt * A


def peer(q, k, v, dt, A):  # noqa: N803
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(v, dt.transpose(1, 2), A, k, q, chunk_size=256)


def main(argv=None, sizes=SIZES):
    return run(make_engine, plain, sizes, extra=extra, peer=peer, argv=argv)


if __name__ == "__main__":
    main()
