"""The processes of train_long.py, and its loop over steps."""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

AHEAD = 3  # steps before the clock starts


def begin(device):
    """The mesh of the processes that torchrun started, or None."""
    ranks, rank = (int(os.environ.get(name, each)) for name, each in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    if device == "cuda":
        torch.cuda.set_device(rank)
    if ranks == 1:
        return None
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    return init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))


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
