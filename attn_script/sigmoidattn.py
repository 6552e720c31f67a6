"""Sigmoid attention (Ramapuram et al. 2024): each weight stands alone, and a bias of -log(length) keeps sums near 1.

The bias is a custom input, so it gets a gradient and may be learned.

    python attn_script/sigmoidattn.py [--show] [--length N] [--backend interpret]
"""

import math

import torch
from _run import run

from attention_engine import AttentionEngine, CustomIO, OnlineFunc

D = 128


def score_mod(score, custom, b, h, q_idx, kv_idx):
    return score * D**-0.5 + custom["bias"]


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class OnlineSigmoid(OnlineFunc):
    def __init__(self):
        super().__init__(online_rowscales={}, final_rowscales={})  # a row keeps no state

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores.sigmoid(), {}, 1  # 1: what was summed so far stays as it is

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {}


def make_engine(qkv_meta, **options):
    return AttentionEngine(
        qkv_meta,
        CustomIO({"bias": (1,)}),
        score_mod=score_mod,
        mask_mod=causal_mask,
        online_func=OnlineSigmoid(),
        **options,
    )


def plain(s, h, q_idx, kv_idx, bias):
    """The same weights from all pairs at once, to compare with."""
    return torch.where(q_idx >= kv_idx, (s * D**-0.5 + bias).sigmoid(), 0.0)


def bias(length):
    return {"bias": torch.tensor([-math.log(length)])}


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=32, dim=D, custom=bias, argv=argv)


if __name__ == "__main__":
    main()
