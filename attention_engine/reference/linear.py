"""A linear attention on torch tensors: the recurrence itself, token by token; autograd differentiates it, twice.

Tensors are (batch, length, heads, dim) here; decay is (batch, length, heads), or with a last dim one for each channel
of q and k; a state is (batch, heads, dim, dim_v).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearProgram, X
from attention_engine.ir.program import Q_IDX, B, H
from attention_engine.reference.dense import compute_dtype
from attention_engine.reference.evaluate import Evaluator

Custom = Mapping[str, Tensor]


def token_indices(batch: int, heads: int, length: int, device: torch.device) -> dict[Expr, Tensor]:
    """The index variables, to broadcast with (batch, heads, length, dim)."""
    sizes = ((B, batch, (-1, 1, 1, 1)), (H, heads, (1, -1, 1, 1)), (Q_IDX, length, (1, 1, -1, 1)))
    return {v: torch.arange(n, device=device).view(shape) for v, n, shape in sizes}


def apply_mods(
    program: LinearProgram, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Custom, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as (batch, heads, length, dim), decay (batch, heads, length, dim or 1), after mods, one for each head."""
    queries, keys, values = (_modify(program, name, t, v, custom, dtype) for name, t in (("q", q), ("k", k), ("v", v)))
    return queries, keys, values, apply_decay_mod(program, v, decay, custom, dtype)


def apply_decay_mod(
    program: LinearProgram, v: Tensor, decay: Tensor | None, custom: Custom, dtype: torch.dtype
) -> Tensor:
    """decay (batch, heads, length, dim or 1), after its mod; v says how many heads there are."""
    if decay is None:
        decay = torch.zeros(v.shape[:3], device=v.device, dtype=dtype)
    decay = decay if decay.ndim == 4 else decay[..., None]
    return _modify(program, "decay", decay, v, custom, dtype)


def _modify(
    program: LinearProgram, name: str, tensor: Tensor, v: Tensor, custom: Custom, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    batch, length, heads, _ = v.shape
    each = tensor.to(dtype).transpose(1, 2).repeat_interleave(heads // tensor.shape[2], 1)
    mod = program.mod(name)
    if mod is X:
        return each
    values = {**token_indices(batch, heads, length, v.device), X: each}
    return Evaluator(values, custom, dtype, v.device)(mod).expand(each.shape)


def recur(
    program: LinearProgram, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, custom: Custom | None = None,
    initial_state: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o in v's dtype, the last state) by h_t = exp(decay_t) h_{t-1} + k_t^T v_t, o_t = q_t h_t.

    dtype: what is computed in; float64 where any tensor is, else float32.
    """
    custom = custom or {}
    floats = [t for t in (q, k, v, decay, initial_state, *custom.values()) if t is not None and t.is_floating_point()]
    dtype = dtype or compute_dtype(*floats)
    queries, keys, values, logs = apply_mods(program, q, k, v, decay, custom, dtype)
    batch, heads, length, dim = queries.shape
    if initial_state is None:
        initial_state = v.new_zeros(batch, heads, dim, v.shape[3], dtype=dtype)
    state, outputs = initial_state.to(dtype), []
    keep = logs.exp()
    for t in range(length):
        state = keep[:, :, t, :, None] * state + keys[:, :, t, :, None] * values[:, :, t, None, :]
        outputs.append((queries[:, :, t, None, :] @ state)[:, :, 0])
    output = torch.stack(outputs, 1) if outputs else v.new_zeros(batch, 0, heads, v.shape[3], dtype=dtype)
    return output.to(v.dtype if dtype is not torch.float64 else dtype), state


def state_of_run(
    program: LinearProgram, k: Tensor, v: Tensor, decay: Tensor | None, custom: Custom, dtype: torch.dtype
) -> Tensor:
    """The state that tokens leave of none."""
    keys, values = (_modify(program, name, t, v, custom, dtype) for name, t in (("k", k), ("v", v)))
    keep = apply_decay_mod(program, v, decay, custom, dtype).exp()
    state = keys.new_zeros(*keys.shape[:2], keys.shape[3], values.shape[3])
    for t in range(keys.shape[2]):
        state = keep[:, :, t, :, None] * state + keys[:, :, t, :, None] * values[:, :, t, None, :]
    return state


def gradient_before_run(
    program: LinearProgram, q: Tensor, d_o: Tensor, decay: Tensor | None, custom: Custom, dtype: torch.dtype
) -> Tensor:
    """The gradient of the state before tokens, where that after them has none."""
    queries, arriving = _modify(program, "q", q, d_o, custom, dtype), d_o.to(dtype).transpose(1, 2)
    keep = apply_decay_mod(program, d_o, decay, custom, dtype).exp()
    gradient = queries.new_zeros(*queries.shape[:2], queries.shape[3], arriving.shape[3])
    for t in reversed(range(queries.shape[2])):
        gradient = keep[:, :, t, :, None] * (gradient + queries[:, :, t, :, None] * arriving[:, :, t, None, :])
    return gradient
