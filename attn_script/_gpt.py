"""A small GPT over bytes (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"), whose attention
is given: attention(q, k, v) on (batch, length, heads, dim)."""

import time

import torch
from torch import nn
from torch.nn import functional

BYTES = 256


class Block(nn.Module):
    """Attention, then two layers, each of what was normalised and added to it."""

    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.out(self.attention(*qkv.unbind(2)).flatten(-2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Logits of the next byte, (batch, length, 256). make_attention: called once a layer."""

    def __init__(self, layers, heads, dim, context, make_attention):
        super().__init__()
        self.context, width = context, heads * dim
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, make_attention()) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.apply(start)

    def forward(self, tokens, places=None):
        """places: where the tokens stand in their sequence, of a part of it."""
        x = self.bytes(tokens) + (self.places.weight[: tokens.shape[1]] if places is None else self.places(places))
        return functional.linear(self.last(self.blocks(x)), self.bytes.weight)

    @torch.no_grad()
    def write(self, start, length, dtype):
        """Bytes that may follow `start`."""
        device = self.places.weight.device
        tokens = torch.tensor([list(start)], device=device)
        for _ in range(length):
            with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
                logits = self(tokens[:, -self.context :])[0, -1].float()
            tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1)[None]], 1)
        return bytes(tokens[0].tolist())


def start(module):
    """Small random weights, as GPT-2 starts with."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def train(model, text, batch, steps, dtype):
    """The losses of all steps; prints some, how many tokens a second were learned from, and what a step took."""
    device, context = model.places.weight.device, model.context
    on_gpu = device.type == "cuda"
    run = torch.compile(model) if on_gpu else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4 if on_gpu else 3e-3, fused=on_gpu)
    losses, told, started = [], 0, time.perf_counter()
    for step in range(1, steps + 1):
        places = torch.randint(len(text) - context - 1, (batch, 1)) + torch.arange(context + 1)
        tokens = text[places].to(device, torch.long)
        with torch.autocast(device.type, dtype, enabled=on_gpu):
            logits = run(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0 or step in (10, steps):
            shown = losses[-1].item()  # waits for the GPU
            seconds = (time.perf_counter() - started) / (step - told)
            rate = batch * context / seconds
            print(f"step {step}: loss {shown:.3f}, {rate:.0f} tokens a second, {1e3 * seconds:.1f} ms a step")
            told, started = step, time.perf_counter()
    return torch.stack(losses).tolist()


# ---- PyTorch's own attentions, to compare with


def sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def flex(context, device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, context, context, device)

    def attention(q, k, v):
        if q.shape[1] != context:  # while it writes: another length is another block mask
            return sdpa(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, block_mask=causal).transpose(1, 2)

    return attention
