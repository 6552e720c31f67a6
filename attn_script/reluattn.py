"""ReLU attention over the number of keys a query sees (Wortsman et al. 2023).

python attn_script/reluattn.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine, OnlineFunc

D = 128


def score_mod(score, custom, b, h, q_idx, kv_idx):
    return score * D**-0.5 / (q_idx + 1)  # relu(x) / n = relu(x / n)


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class OnlineRelu(OnlineFunc):
    def __init__(self):
        super().__init__(online_rowscales={}, final_rowscales={})  # a row keeps no state

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores.relu(), {}, 1  # 1: what was summed so far stays as it is

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {}


def make_engine(qkv_meta, **options):
    return AttentionEngine(qkv_meta, score_mod=score_mod, mask_mod=causal_mask, online_func=OnlineRelu(), **options)


def plain(s, h, q_idx, kv_idx):
    """The same weights from all pairs at once, to compare with."""
    return torch.where(q_idx >= kv_idx, (s * D**-0.5).relu() / (q_idx + 1), 0.0)


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=32, dim=D, argv=argv)


if __name__ == "__main__":
    main()
