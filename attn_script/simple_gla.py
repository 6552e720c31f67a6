"""Simple gated linear attention, or gated retention (Yang et al. 2024): each token and head brings its own decay.

python attn_script/simple_gla.py [--length N] [--backend interpret]
"""

import torch
from _run_linear import Sizes, run

from attention_engine import LinearAttentionEngine

SIZES = Sizes(heads=32, q_heads=32, k_heads=32, dim=256, dim_v=512)


def q_mod(x, custom):
    return x * SIZES.dim**-0.5


def decay_mod(x, custom):  # the log of a sigmoid gate, from the gate's own number
    return x.logsigmoid()


def make_engine(qkv_meta, **options):
    return LinearAttentionEngine(qkv_meta, q_mod=q_mod, decay_mod=decay_mod, **options)


def extra(sizes):
    make = torch.Generator().manual_seed(1)
    return {"decay": torch.randn(sizes.batch, sizes.length, sizes.heads, generator=make) + 3}


def plain(q, k, v, decay):
    return q * SIZES.dim**-0.5, k, v, torch.nn.functional.logsigmoid(decay)


def peer(q, k, v, decay):
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, torch.nn.functional.logsigmoid(decay))[0]


def main(argv=None):
    return run(make_engine, plain, SIZES, extra=extra, peer=peer, argv=argv)


if __name__ == "__main__":
    main()
