"""Rewrites expressions for packed sequences: b, q_idx and kv_idx become what tables say of rows.

The kernels then see one batch of rows, and a mask that lets nobody out of its sequence. In a row's sequence

    b = sequence of the row,    q_idx = row + ahead - first,    kv_idx = row of the key - first

where `first` is the row of the sequence's first key, and `ahead` is 0 where queries and keys are the same rows. Both
places are counted from the same `first`, the query's, so that it leaves their difference: a causal mask and ALiBi are
those of plain rows again, and tiles are told apart by their bounds. What a key alone decides (a padding mask, a table
of keys) is made of the key's own tables, and stays a thing of the key: it is the same where a pair is of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attention_engine.ir.expr import INTEGERS, Axis, Expr, Op, Type, const, make, rebuild
from attention_engine.ir.packing import AHEAD, FIRST, FIRST_K, SEQUENCE_K, SEQUENCE_Q, Packing, of_key, of_query
from attention_engine.ir.program import KV_IDX, Q_IDX, B
from attention_engine.passes.simplify import add, mul, simplify, split_coefficient, terms

LINEAR = frozenset({Op.VAR, Op.ADD, Op.MUL})  # of integers, in which the query's `first` may meet its like and go
COMPARISONS = frozenset({Op.LESS, Op.LESS_EQUAL, Op.EQUAL})
OWN_ROWS = {"seq_len": Q_IDX, "seq_len_kv": KV_IDX}


def _sum(*parts: Expr) -> Expr:
    total = parts[0]
    for part in parts[1:]:
        total = make(Op.ADD, total, part)
    return total


def _negative(expr: Expr) -> Expr:
    return make(Op.MUL, const(-1, Type.INT), expr)


def _without_first(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Both sides of a comparison without the query's `first`, where both have as much of it."""
    a, b = simplify(a, b)
    first = of_query(FIRST)
    counts = [sum(int(n) for n, rest in map(split_coefficient, terms(side)) if rest is first) for side in (a, b)]
    if counts[0] != counts[1]:
        return a, b
    back = mul(const(-counts[0], first.dtype), first)
    return add(a, back), add(b, back)


class PackDocuments:
    """The rewriting. axes: of the declared custom inputs, whose packed rows are read where they stand."""

    def __init__(self, packing: Packing, axes: Mapping[str, Sequence[int | str]]) -> None:
        self.axes = axes
        unlike = packing is Packing.UNLIKE
        ahead = [of_query(AHEAD)] if unlike else []
        first, first_k = _negative(of_query(FIRST)), _negative(of_key(FIRST_K if unlike else FIRST))
        self.of_pair = {B: of_query(SEQUENCE_Q), Q_IDX: _sum(Q_IDX, *ahead, first), KV_IDX: _sum(KV_IDX, first)}
        self.of_key = {B: of_key(SEQUENCE_K), KV_IDX: _sum(KV_IDX, first_k)}
        self._done: dict[tuple[Expr, bool], Expr] = {}

    def mask(self, mask: Expr | None) -> Expr:
        """The mask within sequences."""
        same = make(Op.EQUAL, of_query(SEQUENCE_Q), of_key(SEQUENCE_K))
        return same if mask is None else make(Op.AND, same, self(mask))

    def __call__(self, expr: Expr) -> Expr:
        """The expression of packed rows."""
        stack: list[tuple[Expr, bool]] = [(expr, self._of_key(expr, False))]
        while stack:
            node, of_key = stack[-1]
            if (node, of_key) in self._done:
                stack.pop()
                continue
            inner = {arg: (arg, self._of_key(arg, of_key)) for arg in node.args}
            missing = [each for each in inner.values() if each not in self._done]
            stack += missing
            if not missing:
                stack.pop()
                changed = {arg: self._done[each] for arg, each in inner.items()}
                self._done[node, of_key] = self._change(node, of_key, changed)
        return self._done[expr, self._of_key(expr, False)]

    @staticmethod
    def _of_key(node: Expr, within: bool) -> bool:
        """Is the node made of a key's own tables? Those are in which a key decides alone."""
        if within:
            return True
        alone = Axis.KEY in node.axes and Axis.QUERY not in node.axes
        return alone and not (node.op in LINEAR and node.dtype in INTEGERS)

    def _change(self, node: Expr, of_key: bool, changed: Mapping[Expr, Expr]) -> Expr:
        if node.op is Op.VAR:
            return (self.of_key if of_key else self.of_pair).get(node, node)
        if node.op is not Op.LOAD:
            args = tuple(changed[a] for a in node.args)
            between = node.op in COMPARISONS and not of_key and all(a.dtype in INTEGERS for a in args)
            return rebuild(node, _without_first(*args) if between else args)
        axes = self.axes.get(node.name, ())
        own = [OWN_ROWS.get(str(axis)) is a for axis, a in zip(axes, node.args, strict=True)] if axes else []
        places = [a if n < len(own) and own[n] else changed[a] for n, a in enumerate(node.args)]
        return make(Op.LOAD, *places, arg=node.arg, dtype=node.dtype)
