"""Retention as a recurrence (Sun et al. 2023): a head forgets at one rate, gamma_h = 1 - 2^(-5-h), q is scaled.

Linear in the length, where attn_script/retention.py weighs all pairs; without that one's row normaliser.

    python attn_script/retention_linear.py [--length N] [--backend interpret]
"""

import torch
from _run_linear import Sizes, run

from attention_engine import CustomIO, LinearAttentionEngine

SIZES = Sizes(heads=32, q_heads=32, k_heads=32, dim=256, dim_v=512)


def q_mod(x, custom):
    return x * SIZES.dim**-0.5


def decay_mod(x, custom):
    return custom["gamma"].log()


def make_engine(qkv_meta, **options):
    io = CustomIO({"gamma": ("heads",)})
    return LinearAttentionEngine(qkv_meta, q_mod=q_mod, decay_mod=decay_mod, custom_io=io, **options)


def extra(sizes):
    return {"gamma": 1 - 2.0 ** (-5 - torch.arange(sizes.heads, dtype=torch.float32))}


def plain(q, k, v, gamma):
    return q * SIZES.dim**-0.5, k, v, gamma.log().expand(v.shape[:3])


def peer(q, k, v, gamma):
    from fla.ops.retention import chunk_retention

    return chunk_retention(q, k, v)[0]


def main(argv=None):
    return run(make_engine, plain, SIZES, extra=extra, peer=peer, argv=argv)


if __name__ == "__main__":
    main()
