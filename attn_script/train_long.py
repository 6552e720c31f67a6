"""Trains the small GPT of train_gpt.py on sequences that are split among processes: losses are those of one process.

torchrun --nproc-per-node 2 attn_script/train_long.py [--attention fading] [--method ring] [--device cpu]
         [--context N] [--steps N] [--rate R] [--text FILE]

Without torchrun it is one process, with the whole sequence.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _gpt import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from train_gpt import ATTENTIONS, PAGES

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.distributed import ContextParallel

SIZES = {"cpu": (2, 4, 32, 256, 4), "cuda": (12, 12, 64, 32768, 1)}  # layers, heads, head dim, context, batch
RATES = {"cpu": (3e-3, 1), "cuda": (6e-4, 20)}  # Adam's, and the steps after which it is reached
OURS = ("softmax", "sigmoid", "fading")
AHEAD = 3  # steps before the clock starts


def split(attention, mesh, method):
    """The attention on sequences that the mesh's ranks share: its engine sees the whole sequence's indices."""
    if isinstance(attention, AttentionEngine):
        return ContextParallel(attention, mesh, method)
    attention.engine = split(attention.engine, mesh, method)  # a module with an engine in it
    return attention


def train(model, own, text, context, batch, steps, dtype, rate, warm):
    """The losses of all steps, and what one took. own: the places of this rank's tokens."""
    device = next(model.parameters()).device
    on_gpu, ranks = device.type == "cuda", dist.get_world_size() if dist.is_initialized() else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=on_gpu)
    losses, started = [], time.perf_counter()
    for step in range(1, steps + 1):
        # The same sequences on every rank, as all are seeded alike; each takes its own tokens of them.
        first = torch.randint(len(text) - context - 1, (batch, 1))
        whole = text[first + torch.arange(context + 1)].to(device, torch.long)
        tokens, following = whole[:, own], whole[:, own + 1]
        with torch.autocast(device.type, dtype, enabled=on_gpu):
            logits = model(tokens, own)
        # DDP averages gradients over ranks: a rank's loss is its part of the mean over all tokens, times the ranks.
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum")
        loss = loss * ranks / (batch * context)
        optimizer.zero_grad()
        # Without a warm-up losses leap, and roundings of 16 bits grow with them: runs that should be alike part.
        optimizer.param_groups[0]["lr"] = rate * min(step / warm, 1)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step == AHEAD:
            losses[-1].item()  # waits for the GPU
            started = time.perf_counter()
    found = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(found)
    found = (found / ranks).tolist()
    return found, (time.perf_counter() - started) / max(steps - AHEAD, 1)


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
    ranks, rank = (int(os.environ.get(name, each)) for name, each in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    mesh, device = None, args.device
    if device == "cuda":
        torch.cuda.set_device(rank)
    if ranks > 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)  # the same weights and the same sequences on every rank
    layers, heads, dim, context, batch = SIZES[device]
    context = args.context or context
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    metas = (meta_tensor(batch, heads, context, dim, dtype=dtype),) * 3
    makes = ATTENTIONS[args.attention]
    if mesh is None:
        model = GPT(layers, heads, dim, context, lambda: makes(metas, context)).to(device)
    else:
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
        rate = batch * context / seconds
        print(f"{ranks} processes: {1e3 * seconds:.1f} ms a step, {rate:.0f} tokens a second")
    if mesh is not None:
        dist.barrier()  # gloo: who leaves first takes the others' connections with it
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
