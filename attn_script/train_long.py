"""Trains the small GPT of train_gpt.py on sequences that are split among processes: losses are those of one process.

torchrun --nproc-per-node 2 attn_script/train_long.py [--attention fading] [--method ring] [--device cpu]
         [--context N] [--steps N] [--rate R] [--text FILE]

Without torchrun it is one process, with the whole sequence.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from _gpt import GPT
from _long import begin, train
from torch.nn.parallel import DistributedDataParallel
from train_gpt import ATTENTIONS, PAGES

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.distributed import ContextParallel

SIZES = {"cpu": (2, 4, 32, 256, 4), "cuda": (12, 12, 64, 32768, 1)}  # layers, heads, head dim, context, batch
RATES = {"cpu": (3e-3, 1), "cuda": (6e-4, 20)}  # Adam's, and the steps after which it is reached
OURS = ("softmax", "sigmoid", "fading")


def split(attention, mesh, method):
    """The attention on sequences that the mesh's ranks share: its engine sees the whole sequence's indices."""
    if mesh is None:
        return attention
    if isinstance(attention, AttentionEngine):
        return ContextParallel(attention, mesh, method)
    attention.engine = split(attention.engine, mesh, method)  # a module with an engine in it
    return attention


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=OURS, default="softmax")
    parser.add_argument("--method", choices=("auto", "gather", "ring", "heads"), default="auto")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--text", type=Path, help="a file to learn from; without it, this project's documents")
    args = parser.parse_args(argv)
    device, mesh = args.device, begin(args.device)
    torch.manual_seed(0)  # the same weights and the same sequences on every rank
    layers, heads, dim, context, batch = SIZES[device]
    context = args.context or context
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    metas = (meta_tensor(batch, heads, context, dim, dtype=dtype),) * 3
    makes = ATTENTIONS[args.attention]
    model = GPT(layers, heads, dim, context, lambda: split(makes(metas, context), mesh, args.method)).to(device)
    shared = [each for each in model.modules() if isinstance(each, ContextParallel)]
    own = torch.arange(context, device=device)  # the places of this process's tokens
    for each in shared:
        own = each.places(context)  # which tells each layer the length
    if mesh is not None:
        model = DistributedDataParallel(model, process_group=mesh.get_group())
    text = args.text.read_bytes() if args.text else b"\n".join(p.read_bytes() for p in sorted(PAGES.glob("*.md")))
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rate, warm = RATES[device]
    losses, seconds = train(model, own, text, context, batch, args.steps, dtype, args.rate or rate, warm)
    if int(os.environ.get("RANK", "0")) == 0:
        for step, loss in enumerate(losses, 1):
            print(f"step {step}: loss {loss:.6f}")
        said = f"{mesh.size() if mesh else 1} processes: {1e3 * seconds:.1f} ms a step"
        print(f"{said}, {batch * context / seconds:.0f} tokens a second")
    if mesh is not None:
        dist.barrier()  # gloo: who leaves first takes the others' connections with it
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
