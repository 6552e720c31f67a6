"""How ranks that share a sequence attend to all of it: by all keys of it, by all tokens of some heads, or by both."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention_engine.distributed.block_gradients import BlockGradients, one_after_another, wanted_of
from attention_engine.distributed.cost import WORTH, groups_of
from attention_engine.distributed.exchange import Tokens, gather, gather_ranges
from attention_engine.distributed.gathered import Gathered, GatheredFunction, gradients_of
from attention_engine.distributed.heads import Group, Trip, to_heads, to_tokens
from attention_engine.distributed.layout import Layout, Run
from attention_engine.distributed.needs import KeptPieces, Range, first_by, needed_by, within
from attention_engine.distributed.placements import Placement, of_block
from attention_engine.distributed.ring import Ring, RingAttention, RingFunction
from attention_engine.distributed.split import Split
from attention_engine.errors import HeadsDoNotDivide, LengthsDiffer
from attention_engine.passes.analyse_mask import Bound
from attention_engine.passes.starts import Dimension
from attention_engine.runtime.inputs import share_keys
from attention_engine.runtime.module import AttentionEngine
from attention_engine.runtime.moved import Portion, call_portion, prepare_portion

AXES = ("batch", "heads", "seq_len", "seq_len_kv")
FEW_RUNS = 2  # of a rank, each a launch with the mask's bounds; of more one launch has all, with a map of tiles
ONE_RUN = 1  # the same where the mask reads tensors: it needs a map anyway
ALIGNED = 128  # keys: tiles of a part begin where those of the whole do
Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """What a call is of: who shares it, the layouts of its queries and keys, the sizes of the whole attention. made,
    in_blocks: where tensors of starts, and attentions that run block by block, are kept, which are made once."""

    engine: AttentionEngine
    split: Split
    queries: Layout
    keys: Layout
    sizes: Mapping[str, int]
    made: dict[object, Any]
    in_blocks: dict[object, RingAttention | BlockGradients | None]
    returns_rows: bool
    seed: Tensor | None  # of dropped weights
    bounds: Sequence[Bound]  # of the mask
    own_heads: Collection[Dimension]  # of custom inputs, where every read asks for the head's own
    lists: bool  # may one launch have the queries of several runs?
    held: Sequence[Tensor] = ()  # what the engine's functions capture
    kept: KeptPieces | None = None  # what the tensors say that the mask reads, where that is known
    beside_sends: bool = False  # do sends run beside the forward kernels?

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """BadInput where k and v differ; HeadsDoNotDivide."""
        if k.shape[1] != v.shape[1]:
            raise LengthsDiffer(f"this rank's k has {k.shape[1]} tokens and v {v.shape[1]}. They must be equal.")
        if self.split.heads is not None and q.shape[2] % self.split.heads.size:
            size = self.split.heads.size
            raise HeadsDoNotDivide(
                f'{q.shape[2]} query heads can\'t be shared evenly among {size} ranks, as method="heads" does.\n'
                f'  Use method="gather", or a multiple of {size} heads.'
            )

    def launched(self, queries: Tokens) -> tuple[Sequence[Run], Sequence[Run]]:
        """The runs of this rank's queries, a launch each. Where they are many, one of all, and those that it lists."""
        runs = queries.layout.runs[queries.ranks.rank]
        if len(runs) <= (FEW_RUNS if self.kept is None else ONE_RUN) or not self.lists or self.split.goes_round:
            return runs, ()
        return [Run(0, queries.own, 0)], runs

    def seen(self, run: Run, listed: Sequence[Run] = ()) -> Range:
        """The keys that a run of queries, or those listed in its place, may see, from a multiple of ALIGNED on; one at
        least."""
        if listed:
            each = [self.seen(one) for one in listed]
            return min(first for first, _ in each), max(stop for _, stop in each)
        first, stop = within(self.bounds, self.keys.length, run)
        first = min(first, self.keys.length - 1) // ALIGNED * ALIGNED
        return first, max(stop, first + 1)

    def in_turns(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Is there enough to send that some of it comes beside the first kernels? All ranks say the same."""
        of_q, of_k, of_v = (t.shape[0] * t.shape[2] * t.shape[3] * t.element_size() for t in (q, k, v))
        return of_q * self.queries.length + (of_k + of_v) * self.keys.length >= WORTH * self.split.size

    def needed(self, queries: Tokens, keys: Tokens, in_turns: bool = False) -> Tokens:
        """Gathered keys, of which each rank gets those alone that it needs, in turns those of its first launch first.
        Collectives bring all."""
        if not keys.ranks.sends_directly:
            return keys
        bounds, layouts = tuple(self.bounds), (queries.layout, keys.layout)
        needs = needed_by(bounds, *layouts, self.kept)
        if needs is None or self.kept is not None or not in_turns:
            return replace(keys, needs=needs)
        first = first_by(bounds, *layouts, FEW_RUNS if self.lists else queries.layout.length)
        return replace(keys, needs=needs, first=first if first != needs else None)

    def by_blocks(self, key: str, wanted: Sequence[str] | None) -> RingAttention | BlockGradients | None:
        """How the attention of this key runs as keys go round, or its gradients are made run by run; None where
        it can't. wanted: the custom inputs that want gradients; None: no tensor does."""
        known = key, None if wanted is None else tuple(wanted)
        if known not in self.in_blocks:
            asked = self.engine.device, self.engine.deterministic
            if self.split.goes_round:
                self.in_blocks[known] = RingAttention.of(key, wanted, *asked)
            else:
                self.in_blocks[known] = gradients_of(key, wanted or [], *asked)
        return self.in_blocks[known]

    def portion(self, starts: Mapping[str, int], q: Tensor, runs: Sequence[Run] = ()) -> Portion:
        """What starts there. runs: the queries, where they are listed."""
        known = tuple(starts.items()), q.device
        if known not in self.made:
            at = [starts.get(axis, 0) for axis in AXES]
            self.made[known] = torch.tensor([at], dtype=torch.int32, device=q.device)
        moved = tuple(axis for axis in AXES if axis in starts)
        where = self.made[known], moved, self.sizes, self._places(runs, q)
        unwritten = () if self.kept is None else self.kept.told.keys()
        return Portion(*where, self.beside_sends, starts.get("seq_len_kv", 0), unwritten, self.made)

    def _places(self, runs: Sequence[Run], q: Tensor) -> Tensor | None:
        """Where each query of these runs stands, made once."""
        if not runs:
            return None
        known = tuple(runs), q.device
        if known not in self.made:
            at = [torch.arange(run.start, run.start + run.count, dtype=torch.int32) for run in runs]
            self.made[known] = torch.cat(at).to(q.device)
        found: Tensor = self.made[known]
        return found

    def attend(
        self, starts: Mapping[str, int], q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor],
        runs: Sequence[Run] = (),
    ) -> tuple[Tensor, Rows]:  # fmt: skip
        """Output and rows of a part that starts there; tensors are (batch, length, heads, dim). runs: as of portion."""
        part = self.portion(starts, q, runs)
        turn = self.engine.layout == "bhsd"
        q, k, v = (t.transpose(1, 2) if turn else t for t in (q, k, v))
        found = call_portion(
            self.engine,
            part,
            q,
            k,
            v,
            custom,
            return_rowscales=self.returns_rows,
            dropout_seed=self.seed,
            held=self.held,
        )
        o, rows = found if self.returns_rows else (found, {})
        return o.transpose(1, 2) if turn else o, rows


