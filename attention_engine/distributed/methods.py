"""How ranks that share a sequence attend to all of it: by all keys of it, or by all tokens of some heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_engine.distributed.exchange import Ranks, Tokens, gather, to_heads, to_tokens
from attention_engine.distributed.layout import Layout
from attention_engine.distributed.placements import Placement
from attention_engine.errors import HeadsDoNotDivide, LengthsDiffer
from attention_engine.ir.program import H
from attention_engine.passes.starts import own_rows
from attention_engine.runtime.module import AttentionEngine
from attention_engine.runtime.moved import Part, call_part

Custom = Sequence[Tensor]
Placed = Sequence[Placement]


@dataclass(frozen=True)
class Call:
    """What a call is of: the layouts of its queries and keys, the sizes of the whole attention; where tensors of starts
    are kept, which are made once."""

    engine: AttentionEngine
    ranks: Ranks
    queries: Layout
    keys: Layout
    sizes: Mapping[str, int]
    starts: dict[object, Tensor]
    returns_rows: bool

    def check(self, q: Tensor, k: Tensor, v: Tensor, method: str) -> None:
        """BadInput where k and v differ; HeadsDoNotDivide."""
        if k.shape[1] != v.shape[1]:
            raise LengthsDiffer(f"this rank's k has {k.shape[1]} tokens and v {v.shape[1]}. They must be equal.")
        if method == "heads" and q.shape[2] % self.ranks.size:
            size = self.ranks.size
            raise HeadsDoNotDivide(
                f'{q.shape[2]} query heads can\'t be shared evenly among {size} ranks, as method="heads" does.\n'
                f'  Use method="gather", or a multiple of {size} heads.'
            )

    @property
    def tokens_of_queries(self) -> Tokens:
        """How queries are shared."""
        return Tokens(self.ranks, self.queries)

    @property
    def tokens_of_keys(self) -> Tokens:
        """How keys are shared."""
        return Tokens(self.ranks, self.keys)

    def attend(
        self, axis: str, start: int, q: Tensor, k: Tensor, v: Tensor, custom: Custom
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """Output and rows of a part that starts there on one axis; tensors are (batch, length, heads, dim)."""
        known = axis, start, q.device
        if known not in self.starts:
            at = [start if axis == name else 0 for name in ("batch", "heads", "seq_len", "seq_len_kv")]
            self.starts[known] = torch.tensor([at], dtype=torch.int32, device=q.device)
        part = Part(self.starts[known], (axis,), self.sizes)
        turn = self.engine.layout == "bhsd"
        q, k, v = (t.transpose(1, 2) if turn else t for t in (q, k, v))
        found = call_part(self.engine, part, q, k, v, custom, return_rowscales=self.returns_rows)
        o, rows = found if self.returns_rows else (found, {})
        return o.transpose(1, 2) if turn else o, rows

    def result(self, parts: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> Any:
        """Outputs of parts one after another, and their rows, (batch, heads, queries)."""
        first, rows = parts[0]
        if len(parts) > 1:
            first = torch.cat([o for o, _ in parts], 1)
            rows = {name: torch.cat([each[name] for _, each in parts], 2) for name in rows}
        return (first, rows) if self.returns_rows else first


def by_gather(call: Call, q: Tensor, k: Tensor, v: Tensor, custom: Custom, placed: Placed) -> Any:
    """Each rank gets all keys, and a run of its queries is a launch. Gradients of keys are added up in
    fp32, each on the rank that holds it."""
    tokens = call.tokens_of_keys
    k, v = gather(tokens, 1, k, v)
    custom = [t if p.keys is None else gather(tokens, p.keys, t)[0] for p, t in zip(placed, custom, strict=True)]
    parts = []
    for run in call.queries.runs[call.ranks.rank]:
        both = zip(placed, custom, strict=True)
        own = [t if p.queries is None else t.narrow(p.queries, run.at, run.count) for p, t in both]
        parts.append(call.attend("seq_len", run.start, q[:, run.here], k, v, own))
    return call.result(parts)


def by_heads(call: Call, q: Tensor, k: Tensor, v: Tensor, custom: Custom, placed: Placed) -> Any:
    """Each rank gets all tokens of some heads, attends, and gives its output back for its tokens of all heads."""
    of_q, of_k, size = call.tokens_of_queries, call.tokens_of_keys, call.ranks.size
    times = size // math.gcd(k.shape[2], size)  # key heads that don't divide are repeated
    if times > 1:
        k, v = (t.repeat_interleave(times, 2) for t in (k, v))
    q, k, v = to_heads(q, of_q), to_heads(k, of_k), to_heads(v, of_k)
    first, heads = call.ranks.rank * q.shape[2], q.shape[2]
    own = own_rows(call.engine._program, {p.spec.name: p.spec.axes for p in placed}, (H,))
    given = []
    for placement, tensor in zip(placed, custom, strict=True):
        if placement.queries is not None:
            (tensor,) = gather(of_q, placement.queries, tensor)
        elif placement.keys is not None:
            (tensor,) = gather(of_k, placement.keys, tensor)
        for n in range(tensor.ndim):
            tensor = tensor.narrow(n, first, heads) if (placement.spec.name, n) in own else tensor
        given.append(tensor)
    o, rows = call.attend("heads", first, q, k, v, given)
    back = {name: to_tokens(row.transpose(1, 2)[..., None], of_q)[..., 0].transpose(1, 2) for name, row in rows.items()}
    return call.result([(to_tokens(o, of_q), back)])


def by_fewest_bytes(sizes: Mapping[str, int], kv_heads: int, size: int) -> str:
    """The method that sends fewer bytes forward: keys of all other ranks, or a rank's own q, k, v and o."""
    keys = sizes["seq_len_kv"] * kv_heads
    divides = sizes["heads"] % size == 0 and kv_heads % size == 0
    return "heads" if divides and keys * size > sizes["seq_len"] * sizes["heads"] + keys else "gather"


METHODS: dict[str, Callable[..., Any]] = {"gather": by_gather, "heads": by_heads}
