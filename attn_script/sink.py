"""Softmax with a learned sink for each head: one more score in each row's sum, without a value (as gpt-oss has).

python attn_script/sink.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine, CustomIO
from attention_engine.library import OnlineSoftmax, causal, scale

D, HEADS, KV_HEADS = 128, 32, 8


class SinkSoftmax(OnlineSoftmax):
    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx, custom):
        m, r = online_rowscales["m"], online_rowscales["r"]
        top = m.max(custom["sink"])
        total = r * (m - top).exp() + (custom["sink"] - top).exp()
        return o * (m - top).exp() / total, {"lse": total.log() + top}


def make_engine(qkv_meta, **options):
    return AttentionEngine(
        qkv_meta,
        CustomIO({"sink": ("heads",)}),
        score_mod=scale(D**-0.5),
        mask_mod=causal,
        online_func=SinkSoftmax(),
        **options,
    )


def sinks(length):
    heads = HEADS if torch.cuda.is_available() else 2 * HEADS // KV_HEADS
    return {"sink": torch.randn(heads, generator=torch.Generator().manual_seed(2))}


def plain(s, h, q_idx, kv_idx, sink):
    """The same weights from all pairs at once, to compare with."""
    x = torch.where(q_idx >= kv_idx, s * D**-0.5, -torch.inf)
    column = sink[h].to(s.dtype).expand(*s.shape[:3], 1)
    return torch.cat([x, column], -1).softmax(-1)[..., :-1]


def main(argv=None):
    return run(make_engine, plain, heads=HEADS, kv_heads=KV_HEADS, dim=D, custom=sinks, argv=argv)


if __name__ == "__main__":
    main()
