"""Which keys each rank needs, so that no others are sent: by a mask's bounds, and by what tensors say that it reads.

Both are sound: what is left out holds no pair that the mask keeps. What tensors say is found where a layout is dealt,
by interval arithmetic over pieces of queries and of keys: document ids of two pieces that have none in common. It holds
for calls with the same tensors, unwritten since. Of all other calls bounds alone say it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attention_engine.ir.expr import INTEGERS, Axis, Expr, Op, Type, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.passes.analyse_mask import Bound
from attention_engine.passes.index_ranges import Ranges
from attention_engine.reference.evaluate import Evaluator

if TYPE_CHECKING:
    from attention_engine.distributed.layout import Layout, Run

PIECES = 1024  # of a sequence, at most
CLOSE = 256  # tokens: ranges of keys that lie so close are sent as one
Range: TypeAlias = tuple[int, int]  # of tokens of a sequence: the first, and one past the last
Ends: TypeAlias = tuple[Tensor, Tensor]  # of numbers: least and greatest; of truths: must it hold, may it hold


def joined(ranges: Iterable[Range], close: int = 0) -> tuple[Range, ...]:
    """Ranges in their order, those that meet or lie `close` as one."""
    found: list[Range] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1] + close:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((first, stop))
    return tuple(found)


def within(bounds: Sequence[Bound], length: int, run: Run) -> Range:
    """The keys, of so many, that a mask's bounds let a run of queries see: the first, and one past the last. Where they
    let it see none the range may be empty or less."""
    first, stop = 0, length
    for bound in bounds:
        most = bound.q * (run.start + (run.count - 1 if bound.q > 0 else 0)) + bound.offset
        if bound.kv < 0:
            stop = min(stop, most // -bound.kv + 1)
        elif bound.kv > 0:
            first = max(first, -(most // bound.kv))
    return first, stop


@lru_cache(maxsize=64)
def needed_by(
    bounds: tuple[Bound, ...], queries: Layout, keys: Layout, kept: KeptPieces | None
) -> tuple[tuple[Range, ...], ...] | None:  # fmt: skip
    """The keys that each rank needs, of which it may hold some; None: all of them. kept: what tensors say, where they
    are known."""
    found = []
    for runs in queries.runs:
        if kept is None:
            seen = [within(bounds, keys.length, run) for run in runs]
            found.append(joined(each for each in seen if each[0] < each[1]))
        else:
            found.append(kept.needed(runs))
    return None if all(each == ((0, keys.length),) for each in found) else tuple(found)


@lru_cache(maxsize=64)
def first_by(bounds: tuple[Bound, ...], queries: Layout, keys: Layout, most: int) -> tuple[tuple[Range, ...], ...]:
    """The same of each rank's first launch: of its first run, or of all of them, where they are more than so many."""
    found = []
    for runs in queries.runs:
        seen = [within(bounds, keys.length, run) for run in (runs[:1] if len(runs) <= most else runs)]
        found.append(joined(each for each in seen if each[0] < each[1]))
    return tuple(found)


def without(ranges: Sequence[Range], others: Sequence[Range]) -> tuple[Range, ...]:
    """What of the ranges is in none of the others; both in their order, and apart."""
    found = []
    for first, stop in ranges:
        for begin, end in others:
            if first < end and begin < stop:
                if first < begin:
                    found.append((first, begin))
                first = max(first, end)
        if first < stop:
            found.append((first, stop))
    return tuple(found)


