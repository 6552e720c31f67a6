"""Linear attention in plain torch, chunk by chunk: the heads that share a q and a k, in one batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests import plain_linear
from tests.gpu.soak.programs import Linear

Named = dict[str, Tensor]
CHUNK, CHANNEL_CHUNK = 256, 64
SHARED, FIRST = {"q", "k"}, {"initial_state", "last", "dt"}  # with heads of their own; with heads before the length


def base(name: str) -> str:
    """The tensor whose gradient, wanted or given, this is: "dq", "d_o", "ddecay"."""
    if name.startswith("d_"):
        return name[2:]
    return name if name in ("decay", "dt") else name.removeprefix("d")


def of_group(program: Linear, named: Named, batch: int, group: int) -> Named:
    """The part of one batch and of the value heads that share a head of q and k."""
    values = slice(group * program.group, (group + 1) * program.group)
    found = {}
    for name, x in named.items():
        heads = slice(group, group + 1) if base(name) in SHARED else values
        found[name] = x[batch : batch + 1, heads] if base(name) in FIRST else x[batch : batch + 1, :, heads]
    return found


def results(program: Linear, given: Named, batch: int, group: int, double: bool) -> Named:
    """Outputs and the gradient of every input, of that part; in float64, or in the inputs' own dtypes."""
    part = of_group(program, given, batch, group)
    arriving = {n: part.pop(f"d_{n}") for n in ("o", "last") if f"d_{n}" in part}
    leaves = {n: (x.double() if double else x.clone()).detach().requires_grad_() for n, x in part.items()}
    outputs = {n: x for n, x in zip(("o", "last"), _chunks(program, leaves), strict=True) if n in arriving}
    given_back = [arriving[n].to(x.dtype) for n, x in outputs.items()]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), given_back)
    return {n: x.detach() for n, x in outputs.items()} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}


def _chunks(program: Linear, leaves: Named) -> tuple[Tensor, Tensor]:
    q, k, v, decay, state = (leaves.get(n) for n in ("q", "k", "v", "decay", "initial_state"))
    assert q is not None and k is not None and v is not None
    wide = torch.promote_types(v.dtype, torch.float32)
    decay = v.new_zeros(v.shape[:3], dtype=wide) if decay is None else decay
    if program.mods:
        rates = leaves["dt"].transpose(1, 2)
        v, decay = (v * rates[..., None]).to(v.dtype), decay * rates
    state = v.new_zeros(1, v.shape[2], q.shape[3], v.shape[3], dtype=wide) if state is None else state
    form = plain_linear.parallel_channels if program.decay == "channel" else plain_linear.parallel
    size, outputs = (CHANNEL_CHUNK if program.decay == "channel" else CHUNK), []
    for parts in zip(*(x.split(size, 1) for x in (q, k, v, decay)), strict=True):
        o, state = checkpoint(form, *parts, state, use_reentrant=False)
        outputs.append(o)
    return torch.cat(outputs, 1), state
