"""A program whose launches hold a part of an attention: b, h, q_idx and kv_idx start where each launch says.

q_idx becomes q_idx + its start, which a launch reads from a small tensor on the device (`program.start_of`). So one set
of kernels serves all parts: nothing is compiled for another start, nobody waits for the device to tell a number, and
a CUDA graph may be replayed with other starts in the same tensor. Or each query has a place, in a table: then a launch
holds queries of several runs, and a map of tiles stands for the mask's bounds. A program without starts is left as it
is: plain calls run the kernels that they always ran.

Custom inputs come whole, and are read at the indices of the whole attention, but for own rows: a dimension that every
read asks at exactly the index of its axis may come as the part does, and is then read where the launch counts. Where
queries are listed, integers that are read at a query's or a key's own index (document ids, at both) are read of copies,
which have the launch's own rows: a pair of a partial tile would look up a place, and its bounds, for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from attention_engine.ir.expr import Expr, Op, Type, make, rebuild, topological
from attention_engine.ir.program import (
    KV_IDX,
    OF_KEYS,
    OF_QUERIES,
    Q_IDX,
    QUERY_PLACES,
    STARTS,
    B,
    H,
    Program,
    is_start,
    place_of_query,
    start_of,
)
from attention_engine.passes.simplify import simplify
from attention_engine.passes.widths import widen

AXES: Mapping[Expr, str] = {B: "batch", H: "heads", Q_IDX: "seq_len", KV_IDX: "seq_len_kv"}
LENGTHS = (AXES[Q_IDX], AXES[KV_IDX])
Axes = tuple[int | str, ...]  # of a custom input
Dimension = tuple[str, int]  # a custom input's name, and which of its dimensions


@dataclass(frozen=True)
class Copy:
    """A launch's own rows of a custom input: of its queries or its keys, in one dimension."""

    of: str
    dim: int
    index: Expr

    @property
    def name(self) -> str:
        return (OF_QUERIES if self.index is Q_IDX else OF_KEYS) + self.of


@dataclass(frozen=True)
class Moved:
    """Which indices start elsewhere than at 0 (B, H, Q_IDX, KV_IDX, in this order); whether each batch has a start of
    its own; which dimensions of custom inputs hold own rows of such an index. listed: q_idx has no start, but a place
    for each query, so that a launch may hold queries from anywhere; copies: what is then read of copies."""

    indices: tuple[Expr, ...]
    by_batch: bool = False
    own: frozenset[Dimension] = frozenset()
    listed: bool = False
    copies: frozenset[Copy] = frozenset()

    def axes_of(self, name: str, axes: Axes) -> Axes:
        """The axes of a custom input in such a launch: one that comes whole has a length of its own."""
        moved = {AXES[index] for index in self.indices}
        return tuple(
            f"whole_{axis}" if axis in moved and (name, n) not in self.own else axis for n, axis in enumerate(axes)
        )

    def axes_of_copy(self, copy: Copy, axes: Axes) -> Axes:
        """Those of a copy of an input with these axes."""
        whole = self.axes_of(copy.of, axes)
        return (*whole[: copy.dim], AXES[copy.index], *whole[copy.dim + 1 :])

    def read(self, load: Expr, args: tuple[Expr, ...]) -> Expr:
        """A read of a custom input, whose indices became `args`."""
        for copy in self.copies:
            if copy.of == load.name and load.args[copy.dim] is copy.index:
                own = (*args[: copy.dim], copy.index, *args[copy.dim + 1 :])
                return make(Op.LOAD, *own, arg=copy.name, dtype=load.dtype)
        return rebuild(load, args)

    @property
    def axes_of_starts(self) -> Axes:
        """Those of the custom input that holds the starts."""
        return ("batch" if self.by_batch else 1, 4)


def own_rows(program: Program, axes: Mapping[str, Axes], indices: Collection[Expr]) -> frozenset[Dimension]:
    """The dimensions that every read asks at exactly the index of their axis, one of these indices."""
    found = {
        (name, n) for name, each in axes.items() for n, axis in enumerate(each)
        if any(AXES[index] == axis for index in indices)
    }  # fmt: skip
    for read in program.loads():
        for n, (index, axis) in enumerate(zip(read.args, axes.get(read.name, ()), strict=False)):
            if AXES.get(index) != axis:
                found.discard((read.name, n))
    return frozenset(found)


def copies_of(program: Program, axes: Mapping[str, Axes], own: Collection[Dimension]) -> frozenset[Copy]:
    """The copies that listed queries read: of integers with one dimension of queries or keys, which has no own rows."""
    found = set()
    for read in program.loads():
        lengths = [n for n, axis in enumerate(axes.get(read.name, ())) if axis in LENGTHS]
        if read.dtype is Type.FLOAT or len(lengths) != 1 or (read.name, lengths[0]) in own:
            continue
        (dim,), index = lengths, read.args[lengths[0]]
        if index is KV_IDX or (index is Q_IDX and axes[read.name][dim] == AXES[Q_IDX]):
            found.add(Copy(read.name, dim, index))
    return frozenset(found)


def lists_queries(program: Program, axes: Mapping[str, Axes]) -> bool:
    """Does the mask alone ask where queries stand, own rows aside? Then a list of their places costs no pair more than
    a start does: a map of tiles is made of it, and rows of partial tiles read it."""
    moved = with_starts(program, Moved((Q_IDX,), False, own_rows(program, axes, (Q_IDX,)), True))
    asking = topological(*(expr for name, expr in moved.named() if name != "keep"))
    return not any(node.op is Op.LOAD and node.name == QUERY_PLACES for node in asking)


def with_starts(program: Program, moved: Moved) -> Program:
    """The program with these indices from their starts on; every expression in normal form."""
    table = {index: index + start_of(index, moved.by_batch) for index in moved.indices}
    if moved.listed:
        table[Q_IDX] = place_of_query()
    done: dict[Expr, Expr] = {}

    def change(root: Expr) -> Expr:
        for node in topological(root):
            if node in done:
                continue
            args = tuple(done[a] for a in node.args)
            if node.op is Op.LOAD:
                both = enumerate(zip(node.args, args, strict=True))
                args = tuple(old if (node.name, n) in moved.own and old in table else new for n, (old, new) in both)
            done[node] = table.get(node) or (moved.read(node, args) if node.op is Op.LOAD else rebuild(node, args))
        return widen(*simplify(done[root]))[0]

    more = [QUERY_PLACES, *sorted(copy.name for copy in moved.copies)] if moved.listed else []
    return replace(program.map(change), custom=(*program.custom, STARTS, *more))


def starts_read(*roots: Expr | None) -> list[tuple[Expr, Expr]]:
    """Where indices start, as values of a block under their own names: its pairs and rows read no memory for them."""
    found = topological(*(root for root in roots if root is not None))
    return [(node, node) for node in found if is_start(node)]
