"""Linear attention over ranks: what a run of tokens does to the state is S -> a S + S_run, and all that ranks send.

Each rank makes (a, S_run) of its runs alone, without outputs, and sends them to all ranks at once, whatever the length.
Then each knows the states that its runs start from, and makes their outputs. Backward the gradients that runs leave to
the states before them go the same way, from the last run to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.distributed.exchange import Ranks, Tokens, all_of
from attention_engine.distributed.layout import Layout
from attention_engine.distributed.placements import Placement
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.inputs import check_ranks, order_custom
from attention_engine.runtime.linear import LinearAttentionEngine
from attention_engine.runtime.linear_op import LinearAttention
from attention_engine.runtime.linear_runs import Run, run_of

if TYPE_CHECKING:
    from attention_engine.distributed.module import ContextParallel

Tensors: TypeAlias = Sequence[Tensor | None]  # of a run: q, k, v, decay and the custom inputs


@dataclass(frozen=True)
class Along:
    """Runs of tokens, or pieces of a run, in order: what each keeps of the state before it, (runs, batch, heads, dim or
    1), and what it adds, with dim_v. In reverse: of the gradient of the state after it."""

    kept: Tensor
    left: Tensor
    reverse: bool = False

    def walk(self, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What each meets, as one walks along them from `first` (None: nothing), and what the last leaves."""
        order = [*range(len(self.left))][:: -1 if self.reverse else 1]
        found, end = torch.empty_like(self.left), torch.empty_like(self.left[0])
        found[order[0]] = 0 if first is None else first
        for n, following in zip(order, [*order[1:], None], strict=True):
            target = end if following is None else found[following]
            torch.addcmul(self.left[n], self.kept[n][..., None], found[n], out=target)
        return found, end

    def faded(self) -> Tensor:
        """What is kept of what they begin with, as each meets it."""
        order = self.kept.flip(0) if self.reverse else self.kept
        before = torch.cat([torch.ones_like(order[:1]), order[:-1].cumprod(0)])
        return before.flip(0) if self.reverse else before