def attend_together(
    call: Call, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], placed: Sequence[Placement]
) -> tuple[Tensor, Rows]:  # fmt: skip
    """This rank's output and rows. Tokens are exchanged for heads, group by group, then keys are gathered, and a run of
    queries is a launch; outputs go back to who holds their tokens."""
    of_q, of_k = call.split.exchanged(call.queries), call.split.exchanged(call.keys)
    if of_q is None or of_k is None:
        return _attend(call, {}, q, k, v, custom, placed)
    custom, ranks = _rows_of_groups(custom, placed, of_q, of_k), of_q.ranks
    times = ranks.size // math.gcd(k.shape[2], ranks.size)
    if times > 1:  # key heads that the ranks don't divide are repeated
        k, v = (t.repeat_interleave(times, 2) for t in (k, v))
    in_turns = call.split.gather is None and call.in_turns(q, k, v)
    groups = Group.some(groups_of(q.shape[2], k.shape[2], ranks.size) if in_turns else (1,))
    call = replace(call, beside_sends=len(groups) > 1)
    trip, found, names = Trip((of_k, of_k, of_q), groups), [], []
    for number, (of_keys, of_values, of_queries) in enumerate(to_heads(trip, k, v, q)):
        trip.arrive(number)
        first, heads = groups[number].places(q.shape[2], ranks.rank, ranks.size)
        own = _own_heads(call, custom, placed, first, heads)
        o, rows = _attend(call, {"heads": first}, of_queries, of_keys, of_values, own, placed)
        found.append([o, *(r.transpose(1, 2)[..., None] for r in rows.values())])
        trip.depart(number, [t.detach() for t in found[-1]])
        names = [*rows]
    o, *of_rows = to_tokens(trip, found)
    return o, {n: r[..., 0].transpose(1, 2) for n, r in zip(names, of_rows, strict=True)}


