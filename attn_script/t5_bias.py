"""T5's relative bias (Raffel et al. 2020): a learned number for each head and bucket of distances, far ones shared.

The bucket of each distance is a small integer table, read at q_idx - kv_idx; its entry is the place in the other table.

    python attn_script/t5_bias.py [--show] [--length N] [--backend interpret]
"""

import math

import torch
from _run import run

from attention_engine import AttentionEngine, CustomIO
from attention_engine.library import OnlineSoftmax

D, HEADS, BUCKETS, FARTHEST = 128, 32, 32, 128


def bucket_of(distance):
    """Bidirectional: half the buckets for keys before the query, half for those after it."""
    half = BUCKETS // 2
    near, exact = distance.abs(), half // 2
    far = exact + (near.clamp(min=1) / exact).log() / math.log(FARTHEST / exact) * (half - exact)
    side = torch.where(distance < 0, half, 0)
    return side + torch.where(near < exact, near, far.long().clamp(max=half - 1))


def score_mod(score, custom, b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).clamp(-FARTHEST, FARTHEST)
    return score + custom["bias"][custom["bucket"][distance + FARTHEST], h]


def make_engine(qkv_meta, **options):
    axes = {"bias": (BUCKETS, "heads"), "bucket": (2 * FARTHEST + 1,)}
    return AttentionEngine(qkv_meta, CustomIO(axes), score_mod=score_mod, online_func=OnlineSoftmax(), **options)


def tables(length):
    heads = HEADS if torch.cuda.is_available() else 2
    bias = torch.randn(BUCKETS, heads, generator=torch.Generator().manual_seed(1))
    return {"bias": bias, "bucket": bucket_of(torch.arange(-FARTHEST, FARTHEST + 1)).int()}


def plain(s, h, q_idx, kv_idx, bias, bucket):
    """The same weights from all pairs at once, to compare with."""
    distance = (q_idx - kv_idx).clamp(-FARTHEST, FARTHEST)
    return (s + bias[bucket[distance + FARTHEST].long(), h].to(s.dtype)).softmax(-1)


def main(argv=None):
    return run(make_engine, plain, heads=HEADS, kv_heads=HEADS, dim=D, causal=False, custom=tables, small=200,
               argv=argv)  # fmt: skip


if __name__ == "__main__":
    main()
