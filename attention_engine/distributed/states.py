"""Linear attention over ranks: what a run of tokens does to the state is S -> a S + S_run, and all that ranks send.

Each run's (a, S_run) goes to every rank once, whatever its length; each rank works out the states that its runs start
from, and runs them again from there. Gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.distributed.exchange import Ranks, Tokens, gather
from attention_engine.distributed.layout import Layout
from attention_engine.distributed.placements import Placement
from attention_engine.ir.linear import X
from attention_engine.reference.evaluate import Evaluator
from attention_engine.reference.linear import token_indices
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.inputs import check_ranks, order_custom
from attention_engine.runtime.linear import LinearAttentionEngine
from attention_engine.runtime.linear_op import LinearAttention

if TYPE_CHECKING:
    from attention_engine.distributed.module import ContextParallel


class _Tied(torch.autograd.Function):
    """The first tensor; the second has the gradient 0. So every rank goes back through what ranks have sent."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sent: Tensor) -> Tensor:
        ctx.like = sent
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, Tensor]:
        return arriving, torch.zeros_like(ctx.like)


class _Shared(torch.autograd.Function):
    """A tensor that is the same on all ranks: a loss of it counts once, not once on each."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, None]:
        return arriving / ctx.ranks, None


def attend_by_states(
    parallel: ContextParallel, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, **named: Tensor,
) -> Any:  # fmt: skip
    """This rank's part of what the linear engine gives of the whole sequence; the state after the last token is whole
    on every rank."""
    engine, (ranks,) = parallel.engine, parallel.split.groups
    assert isinstance(engine, LinearAttentionEngine)
    tensors = order_custom(engine.custom_io, custom, named)
    check_ranks(engine.layout, q, k, v)
    q, k, v, decay = engine._tokens_first(q, k, v, decay)
    layout = parallel.layout_of(v.shape[1], "v")
    sizes = {"batch": v.shape[0], "heads": v.shape[2], "seq_len": layout.length, "seq_len_kv": layout.length}
    placed = [
        Placement(s, s.axes.index("seq_len") if "seq_len" in s.axes else None, None) for s in engine.custom_io.in_order
    ]
    for placement, tensor in zip(placed, tensors, strict=True):
        placement.check(tensor, sizes, {"seq_len": v.shape[1]})
    given = [t for t in (q, k, v, decay, initial_state) if t is not None]
    parallel.agree(layout, layout, given, tensors, placed)
    runs = []
    for run in layout.runs[ranks.rank]:
        of_run = [t if t is None else t[:, run.here] for t in (q, k, v, decay)]
        both = zip(placed, tensors, strict=True)
        runs.append((of_run, [t if p.queries is None else t.narrow(p.queries, run.at, run.count) for p, t in both]))
    starts, last = _starts(engine, ranks, layout, runs, initial_state)
    outputs = [_call(engine, tokens, own, start)[0] for (tokens, own), start in zip(runs, starts, strict=True)]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    output = output.transpose(1, 2) if engine.layout == "bhsd" else output
    return (output, _Shared.apply(last, ranks.size)) if output_final_state else output  # type: ignore[no-untyped-call]


def _call(
    engine: LinearAttentionEngine, tokens: Sequence[Tensor | None], custom: Sequence[Tensor], start: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output of a run, (batch, length, heads, dim), and the state after it."""
    turn = engine.layout == "bhsd"
    q, k, v, decay = (t if t is None or not turn else t.transpose(1, 2) for t in tokens)
    assert q is not None and k is not None and v is not None
    o, last = engine(q, k, v, decay, *custom, initial_state=start, output_final_state=True)
    return o.transpose(1, 2) if turn else o, last


def _starts(
    engine: LinearAttentionEngine, ranks: Ranks, layout: Layout,
    runs: Sequence[tuple[list[Tensor | None], list[Tensor]]], initial: Tensor | None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """The states that this rank's runs start from, and the one after the last token."""
    maps = []
    for tokens, custom in runs:
        state = _call(engine, tokens, custom, None)[1]
        kept = _kept(engine, tokens, custom, state.dtype)
        maps.append(torch.cat([kept.expand(*state.shape[:3], 1), state], -1))
    order = sorted((run.start, rank) for rank, of in enumerate(layout.runs) for run in of)
    of_runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks.size)]
    for number, (_, rank) in enumerate(order):
        of_runs[rank].append((number, number + 1))
    (sent,) = gather(Tokens(ranks, Layout.of_places("runs", of_runs)), 0, torch.stack(maps))
    state = torch.zeros_like(sent[0, ..., 1:]) if initial is None else initial.to(sent.dtype)
    state, starts = _Tied.apply(state, sent), []  # type: ignore[no-untyped-call]
    for (_, rank), of_run in zip(order, sent, strict=True):
        if rank == ranks.rank:
            starts.append(state)
        state = of_run[..., :1] * state + of_run[..., 1:]
    return starts, state


def _kept(
    engine: LinearAttentionEngine, tokens: Sequence[Tensor | None], custom: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """The factor by which a run multiplies the state before it: (batch, heads, dim or 1, 1)."""
    q, k, v, decay = tokens
    assert q is not None and k is not None and v is not None
    held = [*custom, *tensors_now(engine._captured)]
    attention = ATTENTIONS[engine._check(q, k, v, decay, None, held)]
    assert isinstance(attention, LinearAttention)
    batch, length, heads = v.shape[:3]
    logs = v.new_zeros(batch, length, heads, 1, dtype=dtype) if decay is None else decay.to(dtype)
    logs = (logs if logs.ndim == 4 else logs[..., None]).transpose(1, 2)
    logs = logs.repeat_interleave(heads // logs.shape[1], 1)
    mod, named = attention.program.mod("decay"), attention.named(held)
    if mod is not X:
        values: Mapping[Any, Tensor] = {**token_indices(batch, heads, length, v.device), X: logs}
        logs = Evaluator(values, named, dtype, v.device)(mod).expand(logs.shape)
    return logs.sum(2).exp()[..., None]
