"""Causal softmax attention with 32 query heads on 8 key heads: the shapes alone say so.

python attn_script/gqa.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine
from attention_engine.library import OnlineSoftmax

D = 128


def score_mod(score, custom, b, h, q_idx, kv_idx):
    return score * D**-0.5


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def make_engine(qkv_meta, **options):
    return AttentionEngine(qkv_meta, score_mod=score_mod, mask_mod=causal_mask, online_func=OnlineSoftmax(), **options)


def plain(s, h, q_idx, kv_idx):
    """The same weights from all pairs at once, to compare with."""
    return torch.where(q_idx >= kv_idx, s * D**-0.5, -torch.inf).softmax(-1)


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=8, dim=D, argv=argv)


if __name__ == "__main__":
    main()
