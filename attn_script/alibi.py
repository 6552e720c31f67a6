"""ALiBi (Press et al. 2021): scores fall with distance, by a slope of the head. The slopes are a custom input.

They are tensors like any other, so they get a gradient and may be learned.

    python attn_script/alibi.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine, CustomIO
from attention_engine.library import OnlineSoftmax, causal

D, HEADS = 128, 32


def score_mod(score, custom, b, h, q_idx, kv_idx):
    return score * D**-0.5 - custom["slopes"] * (q_idx - kv_idx)


def make_engine(qkv_meta, **options):
    return AttentionEngine(
        qkv_meta,
        CustomIO({"slopes": ("heads",)}),
        score_mod=score_mod,
        mask_mod=causal,
        online_func=OnlineSoftmax(),
        **options,
    )


def slopes(length):
    heads = HEADS if torch.cuda.is_available() else 2
    return {"slopes": 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)}


def plain(s, h, q_idx, kv_idx, slopes):
    """The same weights from all pairs at once, to compare with."""
    x = s * D**-0.5 - (slopes[h] * (q_idx - kv_idx)).to(s.dtype)
    return torch.where(q_idx >= kv_idx, x, -torch.inf).softmax(-1)


def main(argv=None):
    return run(make_engine, plain, heads=HEADS, kv_heads=HEADS, dim=D, custom=slopes, argv=argv)


if __name__ == "__main__":
    main()