def _attend(
    call: Call, starts: Mapping[str, int], q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor],
    placed: Sequence[Placement],
) -> tuple[Tensor, Rows]:  # fmt: skip
    """This rank's output and rows, of the heads that it has: keys are gathered, or go round. Gradients of keys are
    added up in fp32, each on the rank that holds it."""
    queries, keys = call.split.gathered(call.queries), call.split.gathered(call.keys)
    if queries is None or keys is None:
        return call.attend(starts, q, k, v, custom)
    if made := _with_own_gradients(call, starts, q, k, v, custom, placed, queries, keys):
        return made
    runs, listed = call.launched(queries)
    ranges = [call.seen(run, listed) for run in runs]
    of_runs = gather_ranges(call.needed(queries, keys), 1, ranges, k, v)
    customs = _of_runs(custom, placed, keys, runs, ranges)
    parts = []
    for run, seen, (k, v), own in zip(runs, ranges, of_runs, customs, strict=True):
        at = {**starts, "seq_len": run.start, **({"seq_len_kv": seen[0]} if call.bounds else {})}
        parts.append(call.attend(at, q[:, run.here], k, v, own, listed))
    return _joined(parts)


def _with_own_gradients(
    call: Call, starts: Mapping[str, int], q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor],
    placed: Sequence[Placement], queries: Tokens, keys: Tokens,
) -> tuple[Tensor, Rows] | None:  # fmt: skip
    """The same where keys go round, or where gradients of gathered keys are made run by run. None where autograd makes
    them instead: where they, or the rows, need what blocks of keys don't have."""
    engine, (runs, listed), count = call.engine, call.launched(queries), len(custom)
    given = [*custom, *call.held]
    names = [*engine.custom_io.specs, *(one.name for one in engine._captured)]
    follows = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *given))
    if q.shape[0] != 1 and 1 in (k.shape[0], v.shape[0]):
        k, v = share_keys(q, k, v)

    def prepare(
        first: int, key: int, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]
    ) -> tuple[str, list[Tensor]]:  # fmt: skip
        part = call.portion({**starts, "seq_len": first, "seq_len_kv": key}, q, listed)
        return prepare_portion(engine, part, q, k, v, custom[:count], custom[count:], call.seed)

    wanted = wanted_of(names, given) if follows else None
    seen = {run: call.seen(run, listed) for run in runs}
    if not call.split.goes_round:
        seen |= _widened(seen, keys.layout.length)
    (run, *_), (first, _) = runs, seen[runs[0]]
    key, _ = prepare(run.start, first, q[:, run.here], k[:, :1], v[:, :1], of_block(given, placed, run, 0, 1))
    attention = call.by_blocks(key, wanted)
    if attention is None:
        return None
    for n, placement in enumerate(placed):
        if placement.keys is not None:
            (given[n],) = gather(keys, placement.keys, given[n])
    of_call = runs, seen, placed

    def behind(*block: Any) -> list[Tensor]:
        return prepare(*block)[1]

    if isinstance(attention, RingAttention):
        ring = Ring(keys, *of_call, attention, names, behind)
        output, *rows = RingFunction.apply(ring, q, k, v, *given)  # type: ignore[no-untyped-call]
    else:
        needed = call.needed(queries, keys, call.in_turns(q, k, v))
        gathered = Gathered(needed, *of_call, attention, names, behind)
        output, *rows = GatheredFunction.apply(gathered, q, k, v, *given)  # type: ignore[no-untyped-call]
    returned = attention.attention.row_names[: attention.attention.returned]
    return output, dict(zip(returned, rows, strict=False)) if call.returns_rows else {}


