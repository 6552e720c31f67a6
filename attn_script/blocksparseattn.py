"""Block-sparse attention: a tensor from outside says which blocks of 64 x 64 pairs exist; absent ones are skipped.

Here every query sees its own block, the block before it and every fourth one, causally.

    python attn_script/blocksparseattn.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine
from attention_engine.library import OnlineSoftmax, causal, scale

D, BLOCK = 128, 64


def blocks(length):
    """int8 (1, 1, blocks of queries, blocks of keys)."""
    count = -(-length // BLOCK)
    i, j = torch.arange(count)[:, None], torch.arange(count)
    return ((j <= i) & ((i - j <= 1) | (j % 4 == 0))).to(torch.int8)[None, None]


def make_engine(qkv_meta, **options):
    device = "cpu" if options["backend"] == "interpret" else "cuda"
    return AttentionEngine(
        qkv_meta,
        score_mod=scale(D**-0.5),
        mask_mod=causal,
        online_func=OnlineSoftmax(),
        block_mask=blocks(qkv_meta[0].length).to(device),
        block_size=(BLOCK, BLOCK),
        **options,
    )


def plain(s, h, q_idx, kv_idx):
    """The same weights from all pairs at once, to compare with."""
    exists = blocks(s.shape[-1])[0, 0].to(s.device).bool()
    keep = (q_idx >= kv_idx) & exists[q_idx // BLOCK, kv_idx // BLOCK]
    return torch.where(keep, s * D**-0.5, -torch.inf).softmax(-1)


def kept(length):
    return (blocks(length).sum() * BLOCK**2).item() - length * (BLOCK - 1) / 2


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=32, dim=D, kept=kept, small=530, argv=argv)


if __name__ == "__main__":
    main()
