"""Gated linear attention (Yang et al. 2024): each channel of q and k has a decay of its own, from a gate of each token.

python attn_script/gla.py [--length N] [--backend interpret]
"""

import torch
from _run_linear import Sizes, run

from attention_engine import LinearAttentionEngine

SIZES = Sizes(heads=4, q_heads=4, k_heads=4, dim=256, dim_v=512, batch=4)
NORMALIZER = 16  # gates are drawn towards keeping


def q_mod(x, custom):
    return x * SIZES.dim**-0.5


def decay_mod(x, custom):  # the log of a sigmoid gate, from the gate's own number
    return x.logsigmoid() / NORMALIZER


def make_engine(qkv_meta, **options):
    return LinearAttentionEngine(qkv_meta, q_mod=q_mod, decay_mod=decay_mod, **options)


def extra(sizes):
    make = torch.Generator().manual_seed(1)
    return {"decay": torch.randn(sizes.batch, sizes.length, sizes.heads, sizes.dim, generator=make)}


def plain(q, k, v, decay):
    return q * SIZES.dim**-0.5, k, v, torch.nn.functional.logsigmoid(decay) / NORMALIZER


def peer(q, k, v, decay):
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, torch.nn.functional.logsigmoid(decay) / NORMALIZER)[0]


def main(argv=None):
    return run(make_engine, plain, SIZES, extra=extra, peer=peer, argv=argv)


if __name__ == "__main__":
    main()