def _widened(seen: Mapping[Run, Range], length: int) -> dict[Run, Range]:
    """The run that sees the most keys gets all, if these are half of them: its kernel's zeroes for the others cost less
    than its gradients copied to where all keys' are added up."""
    run = max(seen, key=lambda run: seen[run][1] - seen[run][0])
    first, stop = seen[run]
    return {run: (0, length)} if 2 * (stop - first) >= length else {}


def _of_runs(
    custom: Sequence[Tensor], placed: Sequence[Placement], keys: Tokens, runs: Sequence[Run], ranges: Sequence[Range]
) -> list[list[Tensor]]:  # fmt: skip
    """Custom inputs of each run, with the rows of its queries, and of the keys that it sees."""
    found: list[list[Tensor]] = [[] for _ in runs]
    for placement, tensor in zip(placed, custom, strict=True):
        dim, columns = placement.queries, placement.columns
        own = [tensor if dim is None else tensor.narrow(dim, run.at, run.count) for run in runs]
        if placement.keys is not None:
            own = [each for (each,) in gather_ranges(keys, placement.keys, ranges, tensor)]
        elif columns is not None:
            own = [t.narrow(columns, first, stop - first) for t, (first, stop) in zip(own, ranges, strict=True)]
        for of_run, each in zip(found, own, strict=True):
            of_run.append(each)
    return found


def _joined(parts: Sequence[tuple[Tensor, Rows]]) -> tuple[Tensor, Rows]:
    """Outputs of runs one after another, and their rows, (batch, heads, queries)."""
    rows = {name: one_after_another([each[name] for _, each in parts], 2) for name in parts[0][1]}
    return one_after_another([o for o, _ in parts], 1), rows


def _rows_of_groups(
    custom: Sequence[Tensor], placed: Sequence[Placement], of_q: Tokens, of_k: Tokens
) -> list[Tensor]:  # fmt: skip
    """Custom inputs with the rows of all tokens that are exchanged."""
    found = []
    for placement, tensor in zip(placed, custom, strict=True):
        if placement.queries is not None:
            (tensor,) = gather(of_q, placement.queries, tensor)
        elif placement.keys is not None:
            (tensor,) = gather(of_k, placement.keys, tensor)
        found.append(tensor)
    return found


def _own_heads(
    call: Call, custom: Sequence[Tensor], placed: Sequence[Placement], first: int, heads: int
) -> list[Tensor]:  # fmt: skip
    """Custom inputs with this rank's heads alone, where every read asks for the head's own."""
    found = []
    for placement, tensor in zip(placed, custom, strict=True):
        for n in range(tensor.ndim):
            tensor = tensor.narrow(n, first, heads) if (placement.spec.name, n) in call.own_heads else tensor
        found.append(tensor)
    return found
