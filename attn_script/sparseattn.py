"""Sliding-window attention: a query sees itself and the 255 keys before it. The mask bounds the kernels' loops.

python attn_script/sparseattn.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine
from attention_engine.library import OnlineSoftmax, scale

D, WINDOW = 128, 256


def window_mask(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def make_engine(qkv_meta, **options):
    return AttentionEngine(
        qkv_meta, score_mod=scale(D**-0.5), mask_mod=window_mask, online_func=OnlineSoftmax(), **options
    )


def plain(s, h, q_idx, kv_idx):
    """The same weights from all pairs at once, to compare with."""
    keep = (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)
    return torch.where(keep, s * D**-0.5, -torch.inf).softmax(-1)


def kept(length):
    return length * WINDOW - WINDOW * (WINDOW - 1) / 2


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=32, dim=D, kept=kept, small=530, argv=argv)


if __name__ == "__main__":
    main()
