"""Causal softmax attention, with the online softmax written out in full.

python attn_script/mha.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, SymbolScalar, Var

D = 128
scale = D**-0.5


def score_mod(score, custom_fwd_inputs, b, h, q_idx, kv_idx):
    return score * scale


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class OnlineSoftmax(OnlineFunc):
    def __init__(self):
        super().__init__(
            online_rowscales={"m": SymbolScalar("m", Var("-inf")), "r": SymbolScalar("r", Var("0.0"))},
            final_rowscales={"lse": SymbolScalar("lse", Var("0.0"))},
        )

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = m.max(scores.get_reduce("max"))
        rescale = (m - m_new).exp()
        scores = (scores - m_new).exp()
        r = r * rescale + scores.get_reduce("sum")
        return scores, {"m": m_new, "r": r}, rescale

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        return o / r, {"lse": r.log() + m}


def make_engine(qkv_meta, **options):
    return AttentionEngine(
        qkv_meta, CustomIO({}), score_mod=score_mod, mask_mod=causal_mask, online_func=OnlineSoftmax(), **options
    )


def plain(s, h, q_idx, kv_idx):
    """The same weights from all pairs at once, to compare with."""
    return torch.where(q_idx >= kv_idx, s * scale, -torch.inf).softmax(-1)


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=32, dim=D, argv=argv)


if __name__ == "__main__":
    main()
