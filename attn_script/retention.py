"""Retention in its parallel form (Sun et al. 2023), with the decay matrix as a formula of head and places.

D_ij = gamma_h^(i-j), gamma_h = 1 - 2^(-5-h); each row over max(sum |x|, 1), which is a constant to the backward pass.
The second form takes D as a tensor (1, heads, seq_len, seq_len_kv), a custom input that has its gradient too.

    python attn_script/retention.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, SymbolScalar, Var

D, HEADS = 128, 32


def score_mod(score, custom, b, h, q_idx, kv_idx):
    gamma = 1 - 2.0 ** (-5 - h)
    return score * D**-0.5 * ((q_idx - kv_idx) * gamma.log2()).exp2()


def score_by_tensor(score, custom, b, h, q_idx, kv_idx):
    return score * D**-0.5 * custom["decay"]


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class OnlineRetention(OnlineFunc):
    def __init__(self):
        r = SymbolScalar("r", Var("0.0"))
        super().__init__(online_rowscales={"r": r}, final_rowscales={"r": r})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"r": online_rowscales["r"] + scores.get_reduce("abssum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"].clamp(min=1.0).detach()
        return o / r, {"r": r}


def make_engine(qkv_meta, **options):
    return AttentionEngine(qkv_meta, None, score_mod, causal_mask, OnlineRetention(), **options)


def make_engine_by_tensor(qkv_meta, **options):
    io = CustomIO({"decay": (1, "heads", "seq_len", "seq_len_kv")})
    return AttentionEngine(qkv_meta, io, score_by_tensor, causal_mask, OnlineRetention(), **options)


def decay_of(h, q_idx, kv_idx):
    gamma = 1 - 2.0 ** (-5 - h.double())
    return torch.where(q_idx >= kv_idx, gamma ** (q_idx - kv_idx), 0.0)


def tensors(length):
    h, i = torch.arange(HEADS if torch.cuda.is_available() else 2), torch.arange(length)
    return {"decay": decay_of(h[:, None, None], i[:, None], i)[None].half()}


def plain(s, h, q_idx, kv_idx, decay=None):
    """The same weights from all pairs at once, to compare with."""
    decay = decay_of(h, q_idx, kv_idx) if decay is None else decay
    x = torch.where(q_idx >= kv_idx, s * D**-0.5 * decay.to(s.dtype), 0.0)
    return x / x.detach().abs().sum(-1, keepdim=True).clamp(min=1)


def main(argv=None):
    options = {"heads": HEADS, "kv_heads": HEADS, "dim": D, "argv": argv}
    errors = run(make_engine, plain, **options)
    by_tensor = run(make_engine_by_tensor, plain, custom=tensors, **options)
    return errors | {f"{name} by tensor": error for name, error in by_tensor.items()}


if __name__ == "__main__":
    main()