@dataclass(frozen=True)
class _Shared:
    """What ranks share: an attention of runs, whose numbers in the sequence each rank has; does a call return the last
    state?"""

    attention: LinearAttention
    ranks: Ranks
    numbers: Sequence[Sequence[int]]
    ends: bool

    @staticmethod
    def of(attention: LinearAttention, ranks: Ranks, layout: Layout, ends: bool) -> _Shared:
        """The same of a layout."""
        order = sorted((run.start, rank) for rank, of in enumerate(layout.runs) for run in of)
        numbers = [[n for n, (_, rank) in enumerate(order) if rank == one] for one in range(ranks.size)]
        return _Shared(attention, ranks, numbers, ends)

    @property
    def own(self) -> Sequence[int]:
        """The numbers of this rank's runs."""
        return self.numbers[self.ranks.rank]

    def everyone(self, mine: Sequence[Tensor], more: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """What all ranks have of their runs, in order; and what each has besides."""
        count = sum(map(len, self.numbers))
        besides = [[(count + n, count + n + 1)] if more else [] for n in range(self.ranks.size)]
        places = [[*((n, n + 1) for n in each), *also] for each, also in zip(self.numbers, besides, strict=True)]
        tokens = Tokens(self.ranks, Layout.of_places("runs", places))
        (found,) = all_of(tokens, 0, torch.stack([*mine, *more]))
        return found[:count], found[count:]


class _OverRanks(torch.autograd.Function):
    """(what is shared, how many tensors a run has, the initial state, those of each run...) -> (the last state, each
    run's output...)."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, width: int, initial: Tensor | None, *given: Tensor | None) -> Any:
        ctx.shared, ctx.width, ctx.first = shared, width, initial
        with torch.autocast(_device_of(given), enabled=False):
            runs = [_run(shared, tensors) for tensors in _by_run(given, width)]
            left = [run.states().movedim(1, 0) for run in runs]
            ways = [Along(run.kept().movedim(1, 0), each) for run, each in zip(runs, left, strict=True)]
            walked = [way.walk() for way in ways]
            mine = [
                torch.cat([way.kept.prod(0)[..., None].expand(*end.shape[:3], 1), end], -1)
                for way, (_, end) in zip(ways, walked, strict=True)
            ]
            sent, _ = shared.everyone(mine)
            firsts, last = Along(sent[..., 0], sent[..., 1:]).walk(initial)
            starts = _met(ways, [met for met, _ in walked], firsts, shared.own)
            outputs = [run.output(start) for run, start in zip(runs, starts, strict=True)]
        ctx.save_for_backward(*given, *starts, *(way.kept for way in ways), sent[..., 0].clone())
        ctx.set_materialize_grads(False)
        return last, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_last: Tensor | None, *arriving: Tensor | None) -> tuple[Any, ...]:
        shared, saved, count = ctx.shared, ctx.saved_tensors, len(ctx.shared.own)
        given, starts, kept = saved[: count * ctx.width], saved[-2 * count - 1 : -count - 1], saved[-count - 1 : -1]
        wanted = _by_run(ctx.needs_input_grad[3:], ctx.width)
        with torch.autocast(_device_of(given), enabled=False):
            runs = []
            for tensors, d_o, asked in zip(_by_run(given, ctx.width), arriving, wanted, strict=True):
                v = tensors[2]
                runs.append(_run(shared, tensors, torch.zeros_like(v) if d_o is None else d_o, [*asked[3:]]))
            ways = [Along(each, run.states().movedim(1, 0), True) for each, run in zip(kept, runs, strict=True)]
            walked = [way.walk() for way in ways]
            mine = [end for _, end in walked]
            more = (
                [] if not shared.ends else [torch.zeros_like(mine[0]) if d_last is None else d_last.to(mine[0].dtype)]
            )
            sent, of_last = shared.everyone(mine, more)
            firsts, before_all = Along(saved[-1], sent, True).walk(of_last.mean(0) if more else None)
            ends = _met(ways, [met for met, _ in walked], firsts, shared.own)
            found: list[Tensor | None] = []
            for run, start, end, asked in zip(runs, starts, ends, wanted, strict=True):
                dq, dk, dv, d_decay, _, d_custom = run.gradients(start, end)
                of_run = [dq, dk, dv, d_decay, *d_custom]
                found += [d if wants else None for d, wants in zip(of_run, asked, strict=True)]
        d_initial = None
        if ctx.needs_input_grad[2]:
            begins = shared.own[0] == 0  # the run that starts from it is this rank's
            d_initial = (before_all if begins else torch.zeros_like(before_all)).to(ctx.first.dtype)
        return None, None, d_initial, *found


def _by_run(given: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [given[n : n + width] for n in range(0, len(given), width)]


def _run(shared: _Shared, tensors: Tensors, *of_backward: Any) -> Run:
    q, k, v, decay, *custom = tensors
    assert q is not None and k is not None and v is not None
    return run_of(shared.attention, q, k, v, decay, custom, *of_backward)


def _device_of(given: Tensors) -> str:
    assert given[0] is not None
    return given[0].device.type


def _met(
    ways: Sequence[Along], alone: Sequence[Tensor], firsts: Tensor, own: Sequence[int]
) -> list[Tensor]:  # fmt: skip
    """What the pieces of own runs meet, (batch, pieces, ...), from what they meet where a run begins with nothing."""
    each = zip(ways, alone, own, strict=True)
    return [torch.addcmul(met, way.faded()[..., None], firsts[n]).movedim(0, 1) for way, met, n in each]


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
    present = [t for t in (q, k, v, decay, initial_state) if t is not None]
    first = parallel.agree(layout, layout, False, present, tensors, placed)
    inputs = [*tensors, *tensors_now(engine._captured)]
    key = engine._check(q, k, v, decay, initial_state, inputs)
    attention = ATTENTIONS[key]
    assert isinstance(attention, LinearAttention)
    if first and q.device.type == "cpu":  # as an engine's own first call
        engine._warn_of_growth(key, q, k, v, decay, inputs)
    given: list[Tensor | None] = []
    for run in layout.runs[ranks.rank]:
        if run.count == v.shape[1]:
            given += [q, k, v, decay, *inputs]
            continue
        given += [t if t is None else t[:, run.here] for t in (q, k, v, decay)]
        both = zip(placed, tensors, strict=True)
        given += [t if p.queries is None else t.narrow(p.queries, run.at, run.count) for p, t in both]
        given += inputs[len(tensors) :]
    shared = _Shared.of(attention, ranks, layout, output_final_state)
    last, *outputs = _OverRanks.apply(shared, 4 + len(inputs), initial_state, *given)  # type: ignore[no-untyped-call]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    output = output.transpose(1, 2) if engine.layout == "bhsd" else output
    return (output, last) if output_final_state else output
