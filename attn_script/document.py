"""Packed documents: rows of many documents, each attending to itself, causally; tiles between documents are skipped.

Which document a token is of comes with each call, and other lengths compile nothing new.

    python attn_script/document.py [--show] [--length N] [--backend interpret]
"""

import torch
from _run import run

from attention_engine import AttentionEngine, CustomIO, document_ids
from attention_engine.library import OnlineSoftmax, and_masks, causal, document, scale

D = 128
PARTS = [0.24, 0.05, 0.31, 0.4]  # of the row


def make_engine(qkv_meta, **options):
    return AttentionEngine(
        qkv_meta,
        CustomIO({"documents": ("batch", "seq_len")}),
        score_mod=scale(D**-0.5),
        mask_mod=and_masks(causal, document()),
        online_func=OnlineSoftmax(),
        **options,
    )


def lengths(length):
    return [int(part * length) for part in PARTS]


def ids(length):
    return {"documents": document_ids(lengths(length), length)}  # the last tokens, if any, are one more document


def plain(s, h, q_idx, kv_idx, documents):
    """The same weights from all pairs at once, to compare with."""
    keep = (q_idx >= kv_idx) & (documents[0][q_idx] == documents[0][kv_idx])
    return torch.where(keep, s * D**-0.5, -torch.inf).softmax(-1)


def kept(length):
    return sum(n * (n + 1) / 2 for n in lengths(length))


def main(argv=None):
    return run(make_engine, plain, heads=32, kv_heads=8, dim=D, custom=ids, kept=kept, small=300, argv=argv)


if __name__ == "__main__":
    main()
