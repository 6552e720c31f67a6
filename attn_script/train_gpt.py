"""Trains a small GPT on text, byte by byte, with an attention that is one line to swap (ATTENTIONS).

python attn_script/train_gpt.py [--attention sigmoid] [--device cpu] [--steps N] [--text FILE] [--save FILE]
"""

import argparse
import math
from pathlib import Path

import torch
from _gpt import GPT, flex, sdpa, train
from torch import nn

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.library import OnlineSigmoid, causal

PAGES = Path(__file__).parents[1] / "docs"
SIZES = {"cpu": (2, 4, 32, 64, 16), "cuda": (12, 12, 64, 1024, 16)}  # layers, heads, head dim, context, batch


class Fading(nn.Module):
    """An attention of one's own: each head learns how fast it forgets what is far."""

    def __init__(self, metas):
        super().__init__()
        self.rates, self.scale = nn.Parameter(torch.linspace(-6, -1, metas[0].heads)), metas[0].dim ** -0.5
        self.engine = AttentionEngine(metas, score_mod=self.score, mask_mod=causal)

    def score(self, s, custom, b, h, q_idx, kv_idx):
        return s * self.scale - self.rates[h].exp() * (q_idx - kv_idx)

    def forward(self, q, k, v):
        return self.engine(q, k, v)


def sigmoid(metas, context):
    """Each pair's weight by itself, less by the log of their number (Ramapuram et al., 2024, arXiv 2409.04431)."""

    def score(s, custom, b, h, q_idx, kv_idx):
        return s * metas[0].dim ** -0.5 - math.log(context)

    return AttentionEngine(metas, score_mod=score, mask_mod=causal, online_func=OnlineSigmoid())


ATTENTIONS = {
    "softmax": lambda metas, context: AttentionEngine(metas, mask_mod=causal),
    "sigmoid": sigmoid,
    "fading": lambda metas, context: Fading(metas),
    "sdpa": lambda metas, context: sdpa,
    "flex": lambda metas, context: flex(context, "cuda" if torch.cuda.is_available() else "cpu"),
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=ATTENTIONS, default="softmax")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, help="a file to learn from; without it, this project's documents")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    layers, heads, dim, context, batch = SIZES[args.device]
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    metas = (meta_tensor(batch, heads, context, dim, dtype=dtype),) * 3
    model = GPT(layers, heads, dim, context, lambda: ATTENTIONS[args.attention](metas, context)).to(args.device)
    if args.load:
        model.load_state_dict(torch.load(args.load))
    text = args.text.read_bytes() if args.text else b"\n".join(p.read_bytes() for p in sorted(PAGES.glob("*.md")))
    losses = train(model, torch.frombuffer(bytearray(text), dtype=torch.uint8), batch, args.steps, dtype)
    if args.save:
        torch.save(model.state_dict(), args.save)
    print(model.write(b"Attention ", 200, dtype).decode(errors="replace"))
    return losses


if __name__ == "__main__":
    main()