@dataclass(frozen=True)
class Told:
    """A tensor that a mask read, as it was then."""

    tensor: weakref.ref[Tensor]
    version: int

    @staticmethod
    def of(tensor: Tensor) -> Told:
        return Told(weakref.ref(tensor), tensor._version)

    def holds(self, tensor: Tensor) -> bool:
        """Is it this one, or a view of all of it, and unwritten?"""
        of = self.tensor()
        if of is None or of._version != self.version:
            return False
        return of is tensor or (
            of.data_ptr() == tensor.data_ptr() and of.dtype is tensor.dtype
            and of.shape == tensor.shape and of.stride() == tensor.stride()
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class KeptPieces:
    """Which pieces of the sequence as keys each of its pieces as queries may see by a mask, known by its digest, and by
    what tensors told, by name. made: what calls make of these tensors, for as long as they say the same."""

    mask: str
    length: int
    may: Tensor  # (pieces, pieces) of truths, on the CPU
    told: Mapping[str, Told]
    made: dict[object, Any] = field(default_factory=dict)

    def holds(self, mask: Expr | None, tensors: Mapping[str, Tensor]) -> bool:
        """Is it of this mask, and do these custom inputs and captured tensors say the same?"""
        if mask is None or mask.digest != self.mask:
            return False
        return all(name in tensors and told.holds(tensors[name]) for name, told in self.told.items())

    @property
    def size(self) -> int:
        """Tokens of a piece."""
        return _size(self.length)

    def among(self, first: int, stop: int) -> int:
        """The pieces that hold these tokens, a bit each."""
        return (1 << -(-stop // self.size)) - (1 << first // self.size)

    def seen_by(self, first: int, stop: int) -> int:
        """The pieces of keys that these queries may see, a bit each."""
        rows = self.may[first // self.size : -(-stop // self.size)]
        return sum(1 << n for n in rows.any(0).nonzero().flatten().tolist())

    def needed(self, runs: Sequence[Run]) -> tuple[Range, ...]:
        """The keys that queries of these runs may see."""
        size = self.size
        rows = [self.may[run.start // size : -(-(run.start + run.count) // size)] for run in runs]
        seen = torch.cat(rows).any(0).nonzero().flatten().tolist()
        return joined(((n * size, min((n + 1) * size, self.length)) for n in seen), CLOSE)


def kept_pieces(
    mask: Expr, typed: Expr, length: int, sizes: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> KeptPieces:
    """typed: the mask traced with the types of tensors, which it reads; sizes: of the axes "batch" and "heads"."""
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    size, may = _size(length), None
    places = torch.arange(-(-length // size) * size, device=device).clamp(max=length - 1)
    axes = (("batch", Axis.BATCH), ("heads", Axis.HEAD))
    which = [range(sizes[axis]) if part in typed.axes else [0] for axis, part in axes]
    for b, h in itertools.product(*which):
        at = {B: torch.tensor(b, device=device), H: torch.tensor(h, device=device),
              Q_IDX: places[:, None], KV_IDX: places[None]}  # fmt: skip
        _, kept = _Pieces(Evaluator(at, tensors, torch.float32, device), tensors, size)(typed)
        may = kept if may is None else may | kept
    assert may is not None
    pieces = len(places) // size
    told = {n.name: Told.of(tensors[n.name]) for n in topological(typed) if n.op is Op.LOAD and n.name in tensors}
    return KeptPieces(mask.digest, length, may.expand(pieces, pieces).cpu(), told)


def _size(length: int) -> int:
    """Tokens of a piece."""
    return -(-length // PIECES)


class _Pieces:
    """The ends of what a mask's nodes are in each pair of pieces: (queries', keys'), or 1 where they don't depend."""

    def __init__(self, evaluate: Evaluator, known: Mapping[str, Tensor], size: int) -> None:
        self.evaluate, self.known, self.size, self.may_be = evaluate, known, size, Ranges()
        self.done: dict[Expr, Ends | None] = {}

    def __call__(self, node: Expr) -> Ends:
        found = self._of(node)
        assert found is not None
        return found

    def _of(self, node: Expr) -> Ends | None:
        """None: a number that is not bounded."""
        if node not in self.done:
            self.done[node] = self._find(node)
        return self.done[node]

    def _find(self, node: Expr) -> Ends | None:
        sides = node.axes & {Axis.QUERY, Axis.KEY}
        if node.dtype is Type.FLOAT:
            return None
        reads = {n.name for n in topological(node) if n.op is Op.LOAD}
        if len(sides) < 2 and reads <= self.known.keys():
            return self._ends(self.evaluate(node))
        rule, known = RULES.get(node.op), [self._of(a) for a in node.args]
        ends = [e for e in known if e is not None]
        bounded = rule is not None and len(ends) == len(known) and not self.may_be.wraps(node)
        found = rule(node, ends) if rule is not None and bounded else None
        if found is None and node.dtype is Type.BOOL:
            return self._truth(False), self._truth(True)
        return found

    def _truth(self, value: bool) -> Tensor:
        return torch.tensor(value, device=self.evaluate.device)

    def _ends(self, values: Tensor) -> Ends:
        """Of what depends on one side, or on none."""
        if values.ndim < 2 or values.numel() == 1:
            return values, values
        of_keys = values.shape[0] == 1
        pieces = values.reshape(-1, self.size)
        least, most = (pieces.all(1), pieces.any(1)) if values.dtype is torch.bool else pieces.aminmax(dim=1)
        least, most = (found[None] if of_keys else found[:, None] for found in (least, most))
        return least, most


def _multiply(node: Expr, ends: Sequence[Ends]) -> Ends | None:
    for number, (least, most) in ((node.args[0], ends[1]), (node.args[1], ends[0])):
        if number.op is Op.CONST:
            found = least * int(number.value), most * int(number.value)
            return found if number.value >= 0 else (found[1], found[0])
    return None


def _equal(node: Expr, ends: Sequence[Ends]) -> Ends | None:
    (a, b), (c, d) = ends
    if node.args[0].dtype not in INTEGERS:
        return None
    return (a == d) & (b == c), (a <= d) & (c <= b)


RULES: dict[Op, Callable[[Expr, Sequence[Any]], Ends | None]] = {
    Op.ADD: lambda node, e: (e[0][0] + e[1][0], e[0][1] + e[1][1]),
    Op.MUL: _multiply,
    Op.ABS: lambda node, e: (torch.maximum(e[0][0], -e[0][1]).clamp(min=0), torch.maximum(e[0][1], -e[0][0])),
    Op.MAXIMUM: lambda node, e: (torch.maximum(e[0][0], e[1][0]), torch.maximum(e[0][1], e[1][1])),
    Op.MINIMUM: lambda node, e: (torch.minimum(e[0][0], e[1][0]), torch.minimum(e[0][1], e[1][1])),
    Op.LESS: lambda node, e: (e[0][1] < e[1][0], e[0][0] < e[1][1]),
    Op.LESS_EQUAL: lambda node, e: (e[0][1] <= e[1][0], e[0][0] <= e[1][1]),
    Op.EQUAL: _equal,
    Op.AND: lambda node, e: (e[0][0] & e[1][0], e[0][1] & e[1][1]),
    Op.OR: lambda node, e: (e[0][0] | e[1][0], e[0][1] | e[1][1]),
    Op.NOT: lambda node, e: (~e[0][1], ~e[0][0]),
}
