"""Trains a small GPT whose queries see a few blocks of keys alone, which the model chooses, beside one that sees all.

A block of queries sees itself and the earlier blocks whose mean key its mean query meets best, as in MoBA (Lu et al.,
2025, arXiv 2502.13189) and NSA (Yuan et al., 2025, arXiv 2502.11089). The choice is made anew in each call.

python attn_script/block_topk.py [--device cpu] [--kept N] [--steps N] [--text FILE]
"""

import argparse
from pathlib import Path

import torch
from _gpt import GPT, train
from torch.nn import functional
from train_gpt import PAGES

from attention_engine import AttentionEngine, BlockList
from attention_engine.library import causal

SIZES = {"cpu": (2, 4, 32, 256, 4, 16, 4), "cuda": (12, 8, 128, 8192, 2, 64, 16)}
# layers, heads, head dim, context, batch, tokens of a block, blocks that a block of queries sees


@torch.no_grad()
def choose(q, k, size, kept):
    """For each block of queries of each head, the blocks that it sees: itself, and the best of those before it."""
    pooled_q, pooled_k = (
        functional.avg_pool1d(x.flatten(2).transpose(1, 2), size, ceil_mode=True).unflatten(1, x.shape[2:])
        for x in (q, k)
    )  # (batch, heads, dim, blocks)
    scores = pooled_q.transpose(2, 3) @ pooled_k
    rows = torch.arange(scores.shape[2], device=q.device)
    scores = scores.masked_fill(rows[None, :] > rows[:, None], -torch.inf)
    scores = scores.masked_fill(rows[None, :] == rows[:, None], torch.inf)
    indices = scores.topk(min(kept, len(rows)), -1).indices.to(torch.int32)
    counts = (rows + 1).clamp(max=kept).to(torch.int32).expand(indices.shape[:3])  # what is behind it has score -inf
    return BlockList(indices, counts, (size, size))


def sparse(size, kept):
    """An attention of chosen blocks."""
    engine = AttentionEngine(mask_mod=causal)
    return lambda q, k, v: engine(q, k, v, block_mask=choose(q, k, size, kept))


def dense():
    """The same that sees all."""
    return AttentionEngine(mask_mod=causal)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kept", type=int, help="blocks that a block of queries sees")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--text", type=Path, help="a file to learn from; without it, this project's documents")
    args = parser.parse_args(argv)
    layers, heads, dim, context, batch, size, kept = SIZES[args.device]
    kept = args.kept or kept
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    text = args.text.read_bytes() if args.text else b"\n".join(p.read_bytes() for p in sorted(PAGES.glob("*.md")))
    data, found = torch.frombuffer(bytearray(text), dtype=torch.uint8), {}
    for name, make in (("chosen blocks", lambda: sparse(size, kept)), ("all blocks", dense)):
        torch.manual_seed(0)
        print(f"{name}, {f'{kept} of {context // size}' if name != 'all blocks' else context // size}:")
        found[name] = train(GPT(layers, heads, dim, context, make).to(args.device), data, batch, args.steps, dtype)
    last = {name: sum(losses[-10:]) / len(losses[-10:]) for name, losses in found.items()}
    print("loss of the last ten steps: " + ", ".join(f"{name} {loss:.3f}" for name, loss in last.items()))
    return found


if __name__ == "__main__":
    main()
