"""A tiny transformer as people write it for FlexAttention: packed documents, a learned relative bias, softcap, GQA.

`names` is the module that its attention is imported from: torch's, this package's, or plain formulas. Nothing else
differs.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from tests.flex.cases import plain

WORDS, WIDE, HEADS, KV_HEADS, DIM, LENGTH, SPAN = 23, 32, 4, 2, 8, 48, 16


class Attention(nn.Module):
    def __init__(self, names: Any) -> None:
        super().__init__()
        self.names = names
        self.query, self.out = nn.Linear(WIDE, HEADS * DIM, bias=False), nn.Linear(HEADS * DIM, WIDE, bias=False)
        self.key, self.value = (nn.Linear(WIDE, KV_HEADS * DIM, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(HEADS, SPAN))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.query, self.key, self.value))
        bias = self.bias

        def score_mod(score, b, h, q_idx, kv_idx):
            return 10 * torch.tanh(score / 10) + bias[h, torch.clamp(q_idx - kv_idx, 0, SPAN - 1)]

        o = self.names.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, names: Any, layers: int = 2) -> None:
        super().__init__()
        self.names = names
        self.words, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WORDS, bias=False)
        self.attentions = nn.ModuleList(Attention(names) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WIDE)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDE) for _ in range(2 * layers + 1))

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        def same_document(b, h, q_idx, kv_idx):
            return documents[b, q_idx] == documents[b, kv_idx]

        batch, length = tokens.shape
        mask = self.names.create_block_mask(
            self.names.and_masks(causal, same_document), batch, None, length, length, device=tokens.device
        )
        x = self.words(tokens)
        for n, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * n](x), mask)
            x = x + mlp(self.norms[2 * n + 1](x))
        return self.head(self.norms[-1](x))


def losses(names: Any, steps: int, dtype: torch.dtype, device: str = "cpu", compiled: Any = None) -> list[float]:
    """Of training on sums of earlier words, from the same start."""
    torch.manual_seed(0)
    model = Transformer(names).to(device, dtype)
    make = torch.Generator().manual_seed(1)
    run = model if compiled is None else torch.compile(model, **compiled)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        length = LENGTH - 5 * (step % 2)
        tokens = torch.randint(WORDS, (4, length), generator=make).cumsum(1).to(device) % WORDS
        documents = (torch.arange(length) > torch.randint(5, length, (4, 1), generator=make)).int().to(device)
        logits = run(tokens[:, :-1], documents[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, enable_gqa: bool) -> Tensor:
    return plain((score_mod, block_mask), q, k, v)[0]


PLAIN = types.SimpleNamespace(
    flex_attention=_plain_attention,
    create_block_mask=lambda mask_mod, *sizes, device: mask_mod,
    and_masks=lambda *masks: lambda *place: masks[0](*place) & masks[1](*place),
)
