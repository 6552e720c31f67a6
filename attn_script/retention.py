"""Retention in its parallel form (Sun et al. 2023), with the decay matrix as a formula of head and places.

D_ij = gamma_h^(i-j), gamma_h = 1 - 2^(-5-h); each row over max(sum |x|, 1), which is a constant to the backward pass.
The second form, D as a tensor of (heads, seq_len, seq_len_kv), comes with custom inputs of that shape.

    python attn_script/retention.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine, OnlineFunc, SymbolScalar, Var

D = 128


def score_mod(score, custom, b, h, q_idx, kv_idx):
    gamma = 1 - 2.0 ** (-5 - h)
    return score * D**-0.5 * ((q_idx - kv_idx) * gamma.log2()).exp2()


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class OnlineRetention(OnlineFunc):
    def __init__(self):
        super().__init__(
            online_rowscales={"r": SymbolScalar("r", Var("0.0"))},
            final_rowscales={"r": SymbolScalar("r", Var("1.0"))},
        )

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"r": online_rowscales["r"] + scores.get_reduce("abssum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"].clamp(min=1.0).detach()
        return o / r, {"r": r}


def make_engine(qkv_meta, **options):
    return AttentionEngine(
        qkv_meta, score_mod=score_mod, mask_mod=causal_mask, online_func=OnlineRetention(), **options
    )


def plain(s, h, q_idx, kv_idx):
    """The same weights from all pairs at once, to compare with."""
    gamma = 1 - 2.0 ** (-5 - h.double())
    decay = torch.where(q_idx >= kv_idx, gamma ** (q_idx - kv_idx), 0.0).to(s.dtype)
    x = s * D**-0.5 * decay
    return x / x.detach().abs().sum(-1, keepdim=True).clamp(min=1)


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=32, dim=D, argv=argv)


if __name__ == "__main__":
    main()
